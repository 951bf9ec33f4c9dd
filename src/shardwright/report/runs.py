"""Recorded runs: curves without withdrawn steps, history and summary numbers."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.errors import InputError
from shardwright.files import read_text
from shardwright.report.thin import Floats, smooth
from shardwright.telemetry.events import (
    MEASUREMENTS,
    Checkpoint,
    Evaluation,
    Event,
    EventLog,
    Failed,
    Preempted,
    Ranks,
    Resumed,
    RunFinished,
    RunStarted,
    SkippedStep,
    Step,
    Warned,
    read_events,
    surviving,
)
from shardwright.telemetry.goodput import Goodput, measure_goodput
from shardwright.telemetry.meter import PARTS

PREDICTION_NAME = "prediction.json"
RUNNING = "running or killed"
"""Status of a run whose events end without a result."""


@dataclass(frozen=True)
class Run:
    """Contents of one run folder."""

    path: Path
    name: str
    log: EventLog
    survivors: tuple[Event, ...]

    @cached_property
    def steps(self) -> list[Step]:
        """Steps that were not withdrawn, in ascending order."""
        return sorted((e for e in self.survivors if isinstance(e, Step)), key=lambda e: e.step or 0)

    @cached_property
    def evaluations(self) -> list[Evaluation]:
        """Evaluations that were not withdrawn, in ascending order of steps."""
        return sorted((e for e in self.survivors if isinstance(e, Evaluation)), key=lambda e: e.step or 0)

    @cached_property
    def history(self) -> list[Event]:
        """All events but steps and measurements, withdrawn ones included, in file order."""
        return [event for event in self.log if not isinstance(event, (Step, *MEASUREMENTS))]

    @cached_property
    def start(self) -> RunStarted | None:
        """Last `run_started` event; None if there is none."""
        starts = self.log.of(RunStarted)
        return starts[-1] if starts else None

    @cached_property
    def step_numbers(self) -> Floats:
        """Step numbers, the x values of the curves."""
        return np.array([step.step for step in self.steps], dtype=np.float64)

    @cached_property
    def tokens_seen(self) -> Floats:
        """Tokens since step 0 after each step, computed from the constant batch size."""
        return np.array([step.tokens * (step.step or 0) for step in self.steps], dtype=np.float64)

    def curve(self, value: Callable[[Step], float | None]) -> Floats:
        """Return a field of all steps; NaN where it is missing."""
        return np.array([math.nan if (v := value(step)) is None else v for step in self.steps], dtype=np.float64)

    @cached_property
    def loss(self) -> Floats:
        """Training loss of each step, not smoothed."""
        return self.curve(lambda step: step.loss)

    @property
    def smoothing(self) -> int:
        """Half width, in steps, of the smoothing window: a hundredth of the run's length."""
        return max(1, len(self.steps) // 100) if len(self.steps) > 20 else 0

    @cached_property
    def smooth_loss(self) -> Floats:
        """Training loss, smoothed by a centred mean."""
        return smooth(self.loss, self.smoothing)

    @cached_property
    def memory(self) -> Floats:
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
    def ranks(self) -> list[Ranks]:
        """Events with times of every rank, without withdrawn ones."""
        return [event for event in self.survivors if isinstance(event, Ranks)]

    @cached_property
    def prediction(self) -> dict[str, Any]:
        """The planner's prediction (`prediction.json`); empty if missing or unreadable."""
        try:
            content = json.loads(read_text(self.path / PREDICTION_NAME))
        except (OSError, ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}

    @property
    def status(self) -> str:
        """`completed`, `preempted`, `failed`, `not begun` (no events) or `RUNNING`."""
        if not self.log.events:
            return "not begun"
        for event in reversed(self.log.events):
            if isinstance(event, RunFinished):
                return event.status
            if isinstance(event, Failed):
                return "failed"
            if isinstance(event, Preempted):
                return "preempted"
            if isinstance(event, Step | RunStarted):
                break
        return RUNNING


def load_run(path: str | os.PathLike[str], *, as_far_as_it_goes: bool = False) -> Run:
    """Read a run folder.

    Args:
        as_far_as_it_goes: accept incomplete or damaged event files, see `read_events`.

    Raises:
        InputError: there are no events, or none is readable.
    """
    log = read_events(path, as_far_as_it_goes=as_far_as_it_goes)
    if not log.events and not as_far_as_it_goes:
        raise InputError("the event file has no readable events", field="run", got=str(log.path))
    starts = log.of(RunStarted)
    name = starts[-1].name if starts else log.path.resolve().parent.name
    return Run(log.path.parent, name, log, tuple(surviving(log)))


def load_runs(paths: Sequence[str | os.PathLike[str]]) -> list[Run]:
    """Read run folders, incomplete ones too; runs of the same name are named by their folders.

    Raises:
        InputError: a folder does not exist.
    """
    runs = [load_run(path, as_far_as_it_goes=True) for path in paths]
    names = [run.name for run in runs]
    renamed = []
    for run in runs:
        folder = run.path.resolve().name
        name = run.name if names.count(run.name) == 1 else folder if folder != run.name else str(run.path)
        renamed.append(Run(run.path, name, run.log, run.survivors))
    if len({run.name for run in renamed}) < len(renamed):
        renamed = [Run(run.path, str(run.path), run.log, run.survivors) for run in renamed]
    return renamed


def summarise(run: Run) -> dict[str, Any]:
    """Summarise a run as JSON; unknown values are null.

    Medians exclude the first step, which includes compilation.
    """
    start = run.start
    log = run.log
    later = run.steps[1:] or run.steps
    best = min(run.evaluations, key=lambda e: e.loss if math.isfinite(e.loss) else math.inf, default=None)
    withdrawn = len({id(e) for e in log if isinstance(e, Step)} - {id(e) for e in run.steps})
    return {
        "run": str(run.path),
        "name": run.name,
        "status": run.status,
        "layout": start.layout if start else None,
        "world_size": start.world_size if start else None,
        "host": start.host if start else None,
        "devices": list(start.devices) if start else [],
        "num_parameters": start.num_parameters if start else None,
        "versions": start.versions if start else {},
        "steps": run.steps[-1].step if run.steps else 0,
        "total_steps": start.total_steps if start else None,
        "tokens": int(run.tokens_seen[-1]) if run.steps else 0,
        "training_loss": _number(run.smooth_loss[-1 - run.smoothing] if run.steps else None),
        "validation_loss": _number(run.evaluations[-1].loss) if run.evaluations else None,
        "best_validation_loss": _number(best.loss) if best else None,
        "best_validation_step": best.step if best else None,
        "tokens_per_second": _median([step.tokens_per_second for step in later]),
        "model_flops_per_second": _median([step.model_flops_per_second for step in later]),
        "mfu": _median([step.mfu for step in later]),
        "peak_memory_bytes": [int(peak) for peak in np.nanmax(run.memory, axis=0)] if run.memory.size else [],
        "step_seconds": _median([step.step_seconds for step in later]),
        "part_seconds": {part: _median([getattr(step, f"{part}_seconds") for step in later]) for part in PARTS},
        "total_seconds": run.goodput.total_seconds,
        "wall_seconds": run.goodput.wall_seconds,
        "useful_seconds": run.goodput.useful_seconds,
        "lost_seconds": run.goodput.lost_seconds,
        "useful_share": run.goodput.share,
        "checkpoints": sum(isinstance(event, Checkpoint) for event in run.history),
        "resumes": len(log.of(Resumed)),
        "skipped_steps": sum(isinstance(event, SkippedStep) for event in run.survivors),
        "withdrawn_steps": withdrawn,
        "warnings": [event.message for event in log.of(Warned)],
        "failures": [{"rank": event.rank, "message": event.message} for event in log.of(Failed)],
        "problems": list(log.problems),
    }


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return float(np.median(known)) if known else None


def _number(value: float | None) -> float | None:
    """Convert a number for JSON, which has no NaN."""
    return float(value) if value is not None and math.isfinite(value) else None
