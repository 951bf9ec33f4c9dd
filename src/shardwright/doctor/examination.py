"""Request, context and report of an examination, and the exchange of reports between ranks.

Reports go through the store as JSON, not through the process groups that are examined. So a
rank whose collectives fail can still report, and a missing report is noticed.
"""

from __future__ import annotations

import platform
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from pydantic import TypeAdapter

from shardwright.config.run import DeviceKind
from shardwright.doctor import correctness, gpu_health, storage
from shardwright.doctor.finding import Finding, format_ranks
from shardwright.doctor.host import Host
from shardwright.doctor.probe_budget import (
    ComputeMaximum,
    Omission,
    RankMaximum,
    TimeBudget,
    return_local_number,
)
from shardwright.doctor.rates import (
    calibration_measurement,
    collective_bandwidth,
    device_rates,
    link_bandwidth,
    scaled_rates,
    scratch_disk,
)
from shardwright.doctor.rendezvous import Rendezvous
from shardwright.doctor.software import Software
from shardwright.doctor.stage_watchdog import StageWatchdog, wait_for_reports
from shardwright.hardware import AttentionRate, ElementwiseRate, MatmulRate
from shardwright.hardware.collective_rate import CollectiveKind
from shardwright.launch.rank_environment import RankEnvironment
from shardwright.layout import Layout
from shardwright.parallel.clock_sync import ClockOffset

STAGES = (
    "software", "host", "groups", "products", "attention", "elementwise", "copies", "folders",
    "scratch", "clocks", "correctness", "collectives", "handoff", "links", "reports",
)  # fmt: skip
"""Stages in order; `judge_timeout` uses the order to find ranks that are behind."""
CALIBRATION_SECONDS = 120.0
BUDGET_SHARES = {"products": 0.4, "attention": 0.3, "elementwise": 0.1, "messages": 0.2}
"""Shares of a calibration's time limit by kind of problem."""
_NUM_CALLS = 120
"""Calls of the preferred maximum length that fit into the budget: 1 s each in 120 s."""
_CALLS_BEFORE_TIMEOUT = 12
"""Calls of the absolute maximum length that fit into the time-out: 5 s each in 60 s."""


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
    scratch_folder: str | None = None
    """Folder of offloading's scratch files, whose rates are measured; None for no measurement."""
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
    scaled_products: list[scaled_rates.ScaledRate] = field(default_factory=list)
    attention: list[AttentionRate] = field(default_factory=list)
    elementwise: list[ElementwiseRate] = field(default_factory=list)
    handoff_seconds: float | None = None
    copies: list[device_rates.CopyRate] = field(default_factory=list)
    write_results: list[storage.WriteResult] = field(default_factory=list)
    folder_visibility: list[storage.FolderVisibility] = field(default_factory=list)
    scratch_rate: scratch_disk.ScratchRate | None = None
    clock_offset: ClockOffset | None = None
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

    def join(self, rendezvous: Rendezvous, watch: StageWatchdog) -> ExaminationContext:
        """Return the context after the rendezvous, in which ranks compare through the store."""
        return replace(
            self,
            rendezvous=rendezvous,
            watchdog=watch,
            compute_maximum=RankMaximum(rendezvous, watch),
        )

    def start_time_limit(self, kind: str) -> calibration_measurement.TimeLimit:
        """Start the time limit of a calibration for one kind of problem."""
        most_call_seconds = self.request.timeout_seconds / _CALLS_BEFORE_TIMEOUT
        return calibration_measurement.TimeLimit(
            TimeBudget(self.request.budget_seconds * BUDGET_SHARES[kind], self.compute_maximum),
            call_seconds=min(self.request.budget_seconds / _NUM_CALLS, most_call_seconds),
            max_call_seconds=most_call_seconds,
        )

    def record_omission(self, kind: str, requested: str, seconds: float) -> None:
        """Record a problem that is too slow to measure."""
        self.report.omissions.append(Omission(kind, requested, seconds))


def create_report(ranks: RankEnvironment, device: torch.device) -> RankExamination:
    """Create a rank's report with its host and device."""
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else platform.processor() or platform.machine()
    )
    return RankExamination(ranks.rank, socket.gethostname(), device.type, name)


def exchange_reports(context: ExaminationContext) -> dict[int, RankExamination]:
    """Return all reports that arrive on rank 0; other ranks return none and wait for rank 0."""
    rendezvous = context.rendezvous
    if rendezvous is None:
        return {0: context.report}
    timeout_seconds = context.request.timeout_seconds
    rank = context.ranks.rank
    world_size = context.ranks.world_size
    if rank != 0:
        rendezvous.store.set(
            f"report/{rank}", RANK_EXAMINATION_ADAPTER.dump_json(context.report).decode()
        )
        rendezvous.store.set(f"stage/{rank}", "reports")
        # An exit may end the whole job, so rank 0 must have all reports before.
        wait_for_reports(rendezvous.store, {0: "read"}, 2 * timeout_seconds)
        return {}
    keys = {other: f"report/{other}" for other in range(1, world_size)}
    missing = wait_for_reports(rendezvous.store, keys, timeout_seconds)
    reports = {0: context.report}
    for other in range(1, world_size):
        if other not in missing:
            reports[other] = RANK_EXAMINATION_ADAPTER.validate_json(
                rendezvous.store.get(f"report/{other}")
            )
    rendezvous.store.set("read", "1")
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
