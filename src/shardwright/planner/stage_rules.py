"""How trainers deal layers to pipeline stages, where they do not weigh them as the engine does. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

StageRule = Literal["weighed", "even", "running_sum"]
"""`weighed` is the engine's own (`placement.stages_of`). `even` counts layers, as Megatron-Core, DeepSpeed and torchtitan do.
`running_sum` is nanotron's: a stage takes layers until their cost passes its share of the whole."""


def deal_evenly(num_layers: int, num_stages: int) -> list[int]:
    """Layers of each stage: as many on each; where that does not divide, the ends are counted as layers of their own.

    What remains even so goes to the stages in the middle, whose ranks hold neither an embedding nor a head.

    >>> deal_evenly(8, 4), deal_evenly(126, 16)[:3], deal_evenly(30, 4), deal_evenly(61, 8)
    ([2, 2, 2, 2], [7, 8, 8], [7, 8, 8, 7], [7, 8, 8, 8, 8, 8, 7, 7])
    """
    each, rest = divmod(num_layers, num_stages)
    if rest == num_stages - 2 and num_stages > 2:
        return [each, *[each + 1] * (num_stages - 2), each]
    if rest == num_stages - 1:
        return [*[each + 1] * (num_stages - 1), each]
    return [each + (1 <= stage <= rest) for stage in range(num_stages)]


def deal_by_running_sum(layer_costs: Sequence[float], head_cost: float, num_stages: int) -> tuple[list[int], int]:
    """Layers of each stage, and the stage that holds the head; the embedding costs nothing, and late stages may stand empty.

    >>> deal_by_running_sum([1.0] * 8, 2.0, 4), deal_by_running_sum([1.0] * 2, 4.0, 8)
    (([3, 3, 2, 0], 3), ([1, 1, 0, 0, 0, 0, 0, 0], 2))
    """
    share = (sum(layer_costs) + head_cost) / num_stages
    counts, stage, passed = [0] * num_stages, 0, 0.0
    for cost in layer_costs:
        counts[stage] += 1
        passed += cost
        if passed > (stage + 1) * share:
            stage += 1
    return counts, stage
