"""Choice of a small subset of the verification grid with every pair of properties."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations, product

from shardwright.config.offload import NOT_OFFLOADED, OffloadSection
from shardwright.config.recipe import RecomputeKind
from shardwright.layout import AXES, Layout
from shardwright.schedule import count_stages_per_rank
from shardwright.verification.cases import VerificationCase
from shardwright.verification.grid import GRID_OFFLOADS, NUM_GRID_LAYERS, GridCell

NUM_COVERING_LAYERS = 2
"""Layers of a chosen cell with at most two stages: a first and a last one."""
OFFLOAD_COST = 3.0
"""Cost of a cell with a resident and an offloaded run more."""
RECOMPUTE_COST: dict[RecomputeKind, float] = {"none": 1.0, "full": 1.3, "selective": 1.9}


def choose_covering_cells(cells: Sequence[GridCell]) -> list[GridCell]:
    """Choose cells that cover all pairs of properties, greedily by new pairs per cost.

    Those with at most two stages have `NUM_COVERING_LAYERS` layers: it halves their time;
    `test_pipeline.py` has stages of several layers. Of activations that are offloaded more
    than two layers are needed: two stay on the device. Pipelines have two micro-batches per rank,
    with which every schedule warms up, is steady and drains.
    """
    cells = [
        replace(cell, case=shorten_pipeline(cell), offload=NOT_OFFLOADED)
        for cell in cells
        if not cell.is_compiled and cell.low_precision is None
    ]
    cells = [
        replace(cell, offload=offload, num_layers=choose_num_layers(cell.layout, offload))
        for cell in dict.fromkeys(cells)
        for offload in (NOT_OFFLOADED, *GRID_OFFLOADS)
    ]
    costs = {cell: estimate_cost(cell) for cell in cells}
    uncovered = set().union(*(list_pairs(cell) for cell in cells))
    chosen: list[GridCell] = []
    while uncovered:
        best = max(cells, key=lambda cell: len(uncovered & list_pairs(cell)) / costs[cell])
        chosen.append(best)
        uncovered -= list_pairs(best)
    num_cells = Counter(pair for cell in chosen for pair in list_pairs(cell))
    for cell in sorted(chosen, key=lambda cell: costs[cell], reverse=True):
        if all(num_cells[pair] > 1 for pair in list_pairs(cell)):  # covered by later choices
            chosen.remove(cell)
            num_cells.subtract(list_pairs(cell))
    return sorted(chosen, key=cells.index)


def shorten_pipeline(cell: GridCell) -> VerificationCase:
    if cell.layout.pp == 1:
        return cell.case
    return replace(cell.case, accumulation=2 * cell.layout.pp)


def choose_num_layers(layout: Layout, offload: OffloadSection) -> int:
    num_stages = layout.pp * count_stages_per_rank(layout.schedule)
    if num_stages <= NUM_COVERING_LAYERS and offload.activations == "none":
        return NUM_COVERING_LAYERS
    return NUM_GRID_LAYERS


def estimate_cost(cell: GridCell) -> float:
    """Estimate the processor time of a cell, up to a constant factor; fitted to measured times.

    The time that ranks wait for each other counts too.
    """
    layers_of_rank = cell.num_layers / cell.layout.pp
    operations = layers_of_rank * (1 + cell.case.accumulation) * RECOMPUTE_COST[cell.case.recompute]
    cost = cell.layout.world_size**1.5 * operations * (1.4 if cell.model == "moe" else 1.0)
    return cost * (OFFLOAD_COST if cell.offload.is_enabled else 1.0)


@cache
def list_pairs(cell: GridCell) -> frozenset[tuple[str, str]]:
    """Return the pairs that `choose_covering_cells` covers.

    Offloading is paired with the degrees, stages and recomputations, which decide when its
    transfers begin and end.
    """
    properties = list_properties(cell)
    decisive = [
        name
        for name in properties
        if name in (*AXES, "ep") or name.startswith(("zero_stage", "recompute"))
    ]
    return frozenset(
        [
            *combinations(sorted(properties), 2),
            *product(sorted(cell.offload_properties), decisive),
        ]
    )


def list_properties(cell: GridCell) -> frozenset[str]:
    """Return properties of model, layout and case; all pairs of them are covered."""
    layout = cell.layout
    case = cell.case
    properties = {
        f"model {cell.model}",
        f"accumulation {min(case.accumulation, 3)}",
        f"recompute {case.recompute}",
    }
    properties |= {
        f"dropout {case.dropout}",
        f"documents {case.documents}",
        f"zero_stage {layout.zero_stage}",
    }
    properties |= {
        axis
        for axis in ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep")
        if layout.degree(axis) > 1
    }
    if layout.tp > 1:
        properties.add(f"sequence_parallel {layout.sequence_parallel}")
    if layout.pp > 1:
        properties.add(layout.schedule)
        properties |= {"embedding tied over stages"} if cell.model == "tied" else set()
    if layout.cp > 1:
        properties.add(layout.cp_method)
    return frozenset(properties)
