"""Which part of a decoder a pipeline stage holds, and how its layers are dealt to the stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from shardwright.errors import LayoutError


@dataclass(frozen=True)
class Stage:
    """Blocks `first_layer` to `last_layer` (not included), with the embedding before or the final norm and head after them.

    `index` counts stages in the order in which tokens pass them; `rank` is the position on axis pp that holds it.
    """

    index: int
    rank: int
    first_layer: int
    last_layer: int
    embedding: bool
    head: bool

    @property
    def layers(self) -> range:
        """Numbers of its blocks in the whole model."""
        return range(self.first_layer, self.last_layer)


def cut_stages(
    layer_costs: Sequence[float], rank_of_stage: Sequence[int], *, embedding_cost: float = 0.0, head_cost: float = 0.0
) -> tuple[Stage, ...]:
    """Layers in runs, one at least for each stage, so that the costliest stage costs least; then the sum of squares least.

    Where runs are equally good the early stages get fewer layers: their activations wait longest for the backward pass.

    Args:
        layer_costs: time of each layer, in any unit; the ends' costs in the same.
        rank_of_stage: from the schedule.

    >>> [(s.first_layer, s.last_layer) for s in cut_stages([1.0] * 7, (0, 1, 2), head_cost=1.5)]
    [(0, 3), (3, 6), (6, 7)]

    Raises:
        LayoutError: fewer layers than stages.
    """
    num_layers, num_stages = len(layer_costs), len(rank_of_stage)
    if num_layers < num_stages:
        num_ranks = max(rank_of_stage) + 1
        per_rank = num_stages // num_ranks
        most = num_layers // per_rank
        raise LayoutError(
            f"{num_layers} layers do not fill {num_stages} pipeline stages ({num_ranks} ranks x {per_rank} each)",
            field="layout.pp",
            got=num_ranks,
            allowed=f"at most {most}" if most else "1",
            remedy=f"The nearest that works is pp={most}" if most > 1 else "Use a schedule with one stage a rank, or pp=1",
        )
    borders = _borders(tuple(layer_costs), num_stages, embedding_cost, head_cost)
    return tuple(
        Stage(index, rank, first, last, index == 0, index == num_stages - 1)
        for index, (rank, (first, last)) in enumerate(zip(rank_of_stage, pairwise(borders), strict=True))
    )


@lru_cache(maxsize=512)
def _borders(layer_costs: tuple[float, ...], num_stages: int, embedding_cost: float, head_cost: float) -> tuple[int, ...]:
    """Where each stage begins, and the number of layers. Kept: schedules that differ in their order alone ask the same."""
    num_layers = len(layer_costs)
    before = list(accumulate(layer_costs, initial=0.0))
    cap = _least_cap(layer_costs, num_stages, embedding_cost, head_cost)
    # least[n] is the least sum of squares of stages s, s + 1, ... over the layers from n on; filled from the last stage back.
    least = [float("inf")] * num_layers + [0.0]
    choices: list[list[int]] = []
    for stage in reversed(range(num_stages)):
        ends = (embedding_cost if stage == 0 else 0.0) + (head_cost if stage == num_stages - 1 else 0.0)
        better = [float("inf")] * (num_layers + 1)
        choice = [0] * (num_layers + 1)
        last_end = num_layers - (num_stages - stage - 1) + 1
        for first in range(stage, num_layers - (num_stages - stage) + 1):
            spent, best, chosen = before[first] - ends, float("inf"), 0
            for last in range(first + 1, last_end):
                taken = before[last] - spent
                if taken > cap:
                    break
                total = taken * taken + least[last]
                if total < best * (1 - 1e-12):
                    best, chosen = total, last
            better[first], choice[first] = best, chosen
        least = better
        choices.append(choice)
    borders = [0]
    for choice in reversed(choices):
        borders.append(choice[borders[-1]])
    return tuple(borders)


def _least_cap(layer_costs: Sequence[float], num_stages: int, embedding_cost: float, head_cost: float) -> float:
    """What the costliest stage must cost at least, a hair above: by bisection, filling stages up to a cap from the first on."""
    ends = embedding_cost + head_cost
    low, high = max(layer_costs, default=0.0), sum(layer_costs) + ends

    def fits(cap: float) -> bool:
        stage, filled, left = 0, embedding_cost, len(layer_costs)
        taken = 0
        for cost in layer_costs:
            # A stage takes one layer at least, and leaves one for each stage after it.
            full = taken and (filled + cost > cap or left < num_stages - stage)
            if full:
                stage, filled, taken = stage + 1, 0.0, 0
            if stage == num_stages:
                return False
            filled += cost
            if filled > cap:
                return False
            taken, left = taken + 1, left - 1
        return stage == num_stages - 1 and filled + head_cost <= cap

    # The last stage must stay light enough for the head, which filling from the front does: it gets what is left.
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high * (1 + 1e-9)
