"""Bus bandwidth of collectives by message size over each group of a layout.

Bus bandwidth is that of nccl-tests (doc/PERFORMANCE.md): bytes/s of the message times the bytes
that each rank must send per byte of it, so it compares with the link's peak for any collective
and number of ranks. `hardware.measured_profile` defines the message bytes. All groups of an axis
run at the same time, as in training. A time is that of the group's slowest rank in the best of
several rounds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import get_args

import torch
import torch.distributed as dist

from shardwright.doctor.finding import (
    Finding,
    Verdict,
    find_worst_verdict,
    format_ranks,
    grade_share,
)
from shardwright.doctor.outliers import LINK_THRESHOLDS, find_outliers
from shardwright.doctor.rates.computation import WORK_SECONDS
from shardwright.errors import InputError
from shardwright.hardware import CollectiveRate, Link
from shardwright.hardware.catalog_loading import find_link, find_node
from shardwright.hardware.collective_rate import CollectiveKind
from shardwright.layout import AXES, Layout, RankGrid
from shardwright.parallel.direct_collectives import all_gather_single, reduce_scatter_single
from shardwright.units import format_bytes

SECTION = "collectives"
COLLECTIVE_KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)

_ITEM_BYTES = 4
_NUM_ROUNDS = 4
_ROUNDS_SECONDS = 0.1
_NUM_STEP_GROUPS = 5
_MAX_STEP_CALLS = 16
STEP_SECONDS = 0.5
"""Seconds of all calls of a message between computations."""
_STEP_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
"""Kinds that all ranks of a group call at once between computations of a step."""
_PEAK_SHARE_THRESHOLDS: dict[str, tuple[float, float]] = {
    "all_reduce": (0.6, 0.3),
    "all_gather": (0.6, 0.3),
    "reduce_scatter": (0.6, 0.3),
    "all_to_all": (0.4, 0.2),
    "broadcast": (0.4, 0.2),
    "send": (0.4, 0.2),
}
"""Shares of the link's peak below which the largest message warns and fails.

A ring reaches 75 to 92% of the peak, other algorithms less.
"""


@dataclass(frozen=True)
class AxisGroups:
    """All groups of an axis; `axes` are all names of this partition of the ranks."""

    axes: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]

    @property
    def name(self) -> str:
        """Names of the axis for display: `dp_shard = fsdp`."""
        return " = ".join(self.axes)

    @property
    def size(self) -> int:
        """Number of ranks of a group."""
        return len(self.groups[0])


@dataclass(frozen=True)
class GroupTime:
    """Seconds of one collective over `ranks`, measured on one of them."""

    axis: str
    ranks: tuple[int, ...]
    kind: CollectiveKind
    message_bytes: int
    seconds: float
    processor_seconds: float | None = None
    """Seconds in which this CPU rank's processor works for it. None on a GPU."""
    step_seconds: float | None = None
    """Mean seconds between two computations. None if not measured."""


def list_axis_groups(layout: Layout) -> list[AxisGroups]:
    """List the groups over which a layout communicates, each partition once, and all ranks.

    >>> [groups.name for groups in list_axis_groups(Layout(dp_shard=2, tp=2, zero_stage=3))]
    ['dp_shard = fsdp', 'tp', 'all']
    >>> [groups.name for groups in list_axis_groups(Layout(dp_shard=2, zero_stage=3))]
    ['dp_shard = fsdp = all']
    """
    grid = RankGrid(layout)
    axes_by_groups: dict[tuple[tuple[int, ...], ...], list[str]] = {}
    for axis in (*AXES, "fsdp", "efsdp", "ep"):
        is_expert_axis = axis in ("efsdp", "ep")
        if layout.degree(axis) > 1 and not (is_expert_axis and layout.ep == 1):
            axes_by_groups.setdefault(tuple(grid.groups([axis])), []).append(axis)
    if layout.world_size > 1:
        axes_by_groups.setdefault((tuple(range(layout.world_size)),), []).append("all")
    return [AxisGroups(tuple(axes), groups) for groups, axes in axes_by_groups.items()]


def round_message_bytes(num_bytes: float, num_ranks: int) -> int:
    """Round a message to the nearest size that divides evenly among the ranks."""
    unit = _ITEM_BYTES * num_ranks
    return max(1, round(num_bytes / unit)) * unit


