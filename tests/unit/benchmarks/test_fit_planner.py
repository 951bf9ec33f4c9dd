"""The fit of the planner's efficiencies finds the values that generated the rows; others keep the
value of the level above.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.planner_fit import Fit
from benchmarks.planner_parameters import PARAMETERS, START, Parameter
from benchmarks.planner_picks import RULES, compute_slowdowns, find_picks_that_ran
from benchmarks.planner_rows import (
    Row,
    compute_errors,
    list_sources_with_shared_trainer,
    split_into_halves,
)

from shardwright.planner.prediction import MemoryParts, Prediction, TimeParts
from shardwright.planner.published.measurements import extract_configuration, read_published_run
from shardwright.planner.published.predictions import predict_published_run
from shardwright.planner.rates.calibration import ALL_FRAMEWORKS, EfficiencyTable
from tests.unit.planner.published.rows import ROW

SHARES = [
    Parameter("accelerators", name, "matmul_share", 0.3, 0.95)
    for name in ("gpu", "Ampere", "Hopper")
]
FUSION = [
    Parameter("frameworks", name, "bytes_share", 0.4, 3.0)
    for name in (ALL_FRAMEWORKS, "nanotron", "megatron-core")
]


def _make_rows(
    truth: EfficiencyTable, gpu: str = "A100-SXM4-80GB", source: str = "NeMo"
) -> list[Row]:
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
        rows.append(
            Row(case, predict_published_run(case, truth).tokens_per_second_per_gpu, None, True)
        )
    return rows


def test_the_fit_finds_the_values_that_generated_the_rows() -> None:
    truth = EfficiencyTable(
        {
            "accelerators": {"Ampere": {"matmul_share": 0.55}},
            "frameworks": {"megatron-core": {"bytes_share": 2.0}},
        }
    )
    fitted = Fit(_make_rows(truth), [*SHARES, *FUSION], EfficiencyTable({}), pull=1e-6).run(20)
    for row in _make_rows(truth):
        assert compute_errors(row, fitted).time == pytest.approx(0.0, abs=0.01)


def test_a_value_without_rows_is_that_of_the_level_above() -> None:
    truth = EfficiencyTable({"frameworks": {"megatron-core": {"bytes_share": 2.5}}})
    rows = _make_rows(truth)
    fitted = Fit(rows, FUSION, EfficiencyTable({})).run(20)
    accelerator = rows[0].case.cluster.accelerator
    measured, unmeasured = (
        fitted.get_efficiency(accelerator, name).bytes_share
        for name in ("megatron-core", "nanotron")
    )
    assert measured == pytest.approx(2.5, rel=0.1)
    assert unmeasured == fitted.get_efficiency(accelerator, ALL_FRAMEWORKS).bytes_share
    assert 1.0 < unmeasured < measured, (
        "an unmeasured framework is predicted between the default and the measured ones"
    )
    assert "nanotron" not in fitted.sections["frameworks"], (
        "an entry equal to the level above is not written"
    )


def test_the_fit_does_not_depend_on_its_start() -> None:
    truth = EfficiencyTable({"accelerators": {"Ampere": {"matmul_share": 0.4}}})
    distant = EfficiencyTable(
        {"accelerators": {"gpu": {"matmul_share": 0.9}, "Ampere": {"matmul_share": 0.9}}}
    )
    rows = _make_rows(truth)
    accelerator = rows[0].case.cluster.accelerator
    default, moved = (
        Fit(rows, SHARES, EfficiencyTable({}))
        .run(30, initial=begin)
        .get_efficiency(accelerator)
        .matmul_share
        for begin in (EfficiencyTable({}), distant)
    )
    assert moved == pytest.approx(default, rel=0.01)


def test_a_stronger_pull_keeps_numbers_nearer_to_the_level_above() -> None:
    truth = EfficiencyTable({"accelerators": {"Ampere": {"matmul_share": 0.4}}})
    rows = _make_rows(truth)
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


def test_underestimated_memory_costs_more_and_only_a_wrong_verdict_costs() -> None:
    row = _make_rows(START)[0]
    gib = predict_published_run(row.case, START).memory.total / 2**30

    def cost(row: Row) -> float:
        fit = Fit([row], [], START)
        return float(fit._loss(fit._residuals(fit._make_initial_vector(START)) ** 2)[0].sum())

    exact, under, over = (
        cost(replace(row, memory_gib=gib * factor)) for factor in (1.0, 1 / 0.8, 1 / 1.2)
    )
    assert exact == pytest.approx(0.0, abs=1e-9)
    assert under > over > exact
    judged = replace(row, case=replace(row.case, source="aleph-layouts"))
    fits = predict_published_run(row.case, START).fits
    assert cost(replace(judged, ran=fits)) == pytest.approx(0.0, abs=1e-9)
    assert cost(replace(judged, ran=not fits)) > 0.01


def test_the_halves_of_a_source_are_disjoint() -> None:
    rows = [*_make_rows(START), *_make_rows(START, source="nanotron")]
    fitted_half, other_half = split_into_halves(rows)
    assert sorted(row.case.id for row in (*fitted_half, *other_half)) == sorted(
        row.case.id for row in rows
    )
    assert (
        {row.case.source for row in fitted_half}
        == {row.case.source for row in other_half}
        == {"NeMo", "nanotron"}
    )


def _predict(row: Row, step: float, memory_share: float) -> Prediction:
    prediction = predict_published_run(row.case, START)
    memory = MemoryParts(weights=memory_share * prediction.memory_capacity_bytes)
    return replace(prediction, time=TimeParts(compute=step), memory=memory)


def test_a_pick_is_the_fastest_row_or_one_with_a_margin_or_a_simple_one() -> None:
    rows = [*_make_rows(START), *_make_rows(START, source="nanotron")][:5]
    speeds = (80.0, 70.0, 100.0, 90.0, 10.0)
    rows = [
        replace(row, tokens_per_second=speed, job=("large" if number < 4 else "small",))
        for number, (row, speed) in enumerate(zip(rows, speeds, strict=True))
    ]
    predictions = {
        row.case.id: _predict(row, step, share)
        for row, step, share in zip(
            rows, (1.25, 1.22, 1.2, 1.0, 1.0), (0.5, 0.5, 0.5, 0.999, 0.1), strict=True
        )
    }

    def compute_losses() -> list[float]:
        found = [compute_slowdowns(rows, predictions, rule) for rule in RULES.values()]
        assert all(list(by_source) == ["NeMo"] for by_source in found)  # the other job is small
        return [loss for by_source in found for loss in by_source["NeMo"]]

    # The fastest is tight; of the others, the one without tensor parallelism is within 5%.
    assert compute_losses() == pytest.approx([0.1, 0.0, 0.2])
    fastest = rows[3].case.id
    predictions[fastest] = _predict(rows[3], 1.0, 0.6)
    assert compute_losses() == pytest.approx([0.1, 0.1, 0.1])
    # Nothing fits: the fastest prediction.
    for name, prediction in predictions.items():
        predictions[name] = replace(prediction, memory=MemoryParts(weights=1e15))
    assert compute_losses() == pytest.approx([0.1, 0.1, 0.1])


def test_picks_ran_in_jobs_of_which_some_rows_did_not() -> None:
    rows = [
        replace(row, ran=ran, job=("job",), case=replace(row.case, source="aleph-layouts"))
        for row, ran in zip(_make_rows(START), (True, True, True, False), strict=True)
    ]
    predictions = {
        row.case.id: _predict(row, step, share)
        for row, step, share in zip(rows, (3.0, 2.0, 2.5, 1.0), (0.5, 0.5, 0.5, 0.999), strict=True)
    }
    ran = [find_picks_that_ran(rows, predictions, rule) for rule in RULES.values()]
    assert ran == [[False], [True], [True]]
    all_ran = [replace(row, ran=True) for row in rows]
    assert find_picks_that_ran(all_ran, predictions, RULES["fastest"]) == []
    tight = {row.case.id: _predict(row, 1.0, 0.999) for row in rows}
    assert find_picks_that_ran(rows, tight, RULES["not tight"]) == []


def test_a_source_shares_its_trainer_if_most_of_its_rows_do() -> None:
    nemo = _make_rows(START)
    other = [replace(row, case=replace(row.case, source="other")) for row in nemo]
    alone = _make_rows(START, source="nanotron")
    assert list_sources_with_shared_trainer([*nemo, *alone]) == []
    assert list_sources_with_shared_trainer([*nemo, *other, *alone]) == ["NeMo", "other"]


def test_a_parameter_is_set_within_its_bounds_and_removed() -> None:
    for parameter in PARAMETERS:
        assert parameter.low < parameter.high
        high = parameter.replace(START, 1e12)
        assert parameter.get(high) == pytest.approx(parameter.high)
        assert parameter.get(parameter.drop(high)) is None
        assert parameter.unscale(parameter.scale(parameter.high)) == pytest.approx(parameter.high)
