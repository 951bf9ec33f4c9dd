"""Examine ranks: those of a launcher, those started here, or this process alone; and put what they found together."""

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
from shardwright.probe import bandwidth, clock, correctness, health, host, links, matmul, software, storage
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
    """All findings, and the rates that the planner can use (`calibrate.profile_of` makes a profile of them)."""

    findings: tuple[Finding, ...]
    world_size: int
    layout: str
    device_kind: str = "cpu"
    device_name: str = ""
    memory_bytes: int = 0
    """Of one device; on CPUs a rank's share of its host's."""
    rates: Mapping[str, Any] = field(default_factory=dict)
    """JSON lists: products, attention, copies, collectives."""

    @property
    def verdict(self) -> Verdict:
        """The worst of all findings."""
        return worst(finding.verdict for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """JSON of `--json`."""
        told = asdict(self)
        return {"schema_version": SCHEMA_VERSION, "verdict": self.verdict} | told


DIAGNOSIS = TypeAdapter(Diagnosis)


def examine(order: Order, num_ranks: int, *, module: str = "shardwright.probe.worker") -> Diagnosis | None:
    """Examine this cluster; None on a launcher's ranks other than 0.

    Under torchrun or srun this process is one rank of theirs. Otherwise `num_ranks` run on this machine: one in this process,
    several as `python -m module`. Whatever breaks or hangs becomes a finding.

    Raises:
        InputError: ranks or devices that do not fit the order.
    """
    ranks = find_ranks()
    if ranks is not None or num_ranks == 1:
        return examine_rank(order, ranks or RankEnvironment(), lambda diagnosis: None)
    with tempfile.TemporaryDirectory(prefix="shardwright-") as name:
        folder = Path(name)
        (folder / "order.json").write_bytes(ORDER.dump_json(order))
        broken: ShardwrightError | None = None
        try:
            launch_ranks(num_ranks, module, [str(folder / "order.json"), str(folder / "diagnosis.json")])
        except InputError:
            raise
        except ShardwrightError as error:
            broken = error
        answer = folder / "diagnosis.json"
        if answer.is_file():
            return DIAGNOSIS.validate_json(answer.read_bytes())
        told = str(broken).partition("\n")[0] if broken else "the ranks ended without an answer"
        finding = Finding(
            "peers", "ranks", "fail", told, "Examine with one rank (--nproc 1) to see whether the machine itself is well"
        )
        return Diagnosis((finding,), num_ranks, str(order.layout))


def examine_rank(order: Order, ranks: RankEnvironment, deliver: Callable[[Diagnosis], None]) -> Diagnosis | None:
    """One rank's examination; rank 0 gets the diagnosis, and `deliver` has it even where this process hangs and must end."""
    device = choose_device(order.device, ranks, field="--device")
    report = open_report(ranks, device)
    meeting: Meeting | None = None

    def expired(stage: str) -> None:
        finding = judge_standstill(stage, order.timeout_seconds, meeting, STAGES)
        if ranks.rank == 0:
            deliver(diagnose(order, {0: report}, meeting, (finding,)))
        sys.stderr.write(f"rank {ranks.rank}: {stage}: {finding.value}\n")
        sys.stderr.flush()
        os._exit(1)  # the thread that hangs cannot be ended otherwise

    watch = Watch(order.timeout_seconds, expired)
    room = Room(order, ranks, device, None, watch, report, owns_group=not dist.is_initialized())
    try:
        look_at_self(room)
        if ranks.world_size > 1:
            meeting = meet(ranks, order.timeout_seconds)
            watch.close()
            watch = Watch(order.timeout_seconds, expired, ranks.rank, meeting.store)
            room = room.join(meeting, watch)
        measure(room)
        reports = hand_in(room)
    except NotMet as error:
        if error.known_to_rank_0 and ranks.rank != 0:
            return None
        return diagnose(order, {ranks.rank: report}, None, (error.finding,), world_size=ranks.world_size)
    finally:
        watch.close()
        leave_groups(room)
    return diagnose(order, reports, meeting) if ranks.rank == 0 else None


def diagnose(
    order: Order,
    reports: Mapping[int, RankReport],
    meeting: Meeting | None,
    beside: Sequence[Finding] = (),
    *,
    world_size: int | None = None,
) -> Diagnosis:
    """Judge the reports of all ranks, in the order in which a person would look: self, devices, rates, peers, traffic."""
    first = reports[min(reports)]
    hosts = meeting.hosts if meeting is not None else {rank: report.host_name for rank, report in reports.items()}
    size = world_size or (meeting.world_size if meeting is not None else len(reports))
    findings = [
        *_judge_machines(reports),
        *_judge_rates(reports),
        *storage.judge_writes({rank: report.writes for rank, report in reports.items() if report.writes}, hosts),
    ]
    if meeting is not None:
        findings += judge_meeting(meeting)
        findings += judge_reports_missing(reports, size, hosts)
        findings += clock.judge_clocks({r: report.offset for r, report in reports.items() if report.offset is not None}, hosts)
        findings += storage.judge_sights({r: report.sights for r, report in reports.items()}, order.folders, hosts)
        findings += correctness.judge_correctness({rank: report.checked for rank, report in reports.items()})
    merged = bandwidth.merge_times({rank: report.times for rank, report in reports.items()})
    per_node = {one.ranks: meeting.most_per_node(one.ranks) if meeting else 1 for one in merged}
    name = first.device_name if first.device_kind == "cuda" else None
    findings += bandwidth.judge_collectives(merged, per_node, name, order.inter_link)
    if meeting is not None:
        times = [one for report in reports.values() for one in report.link_times]
        findings += links.judge_links(times, meeting.seats, first.device_kind)
    findings += judge_omissions(first.omissions, order.budget_seconds, order.timeout_seconds)
    return Diagnosis(
        findings=(*findings, *beside),
        world_size=size,
        layout=str(order.layout),
        device_kind=first.device_kind,
        device_name=first.device_name,
        memory_bytes=_memory_bytes(reports),
        rates=_rates(reports, merged, per_node),
    )


def _judge_machines(reports: Mapping[int, RankReport]) -> list[Finding]:
    known = {rank: report.software for rank, report in reports.items() if report.software is not None}
    findings = software.judge_software(known) if known else []
    hosts: dict[str, tuple[host.Host, int]] = {}
    for report in reports.values():
        if report.host is not None:
            seen = hosts.get(report.host_name)
            hosts[report.host_name] = (seen[0] if seen else report.host, (seen[1] if seen else 0) + 1)
    findings += host.judge_hosts(hosts, cuda=any(report.device_kind == "cuda" for report in reports.values()))
    gpus = {rank: report.gpu_at_rest for rank, report in reports.items() if report.gpu_at_rest is not None}
    if gpus:
        loaded = {rank: report.gpu_loaded for rank, report in reports.items() if report.gpu_loaded is not None}
        silent = {rank: report.gpu_silent for rank, report in reports.items() if report.gpu_silent is not None}
        findings += health.judge_gpus(gpus, loaded, silent)
    return findings


def _judge_rates(reports: Mapping[int, RankReport]) -> list[Finding]:
    first = reports[min(reports)]
    names = {rank: report.device_name for rank, report in reports.items()}
    usual = _usual_products(reports)
    findings = matmul.judge_products(usual, first.device_kind, names) if usual else []
    copies = {rank: report.copies for rank, report in reports.items() if report.copies}
    generation = None if first.gpu_loaded is None else first.gpu_loaded.pcie_generation
    return findings + (matmul.judge_copies(copies, first.device_kind, names, generation) if copies else [])


def _usual_products(reports: Mapping[int, RankReport]) -> dict[int, list[Any]]:
    """The square products that every examination makes."""
    return {
        rank: [rate for rate in report.products if rate.m == rate.n == rate.k]
        for rank, report in reports.items()
        if report.products
    }


def _memory_bytes(reports: Mapping[int, RankReport]) -> int:
    first = reports[min(reports)]
    if first.gpu_at_rest is not None:
        return min(report.gpu_at_rest.memory_bytes for report in reports.values() if report.gpu_at_rest is not None)
    sharing = sum(report.host_name == first.host_name for report in reports.values())
    return 0 if first.host is None else (first.host.container_bytes or first.host.memory_bytes) // sharing


def _rates(
    reports: Mapping[int, RankReport], merged: Sequence[bandwidth.GroupTime], per_node: Mapping[tuple[int, ...], int]
) -> dict[str, Any]:
    return {
        "products": [asdict(rate) | {"rank": rank} for rank, report in reports.items() for rate in report.products],
        "attention": [asdict(rate) | {"rank": rank} for rank, report in reports.items() for rate in report.attention],
        "elementwise": [asdict(rate) | {"rank": rank} for rank, report in reports.items() for rate in report.elementwise],
        "handoffs": [
            {"rank": rank, "seconds": report.handoff_seconds}
            for rank, report in reports.items()
            if report.handoff_seconds is not None
        ],
        "copies": [asdict(rate) | {"rank": rank} for rank, report in reports.items() for rate in report.copies],
        "collectives": [
            asdict(bandwidth.rate_of(one, per_node[one.ranks])) | {"axis": one.axis, "ranks": list(one.ranks)} for one in merged
        ],
    }
