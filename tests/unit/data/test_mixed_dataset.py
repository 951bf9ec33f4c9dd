"""Mixture by weight: a function of seed, index and epoch; no sample repeats within a pass."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.config.recipe_loading import validate_recipe
from shardwright.data.dataset import WindowDataset
from shardwright.data.mixed_dataset import MixedDataset, apportion
from shardwright.data.preparation import prepare_data
from shardwright.data.sample_order import SampleOrder
from shardwright.errors import RecipeError
from tests.unit.data.recipes import build_recipe, write_json_lines, write_text


def build_mixture(sizes: list[int], weights: list[float], seed: int = 0) -> MixedDataset:
    """Build a mixture of one-token windows; the tokens of part i start at 1000 x i."""
    parts = [
        WindowDataset(np.arange(1000 * i, 1000 * i + n + 1, dtype=np.uint16), 1, is_evaluation=True)
        for i, n in enumerate(sizes)
    ]
    return MixedDataset(tuple(parts), tuple(weights), seed)


@given(total=st.integers(0, 1000), weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=6))
def test_shares_sum_to_the_total_and_are_nearest(total: int, weights: list[float]) -> None:
    counts = apportion(total, weights)
    assert sum(counts) == total
    for part, weight in zip(counts, weights, strict=True):
        assert abs(part - total * weight / sum(weights)) <= 1 + 1e-9


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    data=st.data(),
    seed=st.integers(0, 2**40),
)
@settings(max_examples=30)
def test_each_part_is_read_completely_before_it_repeats(
    sizes: list[int], data: st.DataObject, seed: int
) -> None:
    weights = [data.draw(st.floats(0.05, 10)) for _ in sizes]
    dataset = build_mixture(sizes, weights, seed)
    drawn: list[list[int]] = [[] for _ in sizes]
    for epoch in range(4):
        epoch_counts = Counter()
        for index in range(len(dataset)):
            part, inner, _ = dataset.locate_sample(index, epoch)
            assert dataset.get_sample(index, epoch).input_ids[0] == 1000 * part + inner
            drawn[part].append(inner)
            epoch_counts[part] += 1
        assert tuple(epoch_counts[part] for part in range(len(sizes))) == apportion(
            sum(sizes), weights
        )
    for size, inner in zip(sizes, drawn, strict=True):
        for first in range(0, len(inner) - size + 1, size):
            assert sorted(inner[first : first + size]) == list(range(size)), (
                "a pass is a permutation"
            )


def test_any_segment_of_the_run_has_the_shares() -> None:
    dataset = build_mixture([400, 100, 20], [1.0, 1.0, 2.0], seed=3)
    order = SampleOrder(3, len(dataset))
    for first in (0, 300, 1500):
        counts = Counter(
            dataset.locate_sample(order.get_index(position), order.get_epoch(position))[0]
            for position in range(first, first + 200)
        )
        assert [counts[part] / 200 for part in range(3)] == pytest.approx(
            [0.25, 0.25, 0.5], abs=0.1
        )


def test_another_seed_draws_other_samples() -> None:
    one = build_mixture([50, 50], [1, 3], 0)
    other = build_mixture([50, 50], [1, 3], 1)
    assert [one.locate_sample(index, 0) for index in range(100)] != [
        other.locate_sample(index, 0) for index in range(100)
    ]


def test_indices_out_of_range_are_refused() -> None:
    for index in (-1, 7):
        with pytest.raises(IndexError):
            build_mixture([3, 4], [1, 1]).get_sample(index)


@pytest.mark.parametrize("packing", ["windows", "documents"])
def test_a_recipe_mixes_its_sources_by_weight(tmp_path: Path, packing: str) -> None:
    sources = [
        {"path": write_json_lines(tmp_path / "a.jsonl", ["aaaaaaaaaa"] * 30), "weight": 1},
        {"path": write_text(tmp_path / "b.txt", "b" * 50), "weight": 3},
    ]
    prepared = prepare_data(build_recipe(tmp_path, sources, packing=packing, length=8))
    assert isinstance(prepared.train, MixedDataset)
    counts = Counter()
    for index in range(len(prepared.train)):
        labels = prepared.train.get_sample(index).labels
        (letter,) = {prepared.tokenizer.decode([label]) for label in labels if label >= 0}
        counts[letter] += 1
    assert (counts["a"], counts["b"]) == prepared.train.num_samples_per_part
    assert counts["b"] / len(prepared.train) == pytest.approx(0.75, abs=0.02)
    assert [source.share for source in prepared.report.sources] == [
        n / len(prepared.train) for n in prepared.train.num_samples_per_part
    ]
    assert [source.num_documents for source in prepared.report.sources] == [30, 1]
    reweighted = [sources[0], sources[1] | {"weight": 4}]
    assert (
        prepare_data(build_recipe(tmp_path, reweighted, packing=packing)).content_hash
        != prepared.content_hash
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
