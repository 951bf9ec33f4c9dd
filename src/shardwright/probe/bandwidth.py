"""Collectives by size over each group that a layout uses, as bus bandwidth beside the link's peak.

Bus bandwidth is nccl-tests' (doc/PERFORMANCE.md): bytes/s of the message times what each rank must send for one byte of it, so that
the number is the link's whatever the collective and however many ranks. Messages are counted as `hardware.profile` says. All groups
of an axis run at the same time, as they do in training. A time is that of the group's slowest rank, in the best of several rounds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import torch
import torch.distributed as dist

from shardwright.errors import InputError
from shardwright.hardware import CollectiveRate, Link
from shardwright.hardware.load import find_link, find_node
from shardwright.hardware.profile import CollectiveKind
from shardwright.layout import AXES, Layout, RankGrid
from shardwright.parallel.collectives import all_gather_single, reduce_scatter_single
from shardwright.probe.finding import Finding, Verdict, graded, name_ranks, worst
from shardwright.probe.outliers import LINK_LIMITS, find_odd
from shardwright.units import format_bytes

SECTION = "collectives"
KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)

_ITEM_BYTES = 4
_LIMITS: dict[str, tuple[float, float]] = {
    "all_reduce": (0.6, 0.3),
    "all_gather": (0.6, 0.3),
    "reduce_scatter": (0.6, 0.3),
    "all_to_all": (0.4, 0.2),
    "broadcast": (0.4, 0.2),
    "send": (0.4, 0.2),
}
"""Shares of the link's peak below which the largest message warns and fails; a ring reaches 75 to 92% of it, the rest less."""


@dataclass(frozen=True)
class Groups:
    """All groups of an axis: `axes` has every name of this way of cutting the ranks."""

    axes: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]

    @property
    def name(self) -> str:
        """As a person calls it: dp_shard = fsdp."""
        return " = ".join(self.axes)

    @property
    def size(self) -> int:
        """Ranks of a group."""
        return len(self.groups[0])


@dataclass(frozen=True)
class GroupTime:
    """Seconds that one collective over `ranks` took as one of them saw it."""

    axis: str
    ranks: tuple[int, ...]
    kind: CollectiveKind
    message_bytes: int
    seconds: float


def groups_of(layout: Layout) -> list[Groups]:
    """The groups that a layout exchanges over, each way of cutting the ranks once; and all ranks, which every step agrees over.

    >>> [groups.name for groups in groups_of(Layout(dp_shard=2, tp=2, zero_stage=3))]
    ['dp_shard = fsdp', 'tp', 'all']
    >>> [groups.name for groups in groups_of(Layout(dp_shard=2, zero_stage=3))]
    ['dp_shard = fsdp = all']
    """
    grid = RankGrid(layout)
    found: dict[tuple[tuple[int, ...], ...], list[str]] = {}
    for axis in (*AXES, "fsdp", "efsdp", "ep"):
        expert = axis in ("efsdp", "ep")
        if layout.degree(axis) > 1 and not (expert and layout.ep == 1):
            found.setdefault(tuple(grid.groups([axis])), []).append(axis)
    if layout.world_size > 1:
        found.setdefault((tuple(range(layout.world_size)),), []).append("all")
    return [Groups(tuple(axes), groups) for groups, axes in found.items()]


def whole_bytes(num_bytes: float, num_ranks: int) -> int:
    """The message nearest to a size that every rank can share evenly."""
    unit = _ITEM_BYTES * num_ranks
    return max(1, round(num_bytes / unit)) * unit


def time_collective(
    kind: CollectiveKind,
    axis: str,
    group: dist.ProcessGroup,
    ranks: Sequence[int],
    message_bytes: int,
    device: torch.device,
    *,
    rounds: int = 4,
    seconds: float = 0.1,
) -> GroupTime:
    """Seconds of one collective on this rank; every member calls this alike.

    Args:
        rounds: of which the best counts.
        seconds: about what all rounds together may take, by the members' common first measurement.
            A collective that takes as long by itself is called twice, once to warm up.
    """
    work = _prepare(kind, group, ranks, message_bytes, device)

    def round_seconds(calls: int) -> float:
        _line_up(group, device)
        began = time.perf_counter()
        for _ in range(calls):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    round_seconds(1)
    first = torch.tensor([round_seconds(1)], dtype=torch.float64, device=device)
    dist.all_reduce(first, op=dist.ReduceOp.MAX, group=group)  # members must agree on the number of calls
    if float(first) >= seconds:
        return GroupTime(axis, tuple(ranks), kind, message_bytes, float(first))
    calls = min(200, max(1, int(seconds / rounds / max(float(first), 1e-6))))
    best = min(round_seconds(calls) for _ in range(rounds)) / calls
    return GroupTime(axis, tuple(ranks), kind, message_bytes, best)


