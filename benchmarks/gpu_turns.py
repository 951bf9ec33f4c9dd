"""Contenders of a case on one device, timed in turn: all alive if they fit, else one by one."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.case import Case
from benchmarks.launch import Ranks, RanksFailed

COUNTED_STEPS = 4
"""Steps after the timed ones of the last round in which waits of the host are counted. Attention is
recorded in one more."""
_MEMORY_FACTOR = 1.1
"""Free memory over the reserved memory of the largest contender so far, for the next to start."""


@dataclass(frozen=True)
class Rounds:
    """Steps of each contender."""

    number: int
    warmup_steps: int
    timed_steps: int


@dataclass
class Visits:
    """Replies of the contenders, by name."""

    replies: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """One reply per round."""
    failures: dict[str, str] = field(default_factory=dict)
    are_alive_together: bool = True
    """False if a contender was timed in a process of its own, without the others."""


def visit_in_turn(
    cases: Mapping[str, Case], logs: Path, rounds: Rounds, time_limit_seconds: float
) -> Visits:
    """Time the contenders in turn (A B A B). A failure does not end the others.

    All import their packages at once, which needs no device, and build and warm up one after
    another. If the next one may not fit into the free memory, those that are alive are timed once
    and end, and the others follow; so the order is A B A B then too.

    Args:
        time_limit_seconds: longest time of a start and of the steps of a round.
    """
    visits = Visits({name: [] for name in cases})
    with ExitStack() as stack:
        started: dict[str, tuple[Ranks, ExitStack]] = {}
        while unfinished := _count_rounds(visits, rounds):
            fewest = min(unfinished.values())
            waiting = [name for name, number in unfinished.items() if number == fewest]
            for name in waiting:
                if name not in started:
                    own = stack.enter_context(ExitStack())
                    ranks = Ranks(
                        cases[name],
                        logs,
                        time_limit_seconds=time_limit_seconds,
                        threads_per_rank=None,
                        waits_to_build=True,
                    )
                    started[name] = own.enter_context(ranks), own
            alive = _warm_up(waiting, started, visits, rounds)
            has_all = alive.keys() == _count_rounds(visits, rounds).keys()
            visits.are_alive_together &= has_all
            for _ in range(rounds.number - fewest if has_all else 1):
                for name, warm in alive.items():
                    if name not in visits.failures:
                        _time(name, warm, started[name][0], visits, rounds)
            for name in alive:
                started.pop(name)[1].close()
    return visits


def _count_rounds(visits: Visits, rounds: Rounds) -> dict[str, int]:
    """Return the rounds so far of the contenders that have neither failed nor finished."""
    return {
        name: len(replies)
        for name, replies in visits.replies.items()
        if name not in visits.failures and len(replies) < rounds.number
    }


def _warm_up(
    waiting: list[str],
    started: dict[str, tuple[Ranks, ExitStack]],
    visits: Visits,
    rounds: Rounds,
) -> dict[str, dict[str, Any]]:
    """Build contenders until the next one may not fit; return their replies to the first steps."""
    alive: dict[str, dict[str, Any]] = {}
    for name in waiting:
        if not _has_memory(alive):
            break
        ranks, own = started[name]
        try:
            ranks.build()
            (ready,) = ranks.wait_ready()
            (warm,) = ranks.run_block(rounds.warmup_steps)
        except RanksFailed as error:
            own.close()
            del started[name]
            if alive and _is_out_of_memory(error):
                break  # it may fit alone
            _record_failure(name, error, visits)
            continue
        alive[name] = warm | {"details": ready["details"]}
    return alive


def _has_memory(alive: Mapping[str, dict[str, Any]]) -> bool:
    """Return True if the device has free memory for one more like the largest so far."""
    replies = list(alive.values())
    if not replies or "free_bytes" not in replies[-1]:
        return True
    largest = max(reply["peak_reserved_bytes"] for reply in replies)
    return bool(replies[-1]["free_bytes"] >= _MEMORY_FACTOR * largest)


def _time(name: str, warm: dict[str, Any], ranks: Ranks, visits: Visits, rounds: Rounds) -> None:
    """Time a round of a contender; count waits and record attention in the last one."""
    replies = visits.replies[name]
    try:
        (timed,) = ranks.run_block(rounds.timed_steps)
        num_waits = None
        attention: dict[str, Any] = {}
        if len(replies) + 1 == rounds.number:
            (counted,) = ranks.run_block(COUNTED_STEPS, "waits")
            num_waits = counted["num_waits"]
            (recorded,) = ranks.run_block(1, "attention")
            names = ("attention_operators", "attention_kernels")
            attention = {name: recorded[name] for name in names}
    except RanksFailed as error:
        _record_failure(name, error, visits)
        return
    replies.append(
        timed
        | attention
        | {
            "losses": warm["losses"] + timed["losses"],
            "warmup_seconds": warm["seconds"],
            "host_waits": None if num_waits is None else num_waits / COUNTED_STEPS,
            "start_seconds": {
                part: warm["details"][f"{part}_seconds"] for part in ("import", "build")
            },
        }
    )


def _is_out_of_memory(error: RanksFailed) -> bool:
    return "OutOfMemoryError" in str(error)


def _record_failure(name: str, error: RanksFailed, visits: Visits) -> None:
    last = str(error).splitlines()[-1]
    visits.failures[name] = "out of memory" if _is_out_of_memory(error) else f"failed: {last}"
    print(error, file=sys.stderr, flush=True)
