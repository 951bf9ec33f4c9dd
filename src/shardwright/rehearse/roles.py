"""Roles: groups of ranks that run the same step, of which one rank is rehearsed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shardwright.layout import Layout, RankGrid
from shardwright.rehearse.collective_recorder import Collective


@dataclass(frozen=True)
class RankRole:
    """Ranks with the same step on different data; `rank`, the first, has the largest shards."""

    rank: int
    ranks: tuple[int, ...]
    stage: int


def list_roles(layout: Layout, *, should_run_each_rank: bool = False) -> list[RankRole]:
    """List one role for each index on axis pp, or one for each rank.

    >>> [(role.rank, len(role.ranks)) for role in list_roles(Layout(pp=2, dp_shard=4, zero_stage=3))]
    [(0, 4), (4, 4)]
    """
    grid = RankGrid(layout)
    stage_of = [grid.coordinates(rank)["pp"] for rank in range(layout.world_size)]
    if should_run_each_rank:
        return [RankRole(rank, (rank,), stage_of[rank]) for rank in range(layout.world_size)]
    by_stage: dict[int, list[int]] = {}
    for rank, stage in enumerate(stage_of):
        by_stage.setdefault(stage, []).append(rank)
    return [RankRole(ranks[0], tuple(ranks), stage) for stage, ranks in by_stage.items()]


def restrict_to_rehearsed(
    sequences: Mapping[int, Sequence[Collective]],
) -> dict[int, list[Collective]]:
    """Restrict every group to the ranks that were rehearsed.

    All ranks of a role make the same calls, so mismatches can only occur between roles. The
    first ranks of all roles form one line through the rank grid. Messages to ranks outside that
    line, such as the ring of a context-parallel group, are equal within a role and left out.
    """
    present = set(sequences)
    if all(set(call.ranks) <= present for calls in sequences.values() for call in calls):
        return {rank: list(calls) for rank, calls in sequences.items()}
    return {
        rank: [
            replace(call, ranks=tuple(member for member in call.ranks if member in present))
            for call in calls
            if _is_between_rehearsed(call, present)
        ]
        for rank, calls in sequences.items()
    }


def _is_between_rehearsed(call: Collective, present: set[int]) -> bool:
    return call.peer is None or call.peer in present
