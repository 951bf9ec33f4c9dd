"""Result of `plan` for one recipe on one cluster, as one value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shardwright.config.recipe import Recipe, RecomputeSection
from shardwright.errors import RecipeError
from shardwright.hardware import Cluster
from shardwright.layout.saved_results import RecomputeChoice
from shardwright.planner.auto_layout import choose_expert_dispatch
from shardwright.planner.candidate import Candidate, LowRankAdapter, Precision
from shardwright.planner.expert_loads import ExpertRankLoads
from shardwright.planner.explanation import explain
from shardwright.planner.low_precision import (
    describe_product_rates,
    explain_missing_kernels,
    read_low_precision_section,
)
from shardwright.planner.memory_settings import (
    predict_run,
    reset_memory_settings,
    search_run_layouts,
)
from shardwright.planner.model_costs import ModelFacts, get_model_facts
from shardwright.planner.prediction import Prediction
from shardwright.planner.predictor import Predictor, build_predictor
from shardwright.planner.problem import (
    build_problem,
    build_recipe_candidate,
    build_template,
    choose_precision_on,
    explain_missing_candidate,
    get_recipe_facts,
    read_planning_shape,
    resolve_compilation_on,
)
from shardwright.planner.recompute.choice import check_choosable, choose_recompute
from shardwright.planner.rejections import (
    Rejection,
    explain_conflict,
    find_cheapest_change,
    find_rejections,
)
from shardwright.planner.scaling import ScalePoint, find_min_gpus, scale_devices
from shardwright.planner.search.divisibility import list_divisors
from shardwright.planner.search.result import select_indistinguishable
from shardwright.planner.search.space import PlanningProblem, SearchSpace
from shardwright.planner.step_profile import (
    StepProfile,
    build_correction,
    describe_measurements,
)
from shardwright.planner.training_rows import (
    ContextSplit,
    TrainingRows,
    compare_context_splits,
    order_by_rows,
    predict_rows,
)
from shardwright.planner.uncertainty import Uncertainty
from shardwright.plans import resolve_precision
from shardwright.units import format_bytes


@dataclass(frozen=True)
class SearchEffort:
    """Number of layouts that the search proved, predicted and rejected for memory."""

    num_proven: int
    num_predicted: int
    num_too_large: int


@dataclass(frozen=True, repr=False)
class PlanningResult:
    """Layouts with the best first, the chosen one, the recipe's own layout or its conflict,
    rejected common layouts, scaling, explanation, and, if nothing fits, the smallest change or
    number of devices that would."""

    predictions: tuple[Prediction, ...]
    chosen: Prediction | None
    recipe_prediction: Prediction | None
    rejections: tuple[Rejection, ...]
    scale_points: tuple[ScalePoint, ...]
    explanation: tuple[str, ...]
    effort: SearchEffort
    uncertainty: Uncertainty
    """Spreads of the errors of all predictions."""
    remedy: str | None = None
    precision_reason: str | None = None
    """Reason for the precision that `precision: auto` resolved to. None if the recipe names
    it."""
    num_measured_steps: int | None = None
    """Step times of this workload that `tune` measured and that correct the predictions; 0 if only
    those of other workloads do. None if none correct them."""
    correction_summary: str | None = None
    """Description of the measured step times that correct the predictions, and of those that are
    ignored because other versions were measured. None: nothing was measured on this cluster."""
    recompute_choice: RecomputeChoice | None = None
    """Results that each layer keeps under the recipe's layout, or the chosen one; None if the
    recipe names a kind of recomputation."""
    row_summary: str | None = None
    """Description of the rows of the data that the times are predicted with. None: full rows."""
    context_splits: tuple[ContextSplit, ...] = ()
    """With rows of the data: the recipe's layout, the chosen one and the best listed one, if their
    context ranks share packed rows, with both values of `layout.cp_split`."""
    expert_summary: str | None = None
    """Description of the loads of experts that times and memory are predicted with. None: even."""
    product_rates: str | None = None
    """Source of the rates of quantised products: measured or assumed. None without such
    products."""
    missing_kernels: str | None = None
    """Reason why the device has no kernels for the recipe's quantised products. None if it has."""
    omissions: tuple[str, ...] = ()
    """Settings of the recipe that the predictions leave out, with the effect, a sentence each."""
    recipe_conflict: str | None = None
    """Reason why the recipe's layout cannot run on this number of devices, whatever their
    memory."""

    @property
    def alternatives(self) -> tuple[Prediction, ...]:
        """Layouts that cannot be distinguished from the fastest recommendable one: those that
        are not tight, unless all that fit are."""
        known = [*self.predictions]
        if self.chosen is not None and not any(p is self.chosen for p in known):
            known.append(self.chosen)
        return tuple(
            select_indistinguishable([p for p in known if not p.is_tight] or known),
        )

    @property
    def choice_reason(self) -> str:
        """Reason why the chosen layout is not the first of the list, as a noun phrase; empty if
        it is the first and can be distinguished from all others."""
        if self.chosen is None or not self.predictions:
            return ""
        if (count := len(self.alternatives)) > 1:
            kind = "fastest measured" if self.chosen.is_measured else "simplest"
            return f"the {kind} of {count} indistinguishable layouts"
        return "" if self.chosen is self.predictions[0] else "the fastest that is not tight"

    def __repr__(self) -> str:
        def describe(prediction: Prediction) -> str:
            candidate = prediction.candidate
            return (
                f"{prediction.tokens_per_second:12,.0f}  "
                f"{format_bytes(prediction.memory.total):>10}  {candidate.describe()}, "
                f"micro-batch {candidate.micro_batch_size}, recompute {candidate.recompute}"
            )

        lines = [f"{'tokens/s':>12}  {'memory':>10}  layout (* chosen)"]
        lines += [
            describe(prediction) + (" *" if prediction is self.chosen else "")
            for prediction in self.predictions
        ]
        if self.chosen is None:
            lines.append(f"no layout fits. {self.remedy or ''}".rstrip())
        elif not any(prediction is self.chosen for prediction in self.predictions):
            lines.append(f"chosen: {describe(self.chosen)}")
        return "\n".join(lines)