def time_collective(
    kind: CollectiveKind,
    axis: str,
    group: dist.ProcessGroup,
    ranks: Sequence[int],
    message_bytes: int,
    device: torch.device,
    compute: Callable[[], None] | None = None,
) -> GroupTime:
    """Measure one collective on this rank; every member calls this with the same arguments.

    The best of `_NUM_ROUNDS` rounds counts, which take about `_ROUNDS_SECONDS` together. A
    collective that takes this long by itself is called twice: warmup, timed. With `compute` it is
    also measured between two computations.
    """
    problem = (kind, group, ranks, message_bytes, device)
    work = _prepare_collective(*problem)

    def time_round(calls: int) -> tuple[float, float]:
        """Return the wall-clock and the processor seconds of some calls on this rank."""
        _synchronise_group(group, device)
        processor_start = time.process_time()
        start = time.perf_counter()
        for _ in range(calls):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start, time.process_time() - processor_start

    def build_time(call_seconds: float, processor_seconds: float) -> GroupTime:
        busy = min(processor_seconds, call_seconds) if device.type == "cpu" else None
        step_seconds = None
        if compute is not None and kind in _STEP_KINDS:
            step_seconds = largest
            if largest < _ROUNDS_SECONDS:
                in_step = _prepare_collective(*problem, has_new_results=True)
                step_seconds = _time_between_computations(in_step, compute, largest)
        return GroupTime(axis, tuple(ranks), kind, message_bytes, call_seconds, busy, step_seconds)

    time_round(1)
    one_seconds, one_processor_seconds = time_round(1)
    first = torch.tensor([one_seconds], dtype=torch.float64, device=device)
    # All members must make the same number of calls.
    dist.all_reduce(first, op=dist.ReduceOp.MAX, group=group)
    largest = float(first)
    if largest >= _ROUNDS_SECONDS:
        return build_time(largest, one_processor_seconds)
    calls = min(200, max(1, int(_ROUNDS_SECONDS / _NUM_ROUNDS / max(largest, 1e-6))))
    best, processor_seconds = min(time_round(calls) for _ in range(_NUM_ROUNDS))
    return build_time(best / calls, processor_seconds / calls)


def _time_between_computations(
    work: Callable[[], object], compute: Callable[[], None], call_seconds: float
) -> float:
    """Return the mean seconds of a call between two computations, in the median of some groups of
    calls, which the rare pauses of a machine do not change.

    Args:
        call_seconds: of one call, equal on all members.
    """

    def time_call() -> float:
        compute()
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    limit = STEP_SECONDS / (_NUM_STEP_GROUPS * (WORK_SECONDS + call_seconds))
    calls = min(_MAX_STEP_CALLS, max(1, int(limit)))
    return median(fmean(time_call() for _ in range(calls)) for _ in range(_NUM_STEP_GROUPS))


