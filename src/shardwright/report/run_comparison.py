"""Comparison of a run's loss curve with a reference's, within a tolerance.

Both runs must have seen the same batches at the same steps; otherwise the comparison is an
error. Relative differences per step are filtered by a running median of five, which removes
single outliers, and averaged over a window. The run deviates where such a mean exceeds the
tolerance. Validation losses are means over many tokens and are compared one by one. The default
tolerance is larger for runs of different precisions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwright.errors import InputError
from shardwright.report.downsampling import FloatArray
from shardwright.report.recorded_run import Run
from shardwright.report.run_settings import name_precision
from shardwright.telemetry.event_log import SkippedStepEvent

SCHEMA_VERSION = 1
TOLERANCE = 0.003
"""Relative tolerance of runs in one precision."""
PRECISION_TOLERANCE = 0.01
"""Relative tolerance of runs in different precisions: about how far three seeds of bf16 lie apart.

Source: docs/benchmarks/low-precision-training.md, which has the differences of every precision.
"""
_PRECISION_SOURCE = "the spread of bf16's seeds in docs/benchmarks/low-precision-training.md"
_NUM_MEDIAN_STEPS = 5
_MIN_WINDOW_STEPS = 25
_MAX_WINDOW_STEPS = 1000


@dataclass(frozen=True)
class LossDeviation:
    """Difference between run and reference over a range of steps."""

    first_step: int
    last_step: int
    """Equal to `first_step` for a single point."""
    loss: float
    reference_loss: float
    relative_difference: float
    """(loss - reference_loss) / reference_loss, averaged over the steps."""

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON; non-finite numbers are null."""
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in vars(self).items()
        }


@dataclass(frozen=True)
class RunComparison:
    """Result of a comparison; `left` is the first deviation beyond the tolerance or None."""

    run: str
    reference: str
    tolerance: float
    window_steps: int
    steps_compared: int
    first_step: int
    last_step: int
    worst: LossDeviation
    """Window of the training loss with the largest difference."""
    left: LossDeviation | None
    validation_points: int
    validation_worst: LossDeviation | None
    validation_left: LossDeviation | None
    notes: tuple[str, ...] = ()
    """Data that was not compared, with reasons."""
    tolerance_reason: str = "given"
    """Source of the tolerance, as one clause."""

    @property
    def agrees(self) -> bool:
        """True if training and validation loss are within the tolerance."""
        return self.left is None and self.validation_left is None

    def as_dict(self) -> dict[str, Any]:
        """Return the result as JSON for `--json`."""
        deviations = ("worst", "left", "validation_worst", "validation_left")
        plain = {name: value for name, value in vars(self).items() if name not in deviations}
        deviation_by_name: dict[str, LossDeviation | None] = {
            name: getattr(self, name) for name in deviations
        }
        nested = {
            name: deviation.as_dict() if deviation else None
            for name, deviation in deviation_by_name.items()
        }
        return {
            "schema_version": SCHEMA_VERSION,
            "agrees": self.agrees,
            **plain,
            **nested,
            "notes": list(self.notes),
        }


