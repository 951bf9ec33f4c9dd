"""Published losses of fp32, bf16, 8-bit and 4-bit runs: the page, the verdict and the tolerance."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks import low_precision_runs
from benchmarks.low_precision import (
    DIFFERENCE_IMAGE,
    FIELDS,
    LOSS_IMAGE,
    NUMBERS,
    PAGE,
    compute_interval,
    draw,
    find_spread,
    list_distinct,
    list_outside,
    render_page,
    sort_runs,
)
from benchmarks.low_precision_runs import (
    BF16_SEEDS,
    FP8_RECIPES,
    LARGER_PRECISIONS,
    SEEDS,
    measure,
)

from shardwright.report.run_comparison import PRECISION_TOLERANCE


@pytest.fixture
def published() -> Any:
    return json.loads(NUMBERS.read_text())


def test_the_tolerance_of_precisions_follows_the_published_runs(published: Any) -> None:
    """The spread of bf16's seeds, rounded."""
    runs = sort_runs(published)
    spreads = []
    for field in FIELDS:
        low, high = find_spread(runs, field, SEEDS)
        spreads.append((high - low) / low)
    assert round(max(spreads), 2) == PRECISION_TOLERANCE


def test_every_precision_has_its_seeds_and_steps(published: Any) -> None:
    runs = sort_runs(published)
    fp8 = [f"fp8 {recipe}" for recipe in FP8_RECIPES]
    assert list(runs) == ["bf16", "fp32", *fp8, "nvfp4", "nvfp4 nearest"]
    for precision, by_seed in runs.items():
        assert tuple(by_seed) == (BF16_SEEDS if precision == "bf16" else SEEDS)
    larger = sort_runs(published, "larger_runs")
    assert tuple(larger) == LARGER_PRECISIONS
    assert all(tuple(by_seed) == SEEDS for by_seed in larger.values())
    assert published["steps"] >= 300
    all_runs = published["runs"] + published["larger_runs"]
    assert {len(run["losses"]) for run in all_runs} == {published["steps"]}


def test_worse_runs_are_named(published: Any) -> None:
    worse = copy.deepcopy(published)
    runs = sort_runs(worse)
    runs["fp8 mxfp8"][2]["validation_loss"] += 0.1
    runs["nvfp4"][3]["final_loss"] = float("nan")
    named = {"fp8 mxfp8 seed 2 (validation)", "nvfp4 seed 3 (training)"}
    assert not named & set(list_outside(sort_runs(published), BF16_SEEDS))
    assert named < set(list_outside(runs, BF16_SEEDS)) < set(list_outside(runs, SEEDS))
    for run in runs["fp8 blockwise"].values():
        run["final_loss"] = runs["bf16"][run["seed"]]["final_loss"] + 0.01 + 0.001 * run["seed"]
    distinct = list_distinct(runs)
    assert "fp8 blockwise (training, +0.0120)" in distinct
    assert all(name in render_page(worse) for name in (*named, *distinct))
    assert compute_interval([1.0, 2.0, 3.0]) == pytest.approx((2.0, 4.303 / 3**0.5))


def test_finished_runs_are_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwright.training import run

    folders = []

    def stop_at_third(recipe: Any) -> None:
        folders.append(Path(recipe.run.dir))
        folders[-1].mkdir()
        if len(folders) == 3:
            raise KeyboardInterrupt

    monkeypatch.setenv("SHARDWRIGHT_DATA", str(tmp_path))
    monkeypatch.setattr(run, "train", stop_at_third)
    row = {"final_loss": 2.0, "validation_loss": 2.0, "losses": [2.0]}
    monkeypatch.setattr(low_precision_runs, "read_run", lambda folder: dict(row))
    monkeypatch.setattr(low_precision_runs, "compare_with_bf16", lambda *_: 0.0)
    with pytest.raises(KeyboardInterrupt):
        measure(tmp_path, 1)
    result = measure(tmp_path, 1)
    num_runs = len(result["runs"]) + len(result["larger_runs"])
    # The interrupted one is trained again from its beginning.
    assert [folders.count(folder) for folder in dict.fromkeys(folders)][:4] == [1, 1, 2, 1]
    assert len(folders) == num_runs + 1
    assert measure(tmp_path, 1)["larger_runs"] == result["larger_runs"]
    assert len(folders) == num_runs + 1


def test_page_and_curves_follow_the_numbers(published: Any) -> None:
    assert PAGE.read_text() == render_page(published)
    assert (LOSS_IMAGE.read_text(), DIFFERENCE_IMAGE.read_text()) == draw(published)
