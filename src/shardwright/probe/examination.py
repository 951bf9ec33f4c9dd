"""Examination of one rank: its environment, then measurements with the other ranks, a report.

Reports go through the store as JSON, not through the process groups that are examined. So a
rank whose collectives fail can still report, and a missing report is noticed.
"""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from shardwright.config.upkeep import DeviceKind
from shardwright.errors import RankFailed
from shardwright.hardware import AttentionRate, ElementwiseRate, MatmulRate
from shardwright.hardware.profile import CollectiveKind
from shardwright.layout import Layout
from shardwright.parallel.mesh import build_mesh, init_process_group
from shardwright.probe import (
    bandwidth,
    clock,
    correctness,
    elementwise,
    health,
    host,
    links,
    matmul,
    ordered,
    software,
    storage,
)
from shardwright.probe.budget import Agree, Agreement, Budget, Omission, agree_alone
from shardwright.probe.finding import Finding, name_ranks
from shardwright.probe.host import Host
from shardwright.probe.rendezvous import Meeting
from shardwright.probe.software import Software
from shardwright.probe.watch import BROKEN, Watch, wait_for_reports
from shardwright.train.outcome import first_line
from shardwright.train.ranks import RankEnvironment
from shardwright.units import MIB_BYTES, format_bytes

STAGES = (
    "software", "host", "groups", "products", "attention", "elementwise", "copies", "folders", "clocks", "correctness",
    "collectives", "handoff", "links", "reports",
)  # fmt: skip
"""Stages in order; `judge_standstill` uses the order to find ranks that are behind."""

_SIZES = {
    "cpu": (4096, 256 * 1024, 4 * MIB_BYTES),
    "cuda": (64 * 1024, MIB_BYTES, 16 * MIB_BYTES, 256 * MIB_BYTES),
}
_GROUP_PATIENCE = {"cpu": 0.7, "cuda": 2.0}
"""Time-out of a collective as a multiple of the time-out of a stage.

gloo raises an error, which the rank can report. NCCL ends the process, so the watch acts first.
"""
CALIBRATION_SECONDS = 120.0
_SHARES = {"products": 0.4, "attention": 0.3, "elementwise": 0.1, "messages": 0.2}
"""Shares of a calibration's time limit by kind of problem."""
_NUM_CALLS = 120
"""Calls of the preferred maximum length that fit into the budget: 1 s each in 120 s."""
_CALLS_BEFORE_TIMEOUT = 12
"""Calls of the absolute maximum length that fit into the time-out: 5 s each in 60 s."""
_COLLECTIVES_SECONDS = 30.0
_RESULTS_SECONDS = 20.0
_LINKS_SECONDS = 20.0
"""Time limits of the default messages, the check of results and the links of pairs."""
_LONGEST_MESSAGE_SECONDS = 2.0
_ROUNDS_SECONDS = 0.25
"""Seconds of the repeated calls of a short problem, its preparation included."""
_LINK_BYTES = {"cpu": MIB_BYTES, "cuda": 64 * MIB_BYTES}


@dataclass(frozen=True)
class Order:
    """Request of an examination.

    For the planner `products` (precision, m, n, k), `messages` (collective, ranks of a group,
    bytes) and `attention` are measured besides the default problems.
    """

    layout: Layout
    folders: tuple[storage.Folder, ...] = ()
    device: DeviceKind = "auto"
    timeout_seconds: float = 60.0
    products: tuple[tuple[str, int, int, int], ...] = ()
    messages: tuple[tuple[CollectiveKind, int, int], ...] = ()
    attention: tuple[matmul.Rows, ...] = ()
    elementwise: tuple[tuple[str, int, int], ...] = ()
    """Tensors as (precision, tokens, width). If there are any, the handoff is measured, too."""
    inter_link: str | None = None
    """Name of the link between nodes in the catalogue."""
    budget_seconds: float = CALIBRATION_SECONDS
    """Time limit of `products`, `messages`, `attention` and `elementwise` together."""


