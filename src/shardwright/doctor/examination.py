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

from shardwright.config.run import DeviceKind
from shardwright.doctor import (
    calibration_measurement,
    collective_bandwidth,
    correctness,
    device_rates,
    elementwise,
    gpu_health,
    host,
    link_bandwidth,
    software,
    storage,
)
from shardwright.doctor import clock_offset as clock
from shardwright.doctor.finding import Finding, format_ranks
from shardwright.doctor.host import Host
from shardwright.doctor.probe_budget import (
    ComputeMaximum,
    Omission,
    RankMaximum,
    TimeBudget,
    return_local_number,
)
from shardwright.doctor.rendezvous import Rendezvous
from shardwright.doctor.software import Software
from shardwright.doctor.stage_watchdog import BROKEN_KEY, StageWatchdog, wait_for_reports
from shardwright.errors import RankFailed
from shardwright.hardware import AttentionRate, ElementwiseRate, MatmulRate
from shardwright.hardware.measured_profile import CollectiveKind
from shardwright.launch.rank_environment import RankEnvironment
from shardwright.launch.rank_outcome import extract_first_line
from shardwright.layout import Layout
from shardwright.parallel.mesh import build_mesh, init_process_group
from shardwright.units import MIB_BYTES, format_bytes

STAGES = (
    "software", "host", "groups", "products", "attention", "elementwise", "copies", "folders", "clocks", "correctness",
    "collectives", "handoff", "links", "reports",
)  # fmt: skip
"""Stages in order; `judge_timeout` uses the order to find ranks that are behind."""

_MESSAGE_BYTES = {
    "cpu": (4096, 256 * 1024, 4 * MIB_BYTES),
    "cuda": (64 * 1024, MIB_BYTES, 16 * MIB_BYTES, 256 * MIB_BYTES),
}
_GROUP_TIMEOUT_SHARES = {"cpu": 0.7, "cuda": 2.0}
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
_MAX_MESSAGE_SECONDS = 2.0
_ROUNDS_SECONDS = 0.25
"""Seconds of the repeated calls of a short problem, its preparation included."""
_LINK_BYTES = {"cpu": MIB_BYTES, "cuda": 64 * MIB_BYTES}


@dataclass(frozen=True)
class ExaminationRequest:
    """Request of an examination.

    For the planner `matmuls` (precision, m, n, k), `messages` (collective, ranks of a group,
    bytes) and `attention` are measured besides the default problems.
    """

    layout: Layout
    folders: tuple[storage.OutputFolder, ...] = ()
    device: DeviceKind = "auto"
    timeout_seconds: float = 60.0
    matmuls: tuple[tuple[str, int, int, int], ...] = ()
    messages: tuple[tuple[CollectiveKind, int, int], ...] = ()
    attention: tuple[device_rates.AttentionWorkload, ...] = ()
    elementwise: tuple[tuple[str, int, int], ...] = ()
    """Tensors as (precision, tokens, width). If there are any, the handoff is measured, too."""
    inter_link_name: str | None = None
    """Name of the link between nodes in the catalogue."""
    budget_seconds: float = CALIBRATION_SECONDS
    """Time limit of `matmuls`, `messages`, `attention` and `elementwise` together."""


@dataclass
class RankExamination:
    """Results of one rank, added by each stage; `failure` is the failed stage and its error."""

    rank: int
    host_name: str
    device_kind: str = "cpu"
    device_name: str = ""
    software: Software | None = None
    host: Host | None = None
    idle_gpu: gpu_health.GpuState | None = None
    loaded_gpu: gpu_health.GpuState | None = None
    gpu_driver_error: str | None = None
    matmuls: list[MatmulRate] = field(default_factory=list)
    attention: list[AttentionRate] = field(default_factory=list)
    elementwise: list[ElementwiseRate] = field(default_factory=list)
    handoff_seconds: float | None = None
    copies: list[device_rates.CopyRate] = field(default_factory=list)
    write_results: list[storage.WriteResult] = field(default_factory=list)
    folder_visibility: list[storage.FolderVisibility] = field(default_factory=list)
    clock_offset: clock.ClockOffset | None = None
    collective_checks: list[correctness.CollectiveCheck] = field(default_factory=list)
    collective_times: list[collective_bandwidth.GroupTime] = field(default_factory=list)
    link_times: list[link_bandwidth.LinkTime] = field(default_factory=list)
    omissions: list[Omission] = field(default_factory=list)
    failure: tuple[str, str] | None = None


RANK_EXAMINATION_ADAPTER = TypeAdapter(RankExamination)


