"""Levels of recomputation of a layer: results that it may keep, with bytes and seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from shardwright.layout.saved_results import LayerResults, SavedResults
from shardwright.planner.candidate import Candidate
from shardwright.planner.memory.activations import compute_result_bytes, get_layer_activations
from shardwright.planner.memory.weight_copies import has_saved_casts
from shardwright.planner.model_costs import ModelFacts, get_model_facts
from shardwright.planner.predictor import Predictor
from shardwright.planner.time.communication import build_groups
from shardwright.planner.time.compute import compute_result_seconds, has_unneeded_end
from shardwright.planner.time.traffic import compute_collective_seconds


class Level(NamedTuple):
    """Results that a layer of a kind may keep, with its bytes and its seconds, per micro-batch."""

    results: LayerResults
    saved_bytes: float
    seconds: float


@dataclass(frozen=True)
class Upgrade:
    """One step from a level of a kind to the next one on the convex hull."""

    slot: int
    lower: int
    upper: int
    seconds_per_byte: float


def compute_levels(predictor: Predictor, plain: Candidate) -> list[list[Level]]:
    """Compute the levels of each kind of layer, from nothing kept to everything saved."""
    facts = predictor.facts
    rates = predictor.get_rates(plain)
    network = predictor.network
    groups = build_groups(plain.layout)
    orders: list[list[SavedResults]] = []
    for kind in facts.kinds:
        sizes = compute_result_bytes(facts, kind, plain)
        seconds = compute_result_seconds(facts, kind, plain, rates)
        for name, traffic in compute_collective_seconds(facts, plain, network, groups).items():
            seconds[name] = seconds.get(name, 0.0) + traffic
        if has_unneeded_end(facts, kind, plain):
            sizes.pop("down", None)
        names = sorted(
            (name for name, size in sizes.items() if size and seconds.get(name)),
            key=lambda name: -seconds[name] / sizes[name],
        )
        orders.append([frozenset(names[:count]) for count in range(len(names) + 1)])
    levels: list[list[Level]] = [[] for _ in orders]
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
) -> list[Level]:
    """Compute bytes and seconds of each kind of layer, all of whose layers keep the same."""
    base: ModelFacts = predictor.facts
    saved_results = tuple(choice[slot] for slot in base.slot_of_layer)
    candidate = replace(plain, recompute="mixed", saved_results=saved_results)
    facts = get_model_facts(base.shape, saved_results, base.frozen_names)
    costs = predictor.compute_layer_costs(candidate)
    elements = facts.count_elements(candidate.layout).layers
    cast_bytes = candidate.engine.get_gather_bytes(candidate.activation_bytes)
    levels = []
    for slot, kind in enumerate(base.kinds):
        first_layer = base.slot_of_layer.index(slot)
        own = facts.slot_of_layer[first_layer]
        seconds, forward, backward, *_ = costs.layers[own]
        saved = get_layer_activations(facts, facts.kinds[own], candidate).saved_bytes
        if has_saved_casts(candidate, facts.kinds[own]):
            saved += cast_bytes * elements[own].local_matrices
        levels.append(
            Level(choice[kind.slot], saved, seconds.total + forward.exposed + backward.exposed)
        )
    return levels


def list_upgrades(slot: int, levels: Sequence[Level]) -> list[Upgrade]:
    """List the steps along the lower convex hull of the levels' seconds over their bytes."""
    hull = [levels[0]]
    remaining = levels[1:]
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
        Upgrade(
            slot,
            levels.index(lower),
            levels.index(upper),
            (lower.seconds - upper.seconds) / max(upper.saved_bytes - lower.saved_bytes, 1e-9),
        )
        for lower, upper in pairwise(hull)
    ]