@dataclass
class RankReport:
    """Results of one rank, added by each stage; `failure` is the failed stage and its error."""

    rank: int
    host_name: str
    device_kind: str = "cpu"
    device_name: str = ""
    software: Software | None = None
    host: Host | None = None
    gpu_at_rest: health.Gpu | None = None
    gpu_loaded: health.Gpu | None = None
    gpu_silent: str | None = None
    products: list[MatmulRate] = field(default_factory=list)
    attention: list[AttentionRate] = field(default_factory=list)
    elementwise: list[ElementwiseRate] = field(default_factory=list)
    handoff_seconds: float | None = None
    copies: list[matmul.CopyRate] = field(default_factory=list)
    writes: list[storage.Written] = field(default_factory=list)
    sights: list[storage.Sight] = field(default_factory=list)
    offset: clock.Offset | None = None
    checked: list[correctness.Checked] = field(default_factory=list)
    times: list[bandwidth.GroupTime] = field(default_factory=list)
    link_times: list[links.LinkTime] = field(default_factory=list)
    omissions: list[Omission] = field(default_factory=list)
    failure: tuple[str, str] | None = None


REPORT = TypeAdapter(RankReport)


@dataclass(frozen=True)
class Room:
    """Context of the stages of one rank."""

    order: Order
    ranks: RankEnvironment
    device: torch.device
    meeting: Meeting | None
    watch: Watch
    report: RankReport
    owns_group: bool = True
    """True if the examination creates and destroys the process group itself."""
    agree: Agree = agree_alone

    def join(self, meeting: Meeting, watch: Watch) -> Room:
        """Return the context after the rendezvous, in which ranks compare through the store."""
        return replace(self, meeting=meeting, watch=watch, agree=Agreement(meeting, watch))

    def limit(self, kind: str) -> ordered.TimeLimit:
        """Start the time limit of a calibration for one kind of problem."""
        most_call_seconds = self.order.timeout_seconds / _CALLS_BEFORE_TIMEOUT
        return ordered.TimeLimit(
            Budget(self.order.budget_seconds * _SHARES[kind], self.agree),
            call_seconds=min(self.order.budget_seconds / _NUM_CALLS, most_call_seconds),
            most_call_seconds=most_call_seconds,
        )

    def omit(self, kind: str, wanted: str, seconds: float, measured: str = "") -> None:
        """Record a problem that is too slow to measure."""
        self.report.omissions.append(Omission(kind, wanted, seconds, measured))


def open_report(ranks: RankEnvironment, device: torch.device) -> RankReport:
    """Create a rank's report with its host and device."""
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else platform.processor() or platform.machine()
    )
    return RankReport(ranks.rank, socket.gethostname(), device.type, name)


def look_at_self(room: Room) -> None:
    """Examine software, host and the idle device, before the rendezvous, which may fail."""
    with room.watch.stage("software"):
        room.report.software = software.read_software(room.device)
    with room.watch.stage("host"):
        room.report.host = host.read_host(room.report.host_name)
        if room.device.type == "cuda":
            room.report.gpu_at_rest, room.report.gpu_silent = health.read_gpu(
                room.device, os.getpid()
            )


def measure(room: Room) -> None:
    """Run the stages after the rendezvous; a failed stage is recorded and ends them."""
    stages: dict[str, Callable[[Room], None]] = {
        "groups": _join_groups,
        "products": _time_products,
        "attention": _time_attention,
        "elementwise": _time_elementwise,
        "copies": _time_copies,
        "folders": _look_at_folders,
        "clocks": _compare_clocks,
        "correctness": _check_results,
        "collectives": _time_collectives,
        "handoff": _time_handoff,
        "links": _time_links,
    }
    for name, stage in stages.items():
        if room.meeting is None and name in (
            "groups",
            "clocks",
            "correctness",
            "collectives",
            "handoff",
            "links",
        ):
            continue
        try:
            with room.watch.stage(name):
                _begin_together(room, name)
                stage(room)
        except RankFailed:  # the failed rank reports the error
            leave_groups(room)
            break
        except (RuntimeError, OSError) as error:
            room.report.failure = (name, first_line(str(error)))
            if room.meeting is not None:
                room.meeting.store.set(BROKEN, str(room.ranks.rank))
            leave_groups(room)  # ends the collectives of peers now, not at their time-out
            break


def _begin_together(room: Room, stage: str) -> None:
    """Synchronise the ranks, so that they measure at the same time, as in training."""
    if room.meeting is None:
        return
    if room.meeting.store.add(f"ready/{stage}", 1) == room.ranks.world_size:
        room.meeting.store.set(f"started/{stage}", "1")
    room.watch.wait(f"started/{stage}")


def leave_groups(room: Room) -> None:
    """Destroy the process group if the examination created it."""
    if room.owns_group and dist.is_initialized():
        dist.destroy_process_group()