def plan_recipe(
    recipe: Recipe,
    cluster: Cluster,
    *,
    num_layouts: int = 10,
    precision: Precision | None = None,
    adapter: LowRankAdapter | None = None,
    gpu_counts: tuple[int, ...] = (),
    should_explain: bool = False,
    step_profile: StepProfile | None = None,
    rows: TrainingRows | None = None,
    expert_loads: ExpertRankLoads | None = None,
) -> PlanningResult:
    """Plan a recipe.

    Args:
        step_profile: step times that `tune` measured on this cluster; they correct the predicted
            times of the layouts, and the choice among them.
        rows: rows of the data. The layouts that the search finds for full rows are predicted with
            them, then ordered and chosen again.
        expert_loads: loads that a run of this model logged, instead of even ones.

    Raises:
        InputError: the model is unsupported or its size is unknown, a pattern of `model.freeze`
            matches no parameter, or the device lacks the precision.
    """
    is_auto = recipe.precision.kind == "auto" and precision is None
    choice = choose_precision_on(cluster.accelerator) if is_auto else None
    recipe = resolve_compilation_on(resolve_precision(recipe, choice), cluster.accelerator)
    template = replace(
        build_template(recipe, precision=precision, adapter=adapter), expert_loads=expert_loads
    )
    predictor = build_predictor(_get_facts(recipe, template), cluster)
    low_precision = read_low_precision_section(recipe, template.precision)
    # Raise for an unsupported precision before the search starts.
    predictor.get_rates(template)
    problem = build_problem(recipe, template, cluster.num_gpus)
    result = search_run_layouts(predictor, problem, num_layouts=num_layouts)
    candidate = build_recipe_candidate(recipe, template, cluster.num_gpus)
    conflict = explain_missing_candidate(recipe, template, cluster.num_gpus)
    if candidate is not None:
        conflict = explain_conflict(predictor, problem, candidate)
    predictions = result.predictions
    chosen = result.chosen
    choice_of_results = None
    if not recipe.layout.auto and conflict is None and candidate is not None:
        candidate, choice_of_results, conflict = _choose_results(recipe, predictor, candidate)
    elif recipe.layout.auto and chosen is not None:
        lean = reset_memory_settings(chosen.candidate, template)  # the choice comes first in a run
        _, choice_of_results, conflict = _choose_results(recipe, predictor, lean)
    own = None if candidate is None or conflict else predict_run(predictor, candidate)
    correction = build_correction(step_profile, predictor, problem)
    num_proven = result.num_proven if rows is None else 0  # the proof is about full rows
    splits: tuple[ContextSplit, ...] = ()
    if rows is not None:
        predictions, chosen = order_by_rows(predictor, result, rows)
        own = None if own is None else predict_rows(predictor, own.candidate, rows)
        splits = _compare_splits(predictor, rows, [own, chosen], predictions[:num_layouts])
    if correction is not None:
        predictions, chosen = correction.correct_search(result)
        num_proven = 0  # the proof is about predictions without correction
        own = None if own is None else correction.apply(own)
    return PlanningResult(
        predictions=tuple(predictions[:num_layouts]),
        chosen=chosen,
        recipe_prediction=own,
        rejections=tuple(find_rejections(predictor, problem)),
        scale_points=tuple(scale_devices(predictor, problem, gpu_counts)),
        explanation=tuple(explain(predictor, problem, result)) if should_explain else (),
        effort=SearchEffort(num_proven, result.num_predicted, result.num_too_large),
        uncertainty=predictor.uncertainty,
        remedy=None if chosen else _find_remedy(predictor, problem),
        precision_reason=None if choice is None else choice.reason,
        num_measured_steps=None if correction is None else correction.num_steps,
        correction_summary=describe_measurements(step_profile, correction),
        product_rates=describe_product_rates(low_precision, cluster),
        missing_kernels=None
        if low_precision is None or template.scaled_shares is None
        else explain_missing_kernels(low_precision, cluster.accelerator, template.scaled_shares),
        omissions=tuple(_list_omissions(recipe, template)),
        recipe_conflict=conflict,
        row_summary=None if rows is None else rows.describe(),
        context_splits=splits,
        expert_summary=None if expert_loads is None else expert_loads.describe(),
        recompute_choice=choice_of_results,
    )