def _line_up(group: dist.ProcessGroup, device: torch.device) -> None:
    """Members begin together."""
    token = torch.zeros(1, device=device)
    dist.all_reduce(token, group=group)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _prepare(
    kind: CollectiveKind, group: dist.ProcessGroup, ranks: Sequence[int], message_bytes: int, device: torch.device
) -> Callable[[], object]:
    """What one call does, its buffers made beforehand."""
    size, me = len(ranks), list(ranks).index(dist.get_rank())
    whole = torch.ones(message_bytes // _ITEM_BYTES, dtype=torch.float32, device=device)
    part = torch.ones(max(1, whole.numel() // size), dtype=torch.float32, device=device)
    if kind == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if kind == "all_gather":
        return lambda: all_gather_single(whole, part, group=group)
    if kind == "reduce_scatter":
        return lambda: reduce_scatter_single(part, whole, group=group)
    if kind == "all_to_all":
        other = torch.empty_like(whole)
        return lambda: dist.all_to_all_single(other, whole, group=group)
    if kind == "broadcast":
        return lambda: dist.broadcast(whole, src=ranks[0], group=group)
    # Members of even number send to the next, which answers with one element: the sender's time is that of the whole way.
    peer, answer = me ^ 1, torch.ones(1, device=device)
    if peer >= size:
        return lambda: None
    return lambda: send_or_receive(whole, answer, ranks[peer], sends=me % 2 == 0, group=group)


def send_or_receive(
    message: torch.Tensor, answer: torch.Tensor, peer: int, *, sends: bool, group: dist.ProcessGroup | None = None
) -> None:
    """One message to a peer and one element back, or the other side of it."""
    if sends:
        dist.send(message, dst=peer, group=group)
        dist.recv(answer, src=peer, group=group)
    else:
        dist.recv(message, src=peer, group=group)
        dist.send(answer, dst=peer, group=group)


def merge_times(times: Mapping[int, Sequence[GroupTime]]) -> list[GroupTime]:
    """One time per group, collective and size: the slowest member's."""
    merged: dict[tuple[str, tuple[int, ...], CollectiveKind, int], float] = {}
    for found in times.values():
        for one in found:
            key = (one.axis, one.ranks, one.kind, one.message_bytes)
            merged[key] = max(merged.get(key, 0.0), one.seconds)
    return [GroupTime(axis, ranks, kind, size, seconds) for (axis, ranks, kind, size), seconds in merged.items()]


def rate_of(one: GroupTime, ranks_per_node: int) -> CollectiveRate:
    """The same as the planner reads it."""
    return CollectiveRate(one.kind, len(one.ranks), ranks_per_node, one.message_bytes, one.seconds)


def link_between(device_name: str, ranks_per_node: int, num_ranks: int, inter: str | None) -> Link | None:
    """The link that a group must cross, where the catalogue knows the device; `inter` names that between nodes.

    Within a node the catalogue's link of the usual machine is taken; one that has only PCIe then falls far short, and is told.
    """
    try:
        node = find_node(device_name)
        if ranks_per_node >= num_ranks:
            return node.intra
        return find_link(inter, node.num_accelerators) if inter else node.inter
    except InputError:
        return None


def judge_collectives(
    merged: Sequence[GroupTime], per_node: Mapping[tuple[int, ...], int], device_name: str | None, inter: str | None
) -> list[Finding]:
    """A line per axis and collective: bus bandwidth by size, the largest beside the link's peak; then groups unlike the others."""
    findings = []
    for axis, kind in dict.fromkeys((one.axis, one.kind) for one in merged):
        alike = [one for one in merged if (one.axis, one.kind) == (axis, kind)]
        sizes = sorted({one.message_bytes for one in alike})
        slowest = {size: max((one for one in alike if one.message_bytes == size), key=lambda one: one.seconds) for size in sizes}
        bus = {size: rate_of(one, per_node[one.ranks]).bus_bytes_per_second for size, one in slowest.items()}
        ranks = alike[0].ranks
        link = None if device_name is None else link_between(device_name, per_node[ranks], len(ranks), inter)
        told = f"{_digits(bus[sizes[-1]])} GB/s at {format_bytes(sizes[-1])}"
        verdict: Verdict = "pass"
        remedy = ""
        if link is not None:
            share = bus[sizes[-1]] / link.bytes_per_second
            told += f", {share:.0%} of {link.name}"
            verdict = graded(share, warn=_LIMITS[kind][0], fail=_LIMITS[kind][1])
            remedy = "NCCL_DEBUG=INFO shows which way it took (NVLink, P2P, SHM, IB, Socket); nvidia-smi topo -m, ibstat"
        numbers = {
            "axis": axis,
            "kind": kind,
            "num_ranks": len(ranks),
            "ranks_per_node": per_node[ranks],
            "bus_bytes_per_second": bus,
            "seconds": {size: one.seconds for size, one in slowest.items()},
            "link": None if link is None else link.name,
            "peak_bytes_per_second": None if link is None else link.bytes_per_second,
        }
        findings.append(Finding(SECTION, f"{kind} over {axis}", verdict, told, remedy if verdict != "pass" else "", numbers))
    return [*findings, *_judge_groups(merged)]


def _judge_groups(merged: Sequence[GroupTime]) -> list[Finding]:
    """Groups that are slower than the others of their axis, told once with the collective that shows it most."""
    findings = []
    for axis in dict.fromkeys(one.axis for one in merged):
        worst_of: dict[tuple[int, ...], tuple[float, str, Verdict]] = {}
        for kind in KINDS:
            alike = [one for one in merged if (one.axis, one.kind) == (axis, kind)]
            largest = max((one.message_bytes for one in alike), default=0)
            rates = {one.ranks: largest / one.seconds for one in alike if one.message_bytes == largest}
            for odd in find_odd(rates, LINK_LIMITS):
                told = f"{kind} at {odd.share:.0%} of the other groups'"
                before = worst_of.get(odd.key)
                if before is None or odd.share < before[0]:
                    worst_of[odd.key] = (odd.share, told, worst([odd.verdict, before[2] if before else "pass"]))
        for ranks, (_, told, verdict) in worst_of.items():
            remedy = f"Look at the devices and links of {name_ranks(ranks)}; the links below say which"
            findings.append(
                Finding(SECTION, f"slow group of {axis}: {name_ranks(ranks)}", verdict, told, remedy, {"ranks": list(ranks)})
            )
    return findings


def _digits(bytes_per_second: float) -> str:
    gigabytes = bytes_per_second / 1e9
    return f"{gigabytes:.{max(0, 2 - max(0, math.floor(math.log10(max(gigabytes, 0.01)))))}f}"
