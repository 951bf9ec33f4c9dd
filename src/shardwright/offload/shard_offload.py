"""Trained matrices of blocks that ZeRO shards, and their gradients, in a slower tier.

FSDP2 gathers and reduces as without offloading. This rank's shard of a group of blocks, its unit,
is on the device while FSDP2 copies it into a gather, and during its update. The next unit's
arrives in the meantime. A reduced gradient leaves at once. The next micro-batch's is added to it
when both are reduced: it returns when the gradients of the unit before are reduced
(docs/decisions/0119-offloaded-shards.md).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from shardwright.config.offload import OffloadTier
from shardwright.model.block_weights import BlockWeight, BlockWeightSources
from shardwright.numerics import get_local_tensor
from shardwright.offload.block_uses import Phase, Use
from shardwright.offload.parameter_offload import FinishGradients, ParameterOffload
from shardwright.offload.parameter_store import ParameterStore
from shardwright.offload.state_buckets import round_to_pages
from shardwright.offload.store_update import StoreUpdate
from shardwright.offload.trained_block import (
    BlockMember,
    TrainedBlock,
    WeightMemory,
    wrap_gradient,
)
from shardwright.offload.weight_offload import read_bytes


class ShardOffload(ParameterOffload):
    """This rank's shards of the matrices of blocks, by unit, with their gradients."""

    def __init__(
        self,
        store: ParameterStore,
        tier: OffloadTier,
        store_update: StoreUpdate | None = None,
    ) -> None:
        super().__init__(store, tier, store_update)
        self._is_backward = False
        self._last_stored: int | None = None
        """Unit whose gradients have left last; their writes are waited for one unit later."""
        self._free_reduced: dict[int, Callable[[], None]] = {}
        self._finished_names: set[str] = set()
        """Weights whose gradients the running pass has finished."""
        self._reduced: int | None = None
        """Unit whose gradients FSDP2 has reduced last in the running pass."""
        self._next_reduced: dict[int | None, int] = {}
        """Unit whose gradients were last reduced after those of each unit; first in a pass after
        None."""
        self._expected: int | None = None
        """Unit whose gradients return before FSDP2 reduces them."""

    def add_shards(
        self,
        unit: int,
        weights: Sequence[BlockWeight],
        residents: Sequence[nn.Parameter],
        sources: BlockWeightSources,
        free_reduced: Callable[[], None],
    ) -> None:
        """Store a unit's shards and free their memory on the device.

        Args:
            weights: shape and dtype of this rank's shards; the modules have the parameters.
            residents: other trained parameters that FSDP2 reduces with them.
            free_reduced: Called when the unit's reduced gradients have left.

        Raises:
            OffloadFailed: the disk is too small or fails.
        """
        size = sum(round_to_pages(weight.num_bytes) for weight in weights)
        gradient_bytes = sum(round_to_pages(item.num_bytes) for item in weights if item.is_trained)
        block = TrainedBlock(self.store.add(size), self.store.add(gradient_bytes))
        offset = 0
        gradient_offset = 0
        for weight in weights:
            parameter = weight.parameter
            local = get_local_tensor(parameter.detach())
            assert local.shape == weight.shape, weight.spec.name
            storage = local.untyped_storage()
            block.memories.append(
                WeightMemory(local.view(-1).view(torch.uint8), storage.nbytes(), offset)
            )
            member = BlockMember(
                weight.spec.name, parameter, local.shape, offset, weight.num_bytes, gradient_offset
            )
            block.members.append(member)
            if weight.num_bytes:
                pieces = read_bytes(weight, sources, 0, weight.num_bytes)
                self.store.fill(block.weight_place + offset, pieces)
            storage.resize_(0)
            offset += round_to_pages(weight.num_bytes)
            self.num_bytes += weight.num_bytes
            self._layer_of_name[member.name] = unit
            if weight.is_trained:
                gradient_offset += round_to_pages(weight.num_bytes)
                parameter.register_post_accumulate_grad_hook(
                    partial(self._take_gradient, unit, member)
                )
        for parameter in residents:
            parameter.register_post_accumulate_grad_hook(_separate_gradient)
        self._blocks[unit] = block
        self._free_reduced[unit] = free_reduced
        self._layers.append(unit)
        self.names = frozenset(self._layer_of_name)

    # Forward and backward passes

    def bring_shards(self, unit: int) -> None:
        """Bring a unit's shards before FSDP2 gathers them, and start to bring the next unit's.

        They are on the device until the next call, and others leave. Those of units whose working
        shards are current stay away.
        """
        phase: Phase = "inference"
        if torch.is_grad_enabled():
            phase = "forward"
        if self._is_backward:
            phase = "backward"
        block = self._blocks[unit]
        is_ready = block.is_present or self._has_copies(block)
        if (unit, phase) == self._last_use and is_ready:
            return  # FSDP2 gathers experts apart from the rest of their block
        self._use(unit, phase)

    def begin_backward(
        self,
        finish: FinishGradients,
        completed_layers: Collection[int],
        *,
        is_deferring: bool = False,
    ) -> None:
        """Prepare for a backward pass of a micro-batch, or a part of it; `finish` is called for
        each gradient."""
        super().begin_backward(finish, completed_layers, is_deferring=is_deferring)
        self._finished_names.clear()
        self._reduced = None
        if not is_deferring:
            self._expect_gradients()
        self._is_backward = True

    def end_backward(self) -> None:
        """Finish the gradients that earlier passes have completed, and wait for those that have
        left, but for the last unit's."""
        for unit in sorted(self._blocks.keys() & set(self._completed_layers)):
            self._finish_stored_gradients(unit)
        if self._expected is not None:  # no reduction has followed
            self._blocks[self._expected].drop_gradients()
            self._expected = None
        last = self._last_stored
        if self.store_update is not None and self._completed_layers:
            last = None
        for unit in self._blocks.keys() - {last}:
            self._finish_gradient_writes(unit)
        self._prepare_host_update()
        self._is_backward = False

    def _fetch(self, use: Use, following: Use | None) -> None:
        """Fetch a unit's shards, start to fetch the next unit's, and free all others."""
        unit, phase = use
        next_unit = None if following is None else following[0]
        for other, others_block in self._blocks.items():
            if other not in (unit, next_unit) and not self._is_pending(other):
                others_block.free_weights()
            if phase != "backward" or other != self._last_stored:
                self._finish_gradient_writes(other)
        self._launch(use)
        block = self._blocks[unit]
        if self._needs_weights(use):
            block.finish()
            self._update_copies(block)
        if self._has_copies(block):
            block.free_weights()
        if following is not None:
            self._launch(following)

    def _launch(self, use: Use) -> None:
        """Start to bring a unit's shards if a gather or its working shards need them; gradients
        return when they are reduced."""
        if not self._is_pending(use[0]) and self._needs_weights(use):
            self._blocks[use[0]].launch(self.store)

    def bring_gradients(self, unit: int, parameters: Collection[nn.Parameter]) -> None:
        """Bring gradients of a unit before FSDP2 adds to them, and start to bring the next unit's.

        Args:
            parameters: Parameters whose gradients are reduced together.
        """
        block = self._blocks[unit]
        if unit != self._reduced:
            self._next_reduced[self._reduced] = unit
            if self._expected is not None and self._expected != unit:
                self._blocks[self._expected].drop_gradients()
            for other in self._blocks.keys() - {self._last_stored}:
                self._finish_gradient_writes(other)
            self._reduced = unit
        block.bring_gradients(
            self.store, [item for item in block.members if item.parameter in parameters]
        )
        self._expect_gradients()

    def _expect_gradients(self) -> None:
        """Start to bring the gradients of the unit that is reduced next in this pass."""
        self._expected = self._next_reduced.get(self._reduced)
        if self._expected is None:
            return
        expected = self._blocks[self._expected]
        expected.launch_gradients(
            self.store,
            [item for item in expected.members if item.name not in self._finished_names],
        )

    def _finish_gradient_writes(self, unit: int) -> None:
        block = self._blocks[unit]
        if block.gradient_writes:
            block.finish_gradient_writes()
            self._free_reduced[unit]()

    def _take_gradient(self, unit: int, member: BlockMember, _parameter: Tensor) -> None:
        """Let a reduced gradient leave; FSDP2 calls this on the stream of the reduction."""
        self._let_leave(unit, member)
        self._last_stored = unit

    def _let_leave(self, unit: int, member: BlockMember) -> None:
        if unit in self._completed_layers:
            assert self._finish_gradients is not None
            self._finish_gradients([member.name])
            self._finished_names.add(member.name)
        self._blocks[unit].store_gradient(member, self.store)

    def _finish_stored_gradients(self, unit: int) -> None:
        """Finish those gradients of a unit to which the last pass has added nothing: experts' that
        were reduced under W of an earlier micro-batch, because I had computed them before."""
        block = self._blocks[unit]
        members = [
            member
            for member in block.members
            if member.name in block.stored_gradients - self._finished_names
        ]
        block.bring_gradients(self.store, members)
        for member in members:
            self._let_leave(unit, member)

    # Update

    def discard_gradients(self) -> None:
        """Drop the gradients of all units, after an update or instead of it."""
        super().discard_gradients()
        self._expected = None
        self._last_stored = None


def _separate_gradient(parameter: Tensor) -> None:
    """Give a gradient memory of its own: its views share that of gradients that leave."""
    assert isinstance(parameter, nn.Parameter)
    gradient = parameter.grad
    assert gradient is not None
    local = get_local_tensor(gradient)
    if local.untyped_storage().nbytes() > local.nbytes:
        parameter.grad = wrap_gradient(local.clone(), parameter)
