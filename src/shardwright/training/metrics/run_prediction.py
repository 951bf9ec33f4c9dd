"""The planner's prediction of a run, and its comparison with the first steps.

Made only if the recipe names its `cluster`. If the first steps are slower than predicted, the
planner searches again with the rates that they measured.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from statistics import median
from typing import Any

from shardwright.config.layout import ClusterSection
from shardwright.errors import InputError
from shardwright.planner.auto_layout import build_cluster
from shardwright.planner.candidate import Candidate
from shardwright.planner.model_costs import ModelFacts
from shardwright.planner.prediction import MemoryParts, Prediction
from shardwright.planner.predictor import build_predictor, predict_rank_memory
from shardwright.planner.problem import (
    build_check,
    build_plan_candidate,
    get_recipe_facts,
    restrict_to_runnable,
    set_vocabulary,
)
from shardwright.planner.rates.device_rates import PEAK_PRECISIONS
from shardwright.planner.replanning import NewPlan, replan
from shardwright.planner.search.result import EQUAL_STEP_SHARE
from shardwright.planner.search.space import PlanningProblem
from shardwright.planner.slowdown import (
    RankStep,
    SlowPart,
    StepSeconds,
    combine_ranks,
    find_slow_part,
    split_prediction,
)
from shardwright.planner.step_profile import correct_full_rows
from shardwright.planner.training_rows import TrainingRows, predict_rows
from shardwright.training.checks.row_lengths import read_training_rows
from shardwright.training.checks.run_checks import ValidatedRun
from shardwright.training.metrics.rank_metrics import RankStepTimes
from shardwright.training.rank_context import RankContext
from shardwright.training.rank_sync import RankSync
from shardwright.units import format_bytes, format_seconds

logger = logging.getLogger(__name__)

_WARMUP_STEPS = 2
"""First steps, which are not measured: kernels are selected and memory grows."""
_MEASURED_STEPS = 5
"""Steps after those, which are measured."""


def predict_training_run(validated_run: ValidatedRun) -> Prediction | None:
    """Predict memory and time of the plan that runs.

    Step times that `tune` measured on the same cluster correct the prediction of full rows, as in
    `plan`. None if the recipe names no cluster, or quantised products are emulated.

    Raises:
        InputError: The cluster is unknown, or its size does not match the number of ranks.
    """
    recipe = validated_run.recipe
    if recipe.cluster is None or _emulates_low_precision(validated_run):
        return None
    facts = get_recipe_facts(recipe, validated_run.shape)
    candidate = build_plan_candidate(recipe, validated_run.plan)
    rows = read_run_rows(validated_run)
    prediction = _predict_cached(facts, candidate, recipe.cluster, rows)
    if rows is not None:
        return prediction
    predictor = build_predictor(facts, build_cluster(recipe.cluster, candidate.layout.world_size))
    try:
        return correct_full_rows(prediction, predictor, _build_problem(validated_run))
    except InputError as error:
        # The prediction is only compared; the run does not depend on a file of the cache.
        logger.warning("measured step times do not correct the prediction: %s", error)
        return prediction


def _build_problem(validated_run: ValidatedRun) -> PlanningProblem:
    """Build the problem of planning this training run with all layouts open."""
    plan = validated_run.plan
    # Another layout takes free memory of its own.
    template = build_plan_candidate(validated_run.planned_recipe or validated_run.recipe, plan)
    return PlanningProblem(
        template,
        plan.layout.world_size,
        plan.batch.global_batch_size,
        is_allowed=build_check(set_vocabulary(validated_run.recipe, plan.shape), template),
    )


def read_run_rows(validated_run: ValidatedRun) -> TrainingRows | None:
    """Read the rows of the run's first steps. None if all are full and of one document, or if
    they are streamed: to read their lengths would be to fetch their files."""
    if (
        validated_run.data.report.packing == "windows"
        or validated_run.recipe.data.streaming is not None
    ):
        return None
    return read_training_rows(
        validated_run.recipe,
        validated_run.shape,
        validated_run.data,
        validated_run.plan.batch.global_batch_size,
    )


def _emulates_low_precision(validated_run: ValidatedRun) -> bool:
    """Return True, and log it, if quantised products are emulated, whose time is not predicted."""
    section = validated_run.recipe.precision.low_precision
    cluster = validated_run.recipe.cluster
    if section is None or cluster is None:
        return False
    peaks = build_cluster(
        cluster, validated_run.plan.layout.world_size
    ).accelerator.peak_flops_per_second
    if PEAK_PRECISIONS[section.kind] in peaks and not section.emulate:
        return False
    logger.info("memory and time are not predicted: quantised products are emulated")
    return True


@lru_cache(maxsize=4)
def _predict_cached(
    facts: ModelFacts, candidate: Candidate, section: ClusterSection, rows: TrainingRows | None
) -> Prediction:
    """Predict, with a cache: the run folder and the comparison need the same prediction."""
    predictor = build_predictor(facts, build_cluster(section, candidate.layout.world_size))
    return predict_rows(predictor, candidate, rows)


def predict_training_memory(validated_run: ValidatedRun) -> MemoryParts:
    """Predict the bytes on the fullest rank; they do not depend on the cluster."""
    candidate = build_plan_candidate(validated_run.recipe, validated_run.plan)
    return max(
        predict_rank_memory(get_recipe_facts(validated_run.recipe, validated_run.shape), candidate),
        key=lambda parts: parts.live,
    )


@dataclass
class PredictionComparison:
    """Comparison of the first steps with the prediction: one log message, and a warning if they
    are slower than its interval."""

    validated_run: ValidatedRun
    prediction: Prediction
    rank_sync: RankSync
    is_guessed: bool = False
    """True if rates of CPU ranks are not measured. A slower step is no surprise then."""
    steps: list[RankStep] = field(default_factory=list)

    def add(self, times: RankStepTimes, memory_bytes: tuple[int, ...]) -> StepSlowdown | None:
        """Add a step of this process and the peak memory of each rank so far.

        After the last measured step the ranks exchange their times. Collective.

        Returns:
            After that step, on rank 0, how the steps are slower than predicted; None if they are
            within the interval.
        """
        if len(self.steps) >= _WARMUP_STEPS + _MEASURED_STEPS:
            return None
        self.steps.append(
            RankStep(times.step_seconds, times.part_seconds["data"], times.wait_seconds)
        )
        if len(self.steps) < _WARMUP_STEPS + _MEASURED_STEPS:
            return None
        own = _compute_median_step(self.steps[_WARMUP_STEPS:])
        rows = self.rank_sync.gather([own.step, own.input, *own.waits.values()])
        if not self.rank_sync.rank_environment.is_main_rank:
            return None
        logger.info("%s", self.describe(own.step, max(memory_bytes, default=0)))
        ranks = [
            RankStep(row[0], row[1], dict(zip(own.waits, row[2:], strict=True))) for row in rows
        ]
        measured = combine_ranks(ranks, self.validated_run.plan.layout)
        if self.is_guessed or measured.step <= compute_slow_limit(self.prediction):
            return None
        return find_slowdown(self.validated_run, self.prediction, measured)

    def describe(self, seconds: float, memory_bytes: int) -> str:
        """Describe the predicted and the measured time, and the prediction's error."""
        predicted_seconds = self.prediction.time.step
        predicted_bytes = self.prediction.memory.live
        text = (
            f"predicted step time {format_seconds(predicted_seconds)}, "
            f"measured {format_seconds(seconds)} ({seconds / predicted_seconds - 1:+.0%})"
        )
        if memory_bytes > 0:
            text += (
                f"; predicted memory {format_bytes(predicted_bytes)}, "
                f"measured {format_bytes(memory_bytes)} ({memory_bytes / predicted_bytes - 1:+.0%})"
            )
        if self.is_guessed and not self.prediction.is_measured:
            text += (
                "; rates of CPU ranks are guessed: measure these ranks "
                "with `shardwright doctor --calibrate`, and name the file in cluster.profile"
            )
        return text


