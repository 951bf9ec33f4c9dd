"""Which rank sits where, and who talks with whom: one row-major grid that every process group is read off."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

from shardwright.layout.degrees import AXES, Layout


@dataclass(frozen=True)
class RankGrid:
    """Ranks of a layout as a row-major grid over `AXES` (tp varies fastest).

    >>> grid = RankGrid(Layout(dp_replicate=2, dp_shard=2, zero_stage=3))
    >>> grid.coordinates(3)["dp_shard"], grid.groups(["dp_shard"]), grid.group_of(1, ["dp_replicate"])
    (1, [(0, 1), (2, 3)], (1, 3))
    """

    layout: Layout

    @property
    def shape(self) -> tuple[int, ...]:
        """Degrees in the order of `AXES`."""
        return tuple(self.layout.degree(axis) for axis in AXES)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of a rank on each axis."""
        if not 0 <= rank < self.layout.world_size:
            raise IndexError(f"rank {rank} of {self.layout.world_size}")
        result = {}
        for axis in reversed(AXES):
            rank, result[axis] = divmod(rank, self.layout.degree(axis))
        return {axis: result[axis] for axis in AXES}

    def rank_at(self, coordinates: dict[str, int]) -> int:
        """Rank at a position."""
        rank = 0
        for axis in AXES:
            rank = rank * self.layout.degree(axis) + coordinates[axis]
        return rank

    def group_of(self, rank: int, axes: Iterable[str]) -> tuple[int, ...]:
        """Ranks that differ from `rank` on `axes` only, itself included, ascending."""
        axes = tuple(axes)
        here = self.coordinates(rank)
        return tuple(
            sorted(
                self.rank_at(here | dict(zip(axes, position, strict=True)))
                for position in product(*(range(self.layout.degree(axis)) for axis in axes))
            )
        )

    def groups(self, axes: Iterable[str]) -> list[tuple[int, ...]]:
        """All groups over `axes`, ascending; together they hold every rank once."""
        axes = tuple(axes)
        others = tuple(axis for axis in AXES if axis not in axes)
        origin = dict.fromkeys(AXES, 0)
        return sorted(
            self.group_of(self.rank_at(origin | dict(zip(others, position, strict=True))), axes)
            for position in product(*(range(self.layout.degree(axis)) for axis in others))
        )

    def data_rank(self, rank: int) -> int:
        """Which slice of the global batch the rank reads: its index over dp_replicate x dp_shard."""
        here = self.coordinates(rank)
        return here["dp_replicate"] * self.layout.dp_shard + here["dp_shard"]
