"""Which ranks of a layout do the same: one of them is rehearsed for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shardwright.layout import Layout, RankGrid
from shardwright.rehearse.collectives import Collective


@dataclass(frozen=True)
class Role:
    """Ranks that run the same step on their own data; `rank`, the first of them, has the largest shards."""

    rank: int
    ranks: tuple[int, ...]
    stage: int


def roles_of(layout: Layout, *, each_rank: bool = False) -> list[Role]:
    """One role for each position on axis pp, or one for each rank.

    >>> [(role.rank, len(role.ranks)) for role in roles_of(Layout(pp=2, dp_shard=4, zero_stage=3))]
    [(0, 4), (4, 4)]
    """
    grid = RankGrid(layout)
    stage_of = [grid.coordinates(rank)["pp"] for rank in range(layout.world_size)]
    if each_rank:
        return [Role(rank, (rank,), stage_of[rank]) for rank in range(layout.world_size)]
    by_stage: dict[int, list[int]] = {}
    for rank, stage in enumerate(stage_of):
        by_stage.setdefault(stage, []).append(rank)
    return [Role(ranks[0], tuple(ranks), stage) for stage, ranks in by_stage.items()]


def among(sequences: Mapping[int, Sequence[Collective]]) -> dict[int, list[Collective]]:
    """The sequences with each group cut down to the ranks that were rehearsed.

    Within a role everybody does the same, so a group inside one role agrees with itself; what can disagree is what crosses roles,
    and the first ranks of all roles stand in one line through the grid. What they exchange with ranks outside the line (the ring of
    a context-parallel group, say) is exchanged alike by all ranks of their role, and left out.
    """
    present = set(sequences)
    if all(set(call.ranks) <= present for calls in sequences.values() for call in calls):
        return {rank: list(calls) for rank, calls in sequences.items()}
    return {
        rank: [replace(call, ranks=tuple(r for r in call.ranks if r in present)) for call in calls if _stays(call, present)]
        for rank, calls in sequences.items()
    }


def _stays(call: Collective, present: set[int]) -> bool:
    return call.peer is None or call.peer in present
