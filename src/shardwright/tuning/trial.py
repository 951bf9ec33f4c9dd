"""One trial: a few steps of a recipe in fresh processes, with the ranks that `train` starts."""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from pathlib import Path

from shardwright.config import Recipe, dump_recipe
from shardwright.config.run import CheckpointSection, ElasticSection
from shardwright.config.training import EvaluationSection
from shardwright.errors import InputError, OutOfMemory, Preempted, RunFailed
from shardwright.launch.launch_limit import LaunchLimit
from shardwright.launch.launcher import launch_ranks
from shardwright.launch.stop_signals import StopRequest
from shardwright.telemetry.event_log import StepEvent, read_events
from shardwright.tuning.measurement import (
    WARMUP_STEPS,
    TrialOutcome,
    TrialStatus,
    format_current_time,
    measure_steps,
)

TRIAL_FOLDER_PREFIX = "trial-"
_MAX_REASON_CHARACTERS = 300


def build_trial_recipe(recipe: Recipe, run_folder: Path, num_steps: int) -> Recipe:
    """Return the recipe that a trial runs: the same model, data, batch and layout.

    It has `num_steps` measured steps after the warm-up. Its learning rate is 0, so no loss can
    diverge without the warm-up of the recipe; an update takes the same time. It has no checkpoints,
    evaluations, restarts, exporters and profiles.
    """
    training = recipe.training.model_copy(
        update={
            "max_steps": WARMUP_STEPS + num_steps,
            "num_epochs": None,
            "learning_rate": 0.0,
            "min_learning_rate": 0.0,
            "schedule": "constant",
            "warmup_steps": 0,
            "decay_steps": None,
        }
    )
    run = recipe.run.model_copy(
        update={
            "dir": str(run_folder),
            "sinks": (),
            "profile_steps": (),
            "replica_check_every_steps": None,
        }
    )
    return recipe.model_copy(
        update={
            "training": training,
            "run": run,
            "evaluation": EvaluationSection(),
            "checkpoint": CheckpointSection(),
            "elastic": ElasticSection(),
            "cluster": None,
        }
    )


def run_trial(
    recipe: Recipe,
    num_ranks: int,
    num_steps: int,
    seconds: float,
    *,
    folder: Path,
    stop: StopRequest,
) -> TrialOutcome | None:
    """Run a trial and remove its files; None if a stop was requested.

    Args:
        num_steps: Measured steps.
        seconds: Time limit of the trial.
        folder: Existing folder in which the trial makes one of its own.
    """
    start_seconds = time.monotonic()
    trial_folder = Path(tempfile.mkdtemp(prefix=TRIAL_FOLDER_PREFIX, dir=folder))
    limit = LaunchLimit(seconds)
    status: TrialStatus = "failed"
    reason = ""
    try:
        run_folder = trial_folder / "run"
        path = trial_folder / "recipe.yaml"
        path.write_text(dump_recipe(build_trial_recipe(recipe, run_folder, num_steps)), "utf-8")
        try:
            launch_ranks(
                num_ranks,
                "shardwright.training.worker",
                [str(path), "--trial"],
                stop,
                trial_folder / "hangs",
                time_limit=limit,
                is_quiet=True,
            )
        except OutOfMemory as error:
            status = "out_of_memory"
            reason = str(error)
        except InputError as error:
            status = "refused"
            reason = str(error)
        except (RunFailed, Preempted) as error:
            reason = str(error)
        total_seconds = time.monotonic() - start_seconds
        if stop:
            return None
        if limit.has_expired and reason and status == "failed":
            return TrialOutcome("time_limit", total_seconds, reason=f"exceeded {seconds:.0f} s")
        if reason:
            return TrialOutcome(status, total_seconds, reason=shorten_reason(reason))
        events = read_events(run_folder).filter_by_type(StepEvent)
    finally:
        shutil.rmtree(trial_folder, ignore_errors=True)
    measured = measure_steps(events, num_steps, total_seconds)
    if measured is None:
        expected = WARMUP_STEPS + num_steps
        reason = f"logged {len(events)} of {expected} steps"
        return TrialOutcome("failed", total_seconds, reason=reason)
    return TrialOutcome("measured", total_seconds, measured, measured_at=format_current_time())


def remove_abandoned_trials(folder: Path) -> None:
    """Remove the folders of trials whose process was killed. No other search may use `folder`."""
    for path in folder.glob(f"{TRIAL_FOLDER_PREFIX}*"):
        shutil.rmtree(path, ignore_errors=True)


def shorten_reason(reason: str) -> str:
    """Return the first line of an error, without the launcher's name of a rank that the error names
    too, and without the prediction of an out-of-memory error.

    >>> shorten_reason("rank 1: rank 1 ran out of memory (std::bad_alloc). The plan predicted 3 B")
    'rank 1 ran out of memory (std::bad_alloc)'
    """
    line = reason.partition("\n")[0].partition(". The plan predicted")[0]
    line = re.sub(r"^(rank \d+): (?=\1 )", "", line)
    if len(line) <= _MAX_REASON_CHARACTERS:
        return line
    return line[: _MAX_REASON_CHARACTERS - 3] + "..."
