"""Layers per pipeline stage by the rules of other training frameworks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

StageRule = Literal["weighed", "even", "running_sum", "running_sum_reached"]
"""`weighed` is shardwright's own rule (`placement.partition_stages`). `even` counts layers, as
Megatron-Core, DeepSpeed and torchtitan do. `running_sum` is nanotron's: a stage takes layers
until their cost exceeds its share of the total. With `running_sum_reached` an equal cost suffices.
"""


def assign_evenly(num_layers: int, num_stages: int) -> list[int]:
    """Return layers per stage in equal numbers. If that is impossible, embedding and head count
    as one layer each.

    A further remainder goes to the middle stages, whose ranks have neither embedding nor head.

    >>> assign_evenly(8, 4), assign_evenly(126, 16)[:3], assign_evenly(30, 4), assign_evenly(61, 8)
    ([2, 2, 2, 2], [7, 8, 8], [7, 8, 8, 7], [7, 8, 8, 8, 8, 8, 7, 7])
    """
    layers_per_stage, rest = divmod(num_layers, num_stages)
    if rest == num_stages - 2 and num_stages > 2:
        return [layers_per_stage, *[layers_per_stage + 1] * (num_stages - 2), layers_per_stage]
    if rest == num_stages - 1:
        return [*[layers_per_stage + 1] * (num_stages - 1), layers_per_stage]
    return [layers_per_stage + (1 <= stage <= rest) for stage in range(num_stages)]


def assign_by_running_sum(
    layer_costs: Sequence[float],
    head_cost: float,
    num_stages: int,
    *,
    should_exceed: bool = True,
) -> tuple[list[int], int]:
    """Return layers per stage, and the stage of the head. The embedding has no cost, and late
    stages may be empty.

    Args:
        should_exceed: False if a stage also ends where its cost equals its share.

    >>> assign_by_running_sum([1.0] * 8, 2.0, 4), assign_by_running_sum([1.0] * 2, 4.0, 8)
    (([3, 3, 2, 0], 3), ([1, 1, 0, 0, 0, 0, 0, 0], 2))
    >>> assign_by_running_sum([1.0] * 16, 4.0, 4)
    ([6, 5, 5, 0], 3)
    >>> assign_by_running_sum([1.0] * 16, 4.0, 4, should_exceed=False)
    ([5, 5, 5, 1], 3)
    """
    share = (sum(layer_costs) + head_cost) / num_stages
    counts = [0] * num_stages
    stage = 0
    assigned_cost = 0.0
    for cost in layer_costs:
        counts[stage] += 1
        assigned_cost += cost
        limit = (stage + 1) * share
        if assigned_cost > limit or (assigned_cost == limit and not should_exceed):
            stage += 1
    return counts, stage