def _compare_splits(
    predictor: Predictor,
    rows: TrainingRows,
    named: Sequence[Prediction | None],
    listed: Sequence[Prediction],
) -> tuple[ContextSplit, ...]:
    """Compare both values of `layout.cp_split` for the named layouts and the first listed one that
    has context ranks that share packed rows."""
    compared = [
        compare_context_splits(predictor, each.candidate, rows)
        for each in named
        if each is not None
    ]
    first = (compare_context_splits(predictor, each.candidate, rows) for each in listed)
    compared.append(next((split for split in first if split is not None), None))
    return tuple(dict.fromkeys(split for split in compared if split is not None))


def _choose_results(
    recipe: Recipe, predictor: Predictor, candidate: Candidate
) -> tuple[Candidate, RecomputeChoice | None, str | None]:
    """Choose the order of `expert_dispatch` and what the layers keep, if left to the plan.

    Returns the candidate, the choice of what is kept, and the reason why there is none.
    """
    if candidate.layout.expert_dispatch == "auto":
        candidate, _ = choose_expert_dispatch(predictor, candidate)
    section = recipe.recompute
    if not isinstance(section, RecomputeSection):
        return candidate, None, None
    try:
        check_choosable(predictor.facts.shape, candidate.precision)
        return *choose_recompute(predictor, candidate, section), None
    except RecipeError as error:
        return candidate, None, str(error)


