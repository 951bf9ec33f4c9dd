"""Weights of a block, and their gradients, on the way between the device and a slower tier."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from shardwright.offload.activation_store import Wait
from shardwright.offload.parameter_store import ParameterStore


@dataclass(frozen=True, eq=False)
class BlockMember:
    """Matrix of a block, and its place in the memories of the block's weights and gradients."""

    name: str
    parameter: nn.Parameter
    offset: int
    num_bytes: int
    gradient_offset: int


@dataclass(eq=False)
class TrainedBlock:
    """Matrices of a block: absent, on the way, present, or leaving."""

    memory: Tensor
    """All bytes of the weights, `[N]`; the storage is empty while they are away."""
    weight_place: int
    gradient_place: int
    members: list[BlockMember] = field(default_factory=list)
    stored_gradients: set[str] = field(default_factory=set)
    """Names of the members whose gradient is complete in the store."""
    reads: list[Wait] | None = None
    """Waits of the reads of weights that are on the way."""
    gradient_reads: list[Wait] = field(default_factory=list)
    writes: list[Wait] = field(default_factory=list)
    """Waits of writes of weights, and of gradients, whose memory is freed when they end."""
    is_present: bool = False
    is_changed: bool = False
    """True if the update has changed the weights on the device."""

    def launch(self, store: ParameterStore) -> None:
        """Allocate the memory and start to read the weights."""
        if self.is_present or self.reads is not None:
            return
        self.memory.untyped_storage().resize_(self.memory.numel())
        self.reads = [store.read(self.weight_place, self.memory)]

    def launch_gradients(self, store: ParameterStore) -> None:
        """Start to read the gradients that the store has, and make them the parameters'."""
        for member in self.members:
            parameter = member.parameter
            if member.name in self.stored_gradients and parameter.grad is None:
                memory = torch.empty(member.num_bytes, dtype=torch.uint8, device=self.memory.device)
                place = self.gradient_place + member.gradient_offset
                self.gradient_reads.append(store.read(place, memory))
                parameter.grad = memory.view(parameter.dtype).view(parameter.shape)

    def finish(self) -> None:
        """Wait for what is on the way."""
        reads, self.reads = self.reads or [], None
        for wait in reads:
            wait()
        self.finish_gradients()
        self.is_present = True

    def finish_gradients(self) -> None:
        """Wait for the gradients that are on the way."""
        reads, self.gradient_reads = self.gradient_reads, []
        for wait in reads:
            wait()

    def store_gradients(self, store: ParameterStore) -> None:
        """Start to write the gradients on the device and take them from the parameters."""
        for member in self.members:
            gradient = member.parameter.grad
            if gradient is not None:
                place = self.gradient_place + member.gradient_offset
                self.writes.append(store.write(place, gradient.contiguous()))
                self.stored_gradients.add(member.name)
                member.parameter.grad = None

    def drop_gradients(self) -> None:
        """Free the gradients on the device; the store keeps what it has."""
        self.finish_gradients()
        for member in self.members:
            member.parameter.grad = None

    def store_weights(self, store: ParameterStore) -> None:
        """Start to write the weights if the update has changed them."""
        if self.is_changed:
            self.writes.append(store.write(self.weight_place, self.memory))
            self.is_changed = False

    def finish_writes(self) -> None:
        """Wait for all writes."""
        writes, self.writes = self.writes, []
        for wait in writes:
            wait()

    def free_weights(self) -> None:
        """Free the memory of weights that have not changed; their reads end first."""
        if self.reads is not None:
            self.finish()
        if self.is_present:
            self.memory.untyped_storage().resize_(0)
        self.is_present = False

    def release(self) -> None:
        """Free weights and gradients on the device; transfers on the way end first."""
        assert not self.is_changed
        self.finish_writes()
        self.drop_gradients()
        self.free_weights()
