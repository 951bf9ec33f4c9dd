"""Units of an update that overlaps with the next forward pass: parameters that are read together.

[Note: gathers of updated shards] FSDP2 copies a shard into a gather on a stream of its own, ahead
of the pass that uses it. So that stream waits for the update of the shards, and training's stream
for the gather.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from shardwright.optim.sharded_optimizer import UpdateUnit
from shardwright.parallel.comm_timing import pause_wait
from shardwright.parallel.parallel_model import ParallelModel
from shardwright.parallel.sharded_weights import list_block_groups, list_parameter_groups

UnitWait = Callable[[int, torch.Stream], None]
"""Lets a stream wait for the update of a unit."""


def list_update_units(model: ParallelModel) -> list[UpdateUnit]:
    """List the units in the order of their first use.

    Those of FSDP2's groups of parameters begin with the root's: embedding and head. Otherwise the
    head comes last.
    """
    decoder = model.decoder
    names = {parameter: name for name, parameter in decoder.named_parameters()}
    if model.fsdp_modules:
        return [
            UpdateUnit(
                frozenset(
                    names[getattr(info.module, info.param_name)]
                    for group in groups
                    for info in (parameter._module_info for parameter in group.fsdp_params)
                ),
                tuple(modules),
            )
            for modules, groups in _list_gathered(model)
        ]
    inputs = [module for module in (_find(decoder, "embedding"), decoder.positions) if module]
    used = [inputs, *(list[nn.Module]([block]) for block in decoder.blocks)]
    units = [
        UpdateUnit(frozenset(names[p] for m in modules for p in m.parameters()), tuple(modules))
        for modules in used
    ]
    listed = frozenset[str]().union(*(unit.names for unit in units))
    outputs = () if decoder.final_norm is None else (decoder.final_norm,)
    return [*units, UpdateUnit(frozenset(names.values()) - listed, outputs)]


def wait_before_gathers(model: ParallelModel, wait: UnitWait) -> None:
    """Call `wait` with the unit, and the stream that copies its shards, before FSDP2 gathers."""
    for unit, (_, groups) in enumerate(_list_gathered(model)):
        for group in groups:
            _wait_before_gather(group, unit, wait)


def _list_gathered(model: ParallelModel) -> list[tuple[Iterable[nn.Module], list[Any]]]:
    """List modules and FSDP2's groups that are gathered together; the root first."""
    if not model.fsdp_modules:
        return []
    root = model.fsdp_modules[-1]
    return [
        ([model.decoder], list_parameter_groups(root)),
        *list_block_groups(model.fsdp_modules).values(),
    ]


def _wait_before_gather(group: Any, unit: int, wait: UnitWait) -> None:
    unshard: Callable[[bool], None] = group.unshard

    def wait_and_unshard(async_op: bool = False) -> None:
        copying, _ = group.comm_ctx.get_all_gather_streams(async_op, group._training_state)
        with pause_wait("data"):  # an update that the host runs is this rank's own work
            wait(unit, copying)
        unshard(async_op)

    group.unshard = wait_and_unshard


def _find(module: nn.Module, name: str) -> nn.Module | None:
    found: nn.Module | None = getattr(module, name, None)
    return found
