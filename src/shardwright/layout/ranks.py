"""Which rank sits where, and who talks with whom: one row-major grid that every process group is read off."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product

from shardwright.layout.degrees import AXES, EXPERT_AXES, FSDP_AXES, Layout

_EXPERT_GRID = ("pp", "dp_replicate", *EXPERT_AXES, "tp")
"""The same ranks in the same order as `AXES`, with the ranks of fsdp cut in the experts' way."""


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
        """Position of a rank on each axis: `AXES`, `fsdp`, and the experts' `efsdp` and `ep`."""
        if not 0 <= rank < self.layout.world_size:
            raise IndexError(f"rank {rank} of {self.layout.world_size}")
        here = self._position(rank, AXES)
        return here | {"fsdp": here["dp_shard"] * self.layout.cp + here["cp"]} | self._position(rank, _EXPERT_GRID)

    def rank_at(self, coordinates: Mapping[str, int]) -> int:
        """Rank at a position on `AXES`."""
        return self._rank(coordinates, AXES)

    def group_of(self, rank: int, axes: Iterable[str]) -> tuple[int, ...]:
        """Ranks that differ from `rank` on `axes` only, itself included, ascending. Axes as in `coordinates`."""
        axes, grid = self._grid_of(axes)
        here = self._position(rank, grid)
        positions = product(*(range(self.layout.degree(axis)) for axis in axes))
        return tuple(sorted(self._rank(here | dict(zip(axes, position, strict=True)), grid) for position in positions))

    def groups(self, axes: Iterable[str]) -> list[tuple[int, ...]]:
        """All groups over `axes`, ascending; together they hold every rank once."""
        axes, grid = self._grid_of(axes)
        others = tuple(axis for axis in grid if axis not in axes)
        origin = dict.fromkeys(grid, 0)
        positions = product(*(range(self.layout.degree(axis)) for axis in others))
        return sorted(
            self.group_of(self._rank(origin | dict(zip(others, position, strict=True)), grid), axes) for position in positions
        )

    def parts(self, axis: str, size: int) -> list[tuple[int, ...]]:
        """Groups over one axis cut into runs of `size` neighbours: who shares a key-value head when there are fewer than ranks."""
        groups = self.groups([axis])
        return [group[first : first + size] for group in groups for first in range(0, len(group), size)]

    def _position(self, rank: int, grid: tuple[str, ...]) -> dict[str, int]:
        position = {}
        for axis in reversed(grid):
            rank, position[axis] = divmod(rank, self.layout.degree(axis))
        return {axis: position[axis] for axis in grid}

    def _rank(self, position: Mapping[str, int], grid: tuple[str, ...]) -> int:
        rank = 0
        for axis in grid:
            rank = rank * self.layout.degree(axis) + position[axis]
        return rank

    def _grid_of(self, axes: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The axes, `fsdp` spelled out, and the way of cutting the ranks in which each of them is an axis."""
        axes = tuple(axes)
        if not set(axes) & set(EXPERT_AXES):
            return tuple(part for axis in axes for part in (FSDP_AXES if axis == "fsdp" else (axis,))), AXES
        return tuple(part for axis in axes for part in (EXPERT_AXES if axis == "fsdp" else (axis,))), _EXPERT_GRID

    def data_rank(self, rank: int) -> int:
        """Which slice of the global batch the rank reads: its index over dp_replicate x dp_shard."""
        here = self.coordinates(rank)
        return here["dp_replicate"] * self.layout.dp_shard + here["dp_shard"]
