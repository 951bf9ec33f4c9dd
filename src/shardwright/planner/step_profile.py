"""Step times that `tune` measured, which correct later predictions for the same hardware.

The file is one JSON object per cluster, in a folder that later plans search:

    schema_version   1
    cluster          name of the cluster: devices, their number, link
    steps            [{workload, layout, micro_batch_size, gradient_accumulation_steps, recompute,
                     compile, offload, predicted_seconds, measured_seconds, spread, rates,
                     measured_at, versions}]

`workload` is a hash of model, batch, length, precision, optimizer, adapters and offloaded
activations. A measured workload is predicted again when a plan reads the file, so a change of the
planner or of its rates does not make its measurements wrong. Of other workloads only the ratio of
measured to predicted time counts, if it was predicted with the same rates.

`versions` are those of torch and shardwright, and on CPU ranks of this machine the CPU's model.
Steps with other ones, or without any, stay in the file but correct nothing:
`StepProfile.outdated_steps`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from functools import cached_property
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any

from shardwright.config.recipe import RecomputeMode
from shardwright.errors import InputError
from shardwright.files import find_user_cache
from shardwright.hardware import Cluster
from shardwright.hardware.step_versions import describe_step_versions
from shardwright.layout import Layout
from shardwright.planner.candidate import Candidate, OffloadKind
from shardwright.planner.memory_settings import predict_run, reset_memory_settings
from shardwright.planner.prediction import Prediction, TimeParts
from shardwright.planner.predictor import Predictor
from shardwright.planner.search.result import (
    EQUAL_STEP_SHARE,
    SearchResult,
    build_layout_key,
    measure_complexity,
    select_indistinguishable,
)
from shardwright.planner.search.space import PlanningProblem
from shardwright.planner.uncertainty import ErrorSpread
from shardwright.units import format_items, format_seconds

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class TunedStep:
    """Measured step time of one candidate."""

    workload: str
    layout: Mapping[str, Any]
    micro_batch_size: int
    gradient_accumulation_steps: int
    recompute: RecomputeMode
    compile: bool
    offload: OffloadKind
    predicted_seconds: float
    """Prediction without any correction, when it was measured."""
    measured_seconds: float
    spread: float
    """Half-width of the measured time's interval, as a share of it."""
    rates: str
    """Rates behind the prediction: data sheets, or a measured profile."""
    measured_at: str
    versions: Mapping[str, str] = field(default_factory=dict)
    """Result of `describe_step_versions` where it was measured; empty in older files."""

    @property
    def settings(self) -> tuple[Any, ...]:
        """Everything that distinguishes candidates of one workload."""
        return (
            *sorted(self.layout.items()),
            self.micro_batch_size,
            self.gradient_accumulation_steps,
            self.recompute,
            self.compile,
            self.offload,
        )

    def build_candidate(self, template: Candidate) -> Candidate:
        """Return the candidate that was measured. `template` has the other settings."""
        return replace(
            template,
            layout=Layout(**self.layout),
            micro_batch_size=self.micro_batch_size,
            gradient_accumulation_steps=self.gradient_accumulation_steps,
            recompute=self.recompute,
            compile=self.compile,
            offload=self.offload,
        )


@dataclass(frozen=True)
class StepProfile:
    """All step times that were measured on one cluster."""

    cluster: str
    steps: tuple[TunedStep, ...] = ()
    path: Path | None = None
    """File that it was read from."""
    outdated_steps: tuple[TunedStep, ...] = ()
    """Steps that were measured with other versions; they correct nothing."""

    def add(self, steps: Sequence[TunedStep]) -> StepProfile:
        """Return the profile with more steps; a newer measurement replaces an older one."""
        merged = {(step.workload, step.settings): step for step in (*self.steps, *steps)}
        return replace(self, steps=tuple(merged.values()))

    def set_aside_outdated(self, versions: Mapping[str, str]) -> StepProfile:
        """Return the profile with the steps that were measured with other versions set aside."""
        return replace(
            self,
            steps=tuple(step for step in self.steps if step.versions == versions),
            outdated_steps=tuple(step for step in self.steps if step.versions != versions),
        )

    def describe_outdated(self) -> str | None:
        """Describe the ignored steps, with the versions of the newest; None without any."""
        if not self.outdated_steps:
            return None
        newest = max(self.outdated_steps, key=lambda step: str(step.measured_at))
        versions = " and ".join(f"{name} {text}" for name, text in newest.versions.items())
        return (
            f"ignored: {format_items(len(self.outdated_steps), 'step time')} that `tune` measured "
            f"with {versions or 'unknown versions'}, not this software and CPU "
            f"({_describe_period(self.outdated_steps)}; {self.path}); `tune` measures again"
        )


