"""Comparisons of the verifier: non-finite, missing and single bad values must fail."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.multiprocess.models import LLAMA

from shardwright.architecture import read_config
from shardwright.config.data import IGNORED_LABEL
from shardwright.config.layout import LayoutSection
from shardwright.data.loader import read_step_micro_batches
from shardwright.errors import ArchitectureError, LayoutError
from shardwright.plans import BatchPlan
from shardwright.verification.cases import (
    VerificationCase,
    choose_cases,
    choose_layouts,
    shrink_shape,
)
from shardwright.verification.comparison import (
    ComparisonResult,
    _compare_tensors,
    compare_numbers,
    compare_tensor,
    find_worst,
)
from shardwright.verification.uneven_data import UnevenDataset


def compare(
    actual: torch.Tensor | None, expected: torch.Tensor | None, scale: float = 1.0
) -> ComparisonResult:
    return compare_tensor("gradient", "w", actual, expected, scale, 1e-5)


def test_equal_tensors_pass_and_an_error_above_1e_5_fails() -> None:
    expected = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
    assert compare(expected.clone(), expected).passed
    assert compare(expected * (1 + 0.9e-5), expected).passed
    assert not compare(expected * (1 + 1.1e-5), expected).passed


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_values_fail(value: float) -> None:
    expected = torch.ones(4)
    actual = torch.tensor([1.0, 1.0, value, 1.0])
    assert not compare(actual, expected).passed
    assert not compare(actual, torch.zeros(4)).passed
    assert not compare_numbers("loss", [1.0, value], torch.tensor([1.0, 1.0]), 1e-5).passed


def test_missing_surplus_and_misshaped_tensors_fail() -> None:
    assert not compare(None, torch.ones(2)).passed
    assert not compare(torch.zeros(2), None).passed
    assert not compare(torch.ones(2, 1), torch.ones(2)).passed
    assert compare(None, None).passed  # frozen on both sides


def test_nearly_zero_tensors_are_compared_relative_to_the_global_norm() -> None:
    expected = torch.full((4,), 1e-12)
    assert compare(torch.zeros(4), expected, scale=1.0).passed
    assert not compare(torch.full((4,), 1e-7), expected, scale=1.0).passed
    assert not compare(torch.zeros(4), expected, scale=1e-6).passed  # not nearly zero at this scale


def test_one_bad_parameter_among_many_fails() -> None:
    good = torch.ones(1000)
    pairs = [(f"p{i}", good, good) for i in range(50)] + [
        ("bad", torch.tensor([1.001]), torch.tensor([1.0]))
    ]
    worst = _compare_tensors(
        "gradient", pairs, {name: expected for name, _, expected in pairs}, 1.0, 1e-5
    )
    assert worst.subject == "bad"
    assert not worst.passed


def test_nan_is_the_worst_result_and_a_missing_parameter_fails() -> None:
    one = torch.ones(1)
    pairs = [("a", one * math.nan, one), ("b", one * 2, one)]
    assert _compare_tensors("gradient", pairs, {"a": one, "b": one}, 1.0, 1e-5).subject == "a"
    assert not _compare_tensors(
        "gradient", [("a", one, one)], {"a": one, "gone": one}, 1.0, 1e-5
    ).passed
    by_rank = [
        ComparisonResult("g", "x", 0.5, 1e-5),
        ComparisonResult("g", "y", math.nan, 1e-5),
        ComparisonResult("g", "z", 0.7, 1e-5),
    ]
    assert find_worst(by_rank).subject == "y"


@pytest.mark.parametrize("accumulation", [1, 2, 3])
@pytest.mark.parametrize("data_ranks", [1, 2, 3])
def test_data_are_uneven_and_one_rank_has_a_single_token(
    data_ranks: int, accumulation: int
) -> None:
    batch = BatchPlan(16, 2, accumulation, data_ranks)
    dataset = UnevenDataset(61, batch, num_steps=3, seed=1, has_documents=True)
    for step in range(3):
        by_rank = [
            read_step_micro_batches(dataset, dataset.order, batch, step, rank)
            for rank in range(data_ranks)
        ]
        tokens = [[micro.num_supervised for micro in micro_batches] for micro_batches in by_rank]
        if data_ranks > 1:
            assert sum(tokens[-1]) == 1
            assert tokens[-1][:-1] == [0] * (accumulation - 1)
            assert len({sum(counts) for counts in tokens}) == data_ranks
        elif accumulation > 1:
            assert tokens[0][0] == 0
        assert sum(map(sum, tokens)) > 1
        ids = [micro.input_ids_BT for micro_batches in by_rank for micro in micro_batches]
        assert (
            len({row.numpy().tobytes() for micro in ids for row in micro})
            == batch.global_batch_size
        )


def test_labels_are_ignored_at_ends_of_documents() -> None:
    dataset = UnevenDataset(61, BatchPlan(16, 2, 1, 2), num_steps=1, seed=1, has_documents=True)
    row = dataset.build_row(0)
    assert row.document_ids is not None
    ends = np.flatnonzero(np.diff(row.document_ids))
    assert len(ends) == 3
    assert (row.labels[ends] == IGNORED_LABEL).all()
    assert (row.positions[ends + 1] == 0).all()


def test_three_cases_cover_every_value() -> None:
    cases = choose_cases(True, is_full=False)
    assert {case.accumulation for case in cases} == {1, 2, 3}
    assert {case.recompute for case in cases} == {"none", "selective", "full"}
    for name in ("tied", "dropout", "documents"):
        assert {getattr(case, name) for case in cases} == {False, True}


def test_a_layout_without_a_number_of_ranks_selects_all_that_fit() -> None:
    assert [str(x) for x in choose_layouts(["zero_stage=0"], 4, LayoutSection())] == [
        f"dp_replicate={ranks},zero_stage=0" for ranks in (2, 3, 4)
    ]
    assert [
        str(x) for x in choose_layouts(["dp_replicate=2,zero_stage=1"], 4, LayoutSection())
    ] == [
        "dp_replicate=2,zero_stage=1",
        "dp_replicate=2,dp_shard=2,zero_stage=1",
    ]
    for text, needed in (("dp_replicate=3,dp_shard=2,zero_stage=1", 6), ("tp=5", 5)):
        with pytest.raises(LayoutError, match=f"from 2 to 4 .* a multiple of {needed} ranks"):
            choose_layouts([text], 4, LayoutSection())
    with pytest.raises(LayoutError, match="ep"):  # more ranks do not help
        choose_layouts(["dp_shard=2,ep=4"], 4, LayoutSection())


def test_settings_of_the_recipes_layout_remain() -> None:
    base = LayoutSection(wrap_blocks=2, dp_shard=8, zero_stage=3)
    assert {layout.wrap_blocks for layout in choose_layouts([], 3, base)} == {2}
    assert choose_layouts(["zero_stage=3,wrap_blocks=3"], 2, base)[0].wrap_blocks == 3


def test_a_shrunk_shape_keeps_its_proportions() -> None:
    shape = read_config(LLAMA)
    small = shrink_shape(shape, num_layers=2, hidden_size=10)
    assert (
        small.num_layers,
        small.hidden_size,
        small.num_heads,
        small.num_kv_heads,
        small.head_dim,
    ) == (
        2,
        10,
        2,
        1,
        6,
    )
    assert small.intermediate_size == 14
    with pytest.raises(ArchitectureError, match="cannot widen"):
        shrink_shape(shape, hidden_size=21)


def test_a_case_alone_determines_the_dropout() -> None:
    shape = VerificationCase(dropout=True).apply_to_shape(read_config(LLAMA))
    assert min(shape.embedding_dropout, shape.attention_dropout, shape.residual_dropout) > 0
    assert VerificationCase(dropout=False).apply_to_shape(shape).residual_dropout == 0
