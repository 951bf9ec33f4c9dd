"""Successive halving: few steps of all candidates, more steps of the best of them.

Source: Jamieson and Talwalkar 2016, Non-stochastic best arm identification and hyperparameter
optimization, algorithm 1. Every round starts its candidates again, so a round keeps a quarter
of the candidates instead of half: processes take longer to start than a few steps take.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Literal, Protocol

from shardwright.tuning.measurement import WARMUP_STEPS, Measurement, TrialOutcome

REDUCTION_FACTOR = 4
"""A round of n candidates passes on n / `REDUCTION_FACTOR`, rounded up; and those that cannot be
distinguished from the fastest, up to twice as many in all."""
RELEVANT_SHARE = 0.03
"""Smallest gain in step time that is worth the last round, which takes longer than all others."""

Ending = Literal["decided", "budget", "stopped"]
"""`decided`: all rounds that were needed have ended. `budget`: the next trial would exceed it.
`stopped`: the user asked to stop."""


class RemainingTime(Protocol):
    """Remaining time of the whole search."""

    def get_remaining_seconds(self) -> float:
        """Return the seconds that are left."""


RunTrial = Callable[[str, int, float], TrialOutcome | None]
"""Runs the candidate of a key for a number of measured steps within a number of seconds. Returns
None if a stop was requested."""


@dataclass(frozen=True)
class Trial:
    """One trial: candidate, number of measured steps, outcome. `is_new` is False for a result of an
    earlier search."""

    key: str
    num_steps: int
    outcome: TrialOutcome
    is_new: bool = True


@dataclass
class HalvingResult:
    """All trials in order, and the reason for the end."""

    trials: list[Trial] = field(default_factory=list)
    ending: Ending = "decided"
    remaining: list[str] = field(default_factory=list)
    """Candidates that no round has removed from the search."""

    def get_last_outcomes(self) -> dict[str, TrialOutcome]:
        """Return the outcome of each candidate's trial with the most steps."""
        last: dict[str, Trial] = {}
        for trial in self.trials:
            if trial.key not in last or trial.num_steps >= last[trial.key].num_steps:
                last[trial.key] = trial
        return {key: trial.outcome for key, trial in last.items()}

    @property
    def best_key(self) -> str | None:
        """Fastest candidate of those that are still in the search, by their last measurement; None
        if none was measured.

        A candidate that left the search was slower than those that stayed, so a lucky short trial
        does not win. It counts only if all that stayed failed later.
        """
        measured = {
            key: outcome.measurement.step_seconds
            for key, outcome in self.get_last_outcomes().items()
            if outcome.measurement is not None
        }
        remaining = [key for key in self.remaining if key in measured]
        return min(remaining or measured, key=lambda key: measured[key], default=None)


def choose_rounds(num_steps: int) -> tuple[int, ...]:
    """Return the measured steps of each round; the last has `num_steps`.

    >>> choose_rounds(64), choose_rounds(8)
    ((4, 16, 64), (3, 8))
    """
    rounds = [num_steps]
    while len(rounds) < 3 and rounds[0] > 3:
        rounds.insert(0, max(3, rounds[0] // REDUCTION_FACTOR))
    return tuple(rounds)


def run_halving(
    keys: Sequence[str],
    run_trial: RunTrial,
    rounds: Sequence[int],
    budget: RemainingTime,
    *,
    max_trial_seconds: float,
    max_first_seconds: float,
    known: Mapping[tuple[str, int], TrialOutcome],
    on_trial: Callable[[Trial], None] = lambda _trial: None,
) -> HalvingResult:
    """Find the fastest candidate.

    Args:
        keys: Candidates, the most promising first.
        rounds: Measured steps of each round, ascending.
        max_trial_seconds: Time limit of one trial; a candidate that exceeds it is out.
        max_first_seconds: Time limit until a candidate is measured.
        known: Outcomes of an earlier search, by candidate and number of steps.
        on_trial: Called with each trial when it has ended.
    """
    search = _Halving(run_trial, budget, (max_first_seconds, max_trial_seconds), known, on_trial)
    result = search.result
    result.remaining = list(keys)
    for number, num_steps in enumerate(rounds):
        if number and len(result.remaining) <= 1:
            break
        measured = search.run_round(result.remaining, num_steps)
        if measured is None:
            break
        is_last_choice = number + 2 == len(rounds)
        result.remaining = select_survivors(measured, is_last_choice=is_last_choice)
    return result


def select_survivors(
    measured: Mapping[str, Measurement], *, is_last_choice: bool = False
) -> list[str]:
    """Return the candidates of the next round, the fastest first.

    Args:
        is_last_choice: True before the last round, in which a candidate is measured again only if
            it may be faster than the fastest by `RELEVANT_SHARE`: the fastest is often alone.
    """
    order = sorted(measured, key=lambda key: measured[key].step_seconds)
    if not order:
        return []
    best = measured[order[0]]
    num_passed = 1 if is_last_choice else ceil(len(order) / REDUCTION_FACTOR)
    limit = max(2, ceil(len(order) / REDUCTION_FACTOR) * 2)
    overlap = best.step_seconds * (1 - RELEVANT_SHARE) if is_last_choice else best.high
    return [
        key
        for position, key in enumerate(order[:limit])
        if position < num_passed or measured[key].low <= overlap
    ]


class _Halving:
    """State of one search."""

    def __init__(
        self,
        run_trial: RunTrial,
        budget: RemainingTime,
        limits: tuple[float, float],
        known: Mapping[tuple[str, int], TrialOutcome],
        on_trial: Callable[[Trial], None],
    ) -> None:
        self.result = HalvingResult()
        self._run_trial = run_trial
        self._budget = budget
        self._limits = limits
        self._known = known
        self._on_trial = on_trial
        self._measured: dict[str, Measurement] = {}

    def run_round(self, keys: Sequence[str], num_steps: int) -> dict[str, Measurement] | None:
        """Try each candidate; return the measurements, or None if the search ends in this round."""
        measured: dict[str, Measurement] = {}
        for key in keys:
            outcome = self._try_candidate(key, num_steps)
            if outcome is None:
                return None
            if outcome.measurement is not None:
                measured[key] = self._measured[key] = outcome.measurement
        return measured

    def _try_candidate(self, key: str, num_steps: int) -> TrialOutcome | None:
        known = self._known.get((key, num_steps))
        if known is not None:
            self._record(Trial(key, num_steps, known, is_new=False))
            return known
        remaining = self._budget.get_remaining_seconds()
        if remaining <= self._estimate_seconds(key, num_steps):
            self.result.ending = "budget"
            return None
        own_limit = self._limits[bool(self._measured)]
        limit = min(remaining, own_limit)
        outcome = self._run_trial(key, num_steps, limit)
        if outcome is None:
            self.result.ending = "stopped"
            return None
        if outcome.status == "time_limit" and limit < own_limit:
            self.result.ending = "budget"  # the budget ended the trial, not its own limit
            return None
        self._record(Trial(key, num_steps, outcome))
        return outcome

    def _record(self, trial: Trial) -> None:
        self.result.trials.append(trial)
        self._on_trial(trial)

    def _estimate_seconds(self, key: str, num_steps: int) -> float:
        """Estimate the duration of a trial from earlier ones; 0 before the first measurement."""
        if not self._measured:
            return 0.0
        fastest = min(self._measured.values(), key=lambda each: each.step_seconds)
        own = self._measured.get(key, fastest)
        setup_seconds = min(each.setup_seconds for each in self._measured.values())
        return setup_seconds + own.step_seconds * (WARMUP_STEPS + num_steps)
