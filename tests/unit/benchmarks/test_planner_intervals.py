"""Spreads of errors by cause: rows left out of a fit have no part in it."""

from __future__ import annotations

from dataclasses import replace
from math import log
from typing import get_args

import pytest
from benchmarks.gpu_figures import count_predicted_runs
from benchmarks.planner_fit import Fit
from benchmarks.planner_intervals import (
    Coverage,
    UnseenError,
    combine_parts,
    combine_sources,
    compute_unseen_errors,
    explain_errors,
    load_public_errors,
    measure_coverage,
    measure_spreads,
    show_totals,
)
from benchmarks.planner_parameters import Parameter
from benchmarks.planner_rows import LeftOut, PartKind, Row, list_parts
from benchmarks.public_rows import ROWS as PUBLIC_ROWS

from shardwright.planner.published.measurements import (
    extract_configuration,
    read_published_run,
    read_rows,
)
from shardwright.planner.published.predictions import predict_published_run
from shardwright.planner.rates.calibration import EfficiencyTable
from shardwright.planner.uncertainty import ErrorCause, ErrorSpread, ErrorSpreads
from tests.unit.planner.published.rows import ROW

PARAMETERS = (
    Parameter("accelerators", "gpu", "matmul_share", 0.3, 0.95),
    Parameter("accelerators", "Ampere", "matmul_share", 0.3, 0.95),
    Parameter("accelerators", "Hopper", "matmul_share", 0.3, 0.95),
)
TRUTH = EfficiencyTable(
    {"accelerators": {"Ampere": {"matmul_share": 0.5}, "Hopper": {"matmul_share": 0.75}}}
)


def make_row(number: int, gpu: str, source: str) -> Row:
    case = read_published_run(
        f"row-{number}",
        extract_configuration(
            ROW | {"gpu": gpu, "source_group": source, "micro_batch": str(1 << number % 3)}
        ),
    )
    return Row(case, predict_published_run(case, TRUTH).tokens_per_second_per_gpu, None, ran=True)


ROWS = [make_row(n, "A100-80GB", "first") for n in range(6)] + [
    make_row(n, "H100-80GB", "second") for n in range(6, 12)
]


def test_rows_that_are_left_out_have_no_part_in_the_fit() -> None:
    def fit_without_first(rows: list[Row]) -> EfficiencyTable:
        fit = Fit(rows, PARAMETERS, EfficiencyTable({}))
        (found,) = fit.fit_without([lambda row: row.case.source == "first"], TRUTH)
        return found

    found = fit_without_first(ROWS)
    changed = [
        replace(row, tokens_per_second=3 * (row.tokens_per_second or 0))
        if row.case.source == "first"
        else row
        for row in ROWS
    ]
    assert fit_without_first(changed) == found
    ampere, hopper = (
        found.get_efficiency(row.case.cluster.accelerator).matmul_share
        for row in (ROWS[0], ROWS[-1])
    )
    assert hopper == pytest.approx(0.75, rel=0.05)
    assert ampere == pytest.approx(
        found.sections["accelerators"]["gpu"]["matmul_share"], rel=0.02
    ), "without its rows a generation has the number of all accelerators"


def test_absent_rows_are_in_no_part_and_in_no_fit() -> None:
    parts = list_parts(ROWS, absent=lambda row: row.case.source == "first")
    assert {kind: len(found) for kind, found in parts.items()} == {
        "half": 2,
        "source": 1,
        "generation": 1,
    }
    for part in (part for found in parts.values() for part in found):
        assert all(part.is_left_out(row) for row in ROWS[:6])
        assert not any(part.is_predicted(row) for row in ROWS[:6])
    for found in parts.values():
        assert [sum(part.is_predicted(row) for part in found) for row in ROWS[6:]] == [1] * 6


def make_errors(source: str, values: list[float], trainer_ignorance: float) -> list[UnseenError]:
    return [
        UnseenError(
            replace(ROWS[0], case=replace(ROWS[0].case, source=source)),
            {"time": value},
            {"time": trainer_ignorance, "memory": 1.0},
            accelerator_ignorance=0.0,
        )
        for value in values
    ]


def test_every_source_counts_once_in_a_spread() -> None:
    errors = {
        "many": [0.1] * 1000,
        "few": [-0.3, -0.2, -0.1, 0.0, 0.2, 0.3],
        "too few": [9.0] * 4,
    }
    spread = combine_sources(errors)
    # A row of "few" is a twelfth of all: two of them are a sixth, one is not a tenth.
    assert (spread.low, spread.high) == pytest.approx((0.2, 0.2))
    assert combine_sources(errors | {"few": errors["few"] * 50}) == spread
    assert combine_sources({}) == ErrorSpread()