def describe_workload(predictor: Predictor, problem: PlanningProblem) -> str:
    """Return a hash of everything but the layout that decides the time of a step.

    Without a global batch every layout has its own, so no two of them are the same workload.
    """
    template = problem.template
    content: tuple[Any, ...] = (
        predictor.facts.shape.to_config(),
        problem.global_batch_size,
        template.sequence_length,
        template.precision,
        template.optimizer,
        None if template.adapter is None else asdict(template.adapter),
        template.reference,
        template.should_reduce_in_bf16,
        template.document_tokens,
        template.activation_offload,
    )
    if template.has_bf16_masters:
        content = (*content, "bf16 master weights")
    if template.parameter_offload != "none":
        content = (*content, template.parameter_offload)
    if predictor.facts.frozen_names:
        content = (*content, sorted(predictor.facts.frozen_names))
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def build_tuned_step(
    prediction: Prediction,
    workload: str,
    *,
    measured_seconds: float,
    spread: float,
    rates: str,
    measured_at: str,
    versions: Mapping[str, str],
) -> TunedStep:
    """Describe a measured candidate for the profile."""
    candidate = prediction.candidate
    return TunedStep(
        workload,
        asdict(candidate.layout),
        candidate.micro_batch_size,
        candidate.gradient_accumulation_steps,
        candidate.recompute,
        candidate.compile,
        candidate.offload,
        prediction.time.step,
        measured_seconds,
        spread,
        rates,
        measured_at,
        versions,
    )


class StepCorrection:
    """Correction of one workload's predictions by the measured steps of its cluster."""

    def __init__(
        self, profile: StepProfile, predictor: Predictor, problem: PlanningProblem
    ) -> None:
        workload = describe_workload(predictor, problem)
        self._steps = [step for step in profile.steps if step.workload == workload]
        rates = predictor.cluster.rates_source
        self._others = [
            step for step in profile.steps if step.workload != workload and step.rates == rates
        ]
        self._path = profile.path
        self._predictor = predictor
        self._template = problem.template

    @cached_property
    def _measured(self) -> dict[Candidate, tuple[TunedStep, Prediction]]:
        """Measured candidates of this workload, with their predictions of today.

        The keys have the memory settings of the template, which a run takes by its free memory.
        """
        candidates = [step.build_candidate(self._template) for step in self._steps]
        return {
            candidate: (step, predict_run(self._predictor, candidate))
            for step, candidate in zip(self._steps, candidates, strict=True)
        }

    @property
    def num_steps(self) -> int:
        """Number of measured steps of this workload."""
        return len(self._steps)

    @property
    def is_empty(self) -> bool:
        """True if nothing was measured that corrects these predictions."""
        return not self._steps and not self._others

    def describe(self) -> str:
        """Describe the step times that correct the predictions: how many, from when and where."""
        steps = self._steps or self._others
        count = format_items(len(self._steps), "step time") + " of this recipe"
        source = count if self._steps else "step times of other recipes"
        return (
            f"corrected by {source} that `tune` measured on this hardware "
            f"{_describe_period(steps)} ({self._path})"
        )

    def correct_search(
        self,
        result: SearchResult,
        is_allowed: Callable[[Candidate], bool] = lambda _candidate: True,
    ) -> tuple[list[Prediction], Prediction | None]:
        """Return the corrected layouts, best first, and the recommended one.

        Of a layout's settings the measured ones go before others that are not clearly faster. Of
        indistinguishable layouts the fastest measured one is recommended, else the simplest.

        Args:
            is_allowed: condition on measured settings, which the search may not have considered.
        """
        known = [*result.predictions, *([] if result.chosen is None else [result.chosen])]
        measured = [
            prediction
            for _, prediction in self._measured.values()
            if prediction.fits and is_allowed(prediction.candidate)
        ]

        def get_rank(prediction: Prediction) -> float:
            return prediction.time.step * (1 if prediction.is_measured else 1 + EQUAL_STEP_SHARE)

        best_of_layout: dict[tuple[int, ...], Prediction] = {}
        for prediction in map(self.apply, (*known, *measured)):
            key = (*build_layout_key(prediction.candidate), prediction.is_tight)
            if key not in best_of_layout or get_rank(prediction) < get_rank(best_of_layout[key]):
                best_of_layout[key] = prediction
        predictions = sorted(best_of_layout.values(), key=lambda each: each.time.step)
        roomy = [prediction for prediction in predictions if not prediction.is_tight]
        equal = select_indistinguishable(roomy or predictions)
        return predictions, min(
            equal,
            key=lambda each: (
                () if each.is_measured else measure_complexity(each.candidate),
                each.time.step,
            ),
            default=None,
        )

    def apply(self, prediction: Prediction) -> Prediction:
        """Return the prediction corrected by its own, its layout's or all other
        measurements."""
        settings = reset_memory_settings(prediction.candidate, self._template)
        found = self._measured.get(settings)
        if found is not None:
            step, predicted = found
            corrected = _scale(prediction, step.measured_seconds / predicted.time.step)
            spread = ErrorSpread(log(1 + step.spread), log(1 + step.spread))
            return replace(
                corrected,
                is_measured=True,
                uncertainty=replace(prediction.uncertainty, time=spread),
            )
        return _scale(prediction, self._compute_ratio(prediction.candidate))

    def _compute_ratio(self, candidate: Candidate) -> float:
        """Return measured over predicted time: the geometric mean over measured settings of the
        same layout, else the median of this workload, else that of others."""
        key = build_layout_key(candidate)
        ratios = {
            measured: step.measured_seconds / predicted.time.step
            for measured, (step, predicted) in self._measured.items()
        }
        same = [
            log(ratio) for measured, ratio in ratios.items() if build_layout_key(measured) == key
        ]
        if same:
            return exp(sum(same) / len(same))
        others = [step.measured_seconds / step.predicted_seconds for step in self._others]
        return median(ratios.values() or others or [1.0])


