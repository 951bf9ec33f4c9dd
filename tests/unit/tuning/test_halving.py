"""Successive halving on candidates with known times, on a clock that only trials advance."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from shardwright.tuning.halving import (
    HalvingResult,
    Trial,
    choose_rounds,
    run_halving,
    select_survivors,
)
from shardwright.tuning.measurement import WARMUP_STEPS, Measurement, TrialOutcome

SETUP_SECONDS = 5.0
ROUNDS = (4, 16, 64)
TWELVE = {f"c{index}": 1.0 + 0.1 * index for index in range(12)}
OOM = TrialOutcome("out_of_memory", SETUP_SECONDS, reason="rank 0 ran out of memory")


def measure(seconds: float, num_steps: int = 4, spread: float = 0.01) -> Measurement:
    return Measurement(num_steps, seconds, spread * seconds, 1 / seconds, 100, 0.0, SETUP_SECONDS)


@dataclass
class SimulatedMachine:
    """Machine whose clock only trials advance. `errors` replace the time of a candidate."""

    step_seconds: dict[str, float]
    budget_seconds: float = 1e9
    errors: dict[str, TrialOutcome] = field(default_factory=dict)
    spread: float = 0.01
    stop_after: int | None = None
    now: float = 0.0
    calls: list[tuple[str, int]] = field(default_factory=list)

    def get_remaining_seconds(self) -> float:
        return self.budget_seconds - self.now

    def run_trial(self, key: str, num_steps: int, limit: float) -> TrialOutcome | None:
        if self.stop_after is not None and len(self.calls) >= self.stop_after:
            return None
        self.calls.append((key, num_steps))
        seconds = SETUP_SECONDS + self.step_seconds[key] * (WARMUP_STEPS + num_steps)
        if seconds > limit:
            self.now += limit
            return TrialOutcome("time_limit", limit, reason="exceeded")
        self.now += seconds
        if key in self.errors:
            return self.errors[key]
        measured = measure(self.step_seconds[key], num_steps, self.spread)
        return TrialOutcome("measured", seconds, measured)

    def search(
        self,
        max_trial_seconds: float = 1e9,
        max_first_seconds: float = 1e9,
        known: dict[tuple[str, int], TrialOutcome] | None = None,
    ) -> HalvingResult:
        return run_halving(
            list(self.step_seconds),
            self.run_trial,
            ROUNDS,
            self,
            max_trial_seconds=max_trial_seconds,
            max_first_seconds=max_first_seconds,
            known=known or {},
        )


def test_the_fastest_wins_wherever_it_is_in_the_order() -> None:
    for position in range(12):
        times = {f"c{index}": 0.5 if index == position else 1.0 + index for index in range(12)}
        result = SimulatedMachine(times).search()
        assert result.best_key == f"c{position}"
        assert result.ending == "decided"


def test_each_round_passes_on_a_quarter_and_ends_when_one_is_left() -> None:
    machine = SimulatedMachine(TWELVE)
    machine.search()
    assert [steps for _, steps in machine.calls] == [4] * 12 + [16] * 3
    assert machine.calls[12:] == [("c0", 16), ("c1", 16), ("c2", 16)]


def test_candidates_that_are_too_close_to_the_fastest_are_measured_longer() -> None:
    machine = SimulatedMachine(TWELVE | {"c1": 1.001}, spread=0.05)
    machine.search()
    assert machine.calls[-2:] == [("c0", 64), ("c1", 64)]


def test_candidates_that_are_equally_fast_are_not_measured_longer() -> None:
    """The second is within 3% of the fastest even at the low end of its interval."""
    machine = SimulatedMachine(TWELVE | {"c1": 1.001}, spread=0.02)
    assert machine.search().best_key == "c0"
    assert {steps for _, steps in machine.calls} == {4, 16}


@pytest.mark.parametrize("is_last_choice", [False, True])
def test_survivors_are_the_fastest_and_those_that_overlap_it(is_last_choice: bool) -> None:
    measured = {key: measure(seconds) for key, seconds in TWELVE.items()}
    expected = ["c0"] if is_last_choice else ["c0", "c1", "c2"]
    assert select_survivors(measured, is_last_choice=is_last_choice) == expected
    wide = {key: measure(seconds, spread=0.5) for key, seconds in TWELVE.items()}
    assert select_survivors(wide, is_last_choice=is_last_choice) == [f"c{i}" for i in range(6)]
    assert select_survivors({}) == []


def test_a_failure_is_no_time() -> None:
    """The candidate that fails is the fastest by its steps; it is out, and its reason stays."""
    machine = SimulatedMachine(TWELVE | {"c5": 0.1}, errors={"c5": OOM})
    result = machine.search()
    assert result.best_key == "c0"
    assert result.get_last_outcomes()["c5"] == OOM
    assert ("c5", 16) not in machine.calls


def test_a_candidate_that_fails_in_a_later_round_leaves_the_place_to_the_next() -> None:
    class FailingLater(SimulatedMachine):
        def run_trial(self, key: str, num_steps: int, limit: float) -> TrialOutcome | None:
            outcome = super().run_trial(key, num_steps, limit)
            return OOM if key == "c0" and num_steps > 4 else outcome

    assert FailingLater(TWELVE).search().best_key == "c1"


def test_the_budget_ends_the_search_with_the_best_so_far() -> None:
    machine = SimulatedMachine(TWELVE, budget_seconds=60.0)
    result = machine.search()
    assert machine.now <= 60.0
    assert result.ending == "budget"
    assert 0 < len(machine.calls) < 12
    assert result.best_key == "c0"


def test_a_trial_that_the_budget_ends_is_not_counted_against_the_candidate() -> None:
    machine = SimulatedMachine({"a": 100.0, "b": 1.0}, budget_seconds=30.0)
    result = machine.search(max_trial_seconds=40.0)
    assert result.ending == "budget"
    assert result.trials == []
    assert result.best_key is None


def test_a_trial_over_its_own_limit_is_out_and_the_search_goes_on() -> None:
    machine = SimulatedMachine({"a": 100.0, "b": 1.0, "c": 2.0})
    result = machine.search(max_trial_seconds=40.0, max_first_seconds=40.0)
    assert result.ending == "decided"
    assert result.get_last_outcomes()["a"].status == "time_limit"
    assert result.best_key == "b"


def test_the_first_measurement_may_take_longer() -> None:
    """Before it nothing shows how long the ranks take to start."""
    machine = SimulatedMachine({"a": 100.0, "b": 90.0, "c": 1.0})
    result = machine.search(max_trial_seconds=400.0)
    assert result.get_last_outcomes()["a"].status == "measured"
    assert result.get_last_outcomes()["b"].status == "time_limit"
    assert result.best_key == "c"


def test_a_stop_ends_the_search_and_keeps_its_results() -> None:
    result = SimulatedMachine(TWELVE, stop_after=3).search()
    assert result.ending == "stopped"
    assert [trial.key for trial in result.trials] == ["c0", "c1", "c2"]
    assert result.best_key == "c0"


def test_known_outcomes_are_not_run_again() -> None:
    first = SimulatedMachine(TWELVE, errors={"c3": OOM}, stop_after=5)
    known = {(t.key, t.num_steps): t.outcome for t in first.search().trials}
    second = SimulatedMachine(TWELVE, errors={"c3": OOM})
    trials: list[Trial] = []
    result = run_halving(
        list(TWELVE),
        second.run_trial,
        ROUNDS,
        second,
        max_trial_seconds=1e9,
        max_first_seconds=1e9,
        known=known,
        on_trial=trials.append,
    )
    assert [trial.is_new for trial in trials[:6]] == [False] * 5 + [True]
    assert not {key for key, steps in second.calls if steps == 4} & {f"c{i}" for i in range(5)}
    assert result.best_key == "c0"
    assert result.get_last_outcomes()["c3"] == OOM


def test_known_outcomes_take_no_budget() -> None:
    known = {(key, 4): TrialOutcome("measured", 9, measure(TWELVE[key])) for key in TWELVE}
    machine = SimulatedMachine(TWELVE, budget_seconds=0.5)
    result = machine.search(known=known)
    assert machine.calls == []
    assert result.ending == "budget"
    assert result.best_key == "c0"


def test_rounds_end_with_the_requested_number_of_steps() -> None:
    for num_steps in range(3, 200):
        rounds = choose_rounds(num_steps)
        assert rounds[-1] == num_steps
        assert list(rounds) == sorted(set(rounds))
        assert rounds[0] >= 3


@pytest.mark.parametrize("seed", range(30))
def test_the_best_of_twelve_takes_a_third_of_the_time_of_all_on_a_noisy_machine(seed: int) -> None:
    """Each trial is off by 3% (normally distributed), and the ranks take as long to start as twenty
    steps; the ordinary suite's counterpart of the long test with real runs."""
    generator = random.Random(seed)
    num_steps = 160
    noise = 0.03

    class NoisyMachine(SimulatedMachine):
        def run_trial(self, key: str, num_steps: int, limit: float) -> TrialOutcome | None:
            outcome = super().run_trial(key, num_steps, limit)
            assert outcome is not None
            seconds = self.step_seconds[key] * generator.gauss(1, noise)
            measured = measure(seconds, num_steps, spread=0.01 + 0.08 / num_steps + noise / 2)
            return TrialOutcome("measured", outcome.seconds, measured)

    step_seconds = SETUP_SECONDS / 20
    times = {f"c{index}": step_seconds * generator.uniform(1, 2.5) for index in range(12)}
    machine = NoisyMachine(times)
    result = run_halving(
        list(times),
        machine.run_trial,
        choose_rounds(num_steps),
        machine,
        max_trial_seconds=1e9,
        max_first_seconds=1e9,
        known={},
    )
    all_seconds = sum(SETUP_SECONDS + (WARMUP_STEPS + num_steps) * each for each in times.values())
    assert result.best_key is not None
    assert times[result.best_key] <= min(times.values()) * (1 + 4 * noise)
    assert machine.now <= all_seconds / 3
