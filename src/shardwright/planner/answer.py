"""All that `plan` tells of a recipe on a cluster, as one value."""

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
    """How much of the space the search had to look at."""

    num_proven: int
    num_predicted: int
    num_too_large: int


@dataclass(frozen=True)
class Answer:
    """Layouts best first; the chosen one among them; the recipe's own, or why that cannot be; the textbooks' that lose; growth;
    reasons; and where nothing fits, the smallest change or number of devices that would."""

    layouts: tuple[Prediction, ...]
    chosen: Prediction | None
    stated: Prediction | None
    rejections: tuple[Rejection, ...]
    points: tuple[ScalePoint, ...]
    sentences: tuple[str, ...]
    effort: Effort
    remedy: str | None = None
    precision_reason: str | None = None
    """Why `precision: auto` came to the layouts' precision; None where the precision is named."""
    is_chosen_for_room: bool = False
    """True if a layout as good as the chosen one or better is tight, and was passed over."""
    impossible: str | None = None
    """Why the recipe as it stands cannot run on so many devices, whatever their memory."""


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
        InputError: a model that we refuse or cannot count, a precision that the device has not.
    """
    choice = choose_precision_on(cluster.accelerator) if recipe.precision.kind == "auto" and precision is None else None
    recipe = settle_precision(recipe, choice)
    facts = facts_of(shape_of(recipe))
    efficiency = load_efficiencies().of(cluster.accelerator)
    template = template_of(recipe, precision=precision, adapter=adapter)
    predictor = Predictor(facts, cluster, efficiency)
    predictor.rates(template.precision)  # a precision without units is told before anything is searched
    question = question_of(recipe, template, cluster.num_gpus)
    found = search(predictor, question, top=top)
    stated = candidate_of(recipe, template, cluster.num_gpus)
    impossible = why_no_candidate(recipe, template, cluster.num_gpus)
    if stated is not None:
        impossible = why_not_at_all(predictor, question, stated)
    return Answer(
        layouts=tuple(found.predictions[:top]),
        chosen=found.chosen,
        stated=None if stated is None or impossible else predictor.predict(stated),
        rejections=tuple(reject(predictor, question)),
        points=tuple(scale(facts, cluster, efficiency, question, gpu_counts)),
        sentences=tuple(explain(predictor, question, found)) if explained else (),
        effort=Effort(found.num_proven, found.num_predicted, found.num_too_large),
        remedy=None if found.chosen else _remedy(facts, cluster, efficiency, predictor, question),
        precision_reason=None if choice is None else choice.reason,
        is_chosen_for_room=found.with_room is not None,
        impossible=impossible,
    )


def _remedy(facts: ModelFacts, cluster: Cluster, efficiency: Efficiency, predictor: Predictor, question: Question) -> str:
    """The smallest change, or the number of devices, with which something fits."""
    told: list[str] = []
    num = question.num_gpus
    if not _can_be_cut(facts, cluster, question, num):
        counts = _nearest_counts(facts, cluster, question)
        batch = question.global_batch_size or "as many as the ranks'"
        return f"No degrees that divide the model's heads, widths and layers and a batch of {batch} sequences make {num:,}; " + (
            f"{' or '.join(f'{count:,}' for count in counts)} GPUs can be cut so" if counts else "Change the global batch"
        )
    for degree in (d for d in divisors(num) if d <= cluster.domain_size):
        layout = replace(question.template.layout, tp=degree, dp_shard=num // degree, zero_stage=3 if num > degree else 0)
        total = question.global_batch_size or num // degree
        candidate = replace(
            question.template,
            layout=layout,
            micro_batch_size=1,
            gradient_accumulation_steps=max(1, total // (num // degree)),
            recompute="full",
        )
        if total % (num // degree) == 0 and why_not_at_all(predictor, question, candidate) is None:
            change, changed = cheapest_change(predictor, question, candidate)
            if change is not None and changed is not None:
                told.append(f"With {candidate.describe()} and full recompute it would fit by {change}")
                break
    more = fewest_gpus(facts, cluster, efficiency, question)
    if more is not None:
        size = format_bytes(more.memory.total)
        told.append(f"{more.num_gpus} of these GPUs would do: {more.candidate.describe()}, {size} each")
    return "; ".join(told) or "Shorten training.sequence_length, or take a smaller model or larger GPUs"


def _can_be_cut(facts: ModelFacts, cluster: Cluster, question: Question, num_gpus: int) -> bool:
    """Whether any degrees make so many devices, whatever their memory."""
    return any(Space(facts, replace(question, num_gpus=num_gpus), cluster.domain_size).degrees())


def _nearest_counts(facts: ModelFacts, cluster: Cluster, question: Question) -> list[int]:
    """The next smaller and the next larger number of devices that degrees can make."""
    num = question.num_gpus
    ways = (range(num - 1, 0, -1), range(num + 1, 2 * num + 1))
    found = [next((count for count in way if _can_be_cut(facts, cluster, question, count)), None) for way in ways]
    return [count for count in found if count is not None]
