"""Result of `plan` for one recipe on one cluster, as one value."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwright.config.schema import Recipe
from shardwright.hardware import Cluster
from shardwright.plan import settle_precision
from shardwright.planner.achieved import load_efficiencies
from shardwright.planner.candidate import Adapter, Precision
from shardwright.planner.efficiency import Efficiency
from shardwright.planner.explain import explain
from shardwright.planner.facts import ModelFacts, facts_of
from shardwright.planner.predict import Predictor
from shardwright.planner.prediction import Prediction
from shardwright.planner.question import (
    candidate_of,
    choose_precision_on,
    question_of,
    shape_of,
    template_of,
    why_no_candidate,
)
from shardwright.planner.rejections import Rejection, cheapest_change, reject, why_not_at_all
from shardwright.planner.rules import divisors
from shardwright.planner.scaling import ScalePoint, fewest_gpus, scale
from shardwright.planner.search import search
from shardwright.planner.space import Question, Space
from shardwright.units import format_bytes


@dataclass(frozen=True)
class Effort:
    """Number of layouts that the search proved, predicted and rejected for memory."""

    num_proven: int
    num_predicted: int
    num_too_large: int


@dataclass(frozen=True)
class Answer:
    """Layouts with the best first, the chosen one, the recipe's own layout or its conflict,
    rejected common layouts, scaling, explanation, and, if nothing fits, the smallest change or
    number of devices that would."""

    layouts: tuple[Prediction, ...]
    chosen: Prediction | None
    stated: Prediction | None
    rejections: tuple[Rejection, ...]
    points: tuple[ScalePoint, ...]
    sentences: tuple[str, ...]
    effort: Effort
    remedy: str | None = None
    precision_reason: str | None = None
    """Reason for the precision that `precision: auto` resolved to. None if the recipe names
    it."""
    is_chosen_for_room: bool = False
    """True if a tight layout that is as good as the chosen one or better was passed over."""
    impossible: str | None = None
    """Reason why the recipe's layout cannot run on this number of devices, whatever their
    memory."""


def answer(
    recipe: Recipe,
    cluster: Cluster,
    *,
    top: int = 10,
    precision: Precision | None = None,
    adapter: Adapter | None = None,
    gpu_counts: tuple[int, ...] = (),
    explained: bool = False,
) -> Answer:
    """Plan a recipe.

    Raises:
        InputError: the model is unsupported or its size is unknown, or the device lacks the
            precision.
    """
    choice = choose_precision_on(cluster.accelerator) if recipe.precision.kind == "auto" and precision is None else None
    recipe = settle_precision(recipe, choice)
    facts = facts_of(shape_of(recipe))
    efficiency = load_efficiencies().of(cluster.accelerator)
    template = template_of(recipe, precision=precision, adapter=adapter)
    predictor = Predictor(facts, cluster, efficiency)
    # Raise for an unsupported precision before the search starts.
    predictor.rates(template.precision)
    question = question_of(recipe, template, cluster.num_gpus)
    result = search(predictor, question, top=top)
    candidate = candidate_of(recipe, template, cluster.num_gpus)
    conflict = why_no_candidate(recipe, template, cluster.num_gpus)
    if candidate is not None:
        conflict = why_not_at_all(predictor, question, candidate)
    return Answer(
        layouts=tuple(result.predictions[:top]),
        chosen=result.chosen,
        stated=None if candidate is None or conflict else predictor.predict(candidate),
        rejections=tuple(reject(predictor, question)),
        points=tuple(scale(facts, cluster, efficiency, question, gpu_counts)),
        sentences=tuple(explain(predictor, question, result)) if explained else (),
        effort=Effort(result.num_proven, result.num_predicted, result.num_too_large),
        remedy=None if result.chosen else _remedy(facts, cluster, efficiency, predictor, question),
        precision_reason=None if choice is None else choice.reason,
        is_chosen_for_room=result.with_room is not None,
        impossible=conflict,
    )


def _remedy(facts: ModelFacts, cluster: Cluster, efficiency: Efficiency, predictor: Predictor, question: Question) -> str:
    """Describe the smallest change, or the number of devices, that makes a layout fit."""
    remedies: list[str] = []
    num_gpus = question.num_gpus
    if not _can_be_cut(facts, cluster, question, num_gpus):
        counts = _nearest_counts(facts, cluster, question)
        total = question.global_batch_size
        batch = "one batch per rank" if total is None else f"a batch of {total} sequences"
        reason = f"No degrees dividing heads, widths, layers and {batch} multiply to {num_gpus:,}"
        alternatives = " or ".join(f"{count:,}" for count in counts)
        remedy = f"{alternatives} GPUs would work" if counts else "Change the global batch"
        return f"{reason}; {remedy}"
    for degree in (d for d in divisors(num_gpus) if d <= cluster.domain_size):
        layout = replace(question.template.layout, tp=degree, dp_shard=num_gpus // degree, zero_stage=3 if num_gpus > degree else 0)
        total = question.global_batch_size or num_gpus // degree
        candidate = replace(
            question.template,
            layout=layout,
            micro_batch_size=1,
            gradient_accumulation_steps=max(1, total // (num_gpus // degree)),
            recompute="full",
        )
        if total % (num_gpus // degree) == 0 and why_not_at_all(predictor, question, candidate) is None:
            change, changed = cheapest_change(predictor, question, candidate)
            if change is not None and changed is not None:
                layout_name = candidate.describe()
                remedies.append(f"{layout_name} with full recomputation would fit with {change}")
                break
    larger = fewest_gpus(facts, cluster, efficiency, question)
    if larger is not None:
        size = format_bytes(larger.memory.total)
        enough = f"{larger.num_gpus} of these GPUs would be enough"
        remedies.append(f"{enough}: {larger.candidate.describe()}, {size} each")
    return "; ".join(remedies) or "Use a shorter sequence_length, a smaller model or larger GPUs"


def _can_be_cut(facts: ModelFacts, cluster: Cluster, question: Question, num_gpus: int) -> bool:
    """Return True if some degrees multiply to `num_gpus`, whatever their memory."""
    return any(Space(facts, replace(question, num_gpus=num_gpus), cluster.domain_size).degrees())


def _nearest_counts(facts: ModelFacts, cluster: Cluster, question: Question) -> list[int]:
    """Return the next smaller and next larger device counts that some degrees multiply to."""
    num_gpus = question.num_gpus
    directions = (range(num_gpus - 1, 0, -1), range(num_gpus + 1, 2 * num_gpus + 1))
    nearest = [
        next((count for count in direction if _can_be_cut(facts, cluster, question, count)), None) for direction in directions
    ]
    return [count for count in nearest if count is not None]
