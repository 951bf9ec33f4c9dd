"""The fit of the planner's efficiencies finds a number that made the rows, and never looks at a row that it holds out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.fit_planner import Row, Search, errors_of, names_read
from benchmarks.planner_parameters import PARAMETERS, Parameter

from shardwright.planner.achieved import Efficiencies
from shardwright.planner.measurements import configuration, read_case
from shardwright.planner.published import predict_case
from tests.unit.planner.test_measurements import ROW

TRUTH = Efficiencies({"accelerators": {"Ampere": {"matmul_share": 0.55}}})


def _rows() -> list[Row]:
    rows = []
    for index, tp in enumerate((1, 2, 4, 8)):
        raw = ROW | {"tp": str(tp), "dp": str(16 // tp), "pp": "1", "gpus": "16", "recompute": "full", "micro_batch": "1"}
        case = read_case(f"row-{index}", configuration(raw))
        rows.append(Row(case, predict_case(case, TRUTH).tokens_per_second_per_gpu, None, True))
    return rows


def test_the_search_finds_the_share_that_made_the_rows() -> None:
    parameter = Parameter("accelerators", "Ampere", "matmul_share", 0.3, 0.95)
    found = Search(_rows()).run(Efficiencies({}), [parameter], passes=6)
    assert found.sections["accelerators"]["Ampere"]["matmul_share"] == pytest.approx(0.55, rel=0.03)


def test_under_predicted_memory_costs_more_and_a_wrong_fit_costs() -> None:
    row = _rows()[0]
    exact = errors_of(row, TRUTH)
    assert exact.time == pytest.approx(0.0)
    assert exact.loss == pytest.approx(0.0)
    gib = predict_case(row.case, TRUTH).memory.total / 2**30
    under, over = (errors_of(replace(row, memory_gib=gib * factor), TRUTH).loss for factor in (1 / 0.8, 1 / 1.2))
    assert under > over == pytest.approx(0.2)


def test_every_parameter_is_read_by_some_row_that_can_exist() -> None:
    names = {(p.section, p.name) for p in PARAMETERS}
    assert ("accelerators", "Ampere") in names
    assert set(names_read(_rows()[0].case)) & names
