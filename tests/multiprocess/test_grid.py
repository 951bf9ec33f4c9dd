"""Every cut, pair and product against one process: few cells that cover all pairs of properties,
all of them in the long suite.
"""

from __future__ import annotations

import pytest

from shardwright.verify.grid import choose_covering_cells, list_cells
from shardwright.verify.verification import GridCellResult, verify_grid
from tests.multiprocess.pool import RankPool

EVERY_DAY_RANKS = 4
"""Some pairs meet on eight ranks only; those take as long as all others together, and are left to
the long suite.
"""


def failures(rows: list[GridCellResult]) -> list[str]:
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
def test_cells_in_which_any_two_properties_meet(ranks: RankPool) -> None:
    cells = [cell for cell in list_cells(EVERY_DAY_RANKS) if cell.refusal is None]
    rows = verify_grid(choose_covering_cells(cells), ranks, on_row=lambda _row: None)
    assert not failures(rows)
    assert len(rows) >= 40
    assert {"dense", "tied", "moe"} == {row.cell.model for row in rows}


@pytest.mark.long
@pytest.mark.timeout(14400)
def test_every_cell(ranks: RankPool) -> None:
    rows = verify_grid(list_cells(), ranks, on_row=lambda _row: None)
    assert not failures(rows)
    run = [row for row in rows if row.result is not None]
    assert len(run) >= 300
    # What is refused is refused for a reason that the recipe's own rule gives.
    assert all(row.cell.refusal for row in rows if row.result is None)
