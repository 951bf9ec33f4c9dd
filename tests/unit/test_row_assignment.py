"""Rows of a step assigned by their work: the same rows, and less waiting."""

from __future__ import annotations

import numpy as np
import pytest

from shardwright.architecture import read_config
from shardwright.data.loader import read_step_micro_batches
from shardwright.data.packed_dataset import PackedDataset, pack_documents
from shardwright.data.sample_order import SampleOrder
from shardwright.layout import Layout
from shardwright.placement.row_assignment import (
    WorkBalance,
    balance_rows,
    sort_by_length,
    split_into_micro_batches,
)
from shardwright.plans import BatchPlan, build_work_balance
from shardwright.schedule import ActionTimes, build_schedule, simulate
from tests.unit.planner import models

RANDOM = np.random.default_rng(0)
LENGTHS = RANDOM.lognormal(4.0, 1.0, size=64).astype(int).clip(4, 500).tolist()
PADDED = WorkBalance(0.002, True, False)


def list_rank_work(order: list[int], micro_batch_size: int, ranks: int) -> list[list[float]]:
    """List the work of each micro-batch, by accumulation step and rank, padding included."""
    return [
        [
            len(rows) * max(PADDED.count_work([LENGTHS[row]]) for row in rows)
            for rows in rows_by_rank
        ]
        for rows_by_rank in split_into_micro_batches(order, micro_batch_size, ranks)
    ]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_ranks_that_wait_once_have_nearly_equal_work(ranks: int, micro_batch_size: int) -> None:
    rows = [(length,) for length in LENGTHS]
    balanced = balance_rows(rows, PADDED, micro_batch_size, ranks)
    assert sorted(balanced) == list(range(64))
    by_length, by_work = (
        [sum(rank) for rank in zip(*list_rank_work(order, micro_batch_size, ranks), strict=True)]
        for order in (sort_by_length(LENGTHS), balanced)
    )
    assert sum(by_work) == pytest.approx(sum(by_length))  # the same padding
    # Four ranks with four micro-batches each: the largest is more than half of a rank's work.
    is_coarse = (ranks, micro_batch_size) == (4, 4)
    assert max(by_work) / np.mean(by_work) < (1.3 if is_coarse else 1.08)
    assert max(by_work) < max(by_length)


def test_ranks_that_wait_each_time_run_similar_micro_batches_together() -> None:
    rows = [(length,) for length in LENGTHS]
    balance = WorkBalance(0.002, True, True)
    order = balance_rows(rows, balance, 4, 2)
    assert order == sort_by_length(LENGTHS)
    waiting = sum(max(step) for step in list_rank_work(order, 4, 2))
    once = balance_rows(rows, PADDED, 4, 2)
    assert waiting < sum(max(step) for step in list_rank_work(once, 4, 2))


@pytest.mark.parametrize("waits_each_micro_batch", [False, True])
@pytest.mark.parametrize(("ranks", "name"), [(1, "1f1b"), (2, "1f1b"), (2, "zb_h1")])
def test_pipelines_fill_and_drain_with_short_micro_batches(
    ranks: int, name: str, waits_each_micro_batch: bool
) -> None:
    rows = [(length,) for length in LENGTHS]
    balance = WorkBalance(0.002, True, waits_each_micro_batch, is_pipeline=True)
    order = balance_rows(rows, balance, 2, ranks)
    assert sorted(order) == list(range(64))
    schedule = build_schedule(name, 4, 32 // ranks)
    for rank in range(ranks):
        seconds = {}
        for key, chosen in (("middle", order), ("first", sort_by_length(LENGTHS))):
            work = [step[rank] for step in list_rank_work(chosen, 2, ranks)]
            times = [ActionTimes.uniform(4, each, each, each) for each in work]
            bubble = simulate(schedule, times).step_seconds - 3 * sum(work)
            seconds[key] = bubble
            if key == "middle":
                assert max(work[0], work[-1]) <= min(work[1:-1])
        assert seconds["middle"] < 0.9 * seconds["first"]


def test_packed_rows_are_balanced_by_their_attention() -> None:
    """Rows of equally many tokens: one long document, or many short ones."""
    rows = [(512,), (64,) * 8, (512,), (64,) * 8]
    balance = WorkBalance(0.01, False, False)
    order = balance_rows(rows, balance, 1, 2)
    work = [sum(balance.count_work(rows[row]) for row in order[rank::2]) for rank in range(2)]
    assert work[0] == pytest.approx(work[1])
    # In their order rank 0 would have both long documents.
    assert sum(balance.count_work(rows[row]) for row in (0, 2)) > 1.4 * work[0]


def test_the_work_of_a_row_is_proportional_to_its_flops() -> None:
    shape = read_config(models.CONFIGS["llama"])
    balance = build_work_balance(shape, Layout(), 512, is_padded=True)
    ratios = [
        length * shape.count_flops_per_token(length) / balance.count_work([length])
        for length in (1, 33, 512)
    ]
    assert ratios == pytest.approx([ratios[0]] * 3)


def test_the_loader_reads_the_assigned_rows() -> None:
    starts = np.concatenate([[0], np.cumsum([length + 1 for length in LENGTHS])]).astype(np.uint64)
    tokens = np.arange(int(starts[-1]), dtype=np.uint32)
    dataset = PackedDataset(
        tokens, pack_documents(starts, 512, is_unpacked=True), 512, is_unpacked=True
    )
    order = SampleOrder(1, len(dataset))

    def read(batch: BatchPlan) -> list[list[list[int]]]:
        return [
            [
                each.sample_indices_B.tolist()
                for each in read_step_micro_batches(dataset, order, batch, 1, rank)
            ]
            for rank in range(2)
        ]

    plain = BatchPlan(512, 2, 4, 2, row_multiple=8)
    balanced = BatchPlan(512, 2, 4, 2, row_multiple=8, balance=PADDED)

    def count_tokens(batch: BatchPlan) -> list[int]:
        return [
            sum(
                each.input_ids_BT.numel()
                for each in read_step_micro_batches(dataset, order, batch, 1, rank)
            )
            for rank in range(2)
        ]

    for batch in (plain, balanced):
        positions = [position for rank in read(batch) for rows in rank for position in rows]
        assert sorted(positions) == list(range(16, 32))
    plain_tokens, balanced_tokens = map(count_tokens, (plain, balanced))
    assert sum(plain_tokens) == sum(balanced_tokens)
    assert max(balanced_tokens) < max(plain_tokens)
