"""Micro-batches: any layout sees the same batches, and the data cursor is one integer."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.config.data import IGNORED_LABEL
from shardwright.data.dataset import WindowDataset
from shardwright.data.loader import (
    MicroBatch,
    iterate_evaluation_micro_batches,
    read_step_micro_batches,
)
from shardwright.data.packed_dataset import PackedDataset, pack_documents
from shardwright.data.sample_order import SampleOrder
from shardwright.plans import BatchPlan

LENGTH = 4
WINDOWS = WindowDataset(np.arange(500, dtype=np.uint16), LENGTH, seed=1)
ORDER = SampleOrder(seed=1, num_samples=len(WINDOWS))
PACKED = PackedDataset(
    np.arange(300, dtype=np.uint16),
    pack_documents(np.arange(0, 301, 3, dtype=np.uint64), LENGTH),
    LENGTH,
)


def list_batch_plans(global_batch_size: int) -> list[BatchPlan]:
    """List every factorisation of a global batch into micro x ranks x accumulation."""
    divisors = [d for d in range(1, global_batch_size + 1) if global_batch_size % d == 0]
    return [
        BatchPlan(LENGTH, micro, global_batch_size // micro // ranks, ranks)
        for micro in divisors
        for ranks in divisors
        if global_batch_size // micro % ranks == 0
    ]


def list_rows(batch: MicroBatch) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """List (global position, inputs, labels) of each row."""
    return [
        (int(position), tuple(inputs), tuple(labels))
        for position, inputs, labels in zip(
            batch.sample_indices_B,
            batch.input_ids_BT.tolist(),
            batch.labels_BT.tolist(),
            strict=True,
        )
    ]


def read_step(plan: BatchPlan, step: int) -> Counter[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    return Counter(
        row
        for data_rank in range(plan.data_ranks)
        for batch in read_step_micro_batches(WINDOWS, ORDER, plan, step, data_rank)
        for row in list_rows(batch)
    )


@pytest.mark.parametrize("step", [0, 1, 10, 11])  # an epoch of 124 windows ends within step 10
def test_every_layout_reads_the_same_global_batch(step: int) -> None:
    batches = [read_step(plan, step) for plan in list_batch_plans(12)]
    assert len(batches) > 10
    assert all(batch == batches[0] for batch in batches)
    assert sorted(position for position, _, _ in batches[0]) == list(
        range(step * 12, step * 12 + 12)
    )


def test_steps_follow_the_order_without_gap_or_repeat() -> None:
    plan = BatchPlan(LENGTH, micro_batch_size=2, gradient_accumulation_steps=3, data_ranks=2)
    read = {position: inputs for step in range(20) for position, inputs, _ in read_step(plan, step)}
    assert sorted(read) == list(range(240))
    for position, inputs in read.items():
        expected = WINDOWS.get_sample(
            ORDER.get_index(position), ORDER.get_epoch(position)
        ).input_ids
        assert inputs == tuple(expected.tolist())


def test_positions_of_micro_batches_follow_the_documented_formula() -> None:
    plan = BatchPlan(LENGTH, micro_batch_size=2, gradient_accumulation_steps=3, data_ranks=4)
    batches = read_step_micro_batches(WINDOWS, ORDER, plan, step=5, data_rank=3)
    assert [batch.sample_indices_B.tolist() for batch in batches] == [
        [5 * 24 + a * 8 + 3 * 2 + i for i in range(2)] for a in range(3)
    ]


def test_a_resumed_run_needs_only_the_step() -> None:
    """The loader has no state between calls: reading steps 0 to 5 does not change step 6."""
    plan = BatchPlan(LENGTH, 2, 2, 2)
    for step in range(6):
        read_step(plan, step)
    fresh = SampleOrder(seed=1, num_samples=len(WINDOWS))
    for data_rank in range(2):
        continued = read_step_micro_batches(WINDOWS, ORDER, plan, 6, data_rank)
        resumed = read_step_micro_batches(WINDOWS, fresh, plan, 6, data_rank)
        for a, b in zip(continued, resumed, strict=True):
            assert torch.equal(a.input_ids_BT, b.input_ids_BT)


@given(num_tokens=st.integers(2, 120), micro=st.integers(1, 5), ranks=st.integers(1, 5))
@settings(max_examples=80, deadline=None)
def test_evaluation_reads_everything_once_with_equal_batch_counts(
    num_tokens: int, micro: int, ranks: int
) -> None:
    dataset = WindowDataset(np.arange(num_tokens, dtype=np.uint16), LENGTH, is_evaluation=True)
    plan = BatchPlan(LENGTH, micro, 1, ranks)
    by_rank = [list(iterate_evaluation_micro_batches(dataset, plan, rank)) for rank in range(ranks)]
    assert len({len(batches) for batches in by_rank}) == 1
    all_batches = [batch for batches in by_rank for batch in batches]
    labels = torch.cat([batch.labels_BT.flatten() for batch in all_batches])
    assert sorted(labels[labels != IGNORED_LABEL].tolist()) == list(range(1, num_tokens))
    assert sum(batch.num_supervised for batch in all_batches) == num_tokens - 1
    assert {tuple(batch.input_ids_BT.shape) for batch in all_batches} == {(micro, LENGTH)}


def test_max_batches_stops_every_rank() -> None:
    plan = BatchPlan(LENGTH, 2, 1, 2)
    assert [
        len(list(iterate_evaluation_micro_batches(WINDOWS, plan, rank, max_batches=3)))
        for rank in range(2)
    ] == [3, 3]


@given(max_rows=st.integers(1, 40), micro=st.integers(1, 5), ranks=st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_max_rows_evaluates_the_same_rows_under_every_layout(
    max_rows: int, micro: int, ranks: int
) -> None:
    """`max_batches` evaluates more rows on more ranks."""
    dataset = WindowDataset(np.arange(120, dtype=np.uint16), LENGTH, is_evaluation=True)
    plan = BatchPlan(LENGTH, micro, 1, ranks)
    by_rank = [
        list(iterate_evaluation_micro_batches(dataset, plan, rank, max_rows=max_rows))
        for rank in range(ranks)
    ]
    assert len({len(batches) for batches in by_rank}) == 1
    labels = torch.cat([batch.labels_BT.flatten() for batches in by_rank for batch in batches])
    expected = [
        label
        for row in range(min(max_rows, len(dataset)))
        for label in dataset.get_sample(row).labels
    ]
    supervised = labels[labels != IGNORED_LABEL].tolist()
    assert sorted(supervised) == sorted(label for label in expected if label != IGNORED_LABEL)


def test_packed_batches_carry_document_boundaries() -> None:
    (batch,) = read_step_micro_batches(
        PACKED, SampleOrder(0, len(PACKED)), BatchPlan(LENGTH, 3, 1, 1), 0, 0
    )
    assert batch.document_ids_BT is not None
    assert batch.document_ids_BT.tolist() == [[0, 0, 1, 1]] * 3
    assert batch.positions_BT.tolist() == [[0, 1, 0, 1]] * 3
    (batch,) = read_step_micro_batches(WINDOWS, ORDER, BatchPlan(LENGTH, 3, 1, 1), 0, 0)
    assert batch.document_ids_BT is None


def test_moving_a_batch_moves_every_tensor() -> None:
    (batch,) = read_step_micro_batches(
        PACKED, SampleOrder(0, len(PACKED)), BatchPlan(LENGTH, 3, 1, 1), 0, 0
    )
    moved = batch.to("meta")
    for name in (
        "input_ids_BT",
        "labels_BT",
        "positions_BT",
        "document_ids_BT",
        "sample_indices_B",
    ):
        assert getattr(moved, name).device.type == "meta"
        assert getattr(moved, name).dtype == torch.int64
    assert moved.num_supervised == batch.num_supervised == 12


@pytest.mark.parametrize("data_rank", [-1, 2])
def test_a_data_rank_that_does_not_exist_is_refused(data_rank: int) -> None:
    with pytest.raises(ValueError, match="data rank"):
        read_step_micro_batches(WINDOWS, ORDER, BatchPlan(LENGTH, 1, 1, 2), 0, data_rank)
