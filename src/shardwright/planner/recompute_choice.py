"""Choice of what each layer keeps for its backward pass within a budget of memory.

Results are kept in the order of seconds saved per byte (the fractional knapsack's rule). A layer
that keeps a result saves its seconds and holds its bytes, independently of other layers, so the
order is the same for all layers of a kind. Of two neighbours in that order some layers take one
and some the other, which meets any budget within about one result of one layer. Layers at the end
of a pipeline stage are the first to keep more: the backward pass frees them first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from shardwright.architecture import HFShape, ModelShape
from shardwright.config.recipe import Recipe, RecomputeSection
from shardwright.errors import RecipeError
from shardwright.hardware import Cluster
from shardwright.layout.kept_results import KeptResults, LayerResults, RecomputeChoice
from shardwright.planner.candidate import Candidate
from shardwright.planner.memory.activations import compute_result_bytes, get_layer_activations
from shardwright.planner.memory.parameter_memory import has_saved_casts
from shardwright.planner.model_costs import ModelFacts, get_model_facts
from shardwright.planner.prediction import MemoryParts
from shardwright.planner.predictor import Predictor
from shardwright.planner.problem import build_plan_candidate
from shardwright.planner.rates.calibration import load_efficiencies
from shardwright.planner.time.compute import compute_result_seconds, has_unneeded_end
from shardwright.plans import Plan
from shardwright.units import GIB_BYTES, format_bytes


class _Level(NamedTuple):
    """What a layer of a kind may keep: its bytes and its seconds, per micro-batch."""

    results: LayerResults
    saved_bytes: float
    seconds: float


@dataclass(frozen=True)
class _Upgrade:
    """One step from a level of a kind to the next one on the convex hull."""

    slot: int
    lower: LayerResults
    upper: LayerResults
    seconds_per_byte: float


def choose_recompute(
    predictor: Predictor,
    candidate: Candidate,
    section: RecomputeSection,
) -> tuple[Candidate, RecomputeChoice]:
    """Choose the fastest recomputation of a candidate within the section's memory.

    Without a budget, the memory is the device's, with the planner's margin for its own error
    unless only a tight choice fits.

    Returns:
        The candidate with recomputation `none` or `mixed`, and the choice.

    Raises:
        RecipeError: even recomputation of whole blocks needs more memory; shows the numbers.
    """
    capacity = predictor.capacity_bytes
    limit = capacity if section.budget_gib is None else section.budget_gib * GIB_BYTES
    plain = replace(candidate, recompute="none", kept_layers=None)
    search = _ChoiceSearch(predictor, plain)

    def fits(memory: MemoryParts) -> bool:
        return memory.total <= limit

    def fits_with_margin(memory: MemoryParts) -> bool:
        return predictor.uncertainty.memory.apply(memory.total)[1] <= capacity

    tests = [fits] if section.budget_gib is not None else [fits_with_margin, fits]
    chosen = next(filter(None, map(search.find, tests)), None)
    if chosen is None:
        raise _build_error(predictor, section, search.compute_memory(search.build(0)), limit)
    return chosen, search.describe(chosen, section, limit)


def resolve_recompute(recipe: Recipe, plan: Plan, cluster: Cluster) -> Plan:
    """Return the plan with `recompute: auto` or a budget resolved for its model and layout.

    Args:
        recipe: its precision must be resolved.
        cluster: devices, with at least as many as the plan has ranks.

    Raises:
        RecipeError: no choice fits, or the plan cannot choose results for this model or precision.
    """
    section = recipe.recompute
    if not isinstance(section, RecomputeSection):
        return plan
    check_choosable(plan.shape, plan.precision.kind)
    candidate = replace(build_plan_candidate(recipe, plan), compile=plan.is_compiled)
    predictor = Predictor(
        get_model_facts(plan.shape.base_shape),
        cluster,
        load_efficiencies().get_efficiency(cluster.accelerator),
    )
    chosen, choice = choose_recompute(predictor, candidate, section)
    return replace(plan, recompute=chosen.recompute, recompute_choice=choice)


def check_choosable(shape: ModelShape, precision: str) -> None:
    """Check that the plan can choose results to keep.

    Raises:
        RecipeError: the blocks are a transformers class's, or products have 8-bit operands.
    """
    if isinstance(shape, HFShape):
        reason = (
            f"the model runs through transformers' {shape.class_name}, whose results have no names"
        )
    elif precision in ("fp8", "nvfp4"):
        reason = f"results of {precision} products are not kept by name yet"
    else:
        return
    raise RecipeError(
        f"{reason}: the plan cannot choose which of them to keep",
        field="recompute",
        got="auto or a budget",
        allowed="none, selective, full",
    )


class _ChoiceSearch:
    """All choices for one candidate, from whole blocks recomputed to nothing recomputed."""

    def __init__(self, predictor: Predictor, plain: Candidate) -> None:
        self._predictor = predictor
        self._plain = plain
        self._facts = predictor.facts
        self._stages = _list_stage_layers(self._facts, plain)
        levels = _compute_levels(predictor, plain)
        self._base = [kind_levels[0].results for kind_levels in levels]
        self._upgrades = sorted(
            (
                upgrade
                for slot, kind_levels in enumerate(levels)
                for upgrade in _list_upgrades(slot, kind_levels)
            ),
            key=lambda upgrade: -upgrade.seconds_per_byte,
        )
        """Stable: upgrades of one kind stay in order, for they are on a convex hull."""
        slots = self._facts.slot_of_layer
        self._most_layers = [
            max(sum(slots[layer] == slot for layer in stage) for stage in self._stages)
            for slot in range(len(levels))
        ]

    def find(self, fits: Callable[[MemoryParts], bool]) -> Candidate | None:
        """Find the fastest choice that fits; None if even the slowest one does not."""
        if fits(self.compute_memory(self._plain)):
            return self._plain
        # Ends of upgrades, the fastest first: memory is not monotonic, because recomputation of
        # the largest layer takes some of it too.
        ends = [0]
        for upgrade in self._upgrades:
            ends.append(ends[-1] + self._most_layers[upgrade.slot])
        position = next(
            (
                index
                for index in reversed(ends[:-1])
                if fits(self.compute_memory(self.build(index)))
            ),
            None,
        )
        if position is None:
            return None
        too_large = ends[ends.index(position) + 1]
        while too_large - position > 1:
            middle = (position + too_large) // 2
            if fits(self.compute_memory(self.build(middle))):
                position = middle
            else:
                too_large = middle
        return self.build(position)

    def compute_memory(self, candidate: Candidate) -> MemoryParts:
        """Compute the memory of the rank that needs the most."""
        pipeline = self._predictor.get_pipeline_stages(candidate)
        return self._predictor.compute_memory(candidate, pipeline)

    def build(self, num_steps: int) -> Candidate:
        """Build the candidate after `num_steps` steps; each upgrades one layer of a stage."""
        states: list[tuple[LayerResults, LayerResults, float]] = [
            (results, results, 0.0) for results in self._base
        ]
        for upgrade in self._upgrades:
            most = self._most_layers[upgrade.slot]
            states[upgrade.slot] = (upgrade.lower, upgrade.upper, min(1.0, num_steps / most))
            num_steps -= most
            if num_steps <= 0:
                break
        slots = self._facts.slot_of_layer
        kept: list[LayerResults] = [None] * len(slots)
        for stage in self._stages:
            for slot, (lower, upper, share) in enumerate(states):
                layers = [layer for layer in stage if slots[layer] == slot]
                num_lower = len(layers) - int(share * len(layers) + 1e-9)
                for position, layer in enumerate(layers):
                    kept[layer] = lower if position < num_lower else upper
        return replace(self._plain, recompute="mixed", kept_layers=tuple(kept))

    def describe(
        self, chosen: Candidate, section: RecomputeSection, limit: float
    ) -> RecomputeChoice:
        """Describe a choice with its predicted figures."""
        layers = chosen.kept_layers or (None,) * len(self._facts.slot_of_layer)
        facts = get_model_facts(self._facts.shape, layers)
        activations = [get_layer_activations(facts, kind, chosen) for kind in facts.kinds]
        costs = self._predictor.compute_layer_costs(chosen)
        seconds = [
            kind.count * layer[0].recompute
            for kind, layer in zip(facts.kinds, costs.layers, strict=True)
        ]
        per_rank = self._predictor.get_pipeline_stages(chosen).partition.layers_per_rank
        return RecomputeChoice(
            layers=layers,
            setting="auto"
            if section.budget_gib is None
            else f"budget of {section.budget_gib:g} GiB",
            cluster=self._predictor.cluster.name,
            budget_bytes=limit,
            memory_bytes=self.compute_memory(chosen).total,
            layer_bytes=max(
                sum(
                    count * layer.saved_bytes
                    for count, layer in zip(counts, activations, strict=True)
                )
                for counts in per_rank
            ),
            recompute_seconds=sum(seconds),
        )


def _list_stage_layers(facts: ModelFacts, candidate: Candidate) -> list[range]:
    """List the layers of each pipeline stage; all layers without a pipeline."""
    layout = candidate.layout
    if layout.pp == 1:
        return [range(facts.shape.num_layers)]
    stages = candidate.engine.partition_layers(facts, layout, candidate.sequence_length)
    return [stage.layers for stage in stages]


def _compute_levels(predictor: Predictor, plain: Candidate) -> list[list[_Level]]:
    """Compute the levels of each kind of layer, from nothing kept to everything saved."""
    facts = predictor.facts
    rates = predictor.get_rates(plain.precision)
    orders: list[list[KeptResults]] = []
    for kind in facts.kinds:
        sizes = compute_result_bytes(facts, kind, plain)
        seconds = compute_result_seconds(facts, kind, plain, rates)
        if has_unneeded_end(facts, kind, plain):
            sizes.pop("down", None)
        names = sorted(
            (name for name, size in sizes.items() if size and seconds.get(name)),
            key=lambda name: -seconds[name] / sizes[name],
        )
        orders.append([frozenset(names[:count]) for count in range(len(names) + 1)])
    levels: list[list[_Level]] = [[] for _ in orders]
    for number in range(max(map(len, orders))):
        choice = [order[min(number, len(order) - 1)] for order in orders]
        for slot, level in enumerate(_compute_kind_levels(predictor, plain, choice)):
            if number < len(orders[slot]):
                levels[slot].append(level)
    for slot, level in enumerate(_compute_kind_levels(predictor, plain, [None] * len(orders))):
        levels[slot].append(level)
    return levels


def _compute_kind_levels(
    predictor: Predictor, plain: Candidate, choice: Sequence[LayerResults]
) -> list[_Level]:
    """Compute bytes and seconds of each kind of layer, all of whose layers keep the same."""
    base: ModelFacts = predictor.facts
    kept = tuple(choice[slot] for slot in base.slot_of_layer)
    candidate = replace(plain, recompute="mixed", kept_layers=kept)
    facts = get_model_facts(base.shape, kept)
    costs = predictor.compute_layer_costs(candidate)
    elements = facts.count_elements(candidate.layout).layers
    cast_bytes = candidate.engine.get_gather_bytes(candidate.activation_bytes)
    levels = []
    for slot, kind in enumerate(base.kinds):
        first_layer = base.slot_of_layer.index(slot)
        own = facts.slot_of_layer[first_layer]
        seconds, forward, backward = costs.layers[own]
        saved = get_layer_activations(facts, facts.kinds[own], candidate).saved_bytes
        if has_saved_casts(candidate, facts.kinds[own]):
            saved += cast_bytes * elements[own].local_matrices
        levels.append(
            _Level(choice[kind.slot], saved, seconds.total + forward.exposed + backward.exposed)
        )
    return levels


def _list_upgrades(slot: int, levels: Sequence[_Level]) -> list[_Upgrade]:
    """List the steps along the lower convex hull of the levels' seconds over their bytes."""
    hull = [levels[0]]
    remaining = sorted(levels[1:], key=lambda level: level.saved_bytes)
    while True:
        steps = [
            (
                (hull[-1].seconds - level.seconds)
                / max(level.saved_bytes - hull[-1].saved_bytes, 1e-9),
                level,
            )
            for level in remaining
            if level.seconds < hull[-1].seconds
        ]
        if not steps:
            break
        hull.append(max(steps, key=lambda step: (step[0], step[1].saved_bytes))[1])
    return [
        _Upgrade(
            slot,
            lower.results,
            upper.results,
            (lower.seconds - upper.seconds) / max(upper.saved_bytes - lower.saved_bytes, 1e-9),
        )
        for lower, upper in pairwise(hull)
    ]


def _build_error(
    predictor: Predictor, section: RecomputeSection, least: MemoryParts, limit: float
) -> RecipeError:
    needed = format_bytes(least.total)
    remedy = "Reduce micro_batch_size or sequence_length, shard more (zero_stage, tp, pp), or "
    if section.budget_gib is None:
        return RecipeError(
            f"recomputation of whole blocks needs {needed} per device as predicted, and a process "
            f"may use {format_bytes(limit)} of {predictor.cluster.accelerator.name}",
            field="recompute",
            got="auto",
            remedy=f"{remedy}offload states and activations",
        )
    return RecipeError(
        f"recomputation of whole blocks already needs {needed} per device as predicted, of which "
        f"{format_bytes(least.weights + least.gradients + least.optimizer)} are weights, gradients "
        "and optimizer states",
        field="recompute.budget_gib",
        got=f"{section.budget_gib:g}",
        allowed=f"at least {least.total / GIB_BYTES:.3g}",
        remedy=f"{remedy}increase the budget",
    )