@dataclass(frozen=True)
class ExaminationContext:
    """Context of the stages of one rank."""

    request: ExaminationRequest
    ranks: RankEnvironment
    device: torch.device
    rendezvous: Rendezvous | None
    watchdog: StageWatchdog
    report: RankExamination
    is_group_owner: bool = True
    """True if the examination creates and destroys the process group itself."""
    compute_maximum: ComputeMaximum = return_local_number

    def join(self, meeting: Rendezvous, watch: StageWatchdog) -> ExaminationContext:
        """Return the context after the rendezvous, in which ranks compare through the store."""
        return replace(
            self, rendezvous=meeting, watchdog=watch, compute_maximum=RankMaximum(meeting, watch)
        )

    def start_time_limit(self, kind: str) -> calibration_measurement.TimeLimit:
        """Start the time limit of a calibration for one kind of problem."""
        most_call_seconds = self.request.timeout_seconds / _CALLS_BEFORE_TIMEOUT
        return calibration_measurement.TimeLimit(
            TimeBudget(self.request.budget_seconds * _SHARES[kind], self.compute_maximum),
            call_seconds=min(self.request.budget_seconds / _NUM_CALLS, most_call_seconds),
            max_call_seconds=most_call_seconds,
        )

    def record_omission(
        self, kind: str, requested: str, seconds: float, measured: str = ""
    ) -> None:
        """Record a problem that is too slow to measure."""
        self.report.omissions.append(Omission(kind, requested, seconds, measured))


def create_report(ranks: RankEnvironment, device: torch.device) -> RankExamination:
    """Create a rank's report with its host and device."""
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else platform.processor() or platform.machine()
    )
    return RankExamination(ranks.rank, socket.gethostname(), device.type, name)


def examine_environment(context: ExaminationContext) -> None:
    """Examine software, host and the idle device, before the rendezvous, which may fail."""
    with context.watchdog.watch_stage("software"):
        context.report.software = software.read_software(context.device)
    with context.watchdog.watch_stage("host"):
        context.report.host = host.read_host(context.report.host_name)
        if context.device.type == "cuda":
            context.report.idle_gpu, context.report.gpu_driver_error = gpu_health.read_gpu(
                context.device, os.getpid()
            )


def run_stages(context: ExaminationContext) -> None:
    """Run the stages after the rendezvous; a failed stage is recorded and ends them."""
    stages: dict[str, Callable[[ExaminationContext], None]] = {
        "groups": _join_groups,
        "products": _time_matmuls,
        "attention": _time_attention,
        "elementwise": _time_elementwise,
        "copies": _time_copies,
        "folders": _check_folders,
        "clocks": _compare_clocks,
        "correctness": _check_collectives,
        "collectives": _time_collectives,
        "handoff": _time_handoff,
        "links": _time_links,
    }
    for name, stage in stages.items():
        if context.rendezvous is None and name in (
            "groups",
            "clocks",
            "correctness",
            "collectives",
            "handoff",
            "links",
        ):
            continue
        try:
            with context.watchdog.watch_stage(name):
                _synchronise_start(context, name)
                stage(context)
        except RankFailed:  # the failed rank reports the error
            destroy_groups(context)
            break
        except (RuntimeError, OSError) as error:
            context.report.failure = (name, extract_first_line(str(error)))
            if context.rendezvous is not None:
                context.rendezvous.store.set(BROKEN_KEY, str(context.ranks.rank))
            destroy_groups(context)  # ends the collectives of peers now, not at their time-out
            break


def _synchronise_start(context: ExaminationContext, stage: str) -> None:
    """Synchronise the ranks, so that they measure at the same time, as in training."""
    if context.rendezvous is None:
        return
    if context.rendezvous.store.add(f"ready/{stage}", 1) == context.ranks.world_size:
        context.rendezvous.store.set(f"started/{stage}", "1")
    context.watchdog.wait_for_key(f"started/{stage}")


def destroy_groups(context: ExaminationContext) -> None:
    """Destroy the process group if the examination created it."""
    if context.is_group_owner and dist.is_initialized():
        dist.destroy_process_group()


def _join_groups(context: ExaminationContext) -> None:
    assert context.rendezvous is not None
    if context.is_group_owner:
        init_process_group(
            context.device.type,
            timeout=timedelta(
                seconds=context.request.timeout_seconds * _GROUP_TIMEOUT_SHARES[context.device.type]
            ),
            store=dist.PrefixStore("groups", context.rendezvous.store),
            rank=context.ranks.rank,
            world_size=context.ranks.world_size,
        )
    build_mesh(context.request.layout, context.device.type)


