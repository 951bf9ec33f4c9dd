"""Measurements from the step events of a trial."""

from __future__ import annotations

import pytest

from shardwright.telemetry.event_log import StepEvent
from shardwright.tuning.measurement import Measurement, TrialOutcome, measure_steps


def build_events(seconds: list[float], tokens: int = 1000) -> list[StepEvent]:
    return [
        StepEvent(
            step=number,
            loss=1.0,
            gradient_norm=1.0,
            learning_rate=0.0,
            tokens=tokens,
            supervised_tokens=tokens,
            samples_seen=number,
            step_seconds=value,
            tokens_per_second=tokens / value,
            memory_bytes=(number, 2 * number),
        )
        for number, value in enumerate(seconds, 1)
    ]


def test_warmup_is_left_out_and_reported() -> None:
    measured = measure_steps(build_events([30.0, 1.2, 1.0, 1.0, 9.0, 1.0, 1.0]), 5, 50.0)
    assert measured is not None
    assert measured.step_seconds == 1.0  # the slow step has no weight in a median
    assert measured.tokens_per_second == 1000
    assert measured.warmup_seconds == pytest.approx(30 + 1.2 - 2)
    assert measured.setup_seconds == pytest.approx(50 - 30 - 1.2 - 13)
    assert measured.memory_bytes == 14


def test_the_spread_shrinks_with_the_number_of_steps_but_not_to_zero() -> None:
    few, many = (
        measure_steps(build_events([1.0, 1.0] + [0.9, 1.1] * (n // 2)), n, 50.0) for n in (4, 64)
    )
    assert few is not None
    assert many is not None
    assert few.spread_seconds > 2 * many.spread_seconds
    equal = measure_steps(build_events([1.0] * 6), 4, 50.0)
    assert equal is not None
    assert equal.spread_seconds == pytest.approx(0.03)
    assert (equal.low, equal.high) == pytest.approx((0.97, 1.03))


@pytest.mark.parametrize("count", [0, 5, 7])
def test_a_trial_with_another_number_of_steps_is_not_measured(count: int) -> None:
    assert measure_steps(build_events([1.0] * count), 4, 10.0) is None


def test_outcomes_survive_json() -> None:
    measured = Measurement(4, 1.0, 0.1, 10.0, 5, 0.0, 2.0)
    for outcome in (
        TrialOutcome("measured", 3.0, measured),
        TrialOutcome("out_of_memory", 3.0, reason="rank 1 ran out of memory"),
    ):
        assert TrialOutcome.from_dict(outcome.as_dict()) == outcome


def test_a_failure_has_no_measurement() -> None:
    with pytest.raises(AssertionError):
        TrialOutcome("out_of_memory", 3.0, Measurement(4, 1.0, 0.1, 10.0, 5, 0.0, 2.0))
