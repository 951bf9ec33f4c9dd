"""Time limits of measurements, and decisions that are equal on all ranks.

A probe measures a small problem first, predicts the time of the next larger one, and stops when
the prediction exceeds its budget. Ranks measure at the same time and are compared with each
other, so every decision uses the maximum over all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from shardwright.doctor.finding import Finding, Verdict
from shardwright.doctor.rendezvous import Rendezvous
from shardwright.doctor.stage_watchdog import StageWatchdog
from shardwright.units import format_seconds

_SECTIONS = {"messages": "collectives", "results": "correctness", "pairs": "links"}
"""Sections of the diagnosis by kind of problem; others belong to `calibration`."""
_SLOW_LINKS = "Check the transport with NCCL_DEBUG=INFO, or set GLOO_SOCKET_IFNAME=eth0"

ComputeMaximum = Callable[[float], float]
"""Function that returns the maximum of all ranks' numbers; all ranks call it equally often."""

_MAX_NAMED = 3
"""Problems that one line names; `--json` contains all of them."""


def return_local_number(number: float) -> float:
    """Return the number unchanged, for a single rank."""
    return number


class RankMaximum:
    """Maximum of all ranks' numbers through the store, which works when collectives do not."""

    def __init__(self, rank_sync: Rendezvous, watchdog: StageWatchdog) -> None:
        self._rendezvous = rank_sync
        self._watchdog = watchdog
        self._num_calls = 0

    def __call__(self, number: float) -> float:
        """Return the maximum over the ranks' calls of the same index.

        Raises:
            RankFailed: another rank has stopped.
        """
        store = self._rendezvous.store
        num_ranks = self._rendezvous.world_size
        topic = f"largest/{self._num_calls}"
        self._num_calls += 1
        store.set(f"{topic}/{self._rendezvous.rank}", repr(number))
        if store.add(f"{topic}/count", 1) == num_ranks:
            numbers = store.multi_get([f"{topic}/{rank}" for rank in range(num_ranks)])
            store.set(topic, repr(max(map(float, numbers))))
        self._watchdog.wait_for_key(topic)
        return float(store.get(topic))


@dataclass
class TimeBudget:
    """Time limit in seconds of several measurements together, on the slowest rank."""

    seconds: float
    compute_maximum: ComputeMaximum = return_local_number
    started: float = field(default_factory=lambda: time.monotonic())

    def can_afford(self, next_seconds: float) -> bool:
        """Return True if a measurement of `next_seconds` still fits; equal on all ranks."""
        return self.compute_maximum(time.monotonic() - self.started + next_seconds) <= self.seconds


@dataclass(frozen=True)
class Omission:
    """Problem that was too slow to measure: reduced to a smaller one, or omitted."""

    kind: str
    """Kind of problem: products, attention, elementwise, messages, results or pairs."""
    requested: str
    seconds: float
    """Predicted seconds of one call of the requested problem on the slowest rank."""
    measured: str = ""
    """Smaller problem that was measured instead; empty if none was."""


def build_omission_findings(
    omissions: Iterable[Omission], budget_seconds: float, timeout_seconds: float
) -> list[Finding]:
    """Report omitted and reduced problems.

    Omissions are equal on all ranks, so those of one rank suffice.
    """
    by_kind: dict[str, list[Omission]] = {}
    for omission in omissions:
        by_kind.setdefault(omission.kind, []).append(omission)
    findings = []
    for kind, of_kind in by_kind.items():
        omitted = [item for item in of_kind if not item.measured]
        reduced = [item for item in of_kind if item.measured]
        numbers: Mapping[str, object] = {
            "left_out": {item.requested: item.seconds for item in omitted},
            "reduced": {item.requested: item.measured for item in reduced},
        }
        section = _SECTIONS.get(kind, "calibration")
        values = []
        if omitted:
            values.append(
                f"{len(omitted)} omitted ({_list_omissions(omitted)}): at "
                f"{_format_time_range(omitted)} per call they exceed the time limit"
            )
            if section == "calibration":
                values.append("a plan uses the nearest measured shape")
        if reduced:
            values.append(
                f"{len(reduced)} measured on a smaller problem ({_list_omissions(reduced)})"
            )
        verdict: Verdict = "warn" if omitted else "pass"
        remedy = ""
        if omitted:
            remedy = _SLOW_LINKS
            if section == "calibration":
                longer = f"--budget {2 * budget_seconds:.0f} --timeout {2 * timeout_seconds:.0f}"
                remedy = f"Allow more time: {longer}"
        findings.append(Finding(section, kind, verdict, "; ".join(values), remedy, numbers))
    return findings


def _list_omissions(omissions: list[Omission]) -> str:
    names = [
        f"{omission.requested} as {omission.measured}" if omission.measured else omission.requested
        for omission in omissions
    ]
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more


def _format_time_range(omissions: list[Omission]) -> str:
    shortest, longest = (pick(omission.seconds for omission in omissions) for pick in (min, max))
    return (
        format_seconds(longest)
        if longest < 1.1 * shortest
        else f"{format_seconds(shortest)} to {format_seconds(longest)}"
    )
