"""One run's loss curve held against another's: where it first leaves a tolerance, and by how much.

Both runs must have seen the same batches at the same steps, or the question has no answer and is refused. Then their losses
differ step by step only by what we want to see, and the curve of relative differences is calm: it is freed of lone outliers by
a running median of five and averaged over a window; the run leaves where such a mean is beyond the tolerance. Validation
losses are means over many tokens and are held against each other one by one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwright.errors import InputError
from shardwright.report.runs import Run
from shardwright.report.thin import Floats
from shardwright.telemetry.events import SkippedStep

SCHEMA_VERSION = 1
_MEDIAN_STEPS = 5
_MIN_WINDOW_STEPS = 25
_MAX_WINDOW_STEPS = 1000


@dataclass(frozen=True)
class Deviation:
    """A place on the curve, and how far the run is from the reference there."""

    first_step: int
    last_step: int
    """Equal to `first_step` for a single point."""
    loss: float
    reference_loss: float
    relative_difference: float
    """(loss - reference_loss) / reference_loss, averaged over the steps."""

    def as_dict(self) -> dict[str, Any]:
        """JSON; what is not finite is null."""
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in vars(self).items()
        }


@dataclass(frozen=True)
class Comparison:
    """What came out. `left` is the first place beyond the tolerance, None when the run stays within it."""

    run: str
    reference: str
    tolerance: float
    window_steps: int
    steps_compared: int
    first_step: int
    last_step: int
    worst: Deviation
    """Training loss, the window farthest from the reference."""
    left: Deviation | None
    validation_points: int
    validation_worst: Deviation | None
    validation_left: Deviation | None
    notes: tuple[str, ...] = ()
    """What was not compared, and why."""

    @property
    def agrees(self) -> bool:
        """Whether training and validation loss both stay within the tolerance."""
        return self.left is None and self.validation_left is None

    def as_dict(self) -> dict[str, Any]:
        """JSON for `--json`."""
        deviations = ("worst", "left", "validation_worst", "validation_left")
        plain = {name: value for name, value in vars(self).items() if name not in deviations}
        found: dict[str, Deviation | None] = {name: getattr(self, name) for name in deviations}
        told = {name: deviation.as_dict() if deviation else None for name, deviation in found.items()}
        return {"schema_version": SCHEMA_VERSION, "agrees": self.agrees, **plain, **told, "notes": list(self.notes)}


def compare_runs(run: Run, reference: Run, *, tolerance: float = 0.003, window_steps: int | None = None) -> Comparison:
    """Hold a run's losses against a reference's.

    Args:
        run, reference: as `load_run` reads them.
        tolerance: relative; 0.003 is three parts in a thousand of the reference's loss.
        window_steps: steps that are averaged; default a tenth of those compared, within 25 to 1000.

    Raises:
        InputError: the runs cannot be compared, with the reason.
    """
    if not tolerance > 0:
        raise InputError("a tolerance is a positive number", field="--tolerance", got=tolerance)
    _refuse_strangers(run, reference)
    steps, ours, theirs = _align(run, reference)
    finite = np.isfinite(ours) & np.isfinite(theirs)
    broken = np.flatnonzero(~np.isfinite(ours) & np.isfinite(theirs))
    # A loss that is not finite ends the comparison there: what comes after it is no curve.
    end = int(broken[0]) if len(broken) else len(steps)
    usable = np.flatnonzero(finite[:end])
    window = window_steps or min(_MAX_WINDOW_STEPS, max(_MIN_WINDOW_STEPS, len(usable) // 10))
    window = max(1, min(window, len(usable)))
    worst, left = _scan(steps[usable], ours[usable], theirs[usable], window, tolerance)
    if len(broken):
        at = int(steps[end])
        gone = Deviation(at, at, float(ours[end]), float(theirs[end]), math.nan)
        left = left or gone
        worst = gone if worst is None else worst
    if worst is None:
        raise InputError(
            "no step that both runs have has a finite loss in the reference", field="REFERENCE", got=str(reference.path)
        )
    points, validation_worst, validation_left, notes = _compare_validation(run, reference, tolerance)
    return Comparison(
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
        notes=(*_missing_notes(run, reference, steps), *notes),
    )


def _refuse_strangers(run: Run, reference: Run) -> None:
    for each, which in ((run, "RUN"), (reference, "REFERENCE")):
        if each.start is None:
            told = "its events hold no start, so nobody can tell what it was trained on"
            raise InputError(told, field=which, got=str(each.log.path))
        if not each.steps:
            raise InputError("it has no steps", field=which, got=str(each.path))
    assert run.start is not None
    assert reference.start is not None
    if run.start.global_batch_tokens != reference.start.global_batch_tokens:
        raise InputError(
            "the runs cannot be compared: a step of one is not a step of the other",
            field="global_batch_tokens",
            got=f"{run.start.global_batch_tokens:,}",
            allowed=f"{reference.start.global_batch_tokens:,}, as in the reference",
            remedy="Train one of them again with the other's global batch and sequence length",
        )
    if run.start.data_hash != reference.start.data_hash:
        raise InputError(
            "the runs cannot be compared: they do not see the same batches in the same order",
            field="data_hash",
            got=run.start.data_hash,
            allowed=f"{reference.start.data_hash}, as in the reference",
            remedy="Train both on the same data, tokenizer, sequence length and seed",
        )


def _align(run: Run, reference: Run) -> tuple[Floats, Floats, Floats]:
    """Steps that both have and neither skipped, with both losses."""
    ours = {step.step: step for step in run.steps}
    theirs = {step.step: step for step in reference.steps}
    skipped = {event.step for each in (run, reference) for event in each.survivors if isinstance(event, SkippedStep)}
    common = sorted(number for number in ours.keys() & theirs.keys() if number is not None and number not in skipped)
    if not common:
        raise InputError("the runs have no step in common", field="RUN", got=str(run.path))
    for number in common:
        if ours[number].samples_seen != theirs[number].samples_seen:
            raise InputError(
                f"the runs cannot be compared: after step {number:,} they had not seen as many samples",
                field="samples_seen",
                got=f"{ours[number].samples_seen:,}",
                allowed=f"{theirs[number].samples_seen:,}, as in the reference",
            )
    return (
        np.array(common, dtype=np.float64),
        np.array([ours[number].loss for number in common], dtype=np.float64),
        np.array([theirs[number].loss for number in common], dtype=np.float64),
    )


def _scan(steps: Floats, ours: Floats, theirs: Floats, window: int, tolerance: float) -> tuple[Deviation | None, Deviation | None]:
    """The window farthest from the reference, and the first one beyond the tolerance."""
    if not len(steps):
        return None, None
    # A loss near zero has no relative difference worth the name; 1e-8 only keeps the division alive.
    means = _window_means(_running_median((ours - theirs) / np.maximum(np.abs(theirs), 1e-8)), window)

    def at(index: int) -> Deviation:
        last = index + window - 1
        loss, reference_loss = float(np.median(ours[index : last + 1])), float(np.median(theirs[index : last + 1]))
        return Deviation(int(steps[index]), int(steps[last]), loss, reference_loss, float(means[index]))

    beyond = np.flatnonzero(np.abs(means) > tolerance)
    return at(int(np.abs(means).argmax())), at(int(beyond[0])) if len(beyond) else None


def _running_median(values: Floats) -> Floats:
    """Median of each value and its neighbours, five in all; windows at the ends are those of the nearest inner value."""
    width = min(_MEDIAN_STEPS, len(values))
    inner = np.median(np.lib.stride_tricks.sliding_window_view(values, width), axis=1)
    before = (width - 1) // 2
    return np.pad(inner, (before, width - 1 - before), mode="edge")


def _window_means(values: Floats, window: int) -> Floats:
    """Mean of every full window, by its first index."""
    sums = np.concatenate(([0.0], np.cumsum(values)))
    return np.asarray((sums[window:] - sums[:-window]) / window, dtype=np.float64)


def _compare_validation(
    run: Run, reference: Run, tolerance: float
) -> tuple[int, Deviation | None, Deviation | None, tuple[str, ...]]:
    theirs = {evaluation.step: evaluation for evaluation in reference.evaluations}
    worst: Deviation | None = None
    left: Deviation | None = None
    points = unequal = 0
    for evaluation in run.evaluations:
        other = theirs.get(evaluation.step)
        if other is None or evaluation.step is None or not math.isfinite(other.loss):
            continue
        if evaluation.tokens != other.tokens:
            unequal += 1
            continue
        points += 1
        difference = (evaluation.loss - other.loss) / max(abs(other.loss), 1e-8)
        here = Deviation(evaluation.step, evaluation.step, evaluation.loss, other.loss, difference)
        size = abs(difference) if math.isfinite(difference) else math.inf
        if worst is None or size > abs(worst.relative_difference):
            worst = here
        if left is None and size > tolerance:
            left = here
    notes = []
    if unequal:
        notes.append(f"{unequal} evaluations were not compared: they hold different numbers of tokens")
    elif not points:
        notes.append("no validation loss was compared: the runs have no evaluation at the same step")
    return points, worst, left, tuple(notes)


def _missing_notes(run: Run, reference: Run, steps: Floats) -> list[str]:
    notes = []
    for each in (run, reference):
        last = each.steps[-1].step or 0
        if last > steps[-1]:
            notes.append(f"{each.name} goes on to step {last:,}; the other ends at {int(steps[-1]):,}")
    return notes


def describe_comparison(comparison: Comparison) -> list[str]:
    """The outcome as lines for people."""
    c = comparison
    lines = [
        f"{c.run} against {c.reference}: {c.steps_compared:,} steps, {c.first_step:,} to {c.last_step:,}, "
        f"in means over {c.window_steps:,}; tolerance {c.tolerance:.2%}",
        _describe_deviation("training loss, at worst", c.worst),
    ]
    if c.validation_worst is not None:
        lines.append(_describe_deviation(f"validation loss ({c.validation_points} points), at worst", c.validation_worst))
    lines += [f"note: {note}" for note in c.notes]
    for name, left in (("training", c.left), ("validation", c.validation_left)):
        if left is not None:
            lines.append(_describe_deviation(f"LEAVES: {name} loss, first", left))
    if c.agrees:
        lines.append("stays within the tolerance")
    return lines


def _describe_deviation(name: str, d: Deviation) -> str:
    where = f"at step {d.last_step:,}" if d.first_step == d.last_step else f"over steps {d.first_step:,} to {d.last_step:,}"
    if not math.isfinite(d.relative_difference):
        return f"{name} {where}: {d.loss} against {d.reference_loss:.4f}"
    return f"{name} {where}: {d.relative_difference:+.3%} ({d.loss:.4f} against {d.reference_loss:.4f})"
