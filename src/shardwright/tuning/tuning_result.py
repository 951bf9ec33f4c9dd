"""Options and result of a search for the fastest settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwright.data.sources.source_files import ProgressOpener
from shardwright.errors import InputError
from shardwright.hardware import Cluster
from shardwright.tuning.candidates import DEFAULT_MAX_CANDIDATES, CandidateList, TuningCandidate
from shardwright.tuning.halving import Ending, Trial
from shardwright.tuning.measurement import Measurement, TrialOutcome

DEFAULT_BUDGET_SECONDS = 600.0
DEFAULT_NUM_STEPS = 64
"""Measured steps of the last round."""


@dataclass(frozen=True)
class TuningOptions:
    """Options of a search, with the meaning of the options of the command line."""

    num_ranks: int | None = None
    """Ranks to start on this machine; default the devices of the cluster, else this machine's
    GPUs, else 1."""
    budget_seconds: float = DEFAULT_BUDGET_SECONDS
    """Time limit of everything, the preparation of the data included."""
    max_trial_seconds: float | None = None
    """Time limit of one trial; default a quarter of the budget, all of it for the first."""
    num_steps: int = DEFAULT_NUM_STEPS
    max_candidates: int = DEFAULT_MAX_CANDIDATES
    fixed: tuple[str, ...] = ()
    """Settings that keep the recipe's value."""
    folder: Path | None = None
    """Folder of the results; default runs/<name>-tune."""
    out: Path | None = None
    """File of the tuned recipe; default tuned.yaml in the folder."""
    resume: bool = False
    """Use the results in the folder, which must exist."""
    open_progress: ProgressOpener | None = None
    """Opens a progress display for reading and tokenising data."""
    on_start: Callable[[CandidateList, Cluster], None] = lambda _candidates, _cluster: None
    on_trial: Callable[[TuningCandidate, Trial], None] = lambda _candidate, _trial: None

    def __post_init__(self) -> None:
        limits: tuple[tuple[str, float, float], ...] = (
            ("--budget", self.budget_seconds, 1.0),
            ("--steps", self.num_steps, 3),
            ("--candidates", self.max_candidates, 2),
            ("--trial-limit", self.max_trial_seconds or 1.0, 1.0),
        )
        for field_name, value, minimum in limits:
            if not value >= minimum:
                raise InputError(
                    "too small", field=field_name, got=value, allowed=f"at least {minimum:g}"
                )


@dataclass(frozen=True)
class TriedCandidate:
    """A candidate with the outcome of its trial with the most steps; None if it was not tried."""

    candidate: TuningCandidate
    outcome: TrialOutcome | None
    first_warmup_seconds: float | None = None
    """Time of the warm-up steps in its first trial, beyond that of other steps: later trials find
    compiled kernels in a cache."""

    @property
    def measurement(self) -> Measurement | None:
        """Measured steps; None if none were."""
        return None if self.outcome is None else self.outcome.measurement

    def as_dict(self) -> dict[str, Any]:
        """Return the candidate as a JSON object in base units."""
        return {
            "settings": self.candidate.describe(),
            "key": self.candidate.key,
            "baseline": self.candidate.is_baseline,
            "prediction": self.candidate.prediction.as_dict(),
            "compile_changed": self.candidate.is_compile_changed,
            "outcome": None if self.outcome is None else self.outcome.as_dict(),
            "warmup_seconds": self.first_warmup_seconds,
        }


@dataclass(frozen=True)
class TuningResult:
    """Result of a search: all candidates, measured ones first and fastest first."""

    tried: tuple[TriedCandidate, ...]
    winner: TriedCandidate | None
    """None if the search was stopped before anything was measured."""
    ending: Ending
    stop_cause: str | None
    """Signal that stopped the search."""
    cluster: Cluster
    folder: Path
    recipe_path: Path | None
    """File of the winner's recipe; None if the search was stopped."""
    profile_path: Path | None
    """File of measured steps that later plans use; None if it could not be written."""
    profile_problem: str | None
    seconds: float
    num_trials: int
    """Trials of this search, without those that it resumed from."""
    candidates: CandidateList = field(repr=False)

    @property
    def baseline(self) -> TriedCandidate | None:
        """The recipe's own settings; None if they cannot run."""
        return next((tried for tried in self.tried if tried.candidate.is_baseline), None)

    @property
    def speedup(self) -> float | None:
        """Step time of the recipe's own settings over that of the winner; None if either was not
        measured."""
        baseline = None if self.baseline is None else self.baseline.measurement
        winner = None if self.winner is None else self.winner.measurement
        return None if not baseline or not winner else baseline.step_seconds / winner.step_seconds

    def as_dict(self) -> dict[str, Any]:
        """Return the result as a JSON object in base units."""
        return {
            "cluster": {
                "name": self.cluster.name,
                "num_gpus": self.cluster.num_gpus,
                "rates": self.cluster.rates_source,
            },
            "ending": self.ending,
            "seconds": self.seconds,
            "num_trials": self.num_trials,
            "num_overlapping": self.candidates.num_overlapping,
            "why_not_as_the_recipe_has_it": self.candidates.baseline_obstacle,
            "speedup": self.speedup,
            "winner": None if self.winner is None else self.winner.as_dict(),
            "candidates": [tried.as_dict() for tried in self.tried],
            "folder": str(self.folder),
            "recipe": None if self.recipe_path is None else str(self.recipe_path),
            "measured_steps": None if self.profile_path is None else str(self.profile_path),
        }
