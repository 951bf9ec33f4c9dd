"""The verification grid has every degree, every pair, and products of three and four degrees."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations

from tests.covering_cells import choose_covering_cells, list_properties

from shardwright.verification.grid import (
    CP_METHODS,
    GRID_CASES,
    GRID_MODELS,
    SCHEDULES,
    GridCell,
    group_by_reference,
    list_cells,
    list_grid_layouts,
)

DEGREES = ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep")


def list_degrees(layout: object) -> frozenset[str]:
    return frozenset(axis for axis in DEGREES if getattr(layout, axis) > 1)


def test_the_grid_has_every_degree_every_pair_and_products_of_three_and_four() -> None:
    combined = {list_degrees(layout) for layout in list_grid_layouts()}
    assert all(
        frozenset([degrees]) in combined
        for degrees in ("dp_replicate", "dp_shard", "tp", "pp", "cp")
    )
    for pair in combinations(DEGREES, 2):
        # Experts use ranks of dp_shard or cp: a pair with ep has one of these too.
        assert any(
            set(pair) <= degrees and len(degrees) <= (3 if "ep" in pair else 2)
            for degrees in combined
        ), pair
    assert {len(degrees - {"ep"}) for degrees in combined} == {1, 2, 3, 4}
    assert max(layout.world_size for layout in list_grid_layouts()) == 16


def test_every_model_has_every_schedule_and_method() -> None:
    cells = list_cells()
    for model in GRID_MODELS:
        layouts = [cell.layout for cell in cells if cell.model == model]
        assert {layout.schedule for layout in layouts if layout.pp > 1} == set(SCHEDULES)
        assert {layout.cp_method for layout in layouts if layout.cp > 1} == set(CP_METHODS)
        assert {layout.sequence_parallel for layout in layouts if layout.tp > 1} == {True, False}


def test_options_of_cases_are_covered_in_pairs() -> None:
    options = [
        (case.accumulation, case.recompute, case.dropout, case.documents) for case in GRID_CASES
    ]
    for first, second in combinations(range(4), 2):
        pairs = {(option[first], option[second]) for option in options}
        assert len(pairs) == len({option[first] for option in options}) * len(
            {option[second] for option in options}
        )


def test_few_cells_cover_all_pairs_of_properties() -> None:
    cells = [cell for cell in list_cells() if cell.layout.world_size <= 8]
    chosen = choose_covering_cells(cells)
    assert len(chosen) < len(cells) / 4

    def list_pairs(cells: Iterable[GridCell]) -> set[tuple[str, ...]]:
        return {pair for cell in cells for pair in combinations(sorted(list_properties(cell)), 2)}

    assert list_pairs(chosen) == list_pairs(cells)


def test_quantised_products_have_references_of_their_own() -> None:
    cells = [cell for cell in list_cells() if cell.low_precision is not None]
    assert {cell.model for cell in cells} == set(GRID_MODELS)
    assert {cell.dtype for cell in cells} == {"float64"}
    plain = [replace(cell, low_precision=None) for cell in cells]
    assert {cell.dtype for cell in plain} == {"float32"}
    assert len(group_by_reference([*cells, *plain])) == 2 * len(cells)
    assert [cell for cell in list_cells(1) if cell.low_precision is not None] == []


def test_cells_share_references() -> None:
    cells = list_cells()
    grouped = group_by_reference(cells)
    assert sum(map(len, grouped)) == len(cells)
    assert len(grouped) < len(cells) / 3
