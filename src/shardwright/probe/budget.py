"""Bounds on how long the examination measures, and decisions that are the same on every rank.

A probe starts with a small problem, predicts from it how long the next larger one takes, and stops
when the prediction exceeds its budget. Ranks measure at the same time and are compared with each
other, so every decision uses the largest number that any rank has.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from shardwright.probe.finding import Finding, Verdict
from shardwright.probe.rendezvous import Meeting
from shardwright.probe.watch import Watch
from shardwright.units import format_seconds

_SECTIONS = {"messages": "collectives", "results": "correctness", "pairs": "links"}
"""Sections of the diagnosis by kind of problem; others belong to `calibration`."""
_SLOW_LINKS = "Find out which way messages take: NCCL_DEBUG=INFO, or GLOO_SOCKET_IFNAME=eth0"

Agree = Callable[[float], float]
"""Returns the largest number that any rank gave; every rank calls it equally often."""

_MOST_NAMED = 3
"""Problems that one line names; `--json` has all of them."""


def agree_alone(number: float) -> float:
    """Return the number: there is no other rank."""
    return number


class Agreement:
    """Finds the largest of all ranks' numbers through the store, which works where collectives do not."""

    def __init__(self, meeting: Meeting, watch: Watch) -> None:
        self._meeting, self._watch = meeting, watch
        self._num_calls = 0

    def __call__(self, number: float) -> float:
        """Return the largest number that any rank gave in its call of the same index.

        Raises:
            RankFailed: another rank has stopped and will not answer.
        """
        store, num_ranks = self._meeting.store, self._meeting.world_size
        topic = f"largest/{self._num_calls}"
        self._num_calls += 1
        store.set(f"{topic}/{self._meeting.rank}", repr(number))
        if store.add(f"{topic}/count", 1) == num_ranks:
            answers = store.multi_get([f"{topic}/{rank}" for rank in range(num_ranks)])
            store.set(topic, repr(max(float(answer) for answer in answers)))
        self._watch.wait(topic)
        return float(store.get(topic))


@dataclass
class Budget:
    """Seconds that several measurements may take together, on the slowest rank."""

    seconds: float
    agree: Agree = agree_alone
    started: float = field(default_factory=lambda: time.monotonic())

    def affords(self, next_seconds: float) -> bool:
        """Return True if a measurement of about so many seconds still fits; the same on every rank."""
        return self.agree(time.monotonic() - self.started + next_seconds) <= self.seconds


@dataclass(frozen=True)
class Omission:
    """A problem that was too slow to measure: reduced to a smaller one, or left out."""

    kind: str
    """products, attention, elementwise, messages, results or pairs."""
    wanted: str
    seconds: float
    """Predicted for one pass of the wanted problem, on the slowest rank."""
    measured: str = ""
    """The smaller problem that was measured instead. Empty: none."""


def judge_omissions(omissions: Iterable[Omission], budget_seconds: float, timeout_seconds: float) -> list[Finding]:
    """Say which problems were left out or reduced, and why.

    Omissions are equal on all ranks, so those of one rank are enough.
    """
    by_kind: dict[str, list[Omission]] = {}
    for omission in omissions:
        by_kind.setdefault(omission.kind, []).append(omission)
    findings = []
    for kind, of_kind in by_kind.items():
        left_out = [one for one in of_kind if not one.measured]
        reduced = [one for one in of_kind if one.measured]
        numbers: Mapping[str, object] = {
            "left_out": {one.wanted: one.seconds for one in left_out},
            "reduced": {one.wanted: one.measured for one in reduced},
        }
        section = _SECTIONS.get(kind, "calibration")
        values = []
        if left_out:
            values.append(
                f"{len(left_out)} left out ({_name(left_out)}): at {_time_range(left_out)} a call they do not fit into the time"
            )
            if section == "calibration":
                values.append("a plan takes the nearest shape that was measured")
        if reduced:
            values.append(f"{len(reduced)} measured on a smaller problem ({_name(reduced)})")
        verdict: Verdict = "warn" if left_out else "pass"
        remedy = ""
        if left_out:
            remedy = _SLOW_LINKS
            if section == "calibration":
                longer = f"--budget {2 * budget_seconds:.0f} --timeout {2 * timeout_seconds:.0f}"
                remedy = f"{longer} allow more"
        findings.append(Finding(section, kind, verdict, "; ".join(values), remedy, numbers))
    return findings


def _name(omissions: list[Omission]) -> str:
    words = [f"{one.wanted} as {one.measured}" if one.measured else one.wanted for one in omissions]
    more = f" and {len(words) - _MOST_NAMED} more" if len(words) > _MOST_NAMED else ""
    return ", ".join(words[:_MOST_NAMED]) + more


def _time_range(omissions: list[Omission]) -> str:
    least, most = (pick(one.seconds for one in omissions) for pick in (min, max))
    return format_seconds(most) if most < 1.1 * least else f"{format_seconds(least)} to {format_seconds(most)}"
