"""The matrix holds what it promises: every cut, every pair, products of three and four, and enough
of them.
"""

from __future__ import annotations

from itertools import combinations

from shardwright.verify.grid import (
    CP_METHODS,
    GRID_CASES,
    GRID_MODELS,
    SCHEDULES,
    choose_covering_cells,
    group_by_reference,
    list_cells,
    list_grid_layouts,
)

CUTS = ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep")


def cut_of(layout: object) -> frozenset[str]:
    return frozenset(axis for axis in CUTS if getattr(layout, axis) > 1)


def test_every_cut_alone_every_pair_and_products_of_three_and_four_are_there() -> None:
    found = {cut_of(layout) for layout in list_grid_layouts()}
    assert all(frozenset([cut]) in found for cut in ("dp_replicate", "dp_shard", "tp", "pp", "cp"))
    for pair in combinations(CUTS, 2):
        # Experts borrow ranks of dp_shard or cp: a pair with them has one of these, too.
        assert any(set(pair) <= cut and len(cut) <= (3 if "ep" in pair else 2) for cut in found), (
            pair
        )
    assert {len(cut - {"ep"}) for cut in found} == {1, 2, 3, 4}
    assert max(layout.world_size for layout in list_grid_layouts()) == 16


def test_every_schedule_and_method_is_met_by_every_model() -> None:
    cells = list_cells()
    for model in GRID_MODELS:
        mine = [cell.layout for cell in cells if cell.model == model]
        assert {layout.schedule for layout in mine if layout.pp > 1} == set(SCHEDULES)
        assert {layout.cp_method for layout in mine if layout.cp > 1} == set(CP_METHODS)
        assert {layout.sequence_parallel for layout in mine if layout.tp > 1} == {True, False}


def test_ways_of_computing_meet_in_pairs() -> None:
    options = [
        (case.accumulation, case.recompute, case.dropout, case.documents) for case in GRID_CASES
    ]
    for one, other in combinations(range(4), 2):
        met = {(option[one], option[other]) for option in options}
        assert len(met) == len({option[one] for option in options}) * len(
            {option[other] for option in options}
        )


def test_few_cells_cover_the_pairs_that_all_of_them_meet() -> None:
    cells = [cell for cell in list_cells() if cell.layout.world_size <= 8]
    chosen = choose_covering_cells(cells)
    assert len(chosen) < len(cells) / 4

    def pairs(of: list[object]) -> set[tuple[str, str]]:
        return {pair for cell in of for pair in combinations(sorted(cell.properties), 2)}  # type: ignore[attr-defined]

    assert pairs(list(chosen)) == pairs(list(cells))


def test_cells_share_references() -> None:
    cells = list_cells()
    grouped = group_by_reference(cells)
    assert sum(map(len, grouped.values())) == len(cells)
    assert len(grouped) < len(cells) / 3
