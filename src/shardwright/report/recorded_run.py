"""Recorded runs: curves without withdrawn steps, history and summary numbers."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from shardwright.errors import InputError
from shardwright.files import read_text
from shardwright.report.downsampling import FloatArray, smooth_values
from shardwright.report.run_settings import describe_settings
from shardwright.telemetry.event_log import (
    MEASUREMENT_TYPES,
    CheckpointEvent,
    EvaluationEvent,
    Event,
    EventLog,
    FailureEvent,
    PreemptionEvent,
    RanksEvent,
    ReshardEvent,
    RestartEvent,
    ResumeEvent,
    RunFinishedEvent,
    RunStartedEvent,
    SkippedStepEvent,
    StepEvent,
    WarningEvent,
    read_events,
    select_surviving,
)
from shardwright.telemetry.event_table import EventTable, build_event_table
from shardwright.telemetry.goodput import Goodput, measure_goodput
from shardwright.telemetry.meter import STEP_PARTS

EventType = TypeVar("EventType", bound=Event)
PREDICTION_FILE_NAME = "prediction.json"
RUNNING_STATUS = "running or killed"
"""Status of a run whose events end without a result."""


@dataclass(frozen=True, repr=False)
class Run:
    """Contents of one run folder."""

    path: Path
    name: str
    log: EventLog
    surviving_events: tuple[Event, ...]

    def __repr__(self) -> str:
        summary = summarise_run(self)
        parts = [f"step {summary['steps']} of {summary['total_steps'] or 'unknown'}"]
        for name in ("training_loss", "validation_loss"):
            if summary[name] is not None:
                parts.append(f"{name.replace('_', ' ')} {summary[name]:.4f}")
        if summary["tokens_per_second"] is not None:
            parts.append(f"{summary['tokens_per_second']:,.0f} tokens/s")
        return f"run {self.name} ({self.path}), {self.status}: {', '.join(parts)}"

    def table(self, kind: str = "step", *, should_include_withdrawn: bool = False) -> EventTable:
        """Return the events of one kind as a table, without steps that a resume withdrew.

        Raises:
            InputError: unknown kind.
        """
        events = self.log.events if should_include_withdrawn else self.surviving_events
        return build_event_table(events, kind)

    @cached_property
    def steps(self) -> list[StepEvent]:
        """Steps that were not withdrawn, in ascending order."""
        return self._sort_events(StepEvent)

    @cached_property
    def evaluations(self) -> list[EvaluationEvent]:
        """Evaluations that were not withdrawn, in ascending order of steps."""
        return self._sort_events(EvaluationEvent)

    def _sort_events(self, kind: type[EventType]) -> list[EventType]:
        events = (event for event in self.surviving_events if isinstance(event, kind))
        return sorted(events, key=lambda event: event.step or 0)

    @cached_property
    def history(self) -> list[Event]:
        """All events but steps and measurements, withdrawn ones included, in file order."""
        return [
            event for event in self.log if not isinstance(event, (StepEvent, *MEASUREMENT_TYPES))
        ]

    @cached_property
    def start(self) -> RunStartedEvent | None:
        """Last `run_started` event; None if there is none."""
        starts = self.log.filter_by_type(RunStartedEvent)
        return starts[-1] if starts else None

    @cached_property
    def step_numbers(self) -> FloatArray:
        """Step numbers, the x values of the curves."""
        return np.array([step.step for step in self.steps], dtype=np.float64)

    @cached_property
    def tokens_seen(self) -> FloatArray:
        """Tokens since step 0 after each step, computed from the constant batch size."""
        return np.array([step.tokens * (step.step or 0) for step in self.steps], dtype=np.float64)

    def build_curve(self, value: Callable[[StepEvent], float | None]) -> FloatArray:
        """Return a field of all steps; NaN where it is missing."""
        return np.array(
            [math.nan if (v := value(step)) is None else v for step in self.steps], dtype=np.float64
        )

    @cached_property
    def loss(self) -> FloatArray:
        """Training loss of each step, not smoothed."""
        return self.build_curve(lambda step: step.loss)

    @property
    def smoothing_half_width(self) -> int:
        """Half width, in steps, of the smoothing window: a hundredth of the run's length."""
        return max(1, len(self.steps) // 100) if len(self.steps) > 20 else 0

    @cached_property
    def smooth_loss(self) -> FloatArray:
        """Training loss, smoothed by a centred mean."""
        return smooth_values(self.loss, self.smoothing_half_width)

    @cached_property
    def memory(self) -> FloatArray:
        """Memory in bytes, shape [steps, ranks]; NaN for ranks that a step does not record."""
        ranks = max((len(step.memory_bytes) for step in self.steps), default=0)
        table = np.full((len(self.steps), ranks), np.nan)
        for row, step in enumerate(self.steps):
            table[row, : len(step.memory_bytes)] = step.memory_bytes
        return table

    @cached_property
    def goodput(self) -> Goodput:
        """Useful, lost and total time of the run."""
        return measure_goodput(self.log)

    @cached_property
    def ranks(self) -> list[RanksEvent]:
        """Events with times of every rank, without withdrawn ones."""
        return self._sort_events(RanksEvent)

    @cached_property
    def prediction(self) -> dict[str, Any]:
        """The planner's prediction (`prediction.json`); empty if missing or unreadable."""
        try:
            content = json.loads(read_text(self.path / PREDICTION_FILE_NAME))
        except (OSError, ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}

    @property
    def interruptions(self) -> list[FailureEvent | RestartEvent]:
        """Failures and restarts in order of time.

        A restart, or the launcher's failure, replaces the failure before it: they name the rank
        that was lost, and a failure of another rank is only the consequence.
        """
        found: list[FailureEvent | RestartEvent] = []
        has_failed = False
        """True between a failure and the next start."""
        for event in self.log.events:
            if isinstance(event, RunStartedEvent):
                has_failed = False
            if not isinstance(event, FailureEvent | RestartEvent):
                continue
            if has_failed:
                found.pop()
            found.append(event)
            has_failed = isinstance(event, FailureEvent)
        return found

    @property
    def status(self) -> str:
        """`completed`, `preempted`, `failed`, `not begun` (no events) or `RUNNING_STATUS`."""
        if not self.log.events:
            return "not begun"
        for event in reversed(self.log.events):
            if isinstance(event, RunFinishedEvent):
                return event.status
            if isinstance(event, FailureEvent):
                return "failed"
            if isinstance(event, PreemptionEvent):
                return "preempted"
            if isinstance(event, StepEvent | RunStartedEvent):
                break
        return RUNNING_STATUS


def load_run(path: str | os.PathLike[str], *, is_lenient: bool = False) -> Run:
    """Read a run folder.

    Args:
        is_lenient: accept incomplete or damaged event files, see `read_events`.

    Raises:
        InputError: there are no events, or none is readable.
    """
    log = read_events(path, is_lenient=is_lenient)
    if not log.events and not is_lenient:
        raise InputError("the event file has no readable events", field="run", got=str(log.path))
    starts = log.filter_by_type(RunStartedEvent)
    name = starts[-1].name if starts else log.path.resolve().parent.name
    return Run(log.path.parent, name, log, tuple(select_surviving(log)))


def load_runs(paths: Sequence[str | os.PathLike[str]]) -> list[Run]:
    """Read run folders, incomplete ones too; runs of the same name are named by their folders.

    Raises:
        InputError: a folder does not exist.
    """
    runs = [load_run(path, is_lenient=True) for path in paths]
    names = [run.name for run in runs]
    renamed = []
    for run in runs:
        folder = run.path.resolve().name
        name = (
            run.name
            if names.count(run.name) == 1
            else folder
            if folder != run.name
            else str(run.path)
        )
        renamed.append(Run(run.path, name, run.log, run.surviving_events))
    if len({run.name for run in renamed}) < len(renamed):
        renamed = [Run(run.path, str(run.path), run.log, run.surviving_events) for run in renamed]
    return renamed


def summarise_run(run: Run) -> dict[str, Any]:
    """Summarise a run as JSON; unknown values are null.

    Medians exclude the first step, which includes compilation.
    """
    start = run.start
    log = run.log
    later = run.steps[1:] or run.steps
    best = min(
        run.evaluations, key=lambda e: e.loss if math.isfinite(e.loss) else math.inf, default=None
    )
    return {
        "run": str(run.path),
        "name": run.name,
        "status": run.status,
        "layout": start.layout if start else None,
        **describe_settings(start),
        "world_size": start.world_size if start else None,
        "host": start.host if start else None,
        "devices": list(start.devices) if start else [],
        "num_parameters": start.num_parameters if start else None,
        "versions": start.versions if start else {},
        "steps": run.steps[-1].step if run.steps else 0,
        "total_steps": start.total_steps if start else None,
        "tokens": int(run.tokens_seen[-1]) if run.steps else 0,
        "training_loss": _convert_number(
            run.smooth_loss[-1 - run.smoothing_half_width] if run.steps else None
        ),
        "validation_loss": _convert_number(run.evaluations[-1].loss) if run.evaluations else None,
        "best_validation_loss": _convert_number(best.loss) if best else None,
        "best_validation_step": best.step if best else None,
        "tokens_per_second": _compute_median([step.tokens_per_second for step in later]),
        "model_flops_per_second": _compute_median([step.model_flops_per_second for step in later]),
        "mfu": _compute_median([step.mfu for step in later]),
        "peak_memory_bytes": [int(peak) for peak in np.nanmax(run.memory, axis=0)]
        if run.memory.size
        else [],
        "step_seconds": _compute_median([step.step_seconds for step in later]),
        "part_seconds": {
            part: _compute_median([getattr(step, f"{part}_seconds") for step in later])
            for part in STEP_PARTS
        },
        "total_seconds": run.goodput.total_seconds,
        "wall_seconds": run.goodput.wall_seconds,
        "useful_seconds": run.goodput.useful_seconds,
        "lost_seconds": run.goodput.lost_seconds,
        "useful_share": run.goodput.share,
        **_count_recoveries(run),
        "warnings": [event.message for event in log.filter_by_type(WarningEvent)],
        "failures": [
            {"rank": event.rank, "message": event.message}
            for event in log.filter_by_type(FailureEvent)
        ],
        "problems": list(log.problems),
    }


def _count_recoveries(run: Run) -> dict[str, int]:
    """Count saved states, interruptions, and the steps that these repeated or skipped."""
    log = run.log
    restarts = log.filter_by_type(RestartEvent)
    resumes = log.filter_by_type(ResumeEvent)
    steps = {id(event) for event in log.filter_by_type(StepEvent)}
    return {
        "checkpoints": sum(isinstance(event, CheckpointEvent) for event in run.history),
        "restarts": len(restarts),
        "warm_restarts": sum(bool(event.surviving_ranks) for event in restarts),
        "resumes": len(resumes),
        "memory_resumes": sum(event.source == "memory" for event in resumes),
        "layout_changes": len(log.filter_by_type(ReshardEvent)),
        "lost_steps": sum(event.steps_lost or 0 for event in resumes),
        "skipped_steps": sum(isinstance(event, SkippedStepEvent) for event in run.surviving_events),
        "withdrawn_steps": len(steps - {id(event) for event in run.steps}),
    }


def _compute_median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return float(np.median(known)) if known else None


def _convert_number(value: float | None) -> float | None:
    """Convert a number for JSON, which has no NaN."""
    return float(value) if value is not None and math.isfinite(value) else None