def _time_matmuls(context: ExaminationContext) -> None:
    device = context.device
    order = context.request
    precisions = [*device_rates.list_precisions(device), *(shape[0] for shape in order.matmuls)]
    seconds_per_flop = {}
    for precision in dict.fromkeys(precisions):
        for rate in device_rates.time_squares(precision, device, context.compute_maximum):
            context.report.matmuls.append(rate)
            context.watchdog.record_progress()
        seconds_per_flop[precision] = context.compute_maximum(
            1 / context.report.matmuls[-1].flops_per_second
        )
    if device.type == "cuda":
        with gpu_health.run_under_load(device):
            context.report.loaded_gpu, _ = gpu_health.read_gpu(device, os.getpid())
    if order.matmuls:
        limit = context.start_time_limit("products")
        measured = tuple(context.report.matmuls)
        rates = calibration_measurement.time_products(
            order.matmuls, measured, seconds_per_flop, device, limit
        )
        _record(context, rates, context.report.matmuls)


def _record(
    context: ExaminationContext,
    results: calibration_measurement.RatesOrOmissions[calibration_measurement.Rate],
    rates: list[calibration_measurement.Rate],
) -> None:
    for rate in results:
        if isinstance(rate, Omission):
            context.report.omissions.append(rate)
        else:
            rates.append(rate)
            context.watchdog.record_progress()


def _time_attention(context: ExaminationContext) -> None:
    rates = calibration_measurement.time_attention(
        context.request.attention, context.device, context.start_time_limit("attention")
    )
    _record(context, rates, context.report.attention)


def _time_elementwise(context: ExaminationContext) -> None:
    limit = context.start_time_limit("elementwise")
    rates = calibration_measurement.time_elementwise(
        context.request.elementwise, context.device, limit
    )
    _record(context, rates, context.report.elementwise)


def _time_handoff(context: ExaminationContext) -> None:
    if context.request.elementwise:
        context.report.handoff_seconds = elementwise.time_handoff(context.device)


def _time_copies(context: ExaminationContext) -> None:
    context.report.copies = device_rates.time_copies(context.device)


def _check_folders(context: ExaminationContext) -> None:
    for folder in context.request.folders:
        if context.ranks.local_rank == 0:  # ranks of a node share its disk
            context.report.write_results.append(storage.time_write(folder))
        if context.rendezvous is not None:
            context.report.folder_visibility.append(
                storage.check_visibility(
                    folder, context.rendezvous.store, context.ranks.rank, context.ranks.world_size
                )
            )
        context.watchdog.record_progress()


def _compare_clocks(context: ExaminationContext) -> None:
    assert context.rendezvous is not None
    context.report.clock_offset = clock.estimate_clock_offset(
        context.rendezvous.store, context.ranks.rank, context.ranks.world_size
    )


def _find_group(
    context: ExaminationContext, groups: collective_bandwidth.AxisGroups
) -> tuple[dist.ProcessGroup, tuple[int, ...]]:
    """Find this rank's group of an axis and its members."""
    ranks = next(members for members in groups.groups if context.ranks.rank in members)
    if groups.axes[0] == "all":
        assert dist.group.WORLD is not None
        return dist.group.WORLD, ranks
    mesh = build_mesh(context.request.layout, context.device.type)
    assert mesh is not None
    group = mesh.group(groups.axes[0])
    assert group is not None
    return group, ranks


def _check_collectives(context: ExaminationContext) -> None:
    budget = TimeBudget(_RESULTS_SECONDS, context.compute_maximum)
    last_seconds = 0.0
    for groups in collective_bandwidth.list_axis_groups(context.request.layout):
        group, ranks = _find_group(context, groups)
        for dtype in correctness.CHECKED_DTYPES:
            if not budget.can_afford(last_seconds):
                name = str(dtype).removeprefix("torch.")
                context.record_omission("results", f"{name} over {groups.name}", last_seconds)
                continue
            start = time.monotonic()
            result = correctness.check_collectives(groups.name, group, ranks, context.device, dtype)
            context.report.collective_checks.append(result)
            last_seconds = time.monotonic() - start
            context.watchdog.record_progress()


