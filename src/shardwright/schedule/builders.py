"""Schedules with one stage per rank: GPipe, 1F1B and ZB-H1. p ranks, m micro-batches."""

from __future__ import annotations

from shardwright.schedule.actions import Action
from shardwright.schedule.row_builder import RankRowBuilder


def build_gpipe(num_ranks: int, num_micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Build GPipe: all forward passes, then all backward passes; m activations per rank.

    Rank r holds stage r. Source: Huang et al. 2019.
    """
    rows = []
    for rank in range(num_ranks):
        row = RankRowBuilder(num_micro_batches)
        for _ in range(num_micro_batches):
            row.add_forward(rank)
        for _ in range(num_micro_batches):
            row.add_backward(rank)
        rows.append(row.build())
    return tuple(rows)


def build_1f1b(num_ranks: int, num_micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Build 1F1B: GPipe's bubble with at most p - r activations on rank r.

    Each backward pass runs as soon as it can. Source: Narayanan et al. 2019.
    """
    rows = []
    for rank in range(num_ranks):
        row = RankRowBuilder(num_micro_batches)
        warmup = min(num_ranks - 1 - rank, num_micro_batches)
        for _ in range(warmup):
            row.add_forward(rank)
        for _ in range(num_micro_batches - warmup):
            row.add_forward(rank)
            row.add_backward(rank)
        for _ in range(warmup):
            row.add_backward(rank)
        rows.append(row.build())
    return tuple(rows)


def build_zb_h1(num_ranks: int, num_micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Build ZB-H1: 1F1B with delayed W; a third of its bubble, p activations per rank.

    W is delayed where other ranks wait. Rank r delays r weight gradients. With the p - r
    forward passes that 1F1B has in flight there, that makes p on every rank: as many as 1F1B on
    its first rank. Source: Qi et al. 2023, section 2.1.
    """
    rows = []
    for rank in range(num_ranks):
        row = RankRowBuilder(num_micro_batches)
        warmup = min(num_ranks - 1 - rank, num_micro_batches)
        for _ in range(warmup):
            row.add_forward(rank)
        for number in range(num_micro_batches):
            if number < num_micro_batches - warmup:
                row.add_forward(rank)
            row.add_backward(rank, split=True)
            if number >= rank:
                row.add_weight_gradient()
        rows.append(row.build())
    return tuple(rows)
