"""Folded schedules: of p ranks, rank r holds stages r and 2p - 1 - r. m micro-batches.

First and last stage share a rank: the loss is computed where the tokens enter, and backward
passes can begin before the pipeline is full from end to end.
"""

from __future__ import annotations

from shardwright.schedule.actions import Action
from shardwright.schedule.row_builder import RankRowBuilder


def build_zbv(num_ranks: int, num_micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Build ZB-V: if F, I and W take equally long, a bubble only at the start.

    It stores as many activations as 1F1B. With fewer than 2p - 1 micro-batches it is the order
    for 2p - 1 without the surplus ones. Source: Qi et al. 2023, section 6.
    """
    filled = max(2 * num_ranks - 1, num_micro_batches)
    rows = []
    for rank in range(num_ranks):
        row = RankRowBuilder(num_micro_batches)
        down = rank
        back = 2 * num_ranks - 1 - rank
        for _ in range(2 * (num_ranks - rank) - 1):
            row.add_forward(down)
        for _ in range(rank):
            row.add_forward(back)
            row.add_forward(down)
        for _ in range(num_ranks - rank):
            row.add_forward(back)
            row.add_backward(back, split=True)
            row.add_weight_gradient()
        while row.count_added("F", back) < filled:
            if row.count_added("F", down) < filled:
                row.add_forward(down)
            row.add_backward(down, split=True)
            row.add_weight_gradient()
            row.add_forward(back)
            row.add_backward(back, split=True)
            row.add_weight_gradient()
        # No forward pass remains: weight gradients fill the time until input gradients arrive.
        for _ in range(rank):
            row.add_backward(down, split=True)
            row.add_backward(back, split=True)
        for _ in range(num_ranks - rank):
            row.add_backward(down, split=True)
            row.add_weight_gradient()
        rows.append(row.build())
    return tuple(rows)


def build_dualpipev(num_ranks: int, num_micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Build DualPipeV, half of DualPipe. At least 2p micro-batches.

    Where DeepSeek runs a forward and a backward pass at once to overlap the expert exchange,
    here they run one after the other. Source: DeepSeek-AI 2024, section 3.2.1, and the DualPipe
    repository.
    """
    rows = []
    for rank in range(num_ranks):
        row = RankRowBuilder(num_micro_batches)
        down = rank
        back = 2 * num_ranks - 1 - rank
        num_later = num_ranks - 1 - rank
        for _ in range(2 * num_later):
            row.add_forward(down)
        for _ in range(rank + 1):
            row.add_forward(down)
            row.add_forward(back)
        for _ in range(num_later):
            row.add_backward(back, split=True)
            row.add_weight_gradient()
            row.add_forward(back)
        for _ in range(num_micro_batches - 2 * num_ranks + rank + 1):
            row.add_forward(down)
            row.add_backward(back)
            row.add_forward(back)
            row.add_backward(down)
        for _ in range(num_later):
            row.add_backward(back)
            row.add_forward(back)
            row.add_backward(down)
        # The second half of the remaining backward passes is split, so that their weight
        # gradients fill the end.
        for number in range(2 * (rank + 1)):
            row.add_backward(down if number % 2 else back, split=number > rank)
        for _ in range(num_later):
            row.add_weight_gradient()
            row.add_backward(down, split=True)
        rows.append(row.build())
    return tuple(rows)
