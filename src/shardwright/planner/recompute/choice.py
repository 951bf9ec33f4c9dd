"""Choice of the results that each layer keeps for its backward pass within a memory budget.

Results are kept in the order of seconds saved per byte (the fractional knapsack's rule). A layer
that keeps a result saves its seconds and holds its bytes, independently of other layers, so the
order is the same for all layers of a kind. Of two neighbours in that order some layers take one
and some the other, which meets any budget within about one result of one layer. Layers at the end
of a pipeline stage are the first to keep more: the backward pass frees them first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from shardwright.architecture import HFShape, ModelShape
from shardwright.config.recipe import Recipe, RecomputeSection
from shardwright.errors import RecipeError
from shardwright.hardware import Cluster
from shardwright.layout.saved_results import LayerResults, RecomputeChoice
from shardwright.planner.candidate import Candidate
from shardwright.planner.memory.activations import get_layer_activations
from shardwright.planner.model_costs import ModelFacts, get_model_facts
from shardwright.planner.prediction import MemoryParts
from shardwright.planner.predictor import Predictor, build_predictor
from shardwright.planner.problem import build_plan_candidate, get_recipe_facts
from shardwright.planner.recompute.levels import compute_levels, list_upgrades
from shardwright.plans import Plan
from shardwright.units import GIB_BYTES, format_bytes


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
    plain = replace(candidate, recompute="none", saved_results=None)
    search = _ChoiceSearch(predictor, plain)

    def fits(memory: MemoryParts) -> bool:
        return memory.total <= limit

    def fits_with_margin(memory: MemoryParts) -> bool:
        return predictor.uncertainty.memory.apply(memory.total)[1] <= capacity

    tests = [fits] if section.budget_gib is not None else [fits_with_margin, fits]
    chosen = next(filter(None, map(search.find, tests)), None)
    if chosen is None:
        raise _build_error(
            predictor, section, search.compute_memory(search.build(search.build_profiles(0))), limit
        )
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
    candidate = build_plan_candidate(recipe, plan)
    predictor = build_predictor(get_recipe_facts(recipe, plan.shape.base_shape), cluster)
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
        f"{reason}: the plan cannot choose which results to keep",
        field="recompute",
        got="auto or a budget",
        allowed="none, selective, full",
    )


_Profile = tuple[int, ...]
"""Level of each layer of a kind in the stage with the most of them, in ascending order."""


class _ChoiceSearch:
    """All choices for one candidate, from whole blocks recomputed to nothing recomputed."""

    def __init__(self, predictor: Predictor, plain: Candidate) -> None:
        self._predictor = predictor
        self._plain = plain
        self._facts = predictor.facts
        self._stages = _list_stage_layers(self._facts, plain)
        self._levels = compute_levels(predictor, plain)
        self._upgrades = sorted(
            (
                upgrade
                for slot, kind_levels in enumerate(self._levels)
                for upgrade in list_upgrades(slot, kind_levels)
            ),
            key=lambda upgrade: -upgrade.seconds_per_byte,
        )
        """Stable: upgrades of one kind stay in order, for they are on a convex hull."""
        slots = self._facts.slot_of_layer
        self._num_layers = [
            max(sum(slots[layer] == slot for layer in stage) for stage in self._stages)
            for slot in range(len(self._levels))
        ]

    def find(self, fits: Callable[[MemoryParts], bool]) -> Candidate | None:
        """Find the fastest choice that fits; None if even the slowest one does not."""
        if fits(self.compute_memory(self._plain)):
            return self._plain

        def are_within(profiles: list[_Profile]) -> bool:
            return fits(self.compute_memory(self.build(profiles)))

        if not are_within(self.build_profiles(0)):
            return None
        # Whole layers do not fill the budget exactly: smaller steps fill the rest, also from
        # other beginnings, which matter in models of few layers.
        filled = [
            self._fill(profiles, are_within)
            for profiles in (self._find_upgraded(are_within), *self._list_uniform_profiles())
            if are_within(profiles)
        ]
        return self.build(min(filled, key=self._sum_seconds))

    def compute_memory(self, candidate: Candidate) -> MemoryParts:
        """Compute the memory of the rank that needs the most."""
        pipeline = self._predictor.get_pipeline_stages(candidate)
        return self._predictor.compute_memory(candidate, pipeline)

    def build_profiles(self, num_steps: int) -> list[_Profile]:
        """Build the profiles after `num_steps` upgrades of one layer each, in order."""
        profiles = [(0,) * count for count in self._num_layers]
        for upgrade in self._upgrades:
            count = self._num_layers[upgrade.slot]
            num_upper = min(count, num_steps)
            profiles[upgrade.slot] = (upgrade.lower,) * (count - num_upper) + (
                upgrade.upper,
            ) * num_upper
            num_steps -= num_upper
            if num_steps == 0:
                break
        return profiles

    def build(self, profiles: Sequence[_Profile]) -> Candidate:
        """Build the candidate; stages with fewer layers of a kind have no larger share of a
        level or of those above it."""
        slots = self._facts.slot_of_layer
        saved: list[LayerResults] = [None] * len(slots)
        for stage in self._stages:
            for slot, profile in enumerate(profiles):
                layers = [layer for layer in stage if slots[layer] == slot]
                for distance, layer in enumerate(reversed(layers)):
                    # Of a profile as long as the stage, the layer at the same distance.
                    position = -(-(distance + 1) * len(profile) // len(layers))
                    saved[layer] = self._levels[slot][profile[-position]].results
        return replace(self._plain, recompute="mixed", saved_results=tuple(saved))

    def _find_upgraded(self, are_within: Callable[[list[_Profile]], bool]) -> list[_Profile]:
        """Find the most upgrades in order that fit.

        The ends of upgrades are tried from the last one on: memory is not monotonic, because
        recomputation of the largest layer takes some of it too.
        """
        ends = [0]
        for upgrade in self._upgrades:
            ends.append(ends[-1] + self._num_layers[upgrade.slot])
        last = next(end for end in reversed(ends) if are_within(self.build_profiles(end)))
        if last == ends[-1]:
            return self.build_profiles(last)
        return self.build_profiles(
            _find_largest(
                last,
                ends[ends.index(last) + 1],
                lambda steps: are_within(self.build_profiles(steps)),
            )
        )

    def _list_uniform_profiles(self) -> list[list[_Profile]]:
        """List profiles in which all layers of a kind have the same level."""
        most = max(map(len, self._levels))
        return [
            [
                (min(level, len(kind_levels) - 1),) * count
                for kind_levels, count in zip(self._levels, self._num_layers, strict=True)
            ]
            for level in range(most)
        ]

    def _fill(
        self, profiles: list[_Profile], are_within: Callable[[list[_Profile]], bool]
    ) -> list[_Profile]:
        """Raise the levels of single layers while they fit, those first that save the most."""
        moves = sorted(
            (
                (kind_levels[lower].seconds - kind_levels[upper].seconds, slot, lower, upper)
                for slot, kind_levels in enumerate(self._levels)
                for lower in range(len(kind_levels))
                for upper in range(lower + 1, len(kind_levels))
            ),
            reverse=True,
        )
        for saved_seconds, slot, lower, upper in moves:
            count = profiles[slot].count(lower)
            if count == 0 or saved_seconds <= 0:
                continue

            move = partial(_move_layers, profiles, slot, (lower, upper))
            number = _find_largest(0, count + 1, partial(_is_move_possible, are_within, move))
            profiles = move(number)
        return profiles

    def _sum_seconds(self, profiles: Sequence[_Profile]) -> float:
        return sum(
            self._levels[slot][level].seconds
            for slot, profile in enumerate(profiles)
            for level in profile
        )

    def describe(
        self, chosen: Candidate, section: RecomputeSection, limit: float
    ) -> RecomputeChoice:
        """Describe a choice with its predicted figures."""
        layers = chosen.saved_results or (None,) * len(self._facts.slot_of_layer)
        facts = get_model_facts(self._facts.shape, layers, self._facts.frozen_names)
        activations = [get_layer_activations(facts, kind, chosen) for kind in facts.kinds]
        costs = self._predictor.compute_layer_costs(chosen)
        seconds = [
            kind.count * passes.seconds.recompute
            for kind, passes in zip(facts.kinds, costs.layers, strict=True)
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


def _is_move_possible(
    are_within: Callable[[list[_Profile]], bool],
    move: Callable[[int], list[_Profile]],
    number: int,
) -> bool:
    return are_within(move(number))


def _move_layers(
    profiles: Sequence[_Profile], slot: int, levels: tuple[int, int], number: int
) -> list[_Profile]:
    """Move `number` layers of a kind from the lower to the upper of two levels."""
    lower, upper = levels
    profile = list(profiles[slot])
    first = profile.index(lower) + profile.count(lower) - number
    profile[first : first + number] = [upper] * number
    return [*profiles[:slot], tuple(sorted(profile)), *profiles[slot + 1 :]]


def _find_largest(low: int, high: int, is_possible: Callable[[int], bool]) -> int:
    """Find a number from `low`, which is possible, to `high`, exclusive, whose successor is not
    possible or is `high`."""
    while high - low > 1:
        middle = (low + high) // 2
        if is_possible(middle):
            low = middle
        else:
            high = middle
    return low


def _list_stage_layers(facts: ModelFacts, candidate: Candidate) -> list[range]:
    """List the layers of each pipeline stage; all layers without a pipeline."""
    layout = candidate.layout
    if layout.pp == 1:
        return [range(facts.shape.num_layers)]
    stages = candidate.engine.partition_layers(facts, layout, candidate.sequence_length)
    return [stage.layers for stage in stages]


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
        allowed=f"at least {_round_up(least.total / GIB_BYTES):.3g}",
        remedy=f"{remedy}increase the budget",
    )


def _round_up(number: float) -> float:
    """Round a positive number up to three significant digits: the nearest ones may be below it."""
    unit = 10.0 ** (math.floor(math.log10(number)) - 2)
    return math.ceil(number / unit) * unit