def build_correction(
    profile: StepProfile | None, predictor: Predictor, problem: PlanningProblem
) -> StepCorrection | None:
    """Build the correction of one workload's predictions; None if nothing that was measured
    applies to it."""
    correction = None if profile is None else StepCorrection(profile, predictor, problem)
    return None if correction is None or correction.is_empty else correction


def describe_measurements(
    profile: StepProfile | None, correction: StepCorrection | None
) -> str | None:
    """Describe the step times that correct the predictions, and those that are outdated; None
    without any."""
    parts = (
        None if correction is None else correction.describe(),
        None if profile is None else profile.describe_outdated(),
    )
    return "; ".join(part for part in parts if part is not None) or None


def correct_full_rows(
    prediction: Prediction, predictor: Predictor, problem: PlanningProblem
) -> Prediction:
    """Return a prediction of full rows, corrected by the step times that `tune` measured on its
    cluster.

    Raises:
        InputError: the file of measured steps is damaged or of another version.
    """
    profile = read_step_profile(predictor.cluster)
    correction = build_correction(profile, predictor, problem)
    return prediction if correction is None else correction.apply(prediction)


def _describe_period(steps: Sequence[TunedStep]) -> str:
    """Describe when steps were measured, and how long ago the last of them was."""
    first = min(str(step.measured_at) for step in steps)
    last = max(str(step.measured_at) for step in steps)
    period = f"at {first}" if first == last else f"from {first} to {last}"
    try:
        age = (datetime.now(UTC) - datetime.fromisoformat(last)).total_seconds()
    except (ValueError, TypeError):  # no time, or one without a time zone
        return period
    return f"{period}, {format_seconds(round(age))} ago" if age >= 1 else period


def _scale(prediction: Prediction, factor: float) -> Prediction:
    time = prediction.time
    parts = {part.name: getattr(time, part.name) * factor for part in fields(TimeParts)}
    return replace(prediction, time=TimeParts(**parts))


def find_profile_path(cluster: Cluster) -> Path:
    """Return the file of a cluster's measured steps: in $SHARDWRIGHT_CACHE/steps, else in
    ~/.cache/shardwright/steps."""
    base = os.environ.get("SHARDWRIGHT_CACHE")
    root = Path(base) if base and "://" not in base else find_user_cache()
    slug = re.sub(r"[^A-Za-z0-9.-]+", "-", cluster.name)
    return root / "steps" / f"{slug}.json"


def read_step_profile(cluster: Cluster) -> StepProfile | None:
    """Read the step times that `tune` measured on a cluster; None if there are none.

    Steps that were measured with other versions than those of this process are set aside.

    Raises:
        InputError: the file is damaged or of another version.
    """
    profile = load_step_profile(find_profile_path(cluster))
    return None if profile is None else profile.set_aside_outdated(describe_step_versions(cluster))


def load_step_profile(path: Path) -> StepProfile | None:
    """Load a file of measured steps; None if there is none.

    Raises:
        InputError: the file is damaged or of another version.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise _build_error(path, str(error)) from error
    try:
        if content["schema_version"] != SCHEMA_VERSION:
            raise _build_error(path, f"its schema_version is {content['schema_version']!r}")
        steps = tuple(TunedStep(**step) for step in content["steps"])
        for step in steps:
            Layout(**step.layout)
            if not (step.measured_seconds > 0 and step.predicted_seconds > 0 and step.spread >= 0):
                raise ValueError("times must be positive")
            if not isinstance(step.versions, dict):
                raise TypeError("versions must be a mapping")
        return StepProfile(str(content["cluster"]), steps, path)
    except (KeyError, TypeError, ValueError) as error:
        raise _build_error(path, f"{type(error).__name__}: {error}") from error


def save_step_profile(profile: StepProfile, path: Path) -> None:
    """Write the file atomically.

    Raises:
        OSError: it cannot be written.
    """
    content = {
        "schema_version": SCHEMA_VERSION,
        "cluster": profile.cluster,
        "steps": [asdict(step) for step in profile.steps],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def _build_error(path: Path, problem: str) -> InputError:
    return InputError(
        f"not a file of measured steps: {problem}",
        field="step profile",
        got=str(path),
        allowed=f"a file of `tune`, schema_version {SCHEMA_VERSION}",
        remedy="Remove it or tune again; `plan --no-measured-steps` does not read it",
    )
