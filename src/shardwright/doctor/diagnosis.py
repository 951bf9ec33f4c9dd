"""Examination of all ranks of a launcher or of this machine, and the diagnosis from it."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from pydantic import TypeAdapter

from shardwright.doctor import correctness, gpu_health, host, software, storage
from shardwright.doctor.examination import (
    STAGES,
    ExaminationContext,
    ExaminationRequest,
    RankExamination,
    create_report,
    exchange_reports,
    judge_missing_reports,
)
from shardwright.doctor.examination_stages import destroy_groups, examine_environment, run_stages
from shardwright.doctor.finding import Finding, Verdict, find_worst_verdict
from shardwright.doctor.probe_budget import build_omission_findings
from shardwright.doctor.rates import (
    collective_bandwidth,
    link_bandwidth,
    rate_findings,
    scaled_rates,
    scratch_disk,
)
from shardwright.doctor.rendezvous import (
    Rendezvous,
    RendezvousFailed,
    join_rendezvous,
    judge_clocks,
    judge_rendezvous,
)
from shardwright.doctor.stage_watchdog import StageWatchdog, judge_timeout
from shardwright.errors import InputError, ShardwrightError
from shardwright.launch.devices import choose_rank_device
from shardwright.launch.launcher import launch_ranks
from shardwright.launch.rank_environment import RankEnvironment, detect_rank_environment

SCHEMA_VERSION = 1
Item = TypeVar("Item")
REQUEST_ADAPTER = TypeAdapter(ExaminationRequest)


@dataclass(frozen=True)
class Diagnosis:
    """All findings, and the rates from which `cluster_profile.build_profile` builds a profile."""

    findings: tuple[Finding, ...]
    world_size: int
    layout: str
    device_kind: str = "cpu"
    device_name: str = ""
    memory_bytes: int = 0
    """Bytes of one device; on CPUs of a rank's share of its host."""
    rates: Mapping[str, Any] = field(default_factory=dict)
    """Measured rates as JSON lists: products, attention, copies, collectives and others."""

    @property
    def verdict(self) -> Verdict:
        """Worst verdict of all findings."""
        return find_worst_verdict(finding.verdict for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON values of `--json`."""
        return {"schema_version": SCHEMA_VERSION, "verdict": self.verdict} | asdict(self)


DIAGNOSIS_ADAPTER = TypeAdapter(Diagnosis)


def examine(request: ExaminationRequest, num_ranks: int) -> Diagnosis | None:
    """Examine this cluster; return None on ranks of a launcher other than 0.

    Under torchrun or srun this process is one of their ranks. Otherwise `num_ranks` run on this
    machine: one in this process, several in processes of their own. Failures and hangs become
    findings.

    Raises:
        InputError: the request does not fit the ranks or devices.
    """
    ranks = detect_rank_environment()
    if ranks is not None or num_ranks == 1:
        return examine_rank(request, ranks or RankEnvironment(), lambda diagnosis: None)
    with tempfile.TemporaryDirectory(prefix="shardwright-") as name:
        folder = Path(name)
        (folder / "request.json").write_bytes(REQUEST_ADAPTER.dump_json(request))
        failure: ShardwrightError | None = None
        try:
            launch_ranks(
                num_ranks,
                "shardwright.doctor.worker",
                [str(folder / "request.json"), str(folder / "diagnosis.json")],
            )
        except InputError:
            raise
        except ShardwrightError as error:
            failure = error
        path = folder / "diagnosis.json"
        if path.is_file():
            return DIAGNOSIS_ADAPTER.validate_json(path.read_bytes())
        value = "the ranks ended without a report"
        if failure:
            value = str(failure).partition("\n")[0]
        remedy = "Run with one rank (--nproc 1) to check the machine without communication"
        finding = Finding("peers", "ranks", "fail", value, remedy)
        return Diagnosis((finding,), num_ranks, str(request.layout))


def examine_rank(
    request: ExaminationRequest, ranks: RankEnvironment, deliver: Callable[[Diagnosis], None]
) -> Diagnosis | None:
    """Examine as one rank; return the diagnosis on rank 0.

    `deliver` receives it if this process hangs and must end.
    """
    device = choose_rank_device(request.device, ranks, field="--device")
    report = create_report(ranks, device)
    rendezvous: Rendezvous | None = None

    def handle_timeout(stage: str) -> None:
        finding = judge_timeout(stage, request.timeout_seconds, rendezvous, STAGES)
        if ranks.rank == 0:
            deliver(diagnose(request, {0: report}, rendezvous, (finding,)))
        sys.stderr.write(f"rank {ranks.rank}: {stage}: {finding.value}\n")
        sys.stderr.flush()
        os._exit(1)  # nothing else ends a hanging thread

    watch = StageWatchdog(request.timeout_seconds, handle_timeout)
    context = ExaminationContext(
        request, ranks, device, None, watch, report, is_group_owner=not dist.is_initialized()
    )
    try:
        examine_environment(context)
        if ranks.world_size > 1:
            rendezvous = join_rendezvous(ranks, request.timeout_seconds)
            watch.close()
            watch = StageWatchdog(
                request.timeout_seconds, handle_timeout, ranks.rank, rendezvous.store
            )
            context = context.join(rendezvous, watch)
        run_stages(context)
        reports = exchange_reports(context)
    except RendezvousFailed as error:
        if error.is_reported_by_rank_0 and ranks.rank != 0:
            return None
        return diagnose(
            request, {ranks.rank: report}, None, (error.finding,), world_size=ranks.world_size
        )
    finally:
        watch.close()
        destroy_groups(context)
    return diagnose(request, reports, rendezvous) if ranks.rank == 0 else None


def diagnose(
    request: ExaminationRequest,
    reports: Mapping[int, RankExamination],
    rendezvous: Rendezvous | None,
    extra_findings: Sequence[Finding] = (),
    *,
    world_size: int | None = None,
) -> Diagnosis:
    """Judge the reports of all ranks: machines, devices, rates, peers, then communication."""
    first = reports[min(reports)]
    hosts = (
        rendezvous.hosts
        if rendezvous is not None
        else {rank: report.host_name for rank, report in reports.items()}
    )
    size = world_size or (rendezvous.world_size if rendezvous is not None else len(reports))
    findings = [
        *_judge_machines(reports),
        *_judge_device_rates(reports),
        *storage.judge_writes(
            _collect(reports, lambda report: report.write_results or None), hosts
        ),
        *scratch_disk.judge_scratch(_collect(reports, lambda report: report.scratch_rate), hosts),
    ]
    if rendezvous is not None:
        findings += judge_rendezvous(rendezvous)
        findings += judge_missing_reports(reports, size, hosts)
        findings += judge_clocks(_collect(reports, lambda report: report.clock_offset), hosts)
        visibility = _collect(reports, lambda report: report.folder_visibility)
        findings += storage.judge_visibility(visibility, request.folders, hosts)
        findings += correctness.judge_correctness(
            _collect(reports, lambda report: report.collective_checks)
        )
    group_times = collective_bandwidth.merge_group_times(
        _collect(reports, lambda report: report.collective_times)
    )
    ranks_per_node = {
        group_time.ranks: rendezvous.count_max_per_node(group_time.ranks) if rendezvous else 1
        for group_time in group_times
    }
    name = first.device_name if first.device_kind == "cuda" else None
    findings += collective_bandwidth.judge_collectives(
        group_times, ranks_per_node, name, request.inter_link_name
    )
    if rendezvous is not None:
        times = [group_time for report in reports.values() for group_time in report.link_times]
        findings += link_bandwidth.judge_links(times, rendezvous.locations, first.device_kind)
    findings += build_omission_findings(
        first.omissions, request.budget_seconds, request.timeout_seconds
    )
    return Diagnosis(
        findings=(*findings, *extra_findings),
        world_size=size,
        layout=str(request.layout),
        device_kind=first.device_kind,
        device_name=first.device_name,
        memory_bytes=_compute_device_memory_bytes(reports),
        rates=_collect_rates(reports, group_times, ranks_per_node),
    )


def _collect(
    reports: Mapping[int, RankExamination], select: Callable[[RankExamination], Item | None]
) -> dict[int, Item]:
    """Select a part of each report, by rank, without those that have none."""
    parts = {rank: select(report) for rank, report in reports.items()}
    return {rank: part for rank, part in parts.items() if part is not None}


def _judge_machines(reports: Mapping[int, RankExamination]) -> list[Finding]:
    by_rank = _collect(reports, lambda report: report.software)
    findings = software.judge_software(by_rank) if by_rank else []
    hosts: dict[str, tuple[host.Host, int]] = {}
    for report in reports.values():
        if report.host is not None:
            first, num_ranks = hosts.get(report.host_name, (report.host, 0))
            hosts[report.host_name] = (first, num_ranks + 1)
    findings += host.judge_hosts(
        hosts, has_cuda=any(report.device_kind == "cuda" for report in reports.values())
    )
    if gpus := _collect(reports, lambda report: report.idle_gpu):
        loaded = _collect(reports, lambda report: report.loaded_gpu)
        silent = _collect(reports, lambda report: report.gpu_driver_error)
        findings += gpu_health.judge_gpus(gpus, loaded, silent)
    return findings


def _judge_device_rates(reports: Mapping[int, RankExamination]) -> list[Finding]:
    first = reports[min(reports)]
    names = _collect(reports, lambda report: report.device_name)
    square_products = _select_square_matmuls(reports)
    findings = (
        rate_findings.judge_matmuls(square_products, first.device_kind, names)
        if square_products
        else []
    )
    scaled = _collect(reports, lambda report: report.scaled_products or None)
    findings += scaled_rates.judge_scaled_products(scaled, first.device_kind)
    copies = _collect(reports, lambda report: report.copies or None)
    generation = None if first.loaded_gpu is None else first.loaded_gpu.pcie_generation
    return findings + (
        rate_findings.judge_copies(copies, first.device_kind, names, generation) if copies else []
    )


def _select_square_matmuls(reports: Mapping[int, RankExamination]) -> dict[int, list[Any]]:
    """Select the square products that every examination measures."""
    return {
        rank: [rate for rate in report.matmuls if rate.m == rate.n == rate.k]
        for rank, report in reports.items()
        if report.matmuls
    }


def _compute_device_memory_bytes(reports: Mapping[int, RankExamination]) -> int:
    first = reports[min(reports)]
    if first.idle_gpu is not None:
        gpus = _collect(reports, lambda report: report.idle_gpu)
        return min(gpu.memory_bytes for gpu in gpus.values())
    num_sharing = sum(report.host_name == first.host_name for report in reports.values())
    return (
        0
        if first.host is None
        else (first.host.container_limit_bytes or first.host.memory_bytes) // num_sharing
    )


def _collect_rates(
    reports: Mapping[int, RankExamination],
    group_times: Sequence[collective_bandwidth.GroupTime],
    ranks_per_node: Mapping[tuple[int, ...], int],
) -> dict[str, Any]:
    def list_rates(select: Callable[[RankExamination], Sequence[Any]]) -> list[dict[str, Any]]:
        return [
            asdict(rate) | {"rank": rank}
            for rank, report in reports.items()
            for rate in select(report)
        ]

    handoffs = _collect(reports, lambda report: report.handoff_seconds)
    return {
        "products": list_rates(lambda report: report.matmuls),
        "scaled_products": list_rates(lambda report: report.scaled_products),
        "attention": list_rates(lambda report: report.attention),
        "elementwise": list_rates(lambda report: report.elementwise),
        "handoffs": [{"rank": rank, "seconds": seconds} for rank, seconds in handoffs.items()],
        "copies": list_rates(lambda report: report.copies),
        "scratch": [
            asdict(rate) | {"rank": rank}
            for rank, rate in _collect(reports, lambda report: report.scratch_rate).items()
            if not rate.problem
        ],
        "collectives": [
            asdict(
                collective_bandwidth.build_collective_rate(
                    group_time, ranks_per_node[group_time.ranks]
                )
            )
            | {"axis": group_time.axis, "ranks": list(group_time.ranks)}
            for group_time in group_times
        ],
    }
