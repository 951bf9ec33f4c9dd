"""Examination of all ranks of a launcher or of this machine, and the diagnosis from it."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from pydantic import TypeAdapter

from shardwright.errors import InputError, ShardwrightError
from shardwright.probe import (
    bandwidth,
    clock,
    correctness,
    health,
    host,
    links,
    matmul,
    software,
    storage,
)
from shardwright.probe.budget import judge_omissions
from shardwright.probe.examination import (
    STAGES,
    Order,
    RankReport,
    Room,
    hand_in,
    judge_reports_missing,
    leave_groups,
    look_at_self,
    measure,
    open_report,
)
from shardwright.probe.finding import Finding, Verdict, worst
from shardwright.probe.rendezvous import Meeting, NotMet, judge_meeting, meet
from shardwright.probe.watch import Watch, judge_standstill
from shardwright.train.devices import choose_device
from shardwright.train.launch import launch_ranks
from shardwright.train.ranks import RankEnvironment, find_ranks

SCHEMA_VERSION = 1
ORDER = TypeAdapter(Order)


@dataclass(frozen=True)
class Diagnosis:
    """All findings, and the rates from which `calibrate.profile_of` builds a profile."""

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
        return worst(finding.verdict for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON values of `--json`."""
        return {"schema_version": SCHEMA_VERSION, "verdict": self.verdict} | asdict(self)


DIAGNOSIS = TypeAdapter(Diagnosis)


def examine(
    order: Order, num_ranks: int, *, module: str = "shardwright.probe.worker"
) -> Diagnosis | None:
    """Examine this cluster; return None on ranks of a launcher other than 0.

    Under torchrun or srun this process is one of their ranks. Otherwise `num_ranks` run on this
    machine: one in this process, several as `python -m module`. Failures and hangs become
    findings.

    Raises:
        InputError: the order does not fit the ranks or devices.
    """
    ranks = find_ranks()
    if ranks is not None or num_ranks == 1:
        return examine_rank(order, ranks or RankEnvironment(), lambda diagnosis: None)
    with tempfile.TemporaryDirectory(prefix="shardwright-") as name:
        folder = Path(name)
        (folder / "order.json").write_bytes(ORDER.dump_json(order))
        failure: ShardwrightError | None = None
        try:
            launch_ranks(
                num_ranks, module, [str(folder / "order.json"), str(folder / "diagnosis.json")]
            )
        except InputError:
            raise
        except ShardwrightError as error:
            failure = error
        path = folder / "diagnosis.json"
        if path.is_file():
            return DIAGNOSIS.validate_json(path.read_bytes())
        value = "the ranks ended without a report"
        if failure:
            value = str(failure).partition("\n")[0]
        remedy = "Run with one rank (--nproc 1) to check the machine without communication"
        finding = Finding("peers", "ranks", "fail", value, remedy)
        return Diagnosis((finding,), num_ranks, str(order.layout))


def examine_rank(
    order: Order, ranks: RankEnvironment, deliver: Callable[[Diagnosis], None]
) -> Diagnosis | None:
    """Examine as one rank; return the diagnosis on rank 0.

    `deliver` receives it if this process hangs and must end.
    """
    device = choose_device(order.device, ranks, field="--device")
    report = open_report(ranks, device)
    meeting: Meeting | None = None

    def handle_timeout(stage: str) -> None:
        finding = judge_standstill(stage, order.timeout_seconds, meeting, STAGES)
        if ranks.rank == 0:
            deliver(diagnose(order, {0: report}, meeting, (finding,)))
        sys.stderr.write(f"rank {ranks.rank}: {stage}: {finding.value}\n")
        sys.stderr.flush()
        os._exit(1)  # nothing else ends a hanging thread

    watch = Watch(order.timeout_seconds, handle_timeout)
    context = Room(order, ranks, device, None, watch, report, owns_group=not dist.is_initialized())
    try:
        look_at_self(context)
        if ranks.world_size > 1:
            meeting = meet(ranks, order.timeout_seconds)
            watch.close()
            watch = Watch(order.timeout_seconds, handle_timeout, ranks.rank, meeting.store)
            context = context.join(meeting, watch)
        measure(context)
        reports = hand_in(context)
    except NotMet as error:
        if error.known_to_rank_0 and ranks.rank != 0:
            return None
        return diagnose(
            order, {ranks.rank: report}, None, (error.finding,), world_size=ranks.world_size
        )
    finally:
        watch.close()
        leave_groups(context)
    return diagnose(order, reports, meeting) if ranks.rank == 0 else None


