"""The fit of the planner's efficiencies finds the numbers that made the rows, and holds the others
to the level above.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.planner_fit import Fit
from benchmarks.planner_parameters import PARAMETERS, START, Parameter
from benchmarks.planner_rows import Row, compute_errors, split_into_halves

from shardwright.planner.calibration import ALL_FRAMEWORKS, EfficiencyTable
from shardwright.planner.published.measurements import extract_configuration, read_published_run
from shardwright.planner.published.predictions import predict_run
from tests.unit.planner.test_measurements import ROW

SHARES = [
    Parameter("accelerators", name, "matmul_share", 0.3, 0.95)
    for name in ("gpu", "Ampere", "Hopper")
]
FUSION = [
    Parameter("frameworks", name, "bytes_share", 0.4, 3.0)
    for name in (ALL_FRAMEWORKS, "nanotron", "megatron-core")
]


def _rows(truth: EfficiencyTable, gpu: str = "A100-SXM4-80GB", source: str = "NeMo") -> list[Row]:
    rows = []
    for tp in (1, 2, 4, 8):
        raw = ROW | {
            "tp": str(tp),
            "dp": str(16 // tp),
            "pp": "1",
            "gpus": "16",
            "recompute": "full",
            "micro_batch": "1",
        }
        raw |= {"gpu": gpu, "source": source, "source_group": source, "notes": ""}
        case = read_published_run(f"{gpu}-{source}-{tp}", extract_configuration(raw))
        rows.append(Row(case, predict_run(case, truth).tokens_per_second_per_gpu, None, True))
    return rows


def test_the_fit_finds_the_numbers_that_made_the_rows() -> None:
    truth = EfficiencyTable(
        {
            "accelerators": {"Ampere": {"matmul_share": 0.55}},
            "frameworks": {"megatron-core": {"bytes_share": 2.0}},
        }
    )
    found = Fit(_rows(truth), [*SHARES, *FUSION], EfficiencyTable({}), pull=1e-6).run(20)
    for row in _rows(truth):
        assert compute_errors(row, found).time == pytest.approx(0.0, abs=0.01)


def test_what_no_row_tells_is_what_the_level_above_has() -> None:
    truth = EfficiencyTable({"frameworks": {"megatron-core": {"bytes_share": 2.5}}})
    rows = _rows(truth)
    found = Fit(rows, FUSION, EfficiencyTable({})).run(20)
    accelerator = rows[0].case.cluster.accelerator
    told, untold = (
        found.get_efficiency(accelerator, name).bytes_share
        for name in ("megatron-core", "nanotron")
    )
    assert told == pytest.approx(2.5, rel=0.1)
    assert untold == found.get_efficiency(accelerator, ALL_FRAMEWORKS).bytes_share
    assert 1.0 < untold < told, (
        "a trainer that nobody measured is taken to be on the way to those that were"
    )
    assert "nanotron" not in found.sections["frameworks"], (
        "an entry that says no more than the level above is not written"
    )


def test_the_search_ends_at_the_same_numbers_wherever_it_begins() -> None:
    truth = EfficiencyTable({"accelerators": {"Ampere": {"matmul_share": 0.4}}})
    far = EfficiencyTable(
        {"accelerators": {"gpu": {"matmul_share": 0.9}, "Ampere": {"matmul_share": 0.9}}}
    )
    rows = _rows(truth)
    accelerator = rows[0].case.cluster.accelerator
    near, moved = (
        Fit(rows, SHARES, EfficiencyTable({}))
        .run(30, initial=begin)
        .get_efficiency(accelerator)
        .matmul_share
        for begin in (EfficiencyTable({}), far)
    )
    assert moved == pytest.approx(near, rel=0.01)


def test_a_stronger_pull_keeps_numbers_nearer_to_the_level_above() -> None:
    truth = EfficiencyTable({"accelerators": {"Ampere": {"matmul_share": 0.4}}})
    rows = _rows(truth)
    accelerator = rows[0].case.cluster.accelerator
    loose, tight = (
        Fit(rows, SHARES, EfficiencyTable({}), pull)
        .run(20)
        .get_efficiency(accelerator)
        .matmul_share
        for pull in (1e-4, 10.0)
    )
    assert loose == pytest.approx(0.4, rel=0.02)
    assert tight > 0.45


def test_memory_that_is_too_small_costs_more_and_only_a_wrong_fit_costs() -> None:
    row = _rows(START)[0]
    gib = predict_run(row.case, START).memory.total / 2**30

    def cost(row: Row) -> float:
        fit = Fit([row], [], START)
        return float(fit._loss(fit._residuals(fit._make_initial_vector(START)) ** 2)[0].sum())

    exact, under, over = (
        cost(replace(row, memory_gib=gib * factor)) for factor in (1.0, 1 / 0.8, 1 / 1.2)
    )
    assert exact == pytest.approx(0.0, abs=1e-9)
    assert under > over > exact
    judged = replace(row, case=replace(row.case, source="aleph-layouts"))
    fits = predict_run(row.case, START).fits
    assert cost(replace(judged, ran=fits)) == pytest.approx(0.0, abs=1e-9)
    assert cost(replace(judged, ran=not fits)) > 0.01


def test_the_halves_of_a_source_have_no_row_in_common() -> None:
    rows = [*_rows(START), *_rows(START, source="nanotron")]
    looked_at, held_out = split_into_halves(rows)
    assert sorted(row.case.id for row in (*looked_at, *held_out)) == sorted(
        row.case.id for row in rows
    )
    assert (
        {row.case.source for row in looked_at}
        == {row.case.source for row in held_out}
        == {"NeMo", "nanotron"}
    )


def test_a_number_is_written_within_its_bounds_and_dropped_again() -> None:
    for parameter in PARAMETERS:
        assert parameter.low < parameter.high
        high = parameter.replace(START, 1e12)
        assert parameter.get(high) == pytest.approx(parameter.high)
        assert parameter.get(parameter.drop(high)) is None
        assert parameter.unscale(parameter.scale(parameter.high)) == pytest.approx(parameter.high)