def compare_runs(
    run: Run, reference: Run, *, tolerance: float | None = None, window_steps: int | None = None
) -> RunComparison:
    """Compare a run's losses with a reference's.

    Args:
        run, reference: results of `load_run`.
        tolerance: relative tolerance; 0.003 is 0.3% of the reference's loss. Default: `TOLERANCE`,
            or `PRECISION_TOLERANCE` if the runs have different precisions.
        window_steps: steps per mean; default a tenth of the compared steps, between 25 and
            1000.

    Raises:
        InputError: the runs cannot be compared; the message names the reason.
    """
    if tolerance is not None and not tolerance > 0:
        raise InputError("the tolerance must be positive", field="--tolerance", got=tolerance)
    _check_comparable(run, reference)
    reason = "given"
    if tolerance is None:
        tolerance, reason = choose_tolerance(run, reference)
    steps, losses, reference_losses = _align_losses(run, reference)
    finite = np.isfinite(losses) & np.isfinite(reference_losses)
    broken = np.flatnonzero(~np.isfinite(losses) & np.isfinite(reference_losses))
    # The comparison ends at the first loss that is not finite.
    end = int(broken[0]) if len(broken) else len(steps)
    usable = np.flatnonzero(finite[:end])
    window = window_steps or min(_MAX_WINDOW_STEPS, max(_MIN_WINDOW_STEPS, len(usable) // 10))
    window = max(1, min(window, len(usable)))
    worst, left = _find_deviations(
        steps[usable], losses[usable], reference_losses[usable], window, tolerance
    )
    if len(broken):
        step = int(steps[end])
        not_finite = LossDeviation(
            step, step, float(losses[end]), float(reference_losses[end]), math.nan
        )
        left = left or not_finite
        worst = not_finite if worst is None else worst
    if worst is None:
        raise InputError(
            "the reference has no finite loss at any common step",
            field="REFERENCE",
            got=str(reference.path),
        )
    points, validation_worst, validation_left, notes = _compare_validation(
        run, reference, tolerance
    )
    return RunComparison(
        run=run.name,
        reference=reference.name,
        tolerance=tolerance,
        window_steps=window,
        steps_compared=len(usable) + bool(len(broken)),
        first_step=int(steps[0]),
        last_step=int(steps[-1]),
        worst=worst,
        left=left,
        validation_points=points,
        validation_worst=validation_worst,
        validation_left=validation_left,
        notes=(*_list_missing_steps(run, reference, steps), *notes),
        tolerance_reason=reason,
    )


def choose_tolerance(run: Run, reference: Run) -> tuple[float, str]:
    """Return the default tolerance of two runs, and its reason as one clause."""
    precisions = [_describe_precision(each) for each in (run, reference)]
    if None in precisions:
        return TOLERANCE, "a run has no recorded precision"
    if precisions[0] == precisions[1]:
        return TOLERANCE, "both runs have one precision"
    change = f"{precisions[0]} against {precisions[1]}"
    return PRECISION_TOLERANCE, f"{change}: {_PRECISION_SOURCE}"


def _describe_precision(run: Run) -> str | None:
    assert run.start is not None
    return name_precision(run.start)


def _check_comparable(run: Run, reference: Run) -> None:
    for candidate, argument in ((run, "RUN"), (reference, "REFERENCE")):
        if candidate.log.missing_reason is not None:
            raise InputError(
                f"no events to read: {candidate.log.missing_reason}",
                field=argument,
                got=str(candidate.log.path),
                remedy="Pass a run folder, which contains events.jsonl",
            )
        if candidate.start is None:
            problem = "the event file has no run_started event, so the training data is unknown"
            raise InputError(problem, field=argument, got=str(candidate.log.path))
        if not candidate.steps:
            raise InputError("the run has no steps", field=argument, got=str(candidate.path))
    assert run.start is not None
    assert reference.start is not None
    if run.start.global_batch_tokens != reference.start.global_batch_tokens:
        raise InputError(
            "the runs cannot be compared: a step has a different number of tokens",
            field="global_batch_tokens",
            got=f"{run.start.global_batch_tokens:,}",
            allowed=f"{reference.start.global_batch_tokens:,}, as in the reference",
            remedy="Train both with the same global batch and sequence length",
        )
    if run.start.data_hash != reference.start.data_hash:
        raise InputError(
            "the runs cannot be compared: their batches or the order of batches differ",
            field="data_hash",
            got=run.start.data_hash,
            allowed=f"{reference.start.data_hash}, as in the reference",
            remedy="Train both on the same data, tokenizer, sequence length and seed",
        )


def _align_losses(run: Run, reference: Run) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the steps that both runs have and neither skipped, with the losses of both."""
    run_steps = {step.step: step for step in run.steps}
    reference_steps = {step.step: step for step in reference.steps}
    skipped = {
        event.step
        for r in (run, reference)
        for event in r.surviving_events
        if isinstance(event, SkippedStepEvent)
    }
    common = sorted(
        number
        for number in run_steps.keys() & reference_steps.keys()
        if number is not None and number not in skipped
    )
    if not common:
        raise InputError("the runs have no step in common", field="RUN", got=str(run.path))
    for number in common:
        if run_steps[number].samples_seen != reference_steps[number].samples_seen:
            raise InputError(
                f"the runs cannot be compared: after step {number:,} "
                "they had seen different numbers of samples",
                field="samples_seen",
                got=f"{run_steps[number].samples_seen:,}",
                allowed=f"{reference_steps[number].samples_seen:,}, as in the reference",
            )
    return (
        np.array(common, dtype=np.float64),
        np.array([run_steps[number].loss for number in common], dtype=np.float64),
        np.array([reference_steps[number].loss for number in common], dtype=np.float64),
    )


def _find_deviations(
    steps: FloatArray,
    losses: FloatArray,
    reference_losses: FloatArray,
    window: int,
    tolerance: float,
) -> tuple[LossDeviation | None, LossDeviation | None]:
    """Return the window with the largest difference, and the first one beyond the tolerance."""
    if not len(steps):
        return None, None
    # 1e-8 only prevents a division by zero; relative differences of losses near zero mean
    # nothing.
    means = _compute_window_means(
        _compute_running_median(
            (losses - reference_losses) / np.maximum(np.abs(reference_losses), 1e-8)
        ),
        window,
    )

    def measure(index: int) -> LossDeviation:
        last = index + window - 1
        loss = float(np.median(losses[index : last + 1]))
        reference_loss = float(np.median(reference_losses[index : last + 1]))
        return LossDeviation(
            int(steps[index]), int(steps[last]), loss, reference_loss, float(means[index])
        )

    beyond = np.flatnonzero(np.abs(means) > tolerance)
    return measure(int(np.abs(means).argmax())), measure(int(beyond[0])) if len(beyond) else None


def _compute_running_median(values: FloatArray) -> FloatArray:
    """Compute running medians of five values; the ends repeat the nearest full window's."""
    width = min(_NUM_MEDIAN_STEPS, len(values))
    inner = np.median(np.lib.stride_tricks.sliding_window_view(values, width), axis=1)
    num_before = (width - 1) // 2
    return np.pad(inner, (num_before, width - 1 - num_before), mode="edge")


def _compute_window_means(values: FloatArray, window: int) -> FloatArray:
    """Compute the mean of every full window, by its first index."""
    sums = np.concatenate(([0.0], np.cumsum(values)))
    return np.asarray((sums[window:] - sums[:-window]) / window, dtype=np.float64)


def _compare_validation(
    run: Run, reference: Run, tolerance: float
) -> tuple[int, LossDeviation | None, LossDeviation | None, tuple[str, ...]]:
    reference_evaluations = {evaluation.step: evaluation for evaluation in reference.evaluations}
    worst: LossDeviation | None = None
    left: LossDeviation | None = None
    points = unequal = 0
    for evaluation in run.evaluations:
        reference_evaluation = reference_evaluations.get(evaluation.step)
        if (
            reference_evaluation is None
            or evaluation.step is None
            or not math.isfinite(reference_evaluation.loss)
        ):
            continue
        if evaluation.tokens != reference_evaluation.tokens:
            unequal += 1
            continue
        points += 1
        difference = (evaluation.loss - reference_evaluation.loss) / max(
            abs(reference_evaluation.loss), 1e-8
        )
        deviation = LossDeviation(
            evaluation.step, evaluation.step, evaluation.loss, reference_evaluation.loss, difference
        )
        size = abs(difference) if math.isfinite(difference) else math.inf
        if worst is None or size > abs(worst.relative_difference):
            worst = deviation
        if left is None and size > tolerance:
            left = deviation
    notes = []
    if unequal:
        notes.append(
            f"{unequal} evaluations were not compared: they have different numbers of tokens"
        )
    elif not points:
        notes.append(
            "no validation loss was compared: the runs have no evaluation at the same step"
        )
    return points, worst, left, tuple(notes)


def _list_missing_steps(run: Run, reference: Run, steps: FloatArray) -> list[str]:
    notes = []
    for longer in (run, reference):
        last = longer.steps[-1].step or 0
        if last > steps[-1]:
            notes.append(
                f"{longer.name} continues to step {last:,}; the other ends at {int(steps[-1]):,}"
            )
    return notes


def describe_comparison(comparison: RunComparison) -> list[str]:
    """Format the result as lines for people."""
    c = comparison
    lines = [
        f"{c.run} against {c.reference}: {c.steps_compared:,} "
        f"steps, {c.first_step:,} to {c.last_step:,}, "
        f"means over {c.window_steps:,} steps; tolerance {c.tolerance:.2%} "
        f"({c.tolerance_reason})",
        _describe_deviation("training loss, largest difference", c.worst),
    ]
    if c.validation_worst is not None:
        name = f"validation loss ({c.validation_points} points), largest difference"
        lines.append(_describe_deviation(name, c.validation_worst))
    lines += [f"note: {note}" for note in c.notes]
    for name, left in (("training", c.left), ("validation", c.validation_left)):
        if left is not None:
            lines.append(_describe_deviation(f"EXCEEDS the tolerance: {name} loss, first", left))
    if c.agrees:
        lines.append("within the tolerance")
    return lines


def _describe_deviation(name: str, deviation: LossDeviation) -> str:
    steps = (
        f"at step {deviation.last_step:,}"
        if deviation.first_step == deviation.last_step
        else f"over steps {deviation.first_step:,} to {deviation.last_step:,}"
    )
    if not math.isfinite(deviation.relative_difference):
        return f"{name} {steps}: {deviation.loss} against {deviation.reference_loss:.4f}"
    return (
        f"{name} {steps}: {deviation.relative_difference:+.3%} "
        f"({deviation.loss:.4f} against {deviation.reference_loss:.4f})"
    )
