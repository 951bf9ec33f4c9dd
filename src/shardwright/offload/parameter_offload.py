"""Trained matrices of blocks, and their gradients, in a slower tier between uses of their block.

The matrices of a block are views of one memory on the device, whose storage is freed while they
are away. They arrive before the block's forward and backward pass and before its update, and
leave after it; only the update changes them, so only then are they written. Gradients leave when
the block's backward pass has ended, and return for the next micro-batch, which adds to them, and
for the update (docs/decisions/0102-offloaded-trained-parameters.md).

[Note: split backward passes] Under I a block needs its weights, and those gradients that I
computes: experts', whose products are not deferred. Under W it needs the other gradients, and no
weights. Which gradients I computes is learnt. One that has not been brought is completed when it
leaves (docs/decisions/0223-offloaded-weights-and-split-backward-passes.md).

[Note: weights that do not move] If working weights stay on the device, a block needs its own
weights only to write them: after an update. The host may update weights by gradients in the store,
without the device (`store_update.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress

from torch import Tensor

from shardwright.config.offload import OffloadTier
from shardwright.errors import OffloadFailed
from shardwright.model.block_weights import BlockWeight, BlockWeightSources
from shardwright.model.decoder import Decoder
from shardwright.model.products.working_weights import WorkingWeights
from shardwright.numerics import scale_
from shardwright.offload.block_uses import BlockUses, Use
from shardwright.offload.parameter_store import ParameterStore
from shardwright.offload.state_buckets import StatePartition, round_to_pages
from shardwright.offload.store import TransferCounts, TransferReporter
from shardwright.offload.store_update import FinishPiece, StoreUpdate
from shardwright.offload.trained_block import BlockMember, TrainedBlock, WeightMemory
from shardwright.offload.weight_offload import read_bytes

FinishGradients = Callable[[Sequence[str]], None]
"""Called with the names of a block's trained weights before their gradients leave the device."""


