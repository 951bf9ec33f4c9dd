"""Interleaved 1F1B: v stages per rank, assigned in turn. p ranks, m micro-batches."""

from __future__ import annotations

from shardwright.schedule.actions import Action
from shardwright.schedule.row_builder import RankRowBuilder


def build_interleaved_1f1b(
    num_ranks: int, num_micro_batches: int, virtual_stages: int
) -> tuple[tuple[Action, ...], ...]:
    """Build interleaved 1F1B: 1 / v of the bubble for (p - 1) / (p v) more activations.

    Groups of p micro-batches pass through a rank's stages in turn. Rank r holds stages r, r +
    p, r + 2p, ...; p divides m. Source: Narayanan et al. 2021, section 2.2.
    """
    rows = []
    total = virtual_stages * num_micro_batches
    for rank in range(num_ranks):
        row = RankRowBuilder(num_micro_batches)
        order = [number // num_ranks % virtual_stages for number in range(total)]
        forwards = [rank + num_ranks * chunk for chunk in order]
        backwards = [rank + num_ranks * (virtual_stages - 1 - chunk) for chunk in order]
        # Before its first backward pass the last rank runs one group through every stage but
        # its last; each earlier rank needs two more forward passes.
        warmup = min((virtual_stages - 1) * num_ranks + 2 * (num_ranks - 1 - rank), total)
        for number in range(warmup):
            row.add_forward(forwards[number])
        for number in range(total):
            if warmup + number < total:
                row.add_forward(forwards[warmup + number])
            row.add_backward(backwards[number])
        rows.append(row.build())
    return tuple(rows)
