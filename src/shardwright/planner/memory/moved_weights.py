"""Matrices of blocks that `offload.parameters` keeps in a slower tier between their uses.

A block's weights are on the device, whole, while it computes, and those of the next one arrive. Of
trained weights the gradients leave when the next block's backward pass has begun, and weights and
gradients return for the update with the moments. If working weights stay on the device, only the
update brings weights. Of trained weights that ZeRO shards only the shards move: FSDP2 gathers
groups of blocks from them, and the counts of blocks are those of groups.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from shardwright.planner.candidate import Candidate
from shardwright.planner.model_costs import ModelFacts, ParameterElementsByPart


class MovedWeights(NamedTuple):
    """Bytes of a rank's offloaded weights; all zero without offloading."""

    weights: float = 0.0
    """Of all weights that the rank keeps in the tier: its part of them under ZeRO."""
    gradients: float = 0.0
    """Of all gradients that it keeps there; 0 if the weights are frozen."""
    block_weights: float = 0.0
    """Of the largest block's weights on the device in a pass, whole; of the rank's shards of a
    group; 0 if passes read working weights."""
    updated_block_weights: float = 0.0
    """Of the same on the device in an update; 0 if the weights are frozen."""
    block_gradients: float = 0.0
    num_blocks: float = 0.0
    """Blocks of the rank, or groups."""
    block_shares: tuple[float, ...] = ()
    """Bytes of each block's weights as shares of the largest block's; () if the rank has not all
    blocks, or blocks are equal."""

    @property
    def stored(self) -> float:
        """Bytes in the tier."""
        return self.weights + self.gradients

    def compute_weight_bytes(self, num_blocks: float, first: int | None = None) -> float:
        """Compute the bytes of the weights of this number of blocks, or of all, on the device:
        from the block `first` on, or of any."""
        return self._count_blocks(num_blocks, first) * self.block_weights

    def compute_gradient_bytes(self, num_blocks: float, first: int | None = None) -> float:
        """Compute the bytes of the gradients of this number of blocks, or of all, on the device:
        from the block `first` on, or of any."""
        num_bytes = self._count_blocks(num_blocks, first) * self.block_gradients
        return min(num_bytes, self.gradients)  # frozen blocks have none

    def _count_blocks(self, num_blocks: float, first: int | None) -> float:
        """Count blocks in sizes of the largest one."""
        if first is None or not self.block_shares:
            return min(num_blocks, self.num_blocks)
        return sum(self.block_shares[first : first + int(num_blocks)])


def compute_moved_weights(
    facts: ModelFacts, candidate: Candidate, layers: tuple[int, ...]
) -> MovedWeights:
    """Compute the bytes of the offloaded weights of a rank with `layers` of each kind."""
    if candidate.parameter_offload == "none":
        return MovedWeights()
    stored, largest = _count_movable(facts.count_elements(candidate.layout), candidate, layers)
    trained, largest_trained = _count_movable(
        facts.count_elements(candidate.layout, should_skip_frozen=True), candidate, layers
    )
    num_blocks = float(sum(layers))
    wrap_blocks = 1
    if candidate.has_offloaded_shards:
        wrap_blocks = min(candidate.layout.wrap_blocks, sum(layers))
        largest *= wrap_blocks
        largest_trained *= wrap_blocks
        num_blocks = ceil(num_blocks / max(1, wrap_blocks))
    size = get_moved_bytes(candidate)
    gradient = candidate.master_bytes if candidate.adapter is None else 0
    return MovedWeights(
        stored * size,
        trained * gradient,
        largest * size * candidate.moves_weights,
        largest * gradient,
        largest_trained * gradient,
        num_blocks,
        _list_block_shares(facts, candidate, layers) if wrap_blocks == 1 else (),
    )


def _list_block_shares(
    facts: ModelFacts, candidate: Candidate, layers: tuple[int, ...]
) -> tuple[float, ...]:
    """List `MovedWeights.block_shares`, unless parameters are frozen: then weights and gradients of
    a block have different shares."""
    if len(layers) == 1 or sum(layers) < len(facts.slot_of_layer) or facts.frozen_names:
        return ()
    by_kind = [part.movable for part in facts.count_elements(candidate.layout).layers]
    largest = max(by_kind)
    return tuple(by_kind[slot] / largest for slot in facts.slot_of_layer) if largest else ()


def _count_movable(
    by_part: ParameterElementsByPart, candidate: Candidate, layers: tuple[int, ...]
) -> tuple[float, float]:
    """Count the elements that a rank keeps in the tier, and those of its largest block."""
    total = by_part.sum_layers(layers)
    largest = max(
        (
            part.movable_sharded if candidate.has_offloaded_shards else part.movable
            for part, count in zip(by_part.layers, layers, strict=True)
            if count
        ),
        default=0.0,
    )
    return total.movable_sharded if candidate.layout.zero_stage >= 1 else total.movable, largest


def get_moved_bytes(candidate: Candidate) -> float:
    """Return the bytes of an offloaded weight."""
    if candidate.adapter is None:
        return candidate.master_bytes
    if candidate.adapter.quantised:
        return candidate.engine.compute_quantised_weight_bytes(1.0, 0.0, candidate.activation_bytes)
    return candidate.activation_bytes


def compute_updated_bytes(candidate: Candidate, moved: MovedWeights) -> tuple[float, float]:
    """Compute the bytes of offloaded weights, and of gradients, on the device in the update.

    They are those of the block that is updated, the next one, and the weights of the last one,
    which are being written. No bucket of moments has parts of two blocks. If the host updates
    them, only weights of the last two blocks arrive, to be cast to working weights.
    """
    if not moved.block_gradients:
        return 0.0, 0.0
    if candidate.is_updated_on_host:
        num_blocks = 0.0 if candidate.moves_weights else 2.0
        return min(num_blocks, moved.num_blocks) * moved.updated_block_weights, 0.0
    weights = min(3.0, moved.num_blocks) * moved.updated_block_weights
    return weights, moved.compute_gradient_bytes(2.0)
