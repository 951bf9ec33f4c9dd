"""Weights that an offloading keeps: their descriptors, and the ranks that share frozen ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Protocol, runtime_checkable

import torch.distributed as dist
from torch import Tensor, nn

from shardwright.layout import ZERO_AXES, Layout, ParameterLayout, select_used_axes
from shardwright.model.block_weights import BlockWeight, BlockWeightSources, ShardGroup
from shardwright.model.decoder import Decoder
from shardwright.model.products.working_weights import WorkingWeights
from shardwright.parallel.comm_timing import time_wait
from shardwright.parallel.direct_collectives import all_gather_single
from shardwright.parallel.mesh import Mesh


class BlockWeightStore(Protocol):
    """Store of weights of blocks that brings them to the device when their block computes."""

    def attach(
        self, decoder: Decoder, weights: Iterable[BlockWeight], sources: BlockWeightSources
    ) -> None:
        """Store the weights and make them the decoder's parameters."""
        ...


@runtime_checkable
class TrainedWeightStore(BlockWeightStore, Protocol):
    """Store of trained weights, which also keeps the gradients of a block between its uses."""

    @property
    def names(self) -> frozenset[str]:
        """Names of all weights in the store; those of `model.freeze` included."""
        ...

    def write_copies(self, working_weights: WorkingWeights) -> None:
        """Write working weights of blocks when their weights are on the device."""
        ...

    def begin_backward(
        self,
        finish: Callable[[Sequence[str]], None],
        completed_layers: Collection[int],
        *,
        is_deferring: bool = False,
    ) -> None:
        """Prepare for a backward pass of a micro-batch, or a part of it.

        Args:
            finish: Called with the names of a block's trained weights when their gradients are
                complete, before they leave the device.
            completed_layers: Layers whose gradients no later pass changes.
            is_deferring: True for I, which leaves gradients to W.
        """
        ...

    def begin_weight_gradients(self, layer: int) -> None:
        """Bring a block's gradients before W adds to them."""
        ...

    def end_backward(self) -> None:
        """Let the gradients of the last block leave, after the backward pass."""
        ...

    def watch_updates(
        self,
        finish: Callable[[Sequence[str]], None],
        finish_piece: Callable[[str, int, Tensor], None],
    ) -> None:
        """Call a function with the names of updated weights before they leave the device.

        Args:
            finish_piece: Called with the name of a weight that the host updates, the first element
                of an updated piece, and the piece.
        """
        ...

    def has_gradient(self, name: str) -> bool:
        """Return True if the store has a gradient of this weight."""
        ...

    def scale_gradients(self, factor: float) -> None:
        """Multiply the gradients by a factor when they return for the update."""
        ...

    def discard_gradients(self) -> None:
        """Drop the gradients of all blocks, after an update or instead of it."""
        ...

    def read_weight(self, name: str) -> Tensor:
        """Return a copy of a weight on the device."""
        ...

    def view_weight(self, name: str) -> Tensor:
        """Return a weight as a view of the store, valid until the next pass or update."""
        ...


@runtime_checkable
class TrainedShardStore(TrainedWeightStore, Protocol):
    """Store of this rank's shards of trained weights, which FSDP2 gathers and reduces."""

    def add_shards(
        self,
        unit: int,
        weights: Sequence[BlockWeight],
        residents: Sequence[nn.Parameter],
        sources: BlockWeightSources,
        free_reduced: Callable[[], None],
    ) -> None:
        """Store the shards of a unit and free their memory.

        Args:
            unit: index of the blocks that FSDP2 gathers together.
            weights: shape and dtype of the shards; the modules have the parameters.
            residents: other trained parameters that are reduced with them.
            free_reduced: Called when the unit's reduced gradients have left.
        """
        ...

    def bring_shards(self, unit: int) -> None:
        """Allocate and fill the shards of a unit; they stay until the next call."""
        ...

    def bring_gradients(self, unit: int, parameters: Collection[nn.Parameter]) -> None:
        """Bring those gradients of a unit to which a reduction adds."""
        ...


@contextmanager
def offload_gradients(
    offload: TrainedWeightStore | None,
    finish: Callable[[Sequence[str]], None],
    completed_layers: Collection[int],
    is_deferring: bool,
) -> Iterator[None]:
    """Offload gradients of blocks during a backward pass in this context, or a part of it.

    Args:
        offload: None leaves all gradients on the device.
        finish, completed_layers, is_deferring: as `TrainedWeightStore.begin_backward` has them.
    """
    if offload is None:
        yield
        return
    offload.begin_backward(finish, completed_layers, is_deferring=is_deferring)
    yield
    offload.end_backward()


def find_shard_groups(
    weights: Iterable[BlockWeight], layouts: dict[str, ParameterLayout], mesh: Mesh | None
) -> dict[str, ShardGroup]:
    """Return the ranks over which ZeRO shards each weight; one value per group of ranks."""
    by_axis: dict[str, ShardGroup] = {}
    found = {}
    for weight in weights:
        axes = [axis for axis in layouts[weight.spec.name].shard_axes if axis in ZERO_AXES]
        if not axes:
            continue
        (axis,) = axes
        assert mesh is not None
        group = mesh.group(axis)
        assert group is not None, f"{weight.spec.name}: sharded over one rank"
        if axis not in by_axis:
            by_axis[axis] = ShardGroup(
                group.size(), group.rank(), partial(_gather_weights, group=group)
            )
        found[weight.spec.name] = by_axis[axis]
    return found


def _gather_weights(memory: Tensor, part: Tensor, *, group: dist.ProcessGroup) -> None:
    with time_wait(group):
        all_gather_single(memory, part, group=group)


def drop_zero_shards(parameter: ParameterLayout, layout: Layout) -> ParameterLayout:
    """Return the descriptor of a parameter that each rank computes with as a whole."""
    zero_axes = [axis for axis in parameter.shard_axes if axis in ZERO_AXES]
    replicated = tuple(
        axis
        for zero_axis in zero_axes
        for axis in select_used_axes(
            layout, *(("dp_shard", "cp") if zero_axis == "fsdp" else (zero_axis,))
        )
    )
    return replace(
        parameter,
        shards=tuple(part for part in parameter.shards if part.axis not in ZERO_AXES),
        replicated_axes=parameter.replicated_axes + replicated,
    )