def _synchronise_group(group: dist.ProcessGroup, device: torch.device) -> None:
    """Synchronise the members, so that they start together."""
    token = torch.zeros(1, device=device)
    dist.all_reduce(token, group=group)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _prepare_collective(
    kind: CollectiveKind,
    group: dist.ProcessGroup,
    ranks: Sequence[int],
    message_bytes: int,
    device: torch.device,
    *,
    has_new_results: bool = False,
) -> Callable[[], object]:
    """Allocate the buffers of a collective and return the function of one call. With
    `has_new_results` each call allocates its result, as layers do."""
    size = len(ranks)
    member = list(ranks).index(dist.get_rank())
    whole = torch.ones(message_bytes // _ITEM_BYTES, dtype=torch.float32, device=device)
    part = torch.ones(max(1, whole.numel() // size), dtype=torch.float32, device=device)
    if kind == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    renew = torch.empty_like if has_new_results else _get_same
    if kind == "all_gather":
        return lambda: all_gather_single(renew(whole), part, group=group)
    if kind == "reduce_scatter":
        return lambda: reduce_scatter_single(renew(part), whole, group=group)
    if kind == "all_to_all":
        output = torch.empty_like(whole)
        return lambda: dist.all_to_all_single(renew(output), whole, group=group)
    if kind == "broadcast":
        return lambda: dist.broadcast(whole, src=ranks[0], group=group)
    # Even members send to the next one, which replies with one element: the sender times both.
    peer = member ^ 1
    answer = torch.ones(1, device=device)
    if peer >= size:
        return lambda: None
    return lambda: send_or_receive(
        whole, answer, ranks[peer], is_sender=member % 2 == 0, group=group
    )


def _get_same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def send_or_receive(
    message: torch.Tensor,
    reply: torch.Tensor,
    peer: int,
    *,
    is_sender: bool,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Send a message to a peer and receive a reply of one element, or the reverse."""
    if is_sender:
        dist.send(message, dst=peer, group=group)
        dist.recv(reply, src=peer, group=group)
    else:
        dist.recv(message, src=peer, group=group)
        dist.send(reply, dst=peer, group=group)


def merge_group_times(times: Mapping[int, Sequence[GroupTime]]) -> list[GroupTime]:
    """Merge the ranks' times into one per group, collective and size: the slowest member's, and the
    busiest processor's."""
    merged: dict[tuple[str, tuple[int, ...], CollectiveKind, int], list[GroupTime]] = {}
    for rank_times in times.values():
        for measured in rank_times:
            key = (measured.axis, measured.ranks, measured.kind, measured.message_bytes)
            merged.setdefault(key, []).append(measured)
    return [
        GroupTime(
            *key,
            max(measured.seconds for measured in by_rank),
            max(_list_known(measured.processor_seconds for measured in by_rank), default=None),
            # Each member's time has its own waits for the others, so none is the slowest.
            fmean(step_seconds)
            if (step_seconds := _list_known(measured.step_seconds for measured in by_rank))
            else None,
        )
        for key, by_rank in merged.items()
    ]


def _list_known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def build_collective_rate(group_time: GroupTime, ranks_per_node: int) -> CollectiveRate:
    """Convert a group's time to the form that the planner reads."""
    return CollectiveRate(
        group_time.kind,
        len(group_time.ranks),
        ranks_per_node,
        group_time.message_bytes,
        group_time.seconds,
        group_time.processor_seconds,
        group_time.step_seconds,
    )


def find_link_between(
    device_name: str, ranks_per_node: int, num_ranks: int, inter_link_name: str | None
) -> Link | None:
    """Find the slowest link of a group in the catalogue; None for an unknown device or link.

    `inter_link_name` names the link between nodes. Within a node it is the link of the device's
    usual machine, so a machine with PCIe only falls far below it and gets a warning.
    """
    try:
        node = find_node(device_name)
        if ranks_per_node >= num_ranks:
            return node.intra
        return find_link(inter_link_name, node.num_accelerators) if inter_link_name else node.inter
    except InputError:
        return None


def judge_collectives(
    group_times: Sequence[GroupTime],
    ranks_per_node: Mapping[tuple[int, ...], int],
    device_name: str | None,
    inter_link_name: str | None,
) -> list[Finding]:
    """Judge each collective over each axis against the link's peak, then groups of an axis."""
    findings = []
    for axis, kind in dict.fromkeys(
        (group_time.axis, group_time.kind) for group_time in group_times
    ):
        selected = [
            group_time
            for group_time in group_times
            if (group_time.axis, group_time.kind) == (axis, kind)
        ]
        sizes = sorted({group_time.message_bytes for group_time in selected})
        slowest = {
            size: max(
                (group_time for group_time in selected if group_time.message_bytes == size),
                key=lambda group_time: group_time.seconds,
            )
            for size in sizes
        }
        bus = {
            size: build_collective_rate(
                group_time, ranks_per_node[group_time.ranks]
            ).bus_bytes_per_second
            for size, group_time in slowest.items()
        }
        ranks = selected[0].ranks
        link = (
            None
            if device_name is None
            else find_link_between(device_name, ranks_per_node[ranks], len(ranks), inter_link_name)
        )
        value = f"{_format_gigabytes(bus[sizes[-1]])} GB/s at {format_bytes(sizes[-1])}"
        verdict: Verdict = "pass"
        remedy = ""
        if link is not None:
            share = bus[sizes[-1]] / link.bytes_per_second
            value += f", {share:.0%} of {link.name}"
            verdict = grade_share(
                share,
                warn_below=_PEAK_SHARE_THRESHOLDS[kind][0],
                fail_below=_PEAK_SHARE_THRESHOLDS[kind][1],
            )
            remedy = (
                "See the transport with NCCL_DEBUG=INFO (NVLink, P2P, SHM, IB, Socket), "
                "the topology with nvidia-smi topo -m and ibstat"
            )
        numbers = {
            "axis": axis,
            "kind": kind,
            "num_ranks": len(ranks),
            "ranks_per_node": ranks_per_node[ranks],
            "bus_bytes_per_second": bus,
            "seconds": {size: group_time.seconds for size, group_time in slowest.items()},
            "link": None if link is None else link.name,
            "peak_bytes_per_second": None if link is None else link.bytes_per_second,
        }
        if verdict == "pass":
            remedy = ""
        findings.append(Finding(SECTION, f"{kind} over {axis}", verdict, value, remedy, numbers))
    return [*findings, *_judge_groups(group_times)]


def _judge_groups(group_times: Sequence[GroupTime]) -> list[Finding]:
    """Report groups slower than others of their axis, once, with the worst collective."""
    findings = []
    for axis in dict.fromkeys(group_time.axis for group_time in group_times):
        worst_of: dict[tuple[int, ...], tuple[float, str, Verdict]] = {}
        for kind in COLLECTIVE_KINDS:
            selected = [
                group_time
                for group_time in group_times
                if (group_time.axis, group_time.kind) == (axis, kind)
            ]
            largest = max((group_time.message_bytes for group_time in selected), default=0)
            rates = {
                group_time.ranks: largest / group_time.seconds
                for group_time in selected
                if group_time.message_bytes == largest
            }
            for slow in find_outliers(rates, LINK_THRESHOLDS):
                value = f"{kind} at {slow.share:.0%} of the other groups' rate"
                previous = worst_of.get(slow.key)
                if previous is None or slow.share < previous[0]:
                    worst_of[slow.key] = (
                        slow.share,
                        value,
                        find_worst_verdict([slow.verdict, previous[2] if previous else "pass"]),
                    )
        for ranks, (_, value, verdict) in worst_of.items():
            remedy = (
                f"Check the devices and links of {format_ranks(ranks)}; the section links shows "
                "which pair is slow"
            )
            findings.append(
                Finding(
                    SECTION,
                    f"slow group of {axis}: {format_ranks(ranks)}",
                    verdict,
                    value,
                    remedy,
                    {"ranks": list(ranks)},
                )
            )
    return findings


def _format_gigabytes(bytes_per_second: float) -> str:
    gigabytes = bytes_per_second / 1e9
    return f"{gigabytes:.{max(0, 2 - max(0, math.floor(math.log10(max(gigabytes, 0.01)))))}f}"