def test_memory_of_our_engine_has_the_spread_of_the_folders_trainers() -> None:
    def make_memory_errors(values: list[float], ignorance: float) -> list[UnseenError]:
        return [
            replace(
                error,
                errors={"memory": error.errors["time"]},
                trainer_ignorance={"time": 1.0, "memory": ignorance},
            )
            for error in make_errors("any", values, 1.0)
        ]

    half = make_memory_errors([0.0] * 5, 0.1)
    source = make_memory_errors([-0.1, 0.2] * 5, 1.0)
    public = make_memory_errors([0.5] * 50, 1.0)
    parts = list_parts(ROWS)
    kinds: dict[PartKind, list[LeftOut]] = {
        "half": parts["half"][:1],
        "source": parts["source"][:1],
    }
    found = combine_parts(ROWS, kinds | {"generation": []}, [half, source], public)
    assert found.spreads["memory"]["own"] == ErrorSpread(0.1, 0.2)
    assert found.spreads["memory"]["trainer"].high == 0.5


def test_errors_of_public_rows_are_those_that_nobody_had_seen() -> None:
    errors = explain_errors(load_public_errors(), ROWS)
    raw = {row["id"]: row for row in read_rows(PUBLIC_ROWS)}
    assert {error.row.case.id for error in errors} == set(raw)
    for error in errors:
        row = raw[error.row.case.id]
        if "time" in error.errors:
            predicted = float(row["first_pred_tok"])
            measured = float(row["tokens_per_sec_per_gpu"])
            assert error.errors["time"] == pytest.approx(log(predicted / measured))
    # A trainer with rows in the fit is a measured one.
    (known,) = {row.case.framework for row in ROWS}
    causes = {error.row.case.framework: error.find_cause("time") for error in errors}
    assert causes.get(known) != "trainer"
    assert "trainer" in causes.values()


def test_a_cause_has_the_variance_beyond_that_of_the_base() -> None:
    base = make_errors("known", [-0.3, 0.3] * 10, trainer_ignorance=0.1)
    other = make_errors("new", [-0.1, 0.5] * 10, trainer_ignorance=1.0)
    spreads = measure_spreads("time", [*base, *other], [])
    assert (spreads["base"].low, spreads["base"].high) == pytest.approx((0.3, 0.3))
    assert (spreads["trainer"].low, spreads["trainer"].high) == pytest.approx((0.0, 0.4))
    assert spreads["sparse"] == ErrorSpread()
    assert spreads["cpu"].high > 0


def test_coverage_is_the_share_of_rows_inside_their_intervals() -> None:
    spread = ErrorSpread(0.1, 0.2)
    causes = dict.fromkeys(get_args(ErrorCause), ErrorSpread())
    spreads = ErrorSpreads({"time": causes | {"base": spread}, "memory": causes}, {})
    errors = make_errors("any", [-0.11, -0.09, 0.0, 0.19, 0.21], 1.0)
    coverage = measure_coverage(errors, spreads)["time"]
    assert (coverage.num_rows, coverage.share) == (5, pytest.approx(0.6))
    assert "memory" not in measure_coverage(errors, spreads)


def test_totals_count_sources_rows_and_a_limited_number_of_rows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show_totals(
        {
            "large": {"time": Coverage(600, 0.4, 0, 0), "memory": Coverage(1, 1.0, 0, 0)},
            "small": {"time": Coverage(100, 0.8, 0, 0)},
        }
    )
    shown = capsys.readouterr().out.splitlines()[0]
    assert shown == (
        "time: 60% of a source on average, 50% of at most 300 rows of each, 46% of all rows"
    )


def test_an_error_is_the_logarithm_of_measured_over_predicted_seconds() -> None:
    row = replace(ROWS[0], tokens_per_second=(ROWS[0].tokens_per_second or 0) / 2)
    (error,) = compute_unseen_errors([row], ROWS[1:], TRUTH)
    assert error.errors["time"] == pytest.approx(0.693, abs=1e-3)
    assert error.find_cause("time") == "accelerator"  # 5 rows on Ampere, 11 of the trainer
    assert error.trainer_ignorance["time"] == pytest.approx(1 / (1 + 11 / 10))


def test_runs_of_our_engine_are_counted_where_predicted_and_measured() -> None:
    run = {"predicted": {"step_seconds": 1.0}, "tokens_per_second": 9.0}
    steps = [
        {"name": "speed a", "result": {"cases": [{"contenders": {"shardwright": run}}]}},
        {"name": "speed b", "result": {"cases": [{"contenders": {"trainer": run}}]}},
        {"name": "smoke", "result": {"cases": [{"contenders": {"shardwright": run}}]}},
        {"name": "speed c", "status": "not run"},
    ]
    assert count_predicted_runs({"steps": steps}, "tokens_per_second") == 1
    assert count_predicted_runs({"steps": steps}, "peak_allocated_bytes") == 0
