"""Mixtures whose weights follow a schedule over steps."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwright.data.preparation import prepare_data
from shardwright.data.run_order import build_run_order
from shardwright.data.sample_order import SampleOrder
from shardwright.data.scheduled_mixture import MixtureOrder, WeightSchedule
from shardwright.errors import RecipeError
from tests.unit.data.recipes import build_recipe, story, write_json_lines

LINEAR = WeightSchedule(((0, (1.0, 0.0, 0.0)), (10, (1.0, 1.0, 2.0)), (40, (0.0, 1.0, 1.0))), True)


def build_order(schedule: WeightSchedule = LINEAR, batch: int = 6, seed: int = 5) -> MixtureOrder:
    lengths = (7, 30, 100)
    parts = tuple(SampleOrder(seed + n, length) for n, length in enumerate(lengths))
    return MixtureOrder(schedule, parts, lengths, batch, seed)


@pytest.mark.parametrize("is_linear", [False, True])
def test_every_step_has_the_shares_of_its_weights(is_linear: bool) -> None:
    schedule = WeightSchedule(LINEAR.knots, is_linear)
    order = build_order(schedule)
    totals = np.zeros(3)
    expected = np.zeros(3)
    for step in range(60):
        shares = np.array(schedule.get_shares(step))
        assert shares.sum() == pytest.approx(1.0)
        counts = order.count_samples(step + 1) - order.count_samples(step)
        assert counts.sum() == 6
        assert np.all(np.abs(counts - 6 * shares) < 1)
        assert np.all(counts[shares == 0] == 0)
        totals += counts
        expected += 6 * shares
        assert np.all(np.abs(totals - expected) < 6)
    if is_linear:
        assert schedule.get_shares(5) == pytest.approx((0.625, 0.125, 0.25))
        assert schedule.get_shares(25) == pytest.approx((0.125, 0.375, 0.5))
    else:
        assert schedule.get_shares(9) == (1.0, 0.0, 0.0)
        assert schedule.get_shares(10) == (0.25, 0.25, 0.5)
    assert schedule.get_shares(10**6) == (0.0, 0.5, 0.5)


def test_parts_are_read_one_sample_after_the_other() -> None:
    order = build_order()
    positions: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for position in range(6 * 60):
        part, inner = order.locate(position)
        positions[part].append(inner)
        ends = (7, 37, 137)
        start = (0, 7, 37)[part]
        assert start <= order.get_index(position) < ends[part]
        assert order.get_epoch(position) == inner // (7, 30, 100)[part]
    for inners in positions.values():
        assert sorted(inners) == list(range(len(inners)))
        assert all(abs(inner - rank) < 6 for rank, inner in enumerate(inners))


def test_the_order_is_a_function_of_the_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading from the middle, and in blocks of another size, gives the same samples."""
    order = build_order()
    whole = [(order.get_index(at), order.get_epoch(at)) for at in range(600)]
    resumed = build_order()
    assert [(resumed.get_index(at), resumed.get_epoch(at)) for at in range(599, 300, -1)] == whole[
        :300:-1
    ]
    monkeypatch.setattr("shardwright.data.scheduled_mixture._STEPS_PER_BLOCK", 7)
    blocks = build_order()
    assert [(blocks.get_index(at), blocks.get_epoch(at)) for at in range(600)] == whole
    other = build_order(seed=6)
    assert [(other.get_index(at), other.get_epoch(at)) for at in range(600)] != whole


def build_sources(folder: Path) -> list[dict[str, Any]]:
    return [
        {
            "path": write_json_lines(
                folder / f"{n}.jsonl", [story(1000 * n + i) for i in range(40)]
            ),
            "weight": 1,
        }
        for n in range(2)
    ]


def test_a_recipe_follows_its_schedule(tmp_path: Path) -> None:
    schedule = [{"step": 3, "weights": [0, 1]}, {"step": 6, "weights": [1, 0]}]
    recipe = build_recipe(tmp_path, build_sources(tmp_path), weight_schedule=schedule)
    data = prepare_data(recipe)
    order = build_run_order(data.train, 0, 4)
    boundary = len(data.train.parts[0])  # type: ignore[attr-defined]
    for step in range(9):
        positions = range(4 * step, 4 * step + 4)
        counts = Counter(order.get_index(at) >= boundary for at in positions)
        assert counts[True] == (2, 4, 0)[step // 3]
        for at in positions:
            data.train.get_sample(order.get_index(at), order.get_epoch(at))
    assert [source.share for source in data.report.sources] == [0.5, 0.5]
    plain = prepare_data(build_recipe(tmp_path, build_sources(tmp_path)))
    other = build_recipe(
        tmp_path,
        build_sources(tmp_path),
        weight_schedule=schedule,
        weight_transition="linear",
    )
    hashes = {data.content_hash, plain.content_hash, prepare_data(other).content_hash}
    assert len(hashes) == 3


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        ([{"step": 3, "weights": [1]}], "1 weights at step 3, but there are 2 sources"),
        ([{"step": 3, "weights": [0, 0]}], "at step 3 are 0"),
        ([{"step": 3, "weights": [1, 1]}] * 2, "3 follows 3"),
        ([{"step": -1, "weights": [1, 1]}], "greater than or equal to 0"),
        ([{"step": 1, "weights": [1, -1]}], "greater than or equal to 0"),
    ],
)
def test_wrong_schedules_are_refused(tmp_path: Path, schedule: Any, text: str) -> None:
    with pytest.raises(RecipeError, match=text):
        build_recipe(tmp_path, build_sources(tmp_path), weight_schedule=schedule)


def test_a_schedule_needs_weights(tmp_path: Path) -> None:
    sources = [{"path": source["path"]} for source in build_sources(tmp_path)]
    schedule = [{"step": 3, "weights": [1, 1]}]
    with pytest.raises(RecipeError, match="give each a `weight`"):
        build_recipe(tmp_path, sources, weight_schedule=schedule)
    with pytest.raises(RecipeError, match="needs a `weight_schedule`"):
        build_recipe(tmp_path, sources, weight_transition="linear")