def _join_groups(room: Room) -> None:
    assert room.meeting is not None
    if room.owns_group:
        init_process_group(
            room.device.type,
            timeout=timedelta(
                seconds=room.order.timeout_seconds * _GROUP_PATIENCE[room.device.type]
            ),
            store=dist.PrefixStore("groups", room.meeting.store),
            rank=room.ranks.rank,
            world_size=room.ranks.world_size,
        )
    build_mesh(room.order.layout, room.device.type)


def _time_products(room: Room) -> None:
    device = room.device
    order = room.order
    precisions = [*matmul.precisions_of(device), *(shape[0] for shape in order.products)]
    seconds_per_flop = {}
    for precision in dict.fromkeys(precisions):
        for rate in matmul.time_squares(precision, device, room.agree):
            room.report.products.append(rate)
            room.watch.progress()
        seconds_per_flop[precision] = room.agree(1 / room.report.products[-1].flops_per_second)
    if device.type == "cuda":
        with health.under_load(device):
            room.report.gpu_loaded, _ = health.read_gpu(device, os.getpid())
    if order.products:
        limit = room.limit("products")
        measured = tuple(room.report.products)
        rates = ordered.time_products(order.products, measured, seconds_per_flop, device, limit)
        _record(room, rates, room.report.products)


def _record(room: Room, found: ordered.Found[ordered.Rate], rates: list[ordered.Rate]) -> None:
    for rate in found:
        if isinstance(rate, Omission):
            room.report.omissions.append(rate)
        else:
            rates.append(rate)
            room.watch.progress()


def _time_attention(room: Room) -> None:
    rates = ordered.time_attention(room.order.attention, room.device, room.limit("attention"))
    _record(room, rates, room.report.attention)


def _time_elementwise(room: Room) -> None:
    limit = room.limit("elementwise")
    rates = ordered.time_elementwise(room.order.elementwise, room.device, limit)
    _record(room, rates, room.report.elementwise)


def _time_handoff(room: Room) -> None:
    if room.order.elementwise:
        room.report.handoff_seconds = elementwise.time_handoff(room.device)


def _time_copies(room: Room) -> None:
    room.report.copies = matmul.time_copies(room.device)


def _look_at_folders(room: Room) -> None:
    for folder in room.order.folders:
        if room.ranks.local_rank == 0:  # ranks of a node share its disk
            room.report.writes.append(storage.time_write(folder))
        if room.meeting is not None:
            room.report.sights.append(
                storage.look_for_others(
                    folder, room.meeting.store, room.ranks.rank, room.ranks.world_size
                )
            )
        room.watch.progress()


def _compare_clocks(room: Room) -> None:
    assert room.meeting is not None
    room.report.offset = clock.estimate_offset(
        room.meeting.store, room.ranks.rank, room.ranks.world_size
    )


def _members(room: Room, groups: bandwidth.Groups) -> tuple[dist.ProcessGroup, tuple[int, ...]]:
    """Find this rank's group of an axis and its members."""
    ranks = next(members for members in groups.groups if room.ranks.rank in members)
    if groups.axes[0] == "all":
        assert dist.group.WORLD is not None
        return dist.group.WORLD, ranks
    mesh = build_mesh(room.order.layout, room.device.type)
    assert mesh is not None
    group = mesh.group(groups.axes[0])
    assert group is not None
    return group, ranks


def _check_results(room: Room) -> None:
    budget = Budget(_RESULTS_SECONDS, room.agree)
    last_seconds = 0.0
    for groups in bandwidth.groups_of(room.order.layout):
        group, ranks = _members(room, groups)
        for dtype in correctness.DTYPES:
            if not budget.affords(last_seconds):
                name = str(dtype).removeprefix("torch.")
                room.omit("results", f"{name} over {groups.name}", last_seconds)
                continue
            start = time.monotonic()
            result = correctness.check_collectives(groups.name, group, ranks, room.device, dtype)
            room.report.checked.append(result)
            last_seconds = time.monotonic() - start
            room.watch.progress()


def _time_collectives(room: Room) -> None:
    seconds = _COLLECTIVES_SECONDS
    if room.order.messages:
        seconds += room.order.budget_seconds * _SHARES["messages"]
    budget = Budget(seconds, room.agree)
    for groups in bandwidth.groups_of(room.order.layout):
        group, ranks = _members(room, groups)
        for kind in bandwidth.KINDS:
            extra = [
                size
                for name, members, size in room.order.messages
                if (name, members) == (kind, groups.size)
            ]
            sizes = {
                bandwidth.whole_bytes(size, groups.size)
                for size in (*_SIZES[room.device.type], *extra)
            }
            _time_sizes(room, budget, groups.name, kind, sorted(sizes), group, ranks)


