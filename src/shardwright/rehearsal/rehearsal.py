"""Rehearsal of a layout: the step of every role, and the check that their collectives match.

A role is a group of ranks that run the same step; one rank of it is rehearsed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import active_children, get_context
from typing import Any, get_args

import torch

from shardwright.config import Recipe
from shardwright.config.run import DeviceKind
from shardwright.errors import InputError, LayoutError
from shardwright.layout import AXES, Layout, RankGrid
from shardwright.plans import Plan
from shardwright.rehearsal.agreement import Disagreement, find_disagreement
from shardwright.rehearsal.collective_recorder import Collective, sum_bytes_by_axis
from shardwright.rehearsal.rank_rehearsal import (
    RankRehearsal,
    RehearsalDevice,
    choose_rehearsed_attention,
    has_several_documents,
    rehearse_rank,
)
from shardwright.units import format_bytes
from shardwright.worker_processes import block_interrupts

SCHEMA_VERSION = 1
MAX_RANKS_WITHOUT_ROLES = 8
"""World sizes up to this rehearse every rank, which also finds bugs of a single rank."""


@dataclass(frozen=True)
class RankRole:
    """Ranks with the same step on different data; `rank`, the first, has the largest shards."""

    rank: int
    ranks: tuple[int, ...]
    stage: int


def list_roles(layout: Layout, *, should_run_each_rank: bool = False) -> list[RankRole]:
    """List one role for each index on axis pp, or one for each rank.

    >>> roles = list_roles(Layout(pp=2, dp_shard=4, zero_stage=3))
    >>> [(role.rank, len(role.ranks)) for role in roles]
    [(0, 4), (4, 4)]
    """
    grid = RankGrid(layout)
    stage_of = [grid.coordinates(rank)["pp"] for rank in range(layout.world_size)]
    if should_run_each_rank:
        return [RankRole(rank, (rank,), stage_of[rank]) for rank in range(layout.world_size)]
    by_stage: dict[int, list[int]] = {}
    for rank, stage in enumerate(stage_of):
        by_stage.setdefault(stage, []).append(rank)
    return [RankRole(ranks[0], tuple(ranks), stage) for stage, ranks in by_stage.items()]


def restrict_to_rehearsed(
    sequences: Mapping[int, Sequence[Collective]],
) -> dict[int, list[Collective]]:
    """Restrict every group to the ranks that were rehearsed.

    All ranks of a role make the same calls, so mismatches can only occur between roles. The
    first ranks of all roles form one line through the rank grid. Messages to ranks outside that
    line, such as the ring of a context-parallel group, are equal within a role and left out.
    """
    present = set(sequences)
    if all(set(call.ranks) <= present for calls in sequences.values() for call in calls):
        return {rank: list(calls) for rank, calls in sequences.items()}
    return {
        rank: [
            replace(call, ranks=tuple(member for member in call.ranks if member in present))
            for call in calls
            if _is_between_rehearsed(call, present)
        ]
        for rank, calls in sequences.items()
    }


def _is_between_rehearsed(call: Collective, present: set[int]) -> bool:
    return call.peer is None or call.peer in present


@dataclass(frozen=True, repr=False)
class Rehearsal:
    """Memory and collectives of a layout's step for each role, and the first mismatch."""

    plan: Plan
    roles: tuple[RankRole, ...]
    reports: tuple[RankRehearsal, ...]
    disagreement: Disagreement | None
    assumptions: tuple[str, ...] = ()
    """Assumptions about the data and the device, one sentence each."""
    device: RehearsalDevice = "cpu"
    """Device type whose operators the step runs."""

    def __repr__(self) -> str:
        layout = self.plan.layout
        num_collectives = max(len(report.collectives) for report in self.reports)
        outcome = (
            "all collectives match"
            if self.disagreement is None
            else f"collectives do not match: {self.disagreement}"
        )
        return (
            f"{layout} on {layout.world_size} ranks: peak {format_bytes(self.peak_bytes)}, "
            f"at most {num_collectives} collectives per rank; {outcome}"
        )

    @property
    def num_run_micro_batches(self) -> tuple[int, int]:
        """Fewest and most micro-batches of a step that a rank has run."""
        counts = [report.num_run_micro_batches for report in self.reports]
        return min(counts), max(counts)

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of the rank that needs most."""
        return max(report.peak_bytes for report in self.reports)

    def find_axes(self, report: RankRehearsal, ranks: tuple[int, ...]) -> str:
        """Name the mesh axes that a group of this rank spans: `tp`, `dp_shard x cp`."""
        grid = RankGrid(self.plan.layout)
        here = grid.coordinates(report.rank)
        others = [grid.coordinates(rank) for rank in ranks]
        return (
            " x ".join(axis for axis in AXES if any(other[axis] != here[axis] for other in others))
            or "this rank"
        )

    def compute_traffic(self, report: RankRehearsal) -> dict[tuple[str, str], tuple[int, float]]:
        """Compute calls and sent bytes of one step by axes and kind."""
        sent = sum_bytes_by_axis(report.collectives, lambda ranks: self.find_axes(report, ranks))
        calls: dict[tuple[str, str], int] = {}
        for call in report.collectives:
            key = (self.find_axes(report, call.ranks), call.kind)
            calls[key] = calls.get(key, 0) + 1
        return {(axis, kind): (calls[axis, kind], total) for (axis, kind), total in sent.items()}

    def as_dict(self) -> dict[str, Any]:
        """Return the rehearsal as JSON values."""
        return {
            "schema_version": SCHEMA_VERSION,
            "plan": self.plan.as_dict(),
            "device": self.device,
            "agrees": self.disagreement is None,
            "disagreement": None if self.disagreement is None else self.disagreement.message,
            "peak_bytes": self.peak_bytes,
            "assumptions": list(self.assumptions),
            "roles": [
                self._build_role_json(role, report)
                for role, report in zip(self.roles, self.reports, strict=True)
            ],
        }

    def _build_role_json(self, role: RankRole, report: RankRehearsal) -> dict[str, Any]:
        return {
            "rank": role.rank,
            "stage": role.stage,
            "num_ranks": len(role.ranks),
            "weights_bytes": report.weights_bytes,
            "gradients_bytes": report.gradients_bytes,
            "optimizer_bytes": report.optimizer_bytes,
            "offloaded_bytes": report.offloaded_bytes,
            "offloaded_activation_bytes": report.offloaded_activation_bytes,
            "offloaded_parameter_bytes": report.offloaded_parameter_bytes,
            "host_bytes": report.host_bytes,
            "disk_bytes": report.disk_bytes,
            "peak_bytes": report.peak_bytes,
            "at_peak": [
                {
                    "kind": part.origin.kind,
                    "operator": part.origin.operator,
                    "line": part.origin.source_line,
                    "num_bytes": part.num_bytes,
                    "num_tensors": part.num_tensors,
                }
                for part in report.contributions
            ],
            "collectives": [
                {
                    "kind": call.kind,
                    "ranks": call.ranks,
                    "num_bytes": call.num_bytes,
                    "dtype": call.dtype,
                    "peer": call.peer,
                }
                for call in report.collectives
            ],
            "num_run_micro_batches": report.num_run_micro_batches,
            "seconds": round(report.seconds, 3),
        }


def rehearse(
    recipe: Recipe,
    plan: Plan,
    *,
    device: RehearsalDevice = "cpu",
    settings: Sequence[str] = (),
    should_run_each_rank: bool | None = None,
    should_run_each_micro_batch: bool = False,
    on_report: Callable[[RankRehearsal], None] = lambda _report: None,
) -> Rehearsal:
    """Rehearse one optimizer step of every role, in parallel processes.

    Args:
        device: device type of the fake tensors, from `choose_device`.
        settings: lines about what a run on the recipe's cluster would choose by free memory.
        should_run_each_rank: rehearse every rank; default for at most `MAX_RANKS_WITHOUT_ROLES`
            ranks.
        should_run_each_micro_batch: run all micro-batches, also those that repeat earlier ones.
        on_report: called with every role's report when it is finished.

    Raises:
        LayoutError: the layout's exchange of experts' rows does not run on fake devices.
    """
    if plan.layout.expert_dispatch == "deep_ep":
        raise LayoutError(
            "DeepEP's kernels do not run on fake devices",
            field="layout.expert_dispatch",
            got="deep_ep",
            remedy="Rehearse once_per_rank, which sends the same rows",
        )
    should_run_each_rank = (
        plan.layout.world_size <= MAX_RANKS_WITHOUT_ROLES
        if should_run_each_rank is None
        else should_run_each_rank
    )
    roles = list_roles(plan.layout, should_run_each_rank=should_run_each_rank)
    reports: list[RankRehearsal] = []
    if len(roles) == 1 and device == "cpu":
        reports.append(
            rehearse_rank(
                recipe,
                plan,
                roles[0].rank,
                should_run_each_micro_batch=should_run_each_micro_batch,
            )
        )
        on_report(reports[0])
    else:  # a process that has used CUDA keeps its context's memory until it ends
        workers = min(len(roles), os.cpu_count() or 1)
        arguments = zip(
            *((recipe, plan, role.rank, device, should_run_each_micro_batch) for role in roles),
            strict=True,
        )
        others = active_children()
        with ProcessPoolExecutor(workers, mp_context=get_context("forkserver")) as pool:
            with block_interrupts():
                results = pool.map(rehearse_rank, *arguments)
            try:
                for report in results:
                    reports.append(report)
                    on_report(report)
            except BaseException:  # a rehearsal may take minutes
                for process in set(active_children()).difference(others):
                    process.kill()
                raise
    disagreement = find_disagreement(
        restrict_to_rehearsed({report.rank: report.collectives for report in reports})
    )
    return Rehearsal(
        plan,
        tuple(roles),
        tuple(reports),
        disagreement,
        (*settings, *_list_assumptions(recipe, plan, device)),
        device,
    )


def choose_device(requested: DeviceKind, recipe: Recipe) -> RehearsalDevice:
    """Choose the device type of the fake tensors; `auto` uses CUDA if the ranks would.

    They would if torch finds a CUDA device and `run.device` is not cpu.

    Raises:
        InputError: no such device type, or CUDA is requested and torch finds no CUDA device.
    """
    if requested not in get_args(DeviceKind):
        raise InputError(
            "not a device type", field="--device", got=requested, allowed="auto, cpu or cuda"
        )
    is_available = torch.cuda.is_available()
    if requested == "cuda" and not is_available:
        raise InputError(
            "torch finds no CUDA device; the step runs its operators, without its memory",
            field="--device",
            got="cuda",
            allowed="cpu or auto",
            remedy="Rehearse on a machine with a GPU, or give a CPU build of torch the test device "
            "of shardwright's repository (python -m tests.hostcuda -m shardwright rehearse ...)",
        )
    if requested == "auto":
        requested = "cuda" if is_available and recipe.run.device != "cpu" else "cpu"
    return requested


def _list_assumptions(recipe: Recipe, plan: Plan, device: RehearsalDevice) -> Iterator[str]:
    """List the assumptions made because fake tensors have no values and no store."""
    if plan.shape.experts is not None:
        over = f" over {plan.layout.ep} ranks" if plan.layout.ep > 1 else ""
        yield (
            f"tokens are distributed evenly over experts{over}; with uneven loads the fullest "
            "rank needs more memory and sends more"
        )
    if has_several_documents(recipe):
        yield (
            "every row holds two documents of half its length; memory does not depend on the "
            "documents' lengths"
        )
        if device == "cpu" and plan.shape.num_kv_heads < plan.shape.num_heads:
            yield (
                "the mask of such rows makes the CUDA kernel repeat keys and values for every "
                "query head; these copies are not counted"
            )
    if choose_rehearsed_attention(recipe, device) != recipe.model.attention:
        yield f"attention runs as `auto` on a CPU, not as {recipe.model.attention}"
    if recipe.run.device != "cpu" and "host" in recipe.offload.list_tiers():
        yield "ranks run on GPUs; on CPUs, `offload: host` moves nothing (run.device: cpu)"
    yield "every token is supervised and every gradient is finite"
    if device == "cpu":
        yield (
            "operators run as on a CPU; those of CUDA keep other workspaces (--device cuda, where "
            "torch has a CUDA device)"
        )