def _time_collectives(context: ExaminationContext) -> None:
    seconds = _COLLECTIVES_SECONDS
    if context.request.messages:
        seconds += context.request.budget_seconds * _SHARES["messages"]
    budget = TimeBudget(seconds, context.compute_maximum)
    for groups in collective_bandwidth.list_axis_groups(context.request.layout):
        group, ranks = _find_group(context, groups)
        for kind in collective_bandwidth.COLLECTIVE_KINDS:
            extra = [
                size
                for name, members, size in context.request.messages
                if (name, members) == (kind, groups.size)
            ]
            sizes = {
                collective_bandwidth.round_message_bytes(size, groups.size)
                for size in (*_MESSAGE_BYTES[context.device.type], *extra)
            }
            _time_sizes(context, budget, groups.name, kind, sorted(sizes), group, ranks)


def _time_sizes(
    context: ExaminationContext,
    budget: TimeBudget,
    axis: str,
    kind: CollectiveKind,
    sizes: Sequence[int],
    group: dist.ProcessGroup,
    ranks: tuple[int, ...],
) -> None:
    """Measure one collective with growing messages; each time predicts the next."""
    byte_seconds = 0.0
    for size in sizes:
        call_seconds = context.compute_maximum(size * byte_seconds)
        is_short = call_seconds <= _MAX_MESSAGE_SECONDS
        if not budget.can_afford(_ROUNDS_SECONDS + 2 * call_seconds) or not is_short:
            context.record_omission(
                "messages", f"{kind} of {format_bytes(size)} over {axis}", call_seconds
            )
            continue
        group_time = collective_bandwidth.time_collective(
            kind, axis, group, ranks, size, context.device
        )
        context.report.collective_times.append(group_time)
        byte_seconds = group_time.seconds / size
        context.watchdog.record_progress()


def _time_links(context: ExaminationContext) -> None:
    num_bytes = _LINK_BYTES[context.device.type]
    num_directions = 2 * len(link_bandwidth.pair_ranks(context.ranks.world_size))
    budget = TimeBudget(_LINKS_SECONDS, context.compute_maximum)
    num_done = 0
    for link_time in link_bandwidth.time_links(context.device, num_bytes, budget):
        if link_time is not None:
            context.report.link_times.append(link_time)
        num_done += 1
        context.watchdog.record_progress()
    if num_done < num_directions:
        omitted = f"{num_directions - num_done} of {num_directions} rounds"
        context.record_omission("pairs", omitted, _LINKS_SECONDS / max(1, num_done))


def exchange_reports(context: ExaminationContext) -> dict[int, RankExamination]:
    """Return all reports that arrive on rank 0; other ranks return none and wait for rank 0."""
    meeting = context.rendezvous
    if meeting is None:
        return {0: context.report}
    timeout_seconds = context.request.timeout_seconds
    rank = context.ranks.rank
    world_size = context.ranks.world_size
    if rank != 0:
        meeting.store.set(
            f"report/{rank}", RANK_EXAMINATION_ADAPTER.dump_json(context.report).decode()
        )
        meeting.store.set(f"stage/{rank}", "reports")
        # An exit may end the whole job, so rank 0 must have all reports before.
        wait_for_reports(meeting.store, {0: "read"}, 2 * timeout_seconds)
        return {}
    keys = {other: f"report/{other}" for other in range(1, world_size)}
    missing = wait_for_reports(meeting.store, keys, timeout_seconds)
    reports = {0: context.report}
    for other in range(1, world_size):
        if other not in missing:
            reports[other] = RANK_EXAMINATION_ADAPTER.validate_json(
                meeting.store.get(f"report/{other}")
            )
    meeting.store.set("read", "1")
    return reports


def judge_missing_reports(
    reports: Mapping[int, RankExamination], world_size: int, hosts: Mapping[int, str]
) -> list[Finding]:
    """Report ranks without a report, and the first failed stage with its ranks."""
    findings = []
    missing = [rank for rank in range(world_size) if rank not in reports]
    if missing:
        missing_hosts = ", ".join(sorted({hosts[rank] for rank in missing}))
        value = f"no report from {format_ranks(missing)} ({missing_hosts}) after the rendezvous"
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
        value = "; ".join(
            f"{format_ranks(ranks)}: {message}" for message, ranks in messages.items()
        )
        remedy = "Set NCCL_DEBUG=INFO or TORCH_CPP_LOG_LEVEL=INFO for details"
        if stage == "groups":
            remedy = (
                "Ranks reach the port but not each other: set GLOO_SOCKET_IFNAME and "
                "NCCL_SOCKET_IFNAME to the interface that connects the nodes (ip addr)"
            )
        ranks = sorted(rank for members in messages.values() for rank in members)
        findings.append(Finding("peers", stage, "fail", value, remedy, {"ranks": ranks}))
    return findings
