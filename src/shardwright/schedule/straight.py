"""Schedules with one stage a rank: GPipe, 1F1B and ZB-H1. p ranks, m micro-batches, rank r holds stage r."""

from __future__ import annotations

from shardwright.schedule.actions import Action
from shardwright.schedule.rows import Row


def build_gpipe(num_ranks: int, num_micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """All forwards, then all backwards: m activations a rank. Huang et al. 2019."""
    rows = []
    for rank in range(num_ranks):
        row = Row(num_micro_batches)
        for _ in range(num_micro_batches):
            row.forward(rank)
        for _ in range(num_micro_batches):
            row.backward(rank)
        rows.append(row.actions())
    return tuple(rows)


def build_1f1b(num_ranks: int, num_micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """GPipe's bubble with at most p - r activations on rank r: a backward follows as soon as it can. Narayanan et al. 2019."""
    rows = []
    for rank in range(num_ranks):
        row = Row(num_micro_batches)
        warmup = min(num_ranks - 1 - rank, num_micro_batches)
        for _ in range(warmup):
            row.forward(rank)
        for _ in range(num_micro_batches - warmup):
            row.forward(rank)
            row.backward(rank)
        for _ in range(warmup):
            row.backward(rank)
        rows.append(row.actions())
    return tuple(rows)


def build_zb_h1(num_ranks: int, num_micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """1F1B with W put off where it would hold others up: a third of its bubble, p activations a rank. Qi et al. 2023, section 2.1.

    Rank r lets r weight gradients wait. With the p - r forwards that 1F1B keeps in flight there that makes p on every rank: as
    much as 1F1B on its first.
    """
    rows = []
    for rank in range(num_ranks):
        row = Row(num_micro_batches)
        warmup = min(num_ranks - 1 - rank, num_micro_batches)
        for _ in range(warmup):
            row.forward(rank)
        for number in range(num_micro_batches):
            if number < num_micro_batches - warmup:
                row.forward(rank)
            row.backward(rank, split=True)
            if number >= rank:
                row.weights()
        rows.append(row.actions())
    return tuple(rows)