def compare_with_prediction(context: RankContext) -> PredictionComparison | None:
    """Build the comparison of a run. None without a prediction, and in trials, which measure their
    steps themselves."""
    run = context.validated_run
    predicted = predict_training_run(run)
    section = run.recipe.cluster
    if predicted is None or section is None or context.is_trial:
        return None
    cluster = build_cluster(section, run.plan.layout.world_size)
    return PredictionComparison(
        run,
        predicted,
        context.rank_sync,
        is_guessed=cluster.accelerator.kind == "cpu" and cluster.profile is None,
    )


def compute_slow_limit(prediction: Prediction) -> float:
    """Return the seconds from which a step is slower than predicted: the high end of the
    interval, which is that of one measurement if `tune` measured these settings. Two runs of the
    same settings may differ by more."""
    return max(prediction.step_interval[1], prediction.time.step * (1 + EQUAL_STEP_SHARE))


def _compute_median_step(steps: Sequence[RankStep]) -> RankStep:
    """Return the median of every time of some steps of one rank."""
    return RankStep(
        median(step.step for step in steps),
        median(step.input for step in steps),
        {name: median(step.waits[name] for step in steps) for name in steps[0].waits},
    )


@dataclass(frozen=True)
class StepSlowdown:
    """First steps that are slower than predicted: which part is, and what would now be faster."""

    measured_seconds: float
    predicted_seconds: float
    high_seconds: float
    """Longest step that is not slower than predicted (`compute_slow_limit`)."""
    slow_part: SlowPart
    new_plan: NewPlan

    def describe(self) -> str:
        """Describe it in one line."""
        part = self.slow_part
        text = (
            f"steps take {format_seconds(self.measured_seconds)}, longer than predicted (at most "
            f"{format_seconds(self.high_seconds)}): {part.describe()} takes "
            f"{format_seconds(part.measured_seconds)} instead of "
            f"{format_seconds(part.predicted_seconds)}; "
        )
        faster = self.new_plan.faster
        if faster is None or self.new_plan.faster_seconds is None:
            return text + "no other layout would be faster at the measured rates"
        candidate = faster.candidate
        return text + (
            f"faster at the measured rates: {candidate.describe()}, micro batch "
            f"{candidate.micro_batch_size} x {candidate.gradient_accumulation_steps}, "
            f"recompute {candidate.recompute} ({format_seconds(self.new_plan.faster_seconds)})"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the fields of the event, in seconds."""
        part = self.slow_part
        faster = self.new_plan.faster
        fields = {
            "part": part.part,
            "parallelism": part.parallelism,
            "rank": part.slow_rank,
            "predicted_part_seconds": part.predicted_seconds,
            "measured_part_seconds": part.measured_seconds,
            "predicted_seconds": self.predicted_seconds,
            "high_seconds": self.high_seconds,
            "measured_seconds": self.measured_seconds,
            "faster_layout": None
            if faster is None
            else asdict(faster.candidate.layout)
            | {
                "micro_batch_size": faster.candidate.micro_batch_size,
                "gradient_accumulation_steps": faster.candidate.gradient_accumulation_steps,
                "recompute": faster.candidate.recompute,
            },
            "faster_seconds": self.new_plan.faster_seconds,
        }
        return {name: value for name, value in fields.items() if value is not None}


def find_slowdown(
    validated_run: ValidatedRun, prediction: Prediction, measured: StepSeconds
) -> StepSlowdown:
    """Find the part of the measured step that is slow, and the layout that would be faster."""
    recipe = validated_run.recipe
    assert recipe.cluster is not None
    facts = get_recipe_facts(recipe, validated_run.shape)
    predictor = build_predictor(facts, build_cluster(recipe.cluster, prediction.num_gpus))
    return StepSlowdown(
        measured.step,
        prediction.time.step,
        compute_slow_limit(prediction),
        find_slow_part(split_prediction(prediction.time), measured),
        replan(
            predictor,
            prediction.candidate,
            restrict_to_runnable(_build_problem(validated_run), validated_run.shape),
            measured,
            partial(predict_rows, rows=read_run_rows(validated_run)),
        ),
    )
