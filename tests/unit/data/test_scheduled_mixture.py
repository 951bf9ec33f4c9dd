"""Mixtures whose weights follow a schedule over steps."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwright.config.recipe_loading import validate_recipe
from shardwright.data.preparation import prepare_data
from shardwright.data.run_order import build_run_order
from shardwright.data.sample_order import SampleOrder
from shardwright.data.scheduled_mixture import MixtureOrder, ScheduledMixture, WeightSchedule
from shardwright.errors import RecipeError
from tests.unit.data.recipes import build_recipe, story, write_json_lines, write_text

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


@pytest.mark.parametrize("packing", ["windows", "documents"])
def test_every_sample_is_read_before_one_is_read_again(tmp_path: Path, packing: str) -> None:
    """Under constant weights too, and not only at the ends of epochs."""
    lengths = ((3, 9.0), (400, 3.0), (40, 0.01))
    sources = [
        {
            "path": write_json_lines(
                tmp_path / f"{number}.jsonl",
                [f"{letter}{row:02}{letter * 7}" for row in range(num_rows)],
            ),
            "weight": weight,
        }
        for number, (letter, (num_rows, weight)) in enumerate(zip("abc", lengths, strict=True))
    ]
    data = prepare_data(build_recipe(tmp_path, sources, packing=packing, length=9))
    assert isinstance(data.train, ScheduledMixture)
    assert [source.share for source in data.report.sources] == pytest.approx(
        [weight / 12.01 for _, weight in lengths]
    )
    order = build_run_order(data.train, 0, 1)
    counts = [Counter[int]() for _ in lengths]
    ends = np.cumsum([len(part) for part in data.train.parts])
    for position in range(3000):
        index = order.get_index(position)
        part = int(np.searchsorted(ends, index, side="right"))
        counts[part][index] += 1
        fewest = (
            min(counts[part].values()) if len(counts[part]) == len(data.train.parts[part]) else 0
        )
        assert counts[part][index] - fewest <= 1
    for count, (_, weight) in zip(counts, lengths, strict=True):
        assert abs(count.total() - 3000 * weight / 12.01) < 2
    reweighted = [*sources[:2], sources[2] | {"weight": 1.0}]
    assert (
        prepare_data(build_recipe(tmp_path, reweighted, packing=packing, length=9)).content_hash
        != data.content_hash
    )


def test_the_same_files_as_one_source_and_as_two_are_cached_apart(tmp_path: Path) -> None:
    """Tokens cached for one source do not serve two: they lack the start of the second."""
    paths = [
        write_json_lines(tmp_path / "set" / f"{name}.jsonl", [name * 20] * 10) for name in "ab"
    ]
    joined = prepare_data(build_recipe(tmp_path, str(tmp_path / "set"), packing="documents"))
    assert [source.num_documents for source in joined.report.sources] == [20]
    weighted = [
        {"path": path, "weight": weight} for path, weight in zip(paths, (1, 3), strict=True)
    ]
    separate = prepare_data(build_recipe(tmp_path, weighted, packing="documents"))
    assert [source.num_documents for source in separate.report.sources] == [10, 10]


def test_weights_are_for_all_sources_or_none(tmp_path: Path) -> None:
    path = write_text(tmp_path / "a.txt", "text")
    document = build_recipe(tmp_path, [path]).model_dump(mode="json")
    document["data"]["sources"] = [{"path": path, "weight": 1.0}, {"path": path}]
    with pytest.raises(RecipeError, match="give it to all or to none"):
        validate_recipe(document)
    document["data"] |= {"sources": [path], "validation": [{"path": path, "weight": 1.0}]}
    with pytest.raises(RecipeError, match="`weight` is for training sources"):
        validate_recipe(document)
