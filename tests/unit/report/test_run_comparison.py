"""`compare`: equal runs pass, divergence is located, incomparable runs are refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwright.errors import InputError
from shardwright.report.recorded_run import Run, load_runs
from shardwright.report.run_comparison import (
    PRECISION_TOLERANCE,
    TOLERANCE,
    RunComparison,
    compare_runs,
    describe_comparison,
)
from shardwright.telemetry.event_log import ResumeEvent, RunStartedEvent, SkippedStepEvent
from tests.unit.report.samples import (
    Loss,
    falling,
    make_complete_run_events,
    make_evaluation,
    make_noisy_loss,
    make_run,
    make_step,
    write_events,
    write_run,
)
from tests.unit.telemetry.samples import make_start_event


def compare(
    run_loss: Loss, reference_loss: Loss = falling, steps: int = 2000, **options: Any
) -> RunComparison:
    run, reference = (
        make_run(name, make_complete_run_events(name, steps, loss))
        for name, loss in (("run", run_loss), ("reference", reference_loss))
    )
    return compare_runs(run, reference, **options)


def test_equal_runs_agree_exactly() -> None:
    comparison = compare(falling)
    assert comparison.agrees
    assert comparison.worst.relative_difference == 0.0
    assert (comparison.steps_compared, comparison.first_step, comparison.last_step) == (
        2000,
        1,
        2000,
    )


@pytest.mark.parametrize("seed", range(5))
def test_noise_alone_is_within_tolerance(seed: int) -> None:
    assert compare(make_noisy_loss(0.01, seed)).agrees


@pytest.mark.parametrize(
    ("precision", "reference_precision", "tolerance", "reason"),
    [
        ({"kind": "bf16"}, {"kind": "bf16"}, TOLERANCE, "both runs have one precision"),
        ({"kind": "fp8"}, {"kind": "bf16"}, PRECISION_TOLERANCE, "fp8 rowwise_with_gw_hp against"),
        (
            {"kind": "fp8", "fp8": {"recipe": "mxfp8"}},
            {"kind": "fp8", "fp8": None},
            PRECISION_TOLERANCE,
            "fp8 mxfp8 against fp8 rowwise_with_gw_hp: the spread of bf16's seeds in docs/",
        ),
        (None, {"kind": "bf16"}, TOLERANCE, "a run has no recorded precision"),
    ],
)
def test_a_change_of_precision_has_its_own_tolerance(
    precision: Any, reference_precision: Any, tolerance: float, reason: str
) -> None:
    def run(name: str, section: Any, loss: Loss) -> Run:
        events = make_complete_run_events(name, 400, loss)
        return make_run(
            name,
            [
                replace(event, recipe={"precision": section})
                if isinstance(event, RunStartedEvent)
                else event
                for event in events
            ],
        )

    middle = (TOLERANCE + PRECISION_TOLERANCE) / 2
    comparison = compare_runs(
        run("run", precision, lambda step: falling(step) * (1 + middle)),
        run("reference", reference_precision, falling),
    )
    assert comparison.tolerance == tolerance
    assert comparison.tolerance_reason.startswith(reason)
    assert comparison.agrees == (tolerance == PRECISION_TOLERANCE)
    assert reason in describe_comparison(comparison)[0]
    given = compare_runs(run("run", precision, falling), run("b", None, falling), tolerance=0.02)
    assert (given.tolerance, given.tolerance_reason) == (0.02, "given")


def test_single_outliers_are_within_tolerance() -> None:
    assert compare(lambda step: falling(step) * (5.0 if step % 400 == 0 else 1.0)).agrees


@pytest.mark.parametrize("seed", range(3))
def test_a_late_divergence_is_located_at_its_start(seed: int) -> None:
    comparison = compare(
        make_noisy_loss(0.005, seed, lambda step: falling(step) * (1.02 if step > 1500 else 1.0))
    )
    assert comparison.left is not None
    assert comparison.left.first_step <= 1500 < comparison.left.last_step < 1600
    assert comparison.worst.relative_difference == pytest.approx(0.02, abs=0.002)
    assert comparison.worst.first_step > 1490


def test_a_divergence_at_the_end_is_detected() -> None:
    comparison = compare(lambda step: falling(step) * (1.02 if step > 1950 else 1.0))
    assert not comparison.agrees


@pytest.mark.parametrize("factor", [1.005, 0.995])
def test_a_constant_offset_diverges_at_the_first_step(factor: float) -> None:
    comparison = compare(lambda step: factor * falling(step))
    assert comparison.left is not None
    assert comparison.left.first_step == 1
    assert comparison.left.relative_difference == pytest.approx(factor - 1)


def test_a_curve_shifted_by_steps_diverges() -> None:
    assert not compare(lambda step: falling(step + 5)).agrees


def test_the_tolerance_is_applied() -> None:
    assert compare(lambda step: 1.002 * falling(step)).agrees
    assert not compare(lambda step: 1.002 * falling(step), tolerance=0.001).agrees


@pytest.mark.parametrize("steps", [1, 2, 4, 7, 30])
def test_short_runs_are_compared_completely(steps: int) -> None:
    assert compare(falling, steps=steps).agrees
    assert not compare(lambda step: 1.01 * falling(step), steps=steps).agrees


def test_a_loss_that_is_not_finite_diverges_there() -> None:
    comparison = compare(lambda step: math.nan if step >= 700 else falling(step), steps=1000)
    assert comparison.left is not None
    assert comparison.left.last_step == 700
    assert json.loads(json.dumps(comparison.as_dict(), allow_nan=False))["left"]["loss"] is None


def test_losses_that_are_never_finite_diverge() -> None:
    assert not compare(lambda step: math.nan, steps=10).agrees


def test_skipped_steps_are_not_compared(tmp_path: Path) -> None:
    events = [
        make_start_event(),
        *(make_step(i, math.nan if i == 5 else falling(i)) for i in range(1, 50)),
    ]
    run, reference = load_runs(
        [
            write_events(tmp_path / "run", [*events, SkippedStepEvent(step=5, reason="nan")]),
            write_run(tmp_path / "reference", 49),
        ]
    )
    comparison = compare_runs(run, reference)
    assert comparison.agrees
    assert comparison.steps_compared == 48


def test_a_resumed_run_is_compared_by_its_surviving_steps(tmp_path: Path) -> None:
    events = [
        make_start_event(),
        *(make_step(i, falling(i)) for i in range(1, 61)),
        *(make_step(i, 99.0) for i in range(61, 90)),
    ]
    events += [
        make_start_event(),
        ResumeEvent(step=60, path="x"),
        *(make_step(i, falling(i)) for i in range(61, 101)),
    ]
    run, reference = load_runs(
        [write_events(tmp_path / "run", events), write_run(tmp_path / "reference", 100)]
    )
    assert compare_runs(run, reference).agrees


def test_a_shorter_reference_is_noted(tmp_path: Path) -> None:
    run, reference = load_runs(
        [write_run(tmp_path / "run", 120), write_run(tmp_path / "reference", 80)]
    )
    comparison = compare_runs(run, reference)
    assert comparison.last_step == 80
    assert any("continues to step 120" in note for note in comparison.notes)


def test_validation_is_compared_at_every_point(tmp_path: Path) -> None:
    def diverge_at_400(step: int) -> float:
        return falling(step) * (1.01 if step == 400 else 1.0)

    run, reference = load_runs(
        [
            write_run(tmp_path / "run", 500, validation=diverge_at_400),
            write_run(tmp_path / "reference", 500, validation=falling),
        ]
    )
    comparison = compare_runs(run, reference)
    assert comparison.left is None
    assert comparison.validation_points == 5
    assert comparison.validation_left is not None
    assert comparison.validation_left.first_step == 400
    assert not comparison.agrees
    assert any(
        line.startswith("EXCEEDS the tolerance: validation loss")
        for line in describe_comparison(comparison)
    )


def test_validation_on_other_tokens_is_noted_and_not_compared(tmp_path: Path) -> None:
    paths = [
        write_events(
            tmp_path / name,
            [make_start_event(), make_step(1, 2.0), make_evaluation(1, loss, tokens=tokens)],
        )
        for name, loss, tokens in (("run", 2.0, 1000), ("reference", 3.0, 500))
    ]
    comparison = compare_runs(*load_runs(paths))
    assert comparison.agrees
    assert comparison.validation_points == 0
    assert any("different numbers of tokens" in note for note in comparison.notes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"global_batch_tokens": 128}, "different number of tokens"),
        ({"data_hash": "other"}, "batches or the order of batches differ"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    run, reference = load_runs(
        [write_run(tmp_path / "run", 10, **change), write_run(tmp_path / "reference", 10)]
    )
    with pytest.raises(InputError, match=message):
        compare_runs(run, reference)


def test_cursors_that_differ_are_refused(tmp_path: Path) -> None:
    ahead = [
        make_start_event(),
        *(make_step(i, 2.0, samples_seen=4 * i + (4 if i > 3 else 0)) for i in range(1, 9)),
    ]
    run, reference = load_runs(
        [write_events(tmp_path / "run", ahead), write_run(tmp_path / "reference", 8)]
    )
    with pytest.raises(InputError, match="after step 4"):
        compare_runs(run, reference)


def test_runs_without_a_common_step_or_a_start_are_refused(tmp_path: Path) -> None:
    reference = write_run(tmp_path / "reference", 5)
    for name, events, message in (
        ("later", [make_start_event(), *(make_step(i, 2.0) for i in (8, 9))], "no step in common"),
        ("headless", [make_step(1, 2.0)], "no run_started event"),
        ("stepless", [make_start_event()], "has no steps"),
    ):
        with pytest.raises(InputError, match=message):
            compare_runs(*load_runs([write_events(tmp_path / name, events), reference]))


def test_a_reference_without_a_finite_loss_is_refused(tmp_path: Path) -> None:
    reference = write_events(
        tmp_path / "reference", [make_start_event(), *(make_step(i, math.inf) for i in range(1, 6))]
    )
    with pytest.raises(InputError, match="no finite loss at any common step"):
        compare_runs(*load_runs([write_run(tmp_path / "run", 5), reference]))


@pytest.mark.parametrize("tolerance", [0.0, -1.0, math.nan])
def test_a_tolerance_must_be_positive(tolerance: float) -> None:
    with pytest.raises(InputError, match="positive"):
        compare(falling, steps=5, tolerance=tolerance)
