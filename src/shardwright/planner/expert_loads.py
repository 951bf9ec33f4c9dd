"""Loads of expert-parallel ranks that an earlier run logged, instead of even ones.

Every rank of a layer waits for the one whose experts have the most tokens, so the time of its
experts and of the rows that it receives is that of the even share times the ratio of the two.
The mean of this ratio over layers and steps depends on the number of ranks: a rank with more
experts averages over them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

from shardwright.architecture import ModelShape
from shardwright.config.recipe import Recipe
from shardwright.errors import InputError
from shardwright.telemetry.event_log import read_events, select_surviving_steps

NUM_STEPS = 20
"""Most logged steps that are averaged, the newest ones."""


@dataclass(frozen=True)
class ExpertRankLoads:
    """Tokens of the busiest rank divided by its even share, by the number of ranks that share the
    experts of a layer."""

    num_steps: int
    """Logged steps over which the ratios are means."""
    ratios: tuple[tuple[int, float], ...]
    """Pairs of a number of ranks, each a divisor of the number of experts, and the ratio."""

    def get_ratio(self, num_ranks: int) -> float:
        """Return the ratio for a number of ranks that divides the number of experts."""
        return self._ratio_of_degree[num_ranks]

    @cached_property
    def _ratio_of_degree(self) -> dict[int, float]:
        return dict(self.ratios)

    def describe(self) -> str:
        """Describe the loads in one line."""
        text = f"loads of experts: mean of {self.num_steps} logged steps"
        shared = [
            f"{ratio:.2f} over {num_ranks}" for num_ranks, ratio in self.ratios if num_ranks > 1
        ]
        if shared:
            text += f"; busiest rank / even share: {', '.join(shared)} ranks"
        return text


def compute_rank_loads(
    steps: Sequence[Sequence[Sequence[int]]], capacity_factor: float | None = None
) -> ExpertRankLoads:
    """Compute the loads of ranks from those of experts.

    Each rank has consecutive experts, as `expert_parallel` shards them. The loads are those of the
    global batch: those of one micro-batch or of one group of ranks vary more.

    Args:
        steps: tokens before dropping, by step, sparse layer and expert.
        capacity_factor: most tokens of an expert, as a multiple of its even share; the others are
            dropped. None: no limit.
    """
    num_experts = len(steps[0][0])
    layers = [
        _limit(tokens, capacity_factor) for layers in steps for tokens in layers if sum(tokens)
    ]
    return ExpertRankLoads(
        len(steps),
        tuple(
            (num_ranks, fmean(_compute_ratio(loads, num_ranks) for loads in layers))
            for num_ranks in range(1, num_experts + 1)
            if num_experts % num_ranks == 0
        ),
    )


def read_logged_loads(
    run: str | os.PathLike[str], recipe: Recipe, shape: ModelShape
) -> ExpertRankLoads:
    """Read the loads that a run logged.

    Args:
        run: run folder. Its model has as many sparse layers and experts as the recipe's.

    Raises:
        InputError: the recipe's model is dense or another one, or the run logged no loads.
    """
    field = "--expert-load"
    if shape.experts is None:
        raise InputError(
            "the recipe's model has no experts",
            field=field,
            got=os.fspath(run),
            remedy="Leave it out for dense models",
        )
    logged = [
        step.expert_tokens
        for step in select_surviving_steps(read_events(run))
        if step.expert_tokens
    ]
    if not logged:
        raise InputError(
            "the run logged no loads of experts",
            field=field,
            got=os.fspath(run),
            allowed="a run of a sparse model that reached a step that is a multiple of "
            "run.log_every_steps",
        )
    num_layers = sum(layer.sparse for layer in shape.layers)
    expected = (num_layers, shape.experts.num_experts)
    found = (len(logged[-1]), len(logged[-1][0]))
    if found != expected:
        raise InputError(
            "the run trained a model with other experts",
            field=field,
            got=f"{found[0]} sparse layers of {found[1]} experts in {os.fspath(run)}",
            allowed=f"{expected[0]} sparse layers of {expected[1]} experts, as in the recipe",
        )
    return compute_rank_loads(logged[-NUM_STEPS:], recipe.moe.capacity_factor)


def _limit(tokens: Sequence[int], capacity_factor: float | None) -> list[float]:
    even = sum(tokens) / len(tokens)
    limit = float("inf") if capacity_factor is None else capacity_factor * even
    return [min(count, limit) / even for count in tokens]


def _compute_ratio(loads: Sequence[float], num_ranks: int) -> float:
    """Return the mean load of the busiest rank's experts; the even load is 1."""
    size = len(loads) // num_ranks
    groups: Iterable[Sequence[float]] = (
        loads[first : first + size] for first in range(0, len(loads), size)
    )
    return max(sum(group) / size for group in groups)