def diagnose(
    order: Order,
    reports: Mapping[int, RankReport],
    meeting: Meeting | None,
    beside: Sequence[Finding] = (),
    *,
    world_size: int | None = None,
) -> Diagnosis:
    """Judge the reports of all ranks: machines, devices, rates, peers, then communication."""
    first = reports[min(reports)]
    hosts = (
        meeting.hosts
        if meeting is not None
        else {rank: report.host_name for rank, report in reports.items()}
    )
    size = world_size or (meeting.world_size if meeting is not None else len(reports))
    findings = [
        *_judge_machines(reports),
        *_judge_rates(reports),
        *storage.judge_writes(
            {rank: report.writes for rank, report in reports.items() if report.writes}, hosts
        ),
    ]
    if meeting is not None:
        findings += judge_meeting(meeting)
        findings += judge_reports_missing(reports, size, hosts)
        findings += clock.judge_clocks(
            {rank: report.offset for rank, report in reports.items() if report.offset is not None},
            hosts,
        )
        findings += storage.judge_sights(
            {rank: report.sights for rank, report in reports.items()}, order.folders, hosts
        )
        findings += correctness.judge_correctness(
            {rank: report.checked for rank, report in reports.items()}
        )
    group_times = bandwidth.merge_times({rank: report.times for rank, report in reports.items()})
    ranks_per_node = {
        group_time.ranks: meeting.most_per_node(group_time.ranks) if meeting else 1
        for group_time in group_times
    }
    name = first.device_name if first.device_kind == "cuda" else None
    findings += bandwidth.judge_collectives(group_times, ranks_per_node, name, order.inter_link)
    if meeting is not None:
        times = [group_time for report in reports.values() for group_time in report.link_times]
        findings += links.judge_links(times, meeting.seats, first.device_kind)
    findings += judge_omissions(first.omissions, order.budget_seconds, order.timeout_seconds)
    return Diagnosis(
        findings=(*findings, *beside),
        world_size=size,
        layout=str(order.layout),
        device_kind=first.device_kind,
        device_name=first.device_name,
        memory_bytes=_memory_bytes(reports),
        rates=_rates(reports, group_times, ranks_per_node),
    )


def _judge_machines(reports: Mapping[int, RankReport]) -> list[Finding]:
    by_rank = {
        rank: report.software for rank, report in reports.items() if report.software is not None
    }
    findings = software.judge_software(by_rank) if by_rank else []
    hosts: dict[str, tuple[host.Host, int]] = {}
    for report in reports.values():
        if report.host is not None:
            entry = hosts.get(report.host_name)
            hosts[report.host_name] = (
                entry[0] if entry else report.host,
                (entry[1] if entry else 0) + 1,
            )
    findings += host.judge_hosts(
        hosts, cuda=any(report.device_kind == "cuda" for report in reports.values())
    )
    gpus = {
        rank: report.gpu_at_rest
        for rank, report in reports.items()
        if report.gpu_at_rest is not None
    }
    if gpus:
        loaded = {
            rank: report.gpu_loaded
            for rank, report in reports.items()
            if report.gpu_loaded is not None
        }
        silent = {
            rank: report.gpu_silent
            for rank, report in reports.items()
            if report.gpu_silent is not None
        }
        findings += health.judge_gpus(gpus, loaded, silent)
    return findings


def _judge_rates(reports: Mapping[int, RankReport]) -> list[Finding]:
    first = reports[min(reports)]
    names = {rank: report.device_name for rank, report in reports.items()}
    square_products = _usual_products(reports)
    findings = (
        matmul.judge_products(square_products, first.device_kind, names) if square_products else []
    )
    copies = {rank: report.copies for rank, report in reports.items() if report.copies}
    generation = None if first.gpu_loaded is None else first.gpu_loaded.pcie_generation
    return findings + (
        matmul.judge_copies(copies, first.device_kind, names, generation) if copies else []
    )


def _usual_products(reports: Mapping[int, RankReport]) -> dict[int, list[Any]]:
    """Select the square products that every examination measures."""
    return {
        rank: [rate for rate in report.products if rate.m == rate.n == rate.k]
        for rank, report in reports.items()
        if report.products
    }


def _memory_bytes(reports: Mapping[int, RankReport]) -> int:
    first = reports[min(reports)]
    if first.gpu_at_rest is not None:
        return min(
            report.gpu_at_rest.memory_bytes
            for report in reports.values()
            if report.gpu_at_rest is not None
        )
    num_sharing = sum(report.host_name == first.host_name for report in reports.values())
    return (
        0
        if first.host is None
        else (first.host.container_bytes or first.host.memory_bytes) // num_sharing
    )


def _rates(
    reports: Mapping[int, RankReport],
    merged: Sequence[bandwidth.GroupTime],
    per_node: Mapping[tuple[int, ...], int],
) -> dict[str, Any]:
    return {
        "products": [
            asdict(rate) | {"rank": rank}
            for rank, report in reports.items()
            for rate in report.products
        ],
        "attention": [
            asdict(rate) | {"rank": rank}
            for rank, report in reports.items()
            for rate in report.attention
        ],
        "elementwise": [
            asdict(rate) | {"rank": rank}
            for rank, report in reports.items()
            for rate in report.elementwise
        ],
        "handoffs": [
            {"rank": rank, "seconds": report.handoff_seconds}
            for rank, report in reports.items()
            if report.handoff_seconds is not None
        ],
        "copies": [
            asdict(rate) | {"rank": rank}
            for rank, report in reports.items()
            for rate in report.copies
        ],
        "collectives": [
            asdict(bandwidth.rate_of(group_time, per_node[group_time.ranks]))
            | {"axis": group_time.axis, "ranks": list(group_time.ranks)}
            for group_time in merged
        ],
    }
