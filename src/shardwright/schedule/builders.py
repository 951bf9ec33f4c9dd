"""Builders of the rows of schedules, as in their papers. p ranks, m micro-batches, v stages a rank.

GPipe, 1F1B and ZB-H1 have one stage per rank. Interleaved 1F1B assigns v stages to each rank in
turn. In the folded schedules, ZBV and DualPipeV, rank r holds stages r and 2p - 1 - r: first
and last stage share a rank, so the loss is computed where the tokens enter, and backward passes
can begin before the pipeline is full from end to end.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain

from shardwright.schedule.actions import Action, ActionKind

Pass = tuple[ActionKind, int]
"""Kind and stage of an action whose micro-batch is the next one of the stage; a W is of the I that
has waited longest, whatever its stage."""


def _number_passes(passes: Iterable[Pass], num_micro_batches: int) -> tuple[Action, ...]:
    """Return the actions of a rank's passes, with all pending W at their end. Those for
    micro-batches from `num_micro_batches` on are counted but left out, and so is a W for which no I
    waits."""
    num_forwards: defaultdict[int, int] = defaultdict(int)
    num_backwards: defaultdict[int, int] = defaultdict(int)
    pending: deque[tuple[int, int]] = deque()
    actions = []
    for kind, stage in passes:
        if kind == "W":
            if not pending:
                continue
            stage, micro_batch = pending.popleft()
        elif kind == "F":
            micro_batch = num_forwards[stage]
            num_forwards[stage] = micro_batch + 1
        else:
            micro_batch = num_backwards[stage]
            num_backwards[stage] = micro_batch + 1
            if kind == "I":
                pending.append((stage, micro_batch))
        if micro_batch < num_micro_batches:
            actions.append(_make_action((kind, stage, micro_batch)))
    actions += [Action("W", *each) for each in pending if each[1] < num_micro_batches]
    return tuple(actions)


_make_action = partial(tuple.__new__, Action)
"""As `Action(*values)`, in a third of its time: schedules have up to a million actions."""


def _list_passes(stage: int, kinds: Sequence[ActionKind]) -> list[Pass]:
    return [(kind, stage) for kind in kinds]


def build_gpipe_row(rank: int, num_ranks: int, num_micro_batches: int) -> tuple[Action, ...]:
    """Build a rank of GPipe: all forward passes, then all backward passes; m activations per rank.

    Rank r holds stage r. Source: Huang et al. 2019.
    """
    forward, backward = _list_passes(rank, ("F", "B"))
    return _number_passes(
        [forward] * num_micro_batches + [backward] * num_micro_batches, num_micro_batches
    )


def build_1f1b_row(rank: int, num_ranks: int, num_micro_batches: int) -> tuple[Action, ...]:
    """Build a rank of 1F1B: GPipe's bubble with at most p - r activations on rank r.

    Each backward pass runs as soon as it can. Source: Narayanan et al. 2019.
    """
    forward, backward = _list_passes(rank, ("F", "B"))
    warmup = min(num_ranks - 1 - rank, num_micro_batches)
    passes = [forward] * warmup
    passes += [forward, backward] * (num_micro_batches - warmup)
    passes += [backward] * warmup
    return _number_passes(passes, num_micro_batches)


def build_zb_h1_row(rank: int, num_ranks: int, num_micro_batches: int) -> tuple[Action, ...]:
    """Build a rank of ZB-H1: 1F1B with delayed W; a third of its bubble, p activations per rank.

    W is delayed where other ranks wait. Rank r delays r weight gradients. With the p - r
    forward passes that 1F1B has in flight there, that makes p on every rank: as many as 1F1B on
    its first rank. Source: Qi et al. 2023, section 2.1.
    """
    forward, inputs, weights = _list_passes(rank, ("F", "I", "W"))
    warmup = min(num_ranks - 1 - rank, num_micro_batches)
    passes = [forward] * warmup
    for number in range(num_micro_batches):
        if number < num_micro_batches - warmup:
            passes.append(forward)
        passes.append(inputs)
        if number >= rank:
            passes.append(weights)
    return _number_passes(passes, num_micro_batches)


def build_interleaved_1f1b_row(
    rank: int, num_ranks: int, num_micro_batches: int, virtual_stages: int
) -> tuple[Action, ...]:
    """Build a rank of interleaved 1F1B: 1 / v of the bubble for (p - 1) / (p v) more activations.

    Groups of p micro-batches pass through a rank's stages in turn. Rank r holds stages r, r +
    p, r + 2p, ...; p divides m. Source: Narayanan et al. 2021, section 2.2.
    """
    total = virtual_stages * num_micro_batches
    order = [number // num_ranks % virtual_stages for number in range(total)]
    forwards: list[Pass] = [("F", rank + num_ranks * chunk) for chunk in order]
    backwards: list[Pass] = [
        ("B", rank + num_ranks * (virtual_stages - 1 - chunk)) for chunk in order
    ]
    # Before its first backward pass the last rank runs one group through every stage but
    # its last; each earlier rank needs two more forward passes.
    warmup = min((virtual_stages - 1) * num_ranks + 2 * (num_ranks - 1 - rank), total)
    passes = forwards[:warmup]
    passes += chain.from_iterable(zip(forwards[warmup:], backwards, strict=False))
    passes += backwards[total - warmup :]
    return _number_passes(passes, num_micro_batches)


def build_zbv_row(rank: int, num_ranks: int, num_micro_batches: int) -> tuple[Action, ...]:
    """Build a rank of ZB-V: if F, I and W take equally long, a bubble only at the start.

    It stores as many activations as 1F1B. With fewer than 2p - 1 micro-batches it is the order
    for 2p - 1 without the surplus ones. Source: Qi et al. 2023, section 6.
    """
    filled = max(2 * num_ranks - 1, num_micro_batches)
    forward_down, inputs_down, weights = _list_passes(rank, ("F", "I", "W"))
    forward_back, inputs_back, _ = _list_passes(2 * num_ranks - 1 - rank, ("F", "I", "W"))
    passes = [forward_down] * (2 * (num_ranks - rank) - 1)
    passes += [forward_back, forward_down] * rank
    passes += [forward_back, inputs_back, weights] * (num_ranks - rank)
    backward = [inputs_down, weights, forward_back, inputs_back, weights]
    num_down = filled - passes.count(forward_down)
    passes += [forward_down, *backward] * num_down
    passes += backward * (filled - passes.count(forward_back))
    # No forward pass remains: weight gradients fill the time until input gradients arrive.
    passes += [inputs_down, inputs_back] * rank
    passes += [inputs_down, weights] * (num_ranks - rank)
    return _number_passes(passes, num_micro_batches)


def build_dualpipev_row(rank: int, num_ranks: int, num_micro_batches: int) -> tuple[Action, ...]:
    """Build a rank of DualPipeV, half of DualPipe. At least 2p micro-batches.

    Where DeepSeek runs a forward and a backward pass at once to overlap the expert exchange,
    here they run one after the other. Source: DeepSeek-AI 2024, section 3.2.1, and the DualPipe
    repository.
    """
    forward_down, backward_down, inputs_down, weights = _list_passes(rank, ("F", "B", "I", "W"))
    forward_back, backward_back, inputs_back, _ = _list_passes(
        2 * num_ranks - 1 - rank, ("F", "B", "I", "W")
    )
    num_later = num_ranks - 1 - rank
    passes = [forward_down] * (2 * num_later)
    passes += [forward_down, forward_back] * (rank + 1)
    passes += [inputs_back, weights, forward_back] * num_later
    passes += [forward_down, backward_back, forward_back, backward_down] * (
        num_micro_batches - 2 * num_ranks + rank + 1
    )
    passes += [backward_back, forward_back, backward_down] * num_later
    # The second half of the remaining backward passes is split, so that their weight
    # gradients fill the end.
    for number in range(2 * (rank + 1)):
        if number > rank:
            passes.append(inputs_down if number % 2 else inputs_back)
        else:
            passes.append(backward_down if number % 2 else backward_back)
    passes += [weights, inputs_down] * num_later
    return _number_passes(passes, num_micro_batches)