def _time_sizes(
    room: Room,
    budget: Budget,
    axis: str,
    kind: CollectiveKind,
    sizes: Sequence[int],
    group: dist.ProcessGroup,
    ranks: tuple[int, ...],
) -> None:
    """Measure one collective with growing messages; each time predicts the next."""
    byte_seconds = 0.0
    for size in sizes:
        call_seconds = room.agree(size * byte_seconds)
        is_short = call_seconds <= _LONGEST_MESSAGE_SECONDS
        if not budget.affords(_ROUNDS_SECONDS + 2 * call_seconds) or not is_short:
            room.omit("messages", f"{kind} of {format_bytes(size)} over {axis}", call_seconds)
            continue
        group_time = bandwidth.time_collective(kind, axis, group, ranks, size, room.device)
        room.report.times.append(group_time)
        byte_seconds = group_time.seconds / size
        room.watch.progress()


def _time_links(room: Room) -> None:
    num_bytes = _LINK_BYTES[room.device.type]
    num_directions = 2 * len(links.pairings(room.ranks.world_size))
    budget = Budget(_LINKS_SECONDS, room.agree)
    num_done = 0
    for link_time in links.time_links(room.device, num_bytes, budget):
        if link_time is not None:
            room.report.link_times.append(link_time)
        num_done += 1
        room.watch.progress()
    if num_done < num_directions:
        omitted = f"{num_directions - num_done} of {num_directions} rounds"
        room.omit("pairs", omitted, _LINKS_SECONDS / max(1, num_done))


def hand_in(room: Room) -> dict[int, RankReport]:
    """Return all reports that arrive on rank 0; other ranks return none and wait for rank 0."""
    meeting = room.meeting
    if meeting is None:
        return {0: room.report}
    timeout_seconds = room.order.timeout_seconds
    rank = room.ranks.rank
    world_size = room.ranks.world_size
    if rank != 0:
        meeting.store.set(f"report/{rank}", REPORT.dump_json(room.report).decode())
        meeting.store.set(f"stage/{rank}", "reports")
        # An exit may end the whole job, so rank 0 must have all reports before.
        wait_for_reports(meeting.store, {0: "read"}, 2 * timeout_seconds)
        return {}
    keys = {other: f"report/{other}" for other in range(1, world_size)}
    missing = wait_for_reports(meeting.store, keys, timeout_seconds)
    reports = {0: room.report}
    for other in range(1, world_size):
        if other not in missing:
            reports[other] = REPORT.validate_json(meeting.store.get(f"report/{other}"))
    meeting.store.set("read", "1")
    return reports


def judge_reports_missing(
    reports: Mapping[int, RankReport], world_size: int, hosts: Mapping[int, str]
) -> list[Finding]:
    """Report ranks without a report, and the first failed stage with its ranks."""
    findings = []
    missing = [rank for rank in range(world_size) if rank not in reports]
    if missing:
        missing_hosts = ", ".join(sorted({hosts[rank] for rank in missing}))
        value = f"no report from {name_ranks(missing)} ({missing_hosts}) after the rendezvous"
        remedy = (
            f"Check on {missing_hosts} that the node is up and the process was not killed "
            "(dmesg | grep -i oom)"
        )
        findings.append(Finding("peers", "reports", "fail", value, remedy))
    failures = {
        rank: report.failure for rank, report in reports.items() if report.failure is not None
    }
    if failures:
        # Later failures are consequences of the first failed stage.
        stage = min((failed_stage for failed_stage, _ in failures.values()), key=STAGES.index)
        messages: dict[str, list[int]] = {}
        for rank, (failed_stage, message) in failures.items():
            if failed_stage == stage:
                messages.setdefault(message, []).append(rank)
        value = "; ".join(f"{name_ranks(ranks)}: {message}" for message, ranks in messages.items())
        remedy = "Set NCCL_DEBUG=INFO or TORCH_CPP_LOG_LEVEL=INFO for details"
        if stage == "groups":
            remedy = (
                "Ranks reach the port but not each other: set GLOO_SOCKET_IFNAME and "
                "NCCL_SOCKET_IFNAME to the interface that connects the nodes (ip addr)"
            )
        ranks = sorted(rank for members in messages.values() for rank in members)
        findings.append(Finding("peers", stage, "fail", value, remedy, {"ranks": ranks}))
    return findings