def _get_facts(recipe: Recipe, template: Candidate) -> ModelFacts:
    """Return the facts of the recipe's model, of which adapters freeze all."""
    facts = get_recipe_facts(recipe, read_planning_shape(recipe))
    return facts if template.adapter is None else get_model_facts(facts.shape)


def _list_omissions(recipe: Recipe, template: Candidate) -> Iterator[str]:
    if recipe.model.freeze and template.adapter is not None:
        yield (
            "model.freeze: adapters freeze all of the model's weights, so predictions with "
            "adapters do not depend on it; `train` refuses both"
        )
    shape = read_planning_shape(recipe)
    if recipe.model.dropout == "config" and shape.attention_dropout > 0.0:
        yield (
            "model.dropout: the model's config drops weights of attention, for which a run stores "
            "all of them; predictions leave out their memory and time. `model.dropout: off` needs "
            "none"
        )
    elif recipe.model.dropout == "config" and shape.residual_dropout > 0.0:
        yield "model.dropout: predictions leave out the masks of the dropout of the model's config"


def _find_remedy(predictor: Predictor, problem: PlanningProblem) -> str:
    """Describe the smallest change, or the number of devices, that makes a layout fit."""
    remedies: list[str] = []
    num_gpus = problem.num_gpus
    if not _has_valid_degrees(predictor, problem, num_gpus):
        counts = _find_nearest_counts(predictor, problem)
        total = problem.global_batch_size
        batch = "one batch per rank" if total is None else f"a batch of {total} sequences"
        reason = f"No degrees dividing heads, widths, layers and {batch} multiply to {num_gpus:,}"
        alternatives = " or ".join(f"{count:,}" for count in counts)
        remedy = f"{alternatives} GPUs would work" if counts else "Change the global batch"
        return f"{reason}; {remedy}"
    for degree in (d for d in list_divisors(num_gpus) if d <= predictor.cluster.domain_size):
        layout = replace(
            problem.template.layout,
            tp=degree,
            dp_shard=num_gpus // degree,
            zero_stage=3 if num_gpus > degree else 0,
        )
        total = problem.global_batch_size or num_gpus // degree
        candidate = replace(
            problem.template,
            layout=layout,
            micro_batch_size=1,
            gradient_accumulation_steps=max(1, total // (num_gpus // degree)),
            recompute="full",
        )
        if (
            total % (num_gpus // degree) == 0
            and explain_conflict(predictor, problem, candidate) is None
        ):
            change, changed = find_cheapest_change(predictor, problem, candidate)
            if change is not None and changed is not None:
                layout_name = candidate.describe()
                remedies.append(f"{layout_name} with full recomputation would fit with {change}")
                break
    larger = find_min_gpus(predictor, problem)
    if larger is not None:
        size = format_bytes(larger.memory.total)
        enough = f"{larger.num_gpus} of these GPUs would be enough"
        remedies.append(f"{enough}: {larger.candidate.describe()}, {size} each")
    return "; ".join(remedies) or "Use a shorter sequence_length, a smaller model or larger GPUs"


def _has_valid_degrees(predictor: Predictor, problem: PlanningProblem, num_gpus: int) -> bool:
    """Return True if some degrees multiply to `num_gpus`, whatever their memory."""
    resized = replace(problem, num_gpus=num_gpus)
    return any(SearchSpace(predictor.facts, resized, predictor.cluster.domain_size).list_degrees())


def _find_nearest_counts(predictor: Predictor, problem: PlanningProblem) -> list[int]:
    """Return the next smaller and next larger device counts that some degrees multiply to."""
    num_gpus = problem.num_gpus
    directions = (range(num_gpus - 1, 0, -1), range(num_gpus + 1, 2 * num_gpus + 1))
    nearest = [
        next(
            (count for count in direction if _has_valid_degrees(predictor, problem, count)),
            None,
        )
        for direction in directions
    ]
    return [count for count in nearest if count is not None]