class ParameterOffload(BlockUses):
    """Matrices of all blocks of a rank, trained or frozen, with the gradients of the trained."""

    def __init__(
        self,
        store: ParameterStore,
        tier: OffloadTier,
        store_update: StoreUpdate | None = None,
    ) -> None:
        """
        Args:
            store_update: lets the host update the weights in the store; None updates them on the
                device.
        """
        super().__init__()
        self.store = store
        self.tier = tier
        self.store_update = store_update
        self.num_bytes = 0
        """Bytes of the weights of this rank's blocks."""
        self.names: frozenset[str] = frozenset()
        """Names of all offloaded weights."""
        self._blocks: dict[int, TrainedBlock] = {}
        self._layer_of_name: dict[str, int] = {}
        self._reporter = TransferReporter()
        self._finish_gradients: FinishGradients | None = None
        self._completed_layers: Collection[int] = ()
        self._backward_use: Use | None = None
        """Block whose backward pass is running, and its part."""
        self._input_pass_names: set[str] = set()
        """Weights whose gradients are computed with those of inputs when a pass is split."""
        self._finish_weights: Callable[[Sequence[str]], None] | None = None
        self._gradient_factor: float | Tensor = 1.0
        self._updated_layers: set[int] = set()
        """Layers that the running update has brought."""
        self._working_weights: WorkingWeights | None = None

    @property
    def stored_bytes(self) -> int:
        """Bytes of the tier: weights and gradients."""
        return self.store.num_bytes

    def attach(
        self, decoder: Decoder, weights: Iterable[BlockWeight], sources: BlockWeightSources
    ) -> None:
        """Store the weights and make them the decoder's parameters, absent from the device.

        Raises:
            OffloadFailed: the disk is too small or fails.
        """
        by_layer: dict[int, list[BlockWeight]] = defaultdict(list)
        for weight in weights:
            assert weight.spec.layer is not None
            assert weight.spec.name not in sources.groups, "ZeRO shards it"
            by_layer[weight.spec.layer].append(weight)
        for block in decoder.blocks:
            found = by_layer.get(block.layer_index)
            if found:
                self._blocks[block.layer_index] = self._store_block(found, sources)
                self.install_hooks(block)
        self._layer_of_name = {
            member.name: layer for layer, block in self._blocks.items() for member in block.members
        }
        self.names = frozenset(self._layer_of_name)

    def _store_block(
        self, weights: Sequence[BlockWeight], sources: BlockWeightSources
    ) -> TrainedBlock:
        offsets = []
        size = 0
        for weight in weights:
            offsets.append(size)
            size += round_to_pages(weight.num_bytes)
        gradient_bytes = sum(round_to_pages(item.num_bytes) for item in weights if item.is_trained)
        memory = self.store.allocate(size)
        block = TrainedBlock(self.store.add(size), self.store.add(gradient_bytes))
        block.memories.append(WeightMemory(memory, memory.untyped_storage().nbytes(), 0))
        gradient_offset = 0
        for weight, offset in zip(weights, offsets, strict=True):
            values = memory[offset : offset + weight.num_bytes].view(weight.dtype)
            # `data` has a version counter of its own: autograd must not take the return of the
            # same values for a change of a saved tensor.
            parameter = weight.install(values.view(weight.shape).data)
            block.members.append(
                BlockMember(
                    weight.spec.name,
                    parameter,
                    parameter.shape,
                    offset,
                    weight.num_bytes,
                    gradient_offset,
                )
            )
            if weight.is_trained:
                gradient_offset += round_to_pages(weight.num_bytes)
            self.num_bytes += weight.num_bytes
        memory.untyped_storage().resize_(0)
        for weight, offset in zip(weights, offsets, strict=True):
            pieces = read_bytes(weight, sources, 0, weight.num_bytes)
            self.store.fill(block.weight_place + offset, pieces)
        return block

    def write_copies(self, working_weights: WorkingWeights) -> None:
        """Write working weights of blocks when their weights are on the device."""
        self._working_weights = working_weights
        if self.store_update is not None:
            self.store_update.working_weights = working_weights
        for block in self._blocks.values():
            working_weights.leave_out(block.parameters)

    # Forward and backward passes

    def begin_backward(
        self,
        finish: FinishGradients,
        completed_layers: Collection[int],
        *,
        is_deferring: bool = False,
    ) -> None:
        """Prepare for a backward pass of a micro-batch, or a part of it.

        Args:
            finish: Called with a block's weights before their gradients leave the last time.
            completed_layers: Layers whose gradients no later pass changes.
            is_deferring: True for I, which leaves gradients to W.
        """
        self._finish_gradients = finish
        self._completed_layers = completed_layers
        self._backward_phase = "input gradients" if is_deferring else "backward"

    def begin_weight_gradients(self, layer: int) -> None:
        """Bring a block's gradients before W adds to them."""
        self._use(layer, "weight gradients")

    def end_backward(self) -> None:
        """Let the gradients of the last block leave, after the backward pass."""
        self._store_gradients()
        self._prepare_host_update()

    def _prepare_host_update(self) -> None:
        """Let training's stream wait for all transfers before an update on the host, so that the
        host knows of their end when it has read the gradient norm."""
        if self.store_update is not None and self._completed_layers:
            for block in self._blocks.values():
                block.release()

    def _fetch(self, use: Use, following: Use | None) -> None:
        """Fetch a block's weights, start to fetch the next block's, and free all others."""
        layer, phase = use
        last = self._backward_use
        if last is not None and last != use:
            self._store_gradients()
            # `release` would wait for the gradients' writes.
            self._blocks[last[0]].free_weights()
        if self._backward_use is None and phase in ("forward", "inference"):
            for other_layer in self._blocks.keys() - {layer}:  # those of the pass before
                self._blocks[other_layer].finish_gradient_writes()
        self._release_others({layer})
        self._launch(use)
        block = self._blocks[layer]
        if self._needs_weights(use):
            block.finish()
            self._update_copies(block)
            if self._has_copies(block):
                block.free_weights()
        block.bring_gradients(self.store, self._list_members(use))
        if phase not in ("forward", "inference"):
            self._backward_use = use
        if following is not None:
            self._launch(following)

    def _launch(self, use: Use) -> None:
        if self._is_pending(use[0]):
            return  # its update ends before its own use
        block = self._blocks[use[0]]
        if self._needs_weights(use):
            block.launch(self.store)
        block.launch_gradients(self.store, self._list_members(use))

    def _is_pending(self, unit: int) -> bool:
        """Return True if a running update on the host has not reached a unit."""
        return self.store_update is not None and unit in self.store_update.pending_units

    def _needs_weights(self, use: Use) -> bool:
        """Return True if a block reads its weights, and not working weights in their place."""
        layer, phase = use
        return phase != "weight gradients" and not self._has_copies(self._blocks[layer])

    def _has_copies(self, block: TrainedBlock) -> bool:
        """Return True if all weights of a block have current working weights."""
        working_weights = self._working_weights
        return working_weights is not None and working_weights.are_current(block.parameters)

    def _update_copies(self, block: TrainedBlock) -> None:
        """Write a block's working weights, if there are any, from its weights."""
        if self._working_weights is not None:
            self._working_weights.update(block.parameters)

    def _list_members(self, use: Use) -> list[BlockMember]:
        """List the members of a block to whose gradients this use adds, or that it completes."""
        layer, phase = use
        members = self._blocks[layer].members
        names = self._input_pass_names
        if phase == "input gradients":
            return [member for member in members if member.name in names]
        if phase == "weight gradients" and layer not in self._completed_layers:
            return [member for member in members if member.name not in names]
        return members if phase in ("backward", "weight gradients") else []

    def _release_others(self, layers: Collection[int]) -> None:
        """Free blocks; those that are being written are freed the next time."""
        for layer, block in self._blocks.items():
            if layer in layers or self._is_pending(layer):
                continue
            if block.is_changed:
                if self._finish_weights is not None:
                    self._finish_weights([member.name for member in block.members])
                self._update_copies(block)
                block.store_weights(self.store)
                block.drop_gradients()
            elif not block.is_away:
                block.release()

    def _store_gradients(self) -> None:
        """Start to write the gradients of the block whose backward pass has ended."""
        if self._backward_use is None:
            return
        use, self._backward_use = self._backward_use, None
        layer, phase = use
        block = self._blocks[layer]
        if phase == "input gradients":
            self._input_pass_names |= {
                member.name for member in block.members if member.parameter.grad is not None
            }
        if layer in self._completed_layers:
            assert self._finish_gradients is not None
            self._finish_gradients(
                [member.name for member in block.members if member.parameter.requires_grad]
            )
        for other in self._blocks.values():
            other.finish_writes()
        block.store_gradients(self.store)

    # Update

    def prepare(self, partition: StatePartition) -> StoreUpdate | None:
        """Prepare for updates in these buckets of moments; return that on the host, if any."""
        if self.store_update is not None:
            self.store_update.prepare(self._blocks, partition)
        return self.store_update

    def watch_updates(
        self, finish: Callable[[Sequence[str]], None], finish_piece: FinishPiece
    ) -> None:
        """Call a function with the names of updated weights before they leave the device.

        Args:
            finish_piece: Called for each piece that the host has updated.
        """
        self._finish_weights = finish
        if self.store_update is not None:
            self.store_update.finish_piece = finish_piece

    def count_staging_bytes(self, buffer_bytes: int) -> int:
        """Count the host memory through which weights on disk pass if the host updates them."""
        if self.store_update is None or self.tier != "disk":
            return 0
        return self.store_update.count_staging_bytes(buffer_bytes)

    def has_gradient(self, name: str) -> bool:
        """Return True if the store has a gradient of an offloaded parameter."""
        layer = self._layer_of_name.get(name)
        return layer is not None and name in self._blocks[layer].stored_gradients

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiply the gradients of this step by a factor, when they return for the update."""
        self._gradient_factor = factor

    def get_unit(self, name: str) -> int | None:
        """Return the blocks that a weight arrives with, by their first layer; None if it stays."""
        return self._layer_of_name.get(name)

    def find_unit(self, names: Iterable[str]) -> int | None:
        """Return the unit of the offloaded parameters among these; None if none is offloaded."""
        units = {self._layer_of_name[name] for name in names if name in self._layer_of_name}
        assert len(units) <= 1, "a bucket has weights of two units"
        return next(iter(units), None)

    def bring_for_update(self, names: Iterable[str]) -> None:
        """Fetch the weights and gradients of the unit whose parameters are updated next.

        Blocks of other parameters leave: the caller goes through the parameters in the model's
        order. `finish_update` ends the update.
        """
        layer = self.find_unit(names)
        if layer is None:
            return
        following = self._layers[self._layers.index(layer) + 1 :][:1]
        self._release_others({layer, *following})
        if layer not in self._updated_layers:
            block = self._blocks[layer]
            self._launch_for_update(block)
            block.finish_writes()
            block.finish()
            block.bring_gradients(self.store, block.members)
            gradients = [item.parameter.grad for item in block.members]
            if self._gradient_factor != 1.0:
                scale_([item for item in gradients if item is not None], self._gradient_factor)
            block.is_changed = True
        assert self._blocks[layer].is_present, "the update has left this unit"
        self._updated_layers.add(layer)
        for layer in following:
            self._launch_for_update(self._blocks[layer])

    def _launch_for_update(self, block: TrainedBlock) -> None:
        block.launch(self.store)
        block.launch_gradients(self.store, block.members)

    def finish_update(self) -> None:
        """Start to write the last blocks and to bring the first one, for the next pass."""
        self._updated_layers.clear()
        if self.store_update is not None:
            self.store_update.end()
            return
        self._release_others(())
        if self._layers:
            self._launch((self._layers[0], "forward"))

    def discard_gradients(self) -> None:
        """Drop the gradients of all blocks, after an update or instead of it."""
        for block in self._blocks.values():
            block.drop_gradients()
            block.stored_gradients.clear()
        self._gradient_factor = 1.0

    # Reading and writing by name

    def read_weight(self, name: str) -> Tensor:
        """Return a copy of a weight on the device."""
        block, member = self._find(name)
        memory = self.store.allocate(member.num_bytes)
        if member.num_bytes:
            self.store.read(block.weight_place + member.offset, memory)()
        return memory.view(member.parameter.dtype).view(member.shape)

    def view_weight(self, name: str) -> Tensor:
        """Return a weight as a view of the store, valid until the next use.

        Reading it saves, and writing into it loads, without a copy in memory.
        """
        for other in self._blocks.values():
            other.release()
        self.store.synchronise()
        block, member = self._find(name)
        return member.view(self.store, block.weight_place + member.offset)

    def _find(self, name: str) -> tuple[TrainedBlock, BlockMember]:
        block = self._blocks[self._layer_of_name[name]]
        return block, next(member for member in block.members if member.name == name)

    def count_device_bytes(self) -> int:
        """Count the bytes of weights on the device."""
        return sum(
            memory.data.untyped_storage().nbytes()
            for block in self._blocks.values()
            for memory in block.memories
        )

    def pop_counts(self) -> TransferCounts:
        """Return bytes and times since the previous call."""
        return self._reporter.take(self.store.counts)

    def close(self) -> None:
        """Free store and memory. No pass may follow."""
        for block in self._blocks.values():
            block.is_changed = False
            with suppress(OffloadFailed):  # the run has failed by it already
                block.release()
        self._blocks.clear()
        if self.store_update is not None:
            self.store_update.close()
        self.store.close()
