"""Frozen weights that an offloading keeps: their descriptors, and the ranks that share them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from shardwright.layout import ZERO_AXES, Layout, ParameterLayout, select_used_axes
from shardwright.model.decoder import Decoder
from shardwright.model.frozen_weights import FrozenWeight, FrozenWeightSources, ShardGroup
from shardwright.parallel.comm_timing import all_gather_single, time_wait
from shardwright.parallel.mesh import Mesh


class FrozenWeightStore(Protocol):
    """Store of frozen weights that brings them to the device when their block computes."""

    def attach(
        self, decoder: Decoder, weights: Iterable[FrozenWeight], sources: FrozenWeightSources
    ) -> None:
        """Store the weights and make them the decoder's parameters."""
        ...


def find_shard_groups(
    weights: Iterable[FrozenWeight], layouts: dict[str, ParameterLayout], mesh: Mesh | None
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
