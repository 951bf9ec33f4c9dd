"""Weights of a block, and their gradients, on the way between the device and a slower tier."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.numerics import get_local_tensor
from shardwright.offload.activation_store import Wait
from shardwright.offload.parameter_store import ParameterStore


@dataclass(frozen=True, eq=False)
class WeightMemory:
    """Memory of weights on the device; its storage is empty while they are away."""

    data: Tensor
    """Bytes of the weights, `[N]`."""
    storage_bytes: int
    """Bytes of the storage, which may have more than the weights: FSDP2 pads shards."""
    offset: int
    """Place among the weights of the block in the store."""


@dataclass(frozen=True, eq=False)
class BlockMember:
    """Matrix of a block, and its place among the block's weights and gradients in the store."""

    name: str
    parameter: nn.Parameter
    shape: torch.Size
    """Shape of this rank's part; a shard's parameter states the whole matrix's."""
    offset: int
    num_bytes: int
    gradient_offset: int

    def view(self, store: ParameterStore, position: int) -> Tensor:
        """Return the bytes of a store from a position on as a tensor of this rank's part."""
        if not self.num_bytes:  # ZeRO may leave this rank no row
            return torch.empty(self.shape, dtype=self.parameter.dtype)
        return store.view(position, self.num_bytes).view(self.parameter.dtype).view(self.shape)


@dataclass(eq=False)
class TrainedBlock:
    """Matrices of a block: absent, on the way, present, or leaving."""

    weight_place: int
    gradient_place: int
    memories: list[WeightMemory] = field(default_factory=list)
    members: list[BlockMember] = field(default_factory=list)
    stored_gradients: set[str] = field(default_factory=set)
    """Names of the members whose gradient is complete in the store."""
    brought_gradients: set[str] = field(default_factory=set)
    """Names of the members whose gradient on the device contains that of the store."""
    arriving_gradients: dict[str, tuple[Tensor, Wait]] = field(default_factory=dict)
    """Gradients on their way from the store, which are not the parameters' yet, by name."""
    reads: list[Wait] | None = None
    """Waits of the reads of weights that are on the way."""
    weight_writes: list[Wait] = field(default_factory=list)
    """Waits of writes of weights, whose memory may be freed when they end."""
    gradient_writes: list[Wait] = field(default_factory=list)
    """Waits of writes of gradients, whose memory is freed when they end."""
    is_present: bool = False
    is_changed: bool = False
    """True if the update has changed the weights on the device."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters of all members."""
        return [member.parameter for member in self.members]

    @property
    def is_away(self) -> bool:
        """True if nothing is on the device or on its way there."""
        gradients = self.brought_gradients or self.arriving_gradients
        return not (self.is_present or gradients) and self.reads is None

    def launch(self, store: ParameterStore) -> None:
        """Allocate the memory and start to read the weights."""
        if self.is_present or self.reads is not None:
            return
        reads = self.allocate()
        for memory in self.memories:
            if memory.data.numel():
                reads.append(store.read(self.weight_place + memory.offset, memory.data))

    def allocate(self) -> list[Wait]:
        """Allocate the memory of the weights if they are away; return the waits of their reads, to
        which the caller adds its own."""
        assert not self.is_present
        if self.reads is None:
            self.reads = []
            for memory in self.memories:
                memory.data.untyped_storage().resize_(memory.storage_bytes)
        return self.reads

    def launch_gradients(self, store: ParameterStore, members: Iterable[BlockMember]) -> None:
        """Start to read those gradients that the store has and the device has not."""
        names = self.stored_gradients - self.brought_gradients - self.arriving_gradients.keys()
        for member in members:
            if member.name in names:
                memory = store.allocate(member.num_bytes)
                wait: Wait = _return_at_once
                if member.num_bytes:
                    wait = store.read(self.gradient_place + member.gradient_offset, memory)
                gradient = memory.view(member.parameter.dtype).view(member.shape)
                self.arriving_gradients[member.name] = gradient, wait

    def bring_gradients(self, store: ParameterStore, members: Iterable[BlockMember]) -> None:
        """Make the gradients that the store has the parameters', or add them to these."""
        members = list(members)
        self.launch_gradients(store, members)
        for member in members:
            if member.name not in self.arriving_gradients:
                continue
            gradient, wait = self.arriving_gradients.pop(member.name)
            wait()
            if member.parameter.grad is None:
                member.parameter.grad = wrap_gradient(gradient, member.parameter)
            else:
                get_local_tensor(member.parameter.grad).add_(gradient)
            self.brought_gradients.add(member.name)

    def finish(self) -> None:
        """Wait for the weights that are on the way."""
        reads, self.reads = self.reads or [], None
        for wait in reads:
            wait()
        self.is_present = True

    def store_gradients(self, store: ParameterStore) -> None:
        """Start to write the gradients on the device and take them from the parameters."""
        for member in self.members:
            if member.parameter.grad is not None:
                self.store_gradient(member, store)

    def store_gradient(self, member: BlockMember, store: ParameterStore) -> None:
        """Start to write one member's gradient and take it from the parameter."""
        self.bring_gradients(store, [member])  # another part of a pass may have computed it before
        gradient = member.parameter.grad
        assert gradient is not None
        if member.num_bytes:
            place = self.gradient_place + member.gradient_offset
            data = get_local_tensor(gradient).contiguous()
            self.gradient_writes.append(store.write(place, data))
        self.stored_gradients.add(member.name)
        self.brought_gradients.discard(member.name)
        member.parameter.grad = None

    def drop_gradients(self) -> None:
        """Free the gradients on the device; the store keeps what it has."""
        arriving, self.arriving_gradients = self.arriving_gradients, {}
        for _, wait in arriving.values():
            wait()
        for member in self.members:
            member.parameter.grad = None
        self.brought_gradients.clear()

    def store_weights(self, store: ParameterStore) -> None:
        """Start to write the weights if the update has changed them."""
        if self.is_changed:
            for memory in self.memories:
                if memory.data.numel():
                    place = self.weight_place + memory.offset
                    self.weight_writes.append(store.write(place, memory.data))
            self.is_changed = False

    def finish_writes(self) -> None:
        """Wait for all writes."""
        self.finish_weight_writes()
        self.finish_gradient_writes()

    def finish_weight_writes(self) -> None:
        """Wait for the writes of weights."""
        writes, self.weight_writes = self.weight_writes, []
        for wait in writes:
            wait()

    def finish_gradient_writes(self) -> None:
        """Wait for the writes of gradients."""
        writes, self.gradient_writes = self.gradient_writes, []
        for wait in writes:
            wait()

    def free_weights(self) -> None:
        """Free the memory of weights that have not changed; their transfers end first."""
        self.finish_weight_writes()
        if self.reads is not None:
            self.finish()
        if self.is_present:
            for memory in self.memories:
                memory.data.untyped_storage().resize_(0)
        self.is_present = False

    def release(self) -> None:
        """Free weights and gradients on the device; transfers on the way end first."""
        assert not self.is_changed
        self.finish_writes()
        self.drop_gradients()
        self.free_weights()


def _return_at_once() -> None:
    """End a transfer of no bytes."""


def wrap_gradient(local: Tensor, parameter: nn.Parameter) -> Tensor:
    """Return a gradient of this rank's part as the parameter's: a DTensor if that is one."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
