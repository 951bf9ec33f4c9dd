"""Pipeline stages: partition of a decoder's layers into runs of balanced cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from shardwright.errors import LayoutError


@dataclass(frozen=True)
class PipelineStage:
    """Blocks `first_layer` to `last_layer` (exclusive), perhaps with the embedding or the head.

    A stage with `has_embedding` starts with the embedding; one with `has_head` ends with the final
    norm and the head. `index` counts stages in the order in which tokens pass them; `rank` is the
    position on axis pp that holds the stage.
    """

    index: int
    rank: int
    first_layer: int
    last_layer: int
    has_embedding: bool
    has_head: bool

    @property
    def layers(self) -> range:
        """Indices of the stage's blocks in the whole model."""
        return range(self.first_layer, self.last_layer)


def partition_layers(
    layer_costs: Sequence[float],
    rank_of_stage: Sequence[int],
    *,
    embedding_cost: float = 0.0,
    head_cost: float = 0.0,
) -> tuple[PipelineStage, ...]:
    """Partition layers into runs, at least one layer each, that minimise the costliest stage.

    Among those, the sum of squares is minimal. Among equally good ones the early stages get
    fewer layers: their activations wait longest for the backward pass.

    Args:
        layer_costs: time of each layer, in any unit, also that of the embedding's and the
            head's.
        rank_of_stage: from the schedule.

    >>> stages = partition_layers([1.0] * 7, (0, 1, 2), head_cost=1.5)
    >>> [(stage.first_layer, stage.last_layer) for stage in stages]
    [(0, 3), (3, 6), (6, 7)]

    Raises:
        LayoutError: fewer layers than stages.
    """
    num_layers = len(layer_costs)
    num_stages = len(rank_of_stage)
    if num_layers < num_stages:
        num_ranks = max(rank_of_stage) + 1
        per_rank = num_stages // num_ranks
        max_ranks = num_layers // per_rank
        raise LayoutError(
            f"{num_layers} layers are fewer than {num_stages} pipeline stages "
            f"({num_ranks} ranks x {per_rank} each)",
            field="layout.pp",
            got=num_ranks,
            allowed=f"at most {max_ranks}" if max_ranks else "1",
            remedy=f"The nearest that works is pp={max_ranks}"
            if max_ranks > 1
            else "Use a schedule with one stage per rank, or pp=1",
        )
    boundaries = _find_boundaries(tuple(layer_costs), num_stages, embedding_cost, head_cost)
    return tuple(
        PipelineStage(index, rank, first, last, index == 0, index == num_stages - 1)
        for index, (rank, (first, last)) in enumerate(
            zip(rank_of_stage, pairwise(boundaries), strict=True)
        )
    )


@lru_cache(maxsize=512)
def _find_boundaries(
    layer_costs: tuple[float, ...], num_stages: int, embedding_cost: float, head_cost: float
) -> tuple[int, ...]:
    """Return the first layer of each stage and the number of layers.

    Cached, because schedules that differ only in their order ask for the same partition.
    """
    num_layers = len(layer_costs)
    costs_before = list(accumulate(layer_costs, initial=0.0))
    cap = _find_min_stage_cost(layer_costs, num_stages, embedding_cost, head_cost)
    # least[n] is the least sum of squares of stages s, s + 1, ... over the layers from n on;
    # filled from the last stage backwards.
    least = [float("inf")] * num_layers + [0.0]
    choices: list[list[int]] = []
    for stage in reversed(range(num_stages)):
        ends = (embedding_cost if stage == 0 else 0.0) + (
            head_cost if stage == num_stages - 1 else 0.0
        )
        better = [float("inf")] * (num_layers + 1)
        choice = [0] * (num_layers + 1)
        last_end = num_layers - (num_stages - stage - 1) + 1
        for first in range(stage, num_layers - (num_stages - stage) + 1):
            cost_before = costs_before[first] - ends
            best = float("inf")
            best_last = 0
            for last in range(first + 1, last_end):
                stage_cost = costs_before[last] - cost_before
                if stage_cost > cap:
                    break
                total = stage_cost * stage_cost + least[last]
                if total < best * (1 - 1e-12):
                    best = total
                    best_last = last
            better[first] = best
            choice[first] = best_last
        least = better
        choices.append(choice)
    boundaries = [0]
    for choice in reversed(choices):
        boundaries.append(choice[boundaries[-1]])
    return tuple(boundaries)


def _find_min_stage_cost(
    layer_costs: Sequence[float], num_stages: int, embedding_cost: float, head_cost: float
) -> float:
    """Find the least possible cost of the costliest stage, plus a small margin.

    Bisection over a cap up to which stages are filled from the first on.
    """
    ends = embedding_cost + head_cost
    low = max(layer_costs, default=0.0)
    high = sum(layer_costs) + ends

    def fits(cap: float) -> bool:
        stage = 0
        filled = embedding_cost
        num_left = len(layer_costs)
        num_placed = 0
        for cost in layer_costs:
            # A stage takes at least one layer, and leaves one for each stage after it.
            is_full = num_placed and (filled + cost > cap or num_left < num_stages - stage)
            if is_full:
                stage, filled, num_placed = stage + 1, 0.0, 0
            if stage == num_stages:
                return False
            filled += cost
            if filled > cap:
                return False
            num_placed, num_left = num_placed + 1, num_left - 1
        return stage == num_stages - 1 and filled + head_cost <= cap

    # The last stage must leave capacity for the head. Filling from the front ensures it: the
    # last stage gets the rest.
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high * (1 + 1e-9)
