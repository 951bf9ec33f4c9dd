"""A new plan of a run with the rates that its first steps measured.

The rates of the devices and of each kind of link are scaled until the prediction of the running
layout has the measured parts (`planner.slowdown`). The search then compares all layouts at these
rates: a layout without the slow traffic does not pay for it, unless its own traffic uses the same
links.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import sqrt

from shardwright.hardware import Cluster, MeasuredProfile
from shardwright.planner.candidate import Candidate
from shardwright.planner.memory_settings import search_run_layouts
from shardwright.planner.prediction import Prediction
from shardwright.planner.predictor import Predictor
from shardwright.planner.search.result import EQUAL_STEP_SHARE
from shardwright.planner.search.space import PlanningProblem
from shardwright.planner.slowdown import StepSeconds, split_prediction
from shardwright.planner.time.communication import build_groups

_MAX_LINK_SLOWDOWN = 1e4
_NUM_BISECTIONS = 24
"""The slowdown of a link is then known to less than 0.01%."""
_NUM_ROUNDS = 3
"""The waits of nodes for each other count as products and grow with the whole step."""
_AXES = {
    "data": ("fsdp", "dp_replicate"),
    "tensor": ("tp",),
    "context": ("cp",),
    "expert": ("ep",),
    "pipeline": ("pp",),
}


@dataclass(frozen=True)
class MeasuredSlowdown:
    """Ratios of measured to predicted time: of everything that devices compute, and of traffic
    within and between domains."""

    compute: float = 1.0
    intra: float = 1.0
    inter: float = 1.0

    def apply(self, predictor: Predictor) -> Predictor:
        """Return the predictor at the measured rates."""
        cluster = predictor.cluster
        efficiency = predictor.efficiency
        factor = self.compute
        accelerator = replace(
            cluster.accelerator,
            memory_bytes_per_second=cluster.accelerator.memory_bytes_per_second / factor,
            peak_flops_per_second={
                name: rate / factor
                for name, rate in cluster.accelerator.peak_flops_per_second.items()
            },
        )
        profile = None if cluster.profile is None else _scale_compute_rates(cluster.profile, factor)
        slowed_cluster = replace(cluster, accelerator=accelerator, profile=profile)
        slowed_efficiency = replace(
            efficiency,
            kernel_seconds=efficiency.kernel_seconds * factor,
            host_seconds=efficiency.host_seconds * factor,
            routing_seconds=efficiency.routing_seconds * factor,
            step_seconds=efficiency.step_seconds * factor,
            intra_slowdown=self.intra,
            inter_slowdown=self.inter,
        )
        return Predictor(predictor.facts, slowed_cluster, slowed_efficiency)


PredictStep = Callable[[Predictor, Candidate], Prediction]
"""Prediction of a candidate's mean step."""


@dataclass(frozen=True)
class NewPlan:
    """Result of a new plan: the rates, and the layout that would now be faster, if any."""

    slowdown: MeasuredSlowdown
    faster: Prediction | None
    faster_seconds: float | None
    """Step time that `faster` would have, on the scale of the measured one."""


def replan(
    predictor: Predictor,
    candidate: Candidate,
    problem: PlanningProblem,
    measured: StepSeconds,
    predict: PredictStep = Predictor.predict,
) -> NewPlan:
    """Search for a faster layout at the measured rates.

    Input takes the same time under every layout. A slow rank slows every layout, because all
    ranks wait for it. A layout is faster if its step is at least `EQUAL_STEP_SHARE` shorter.

    Args:
        candidate: the layout that runs.
        problem: the same training run with all layouts open.
        predict: how a candidate is predicted, for example with the rows of the data. The search
            assumes full rows.
    """
    slowdown = fit_slowdown(predictor, candidate, measured, predict)
    slowed = slowdown.apply(predictor)
    now = predict(slowed, candidate).time.step + measured.input
    found = search_run_layouts(slowed, problem, num_layouts=1).chosen
    best = None if found is None else predict(slowed, found.candidate)
    if best is None or (best.time.step + measured.input) * (1 + EQUAL_STEP_SHARE) > now:
        return NewPlan(slowdown, None, None)
    seconds = measured.step * (best.time.step + measured.input) / now
    return NewPlan(slowdown, best, seconds)


def fit_slowdown(
    predictor: Predictor,
    candidate: Candidate,
    measured: StepSeconds,
    predict: PredictStep = Predictor.predict,
) -> MeasuredSlowdown:
    """Return the ratios by which the prediction of `candidate` matches the measured parts.

    Links are never faster than predicted: their traffic may be hidden behind the computation.
    """

    def split(slowdown: MeasuredSlowdown) -> StepSeconds:
        return split_prediction(predict(slowdown.apply(predictor), candidate).time)

    slowdown = MeasuredSlowdown()
    names_by_link = _group_traffic(candidate, predictor.cluster)
    for _ in range(_NUM_ROUNDS):
        predicted = split(slowdown)
        factor = (measured.products + measured.waiting) / (predicted.products + predicted.waiting)
        slowdown = replace(slowdown, compute=slowdown.compute * factor)
        for link, names in names_by_link.items():
            slowdown = replace(
                slowdown, **{link: _find_factor(split, slowdown, link, names, measured)}
            )
    return slowdown


def _group_traffic(candidate: Candidate, cluster: Cluster) -> Mapping[str, list[str]]:
    """Return the parallelisms of the layout by the slowest link that each of them uses."""
    groups = build_groups(candidate.layout)
    names: dict[str, list[str]] = {"intra": [], "inter": []}
    for name, axes in _AXES.items():
        used = [groups[axis] for axis in axes if groups[axis].num_ranks > 1]
        if used:
            is_near = all(
                cluster.get_link(group.num_ranks, group.stride) is cluster.intra for group in used
            )
            names["intra" if is_near else "inter"].append(name)
    return {link: found for link, found in names.items() if found}


def _find_factor(
    split: Callable[[MeasuredSlowdown], StepSeconds],
    slowdown: MeasuredSlowdown,
    link: str,
    names: list[str],
    measured: StepSeconds,
) -> float:
    """Return the slowdown of a link, from 1 on, at which its traffic takes the measured time."""

    def is_too_fast(factor: float) -> bool:
        predicted = split(replace(slowdown, **{link: factor})).traffic
        return sum(predicted[name] - measured.traffic.get(name, 0.0) for name in names) < 0

    low = 1.0
    high = _MAX_LINK_SLOWDOWN
    if not is_too_fast(low):
        return low
    for _ in range(_NUM_BISECTIONS):
        middle = sqrt(low * high)
        if is_too_fast(middle):
            low = middle
        else:
            high = middle
    return high


def _scale_compute_rates(profile: MeasuredProfile, factor: float) -> MeasuredProfile:
    """Return the profile with all rates except collectives' divided by `factor`."""
    return replace(
        profile,
        memory_bytes_per_second=profile.memory_bytes_per_second / factor,
        matmuls=tuple(
            replace(rate, flops_per_second=rate.flops_per_second / factor)
            for rate in profile.matmuls
        ),
        attention=tuple(
            replace(
                rate,
                forward_flops_per_second=rate.forward_flops_per_second / factor,
                backward_flops_per_second=rate.backward_flops_per_second / factor,
            )
            for rate in profile.attention
        ),
        elementwise=tuple(
            replace(
                rate,
                forward_bytes_per_second=rate.forward_bytes_per_second / factor,
                backward_bytes_per_second=rate.backward_bytes_per_second / factor,
            )
            for rate in profile.elementwise
        ),
    )
