"""Builders of the rows of schedules, as in their papers. p ranks, m micro-batches, v stages a rank.

GPipe, 1F1B and ZB-H1 have one stage per rank. Interleaved 1F1B assigns v stages to each rank in
turn. In the folded schedules, ZBV and DualPipeV, rank r holds stages r and 2p - 1 - r: first
and last stage share a rank, so the loss is computed where the tokens enter, and backward passes
can begin before the pipeline is full from end to end.
"""

from __future__ import annotations

from collections import defaultdict, deque

from shardwright.schedule.actions import Action, ActionKind


class RankRowBuilder:
    """Builder of one rank's actions.

    Attributes:
        num_micro_batches: actions for micro-batches from this number on are counted but left
            out.
    """

    def __init__(self, num_micro_batches: int) -> None:
        self.num_micro_batches = num_micro_batches
        self._actions: list[Action] = []
        self._num_forwards: defaultdict[int, int] = defaultdict(int)
        self._num_backwards: defaultdict[int, int] = defaultdict(int)
        self._pending_weight_gradients: deque[tuple[int, int]] = deque()

    def add_forward(self, stage: int) -> None:
        """Add F of the stage's next micro-batch."""
        micro_batch = self._num_forwards[stage]
        self._num_forwards[stage] = micro_batch + 1
        if micro_batch < self.num_micro_batches:
            self._actions.append(_make_action("F", stage, micro_batch))

    def add_backward(self, stage: int, *, split: bool = False) -> None:
        """Add B of the stage's next micro-batch or, with `split`, its I; `add_weight_gradient` adds
        its W.
        """
        micro_batch = self._num_backwards[stage]
        self._num_backwards[stage] = micro_batch + 1
        if micro_batch < self.num_micro_batches:
            self._actions.append(_make_action("I" if split else "B", stage, micro_batch))
        if split:
            self._pending_weight_gradients.append((stage, micro_batch))

    def add_weight_gradient(self) -> None:
        """Add the W that has waited longest, if there is one."""
        if self._pending_weight_gradients:
            stage, micro_batch = self._pending_weight_gradients.popleft()
            if micro_batch < self.num_micro_batches:
                self._actions.append(_make_action("W", stage, micro_batch))

    def count_forwards(self, stage: int) -> int:
        """Count the stage's forward passes so far."""
        return self._num_forwards[stage]

    def build(self) -> tuple[Action, ...]:
        """Return the row, with all pending W at its end."""
        while self._pending_weight_gradients:
            self.add_weight_gradient()
        return tuple(self._actions)


def _make_action(kind: ActionKind, stage: int, micro_batch: int) -> Action:
    return tuple.__new__(Action, (kind, stage, micro_batch))


def build_gpipe_row(rank: int, num_ranks: int, num_micro_batches: int) -> tuple[Action, ...]:
    """Build a rank of GPipe: all forward passes, then all backward passes; m activations per rank.

    Rank r holds stage r. Source: Huang et al. 2019.
    """
    row = RankRowBuilder(num_micro_batches)
    for _ in range(num_micro_batches):
        row.add_forward(rank)
    for _ in range(num_micro_batches):
        row.add_backward(rank)
    return row.build()


def build_1f1b_row(rank: int, num_ranks: int, num_micro_batches: int) -> tuple[Action, ...]:
    """Build a rank of 1F1B: GPipe's bubble with at most p - r activations on rank r.

    Each backward pass runs as soon as it can. Source: Narayanan et al. 2019.
    """
    row = RankRowBuilder(num_micro_batches)
    warmup = min(num_ranks - 1 - rank, num_micro_batches)
    for _ in range(warmup):
        row.add_forward(rank)
    for _ in range(num_micro_batches - warmup):
        row.add_forward(rank)
        row.add_backward(rank)
    for _ in range(warmup):
        row.add_backward(rank)
    return row.build()


def build_zb_h1_row(rank: int, num_ranks: int, num_micro_batches: int) -> tuple[Action, ...]:
    """Build a rank of ZB-H1: 1F1B with delayed W; a third of its bubble, p activations per rank.

    W is delayed where other ranks wait. Rank r delays r weight gradients. With the p - r
    forward passes that 1F1B has in flight there, that makes p on every rank: as many as 1F1B on
    its first rank. Source: Qi et al. 2023, section 2.1.
    """
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
    return row.build()


def build_interleaved_1f1b_row(
    rank: int, num_ranks: int, num_micro_batches: int, virtual_stages: int
) -> tuple[Action, ...]:
    """Build a rank of interleaved 1F1B: 1 / v of the bubble for (p - 1) / (p v) more activations.

    Groups of p micro-batches pass through a rank's stages in turn. Rank r holds stages r, r +
    p, r + 2p, ...; p divides m. Source: Narayanan et al. 2021, section 2.2.
    """
    total = virtual_stages * num_micro_batches
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
    return row.build()


def build_zbv_row(rank: int, num_ranks: int, num_micro_batches: int) -> tuple[Action, ...]:
    """Build a rank of ZB-V: if F, I and W take equally long, a bubble only at the start.

    It stores as many activations as 1F1B. With fewer than 2p - 1 micro-batches it is the order
    for 2p - 1 without the surplus ones. Source: Qi et al. 2023, section 6.
    """
    filled = max(2 * num_ranks - 1, num_micro_batches)
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
    while row.count_forwards(back) < filled:
        if row.count_forwards(down) < filled:
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
    return row.build()


def build_dualpipev_row(rank: int, num_ranks: int, num_micro_batches: int) -> tuple[Action, ...]:
    """Build a rank of DualPipeV, half of DualPipe. At least 2p micro-batches.

    Where DeepSeek runs a forward and a backward pass at once to overlap the expert exchange,
    here they run one after the other. Source: DeepSeek-AI 2024, section 3.2.1, and the DualPipe
    repository.
    """
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
    return row.build()
