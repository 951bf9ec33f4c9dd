"""Layouts and their combinations against one process: a few cells that cover all pairs of
properties, in NCCL's order, and all of them in the long suite.
"""

from __future__ import annotations

import pytest

from shardwright.verification.grid import list_cells
from shardwright.verification.verification import GridCellResult, verify_grid
from tests.covering_cells import choose_covering_cells
from tests.multiprocess.nccl_order.pool import OrderedRankPool
from tests.multiprocess.pool import RankPool

MAX_RANKS = 4
"""Pairs that need eight ranks take as long as all others together; only the long suite runs
them.
"""


def list_failures(rows: list[GridCellResult]) -> list[str]:
    return [
        f"{row.cell.model} {row.cell.layout} | {row.cell.case}: "
        + (
            row.result.failure
            or "; ".join(
                f"{f.quantity}, {f.subject}: {f.error:.2e}"
                for f in row.result.findings
                if not f.passed
            )
        )
        for row in rows
        if row.result is not None and not row.passed
    ]


@pytest.mark.timeout(900)  # dozens of cells: more than four minutes on a busy machine
def test_cells_that_cover_all_pairs_of_properties(ordered_ranks: OrderedRankPool) -> None:
    cells = [cell for cell in list_cells(MAX_RANKS) if cell.refusal is None]
    rows = verify_grid(choose_covering_cells(cells), ordered_ranks, on_row=lambda _row: None)
    assert not list_failures(rows)
    assert len(rows) >= 40
    assert {"dense", "tied", "moe"} == {row.cell.model for row in rows}


@pytest.mark.long
@pytest.mark.timeout(14400)
def test_every_cell(ranks: RankPool) -> None:
    rows = verify_grid(list_cells(), ranks, on_row=lambda _row: None)
    assert not list_failures(rows)
    run = [row for row in rows if row.result is not None]
    assert len(run) >= 300
    # Every refused cell has the reason that the recipe's own rule gives.
    assert all(row.cell.refusal for row in rows if row.result is None)
