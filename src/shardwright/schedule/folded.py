"""Schedules whose stages come back: of p ranks, rank r holds stages r and 2p - 1 - r. m micro-batches.

First and last stage share a rank: the loss is computed where the tokens come in, and a backward can begin before the
pipeline has filled from end to end.
"""

from __future__ import annotations

from shardwright.schedule.actions import Action
from shardwright.schedule.rows import Row


def build_zbv(num_ranks: int, num_micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """ZB-V: no bubble but the start where F, I and W take equally long, with 1F1B's activations. Qi et al. 2023, section 6.

    With fewer than 2p - 1 micro-batches it is the order for 2p - 1 with those beyond left out.
    """
    filled = max(2 * num_ranks - 1, num_micro_batches)
    rows = []
    for rank in range(num_ranks):
        row, down, back = Row(num_micro_batches), rank, 2 * num_ranks - 1 - rank
        for _ in range(2 * (num_ranks - rank) - 1):
            row.forward(down)
        for _ in range(rank):
            row.forward(back)
            row.forward(down)
        for _ in range(num_ranks - rank):
            row.forward(back)
            row.backward(back, split=True)
            row.weights()
        while row.counted("F", back) < filled:
            if row.counted("F", down) < filled:
                row.forward(down)
            row.backward(down, split=True)
            row.weights()
            row.forward(back)
            row.backward(back, split=True)
            row.weights()
        # Nothing is left to go forward: weight gradients fill the time in which input gradients come down.
        for _ in range(rank):
            row.backward(down, split=True)
            row.backward(back, split=True)
        for _ in range(num_ranks - rank):
            row.backward(down, split=True)
            row.weights()
        rows.append(row.actions())
    return tuple(rows)


def build_dualpipev(num_ranks: int, num_micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """DualPipeV: DualPipe cut in half. DeepSeek-AI 2024, section 3.2.1, and the DualPipe repository. At least 2p micro-batches.

    Where DeepSeek runs a forward and a backward at once to hide the expert exchange, here the one follows the other.
    """
    rows = []
    for rank in range(num_ranks):
        row, down, back = Row(num_micro_batches), rank, 2 * num_ranks - 1 - rank
        after = num_ranks - 1 - rank
        for _ in range(2 * after):
            row.forward(down)
        for _ in range(rank + 1):
            row.forward(down)
            row.forward(back)
        for _ in range(after):
            row.backward(back, split=True)
            row.weights()
            row.forward(back)
        for _ in range(num_micro_batches - 2 * num_ranks + rank + 1):
            row.forward(down)
            row.backward(back)
            row.forward(back)
            row.backward(down)
        for _ in range(after):
            row.backward(back)
            row.forward(back)
            row.backward(down)
        # The second half of what remains is split, so that its weight gradients fill the end.
        for number in range(2 * (rank + 1)):
            row.backward(down if number % 2 else back, split=number > rank)
        for _ in range(after):
            row.weights()
            row.backward(down, split=True)
        rows.append(row.actions())
    return tuple(rows)
