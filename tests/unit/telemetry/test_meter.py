"""Throughput, smoothing, remaining time and goodput."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import pytest

from shardwright.telemetry.event_log import (
    CheckpointEvent,
    EvaluationEvent,
    Event,
    ResumeEvent,
    RunFinishedEvent,
    SkippedStepEvent,
)
from shardwright.telemetry.goodput import measure_goodput
from shardwright.telemetry.meter import (
    ExponentialMean,
    RunProgress,
    ThroughputMeter,
    measure_throughput,
)
from tests.unit.telemetry.samples import make_start_event, make_step_event


def test_throughput_without_flops_or_ceiling_has_no_mfu() -> None:
    rates = measure_throughput(
        100, 2.0, world_size=2, flops_per_token=None, matmul_flops_per_second=1e9
    )
    assert (rates.tokens_per_second, rates.model_flops_per_second, rates.mfu) == (50.0, None, None)
    rates = measure_throughput(
        100, 2.0, world_size=2, flops_per_token=10.0, matmul_flops_per_second=None
    )
    assert (rates.model_flops_per_second, rates.mfu) == (500.0, None)


def test_a_step_above_the_ceiling_keeps_it_and_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    meter = ThroughputMeter(world_size=2, matmul_flops_per_second=1e9)
    with caplog.at_level("INFO", logger="shardwright"):
        mfus = [meter.measure(100, seconds, 10e6).mfu for seconds in (1.0, 0.25, 0.125, 0.5)]
    assert mfus == pytest.approx([0.5, 1.0, 1.0, 1.0])
    (record,) = caplog.records
    assert (
        "a step reached 200% of the measured matmul ceiling (1 GFLOP/s per device)"
        in record.getMessage()
    )


def test_smoothing_decays_by_half_life_and_ignores_nan() -> None:
    mean = ExponentialMean(half_life=2)
    assert math.isnan(mean.value)
    for _ in range(200):
        mean.add(8.0)
    mean.add(math.nan)
    assert mean.value == pytest.approx(8.0)
    mean.add(0.0)
    assert mean.add(0.0) == pytest.approx(4.0)


def test_remaining_time_includes_evaluations_but_not_the_first_step() -> None:
    progress = RunProgress()
    progress.on_event(make_start_event(total_steps=100))
    elapsed = 500.0  # a first step that compiles
    progress.on_event(
        dataclasses.replace(make_step_event(1, step_seconds=500.0), elapsed_seconds=elapsed)
    )
    assert math.isnan(progress.remaining_seconds)
    for step in range(2, 51):
        # An evaluation as long as a step follows every second step.
        elapsed += 2.0 if step % 2 else 1.0
        progress.on_event(
            dataclasses.replace(make_step_event(step, step_seconds=1.0), elapsed_seconds=elapsed)
        )
    assert progress.remaining_seconds == pytest.approx(50 * 1.5, rel=0.02)
    assert progress.loss == pytest.approx(2.5)


def test_goodput_counts_withdrawn_steps_as_lost() -> None:
    def set_time(elapsed: float, event: Event) -> Event:
        return dataclasses.replace(event, elapsed_seconds=elapsed)

    events = [
        set_time(1.0, make_start_event()),
        set_time(2.0, make_step_event(1, step_seconds=1.0)),
        set_time(3.0, CheckpointEvent(step=1, path="a", size_bytes=1, seconds=1.0)),
        set_time(4.0, make_step_event(2, step_seconds=1.0)),
        set_time(1.0, make_start_event()),
        set_time(1.0, ResumeEvent(step=1, path="a")),
        set_time(2.0, make_step_event(2, step_seconds=1.0)),
        set_time(3.0, make_step_event(3, step_seconds=1.0)),
        set_time(3.0, SkippedStepEvent(step=3, reason="nan")),
    ]
    goodput = measure_goodput(events)
    assert goodput.lost_seconds == {
        "set-up": 2.0,
        "checkpoints": 1.0,
        "skipped steps": 1.0,
        "withdrawn steps": 1.0,
    }
    assert goodput.total_seconds == 7.0
    assert goodput.useful_seconds == 2.0
    assert goodput.share == pytest.approx(2 / 7)
    assert measure_goodput([]).share == 0.0


def test_useful_and_lost_times_sum_to_the_wall_time() -> None:
    """Two processes run ten seconds apart; the first opens its file after two seconds."""

    def set_time(elapsed: float, event: Event, opened: float = 1000.0) -> Event:
        return dataclasses.replace(event, elapsed_seconds=elapsed, time=opened + elapsed)

    events = [
        set_time(0.5, make_start_event()),
        set_time(3.0, make_step_event(1, step_seconds=1.0)),
        set_time(4.0, EvaluationEvent(step=1, loss=2.0, perplexity=7.0, tokens=9, seconds=0.75)),
        set_time(
            4.5, CheckpointEvent(step=1, path="a", size_bytes=1, seconds=9.0, stall_seconds=0.25)
        ),
        set_time(
            5.0, RunFinishedEvent(step=1, status="preempted", total_seconds=7.0, total_tokens=64)
        ),
        set_time(1.0, make_start_event(), 1015.0),
        set_time(1.0, ResumeEvent(step=1, path="a"), 1015.0),
        set_time(3.0, make_step_event(2, step_seconds=1.5), 1015.0),
    ]
    goodput = measure_goodput(events)
    assert goodput.lost_seconds == pytest.approx(
        {
            "set-up": 5.5,
            "evaluations": 0.75,
            "checkpoints": 0.25,
            "between steps": 1.0,
            "down": 10.0,
        }
    )
    assert (goodput.useful_seconds, goodput.total_seconds, goodput.wall_seconds) == (
        2.5,
        10.0,
        20.0,
    )
    assert goodput.useful_seconds + sum(goodput.lost_seconds.values()) == pytest.approx(
        goodput.wall_seconds
    )
    assert goodput.share == pytest.approx(0.125)


def test_a_process_that_starts_more_slowly_than_the_former_one_ran_is_another_process() -> None:
    def set_time(elapsed: float, event: Event, opened: float) -> Event:
        return dataclasses.replace(event, elapsed_seconds=elapsed, time=opened + elapsed)

    goodput = measure_goodput(
        [
            set_time(0.5, make_start_event(), 1000.0),
            set_time(2.0, make_step_event(1, step_seconds=1.0), 1000.0),
            set_time(4.0, make_start_event(), 1012.0),
            set_time(4.0, ResumeEvent(step=1, path="a"), 1012.0),
            set_time(7.0, make_step_event(2, step_seconds=1.0), 1012.0),
        ]
    )
    assert (goodput.useful_seconds, goodput.total_seconds, goodput.wall_seconds) == (2.0, 9.0, 19.0)
    assert goodput.lost_seconds == pytest.approx({"set-up": 7.0, "down": 10.0})


@pytest.mark.parametrize(("status", "down_seconds"), [("completed", 0.0), ("preempted", 10.0)])
def test_a_completed_run_was_not_down_before_it_continued(
    status: Literal["completed", "preempted"], down_seconds: float
) -> None:
    def set_time(elapsed: float, event: Event, opened: float) -> Event:
        return dataclasses.replace(event, elapsed_seconds=elapsed, time=opened + elapsed)

    goodput = measure_goodput(
        [
            set_time(0.5, make_start_event(), 1000.0),
            set_time(2.0, make_step_event(1, step_seconds=1.0), 1000.0),
            set_time(
                2.0,
                RunFinishedEvent(step=1, status=status, total_seconds=2.0, total_tokens=64),
                1000.0,
            ),
            set_time(0.5, make_start_event(), 1012.0),
            set_time(2.0, make_step_event(2, step_seconds=1.0), 1012.0),
        ]
    )
    assert goodput.lost_seconds.get("down", 0.0) == pytest.approx(down_seconds)
    assert goodput.wall_seconds == pytest.approx(4.0 + down_seconds)
