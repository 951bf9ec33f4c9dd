"""Grid of ranks: coordinates of each rank, and all process groups of a layout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product

from shardwright.layout.degrees import AXES, EXPERT_AXES, FSDP_AXES, Layout

_EXPERT_GRID = ("pp", "dp_replicate", *EXPERT_AXES, "tp")
"""The same ranks in the same order as `AXES`, with `fsdp` split into the experts' axes."""


@dataclass(frozen=True)
class RankGrid:
    """Ranks of a layout as a row-major grid over `AXES` (tp varies fastest).

    >>> grid = RankGrid(Layout(dp_replicate=2, dp_shard=2, zero_stage=3))
    >>> grid.coordinates(3)["dp_shard"], grid.group_of(1, ["dp_replicate"])
    (1, (1, 3))
    >>> grid.groups(["dp_shard"])
    [(0, 1), (2, 3)]
    """

    layout: Layout

    @property
    def shape(self) -> tuple[int, ...]:
        """Degrees in the order of `AXES`."""
        return tuple(self.layout.degree(axis) for axis in AXES)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return a rank's position on each axis: `AXES`, `fsdp`, `efsdp` and `ep`."""
        if not 0 <= rank < self.layout.world_size:
            raise IndexError(f"rank {rank} of {self.layout.world_size}")
        coordinates = self._compute_position(rank, AXES)
        return (
            coordinates
            | {"fsdp": coordinates["dp_shard"] * self.layout.cp + coordinates["cp"]}
            | self._compute_position(rank, _EXPERT_GRID)
        )

    def group_of(self, rank: int, axes: Iterable[str]) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` on `axes` only, itself included, ascending.

        The axes are those of `coordinates`.
        """
        axes, grid = self._resolve_axes(axes)
        coordinates = self._compute_position(rank, grid)
        positions = product(*(range(self.layout.degree(axis)) for axis in axes))
        return tuple(
            sorted(
                self._compute_rank(coordinates | dict(zip(axes, position, strict=True)), grid)
                for position in positions
            )
        )

    def groups(self, axes: Iterable[str]) -> list[tuple[int, ...]]:
        """List all groups over `axes`, ascending; together they have every rank once."""
        axes, grid = self._resolve_axes(axes)
        others = tuple(axis for axis in grid if axis not in axes)
        origin = dict.fromkeys(grid, 0)
        positions = product(*(range(self.layout.degree(axis)) for axis in others))
        return sorted(
            self.group_of(
                self._compute_rank(origin | dict(zip(others, position, strict=True)), grid), axes
            )
            for position in positions
        )

    def subgroups(self, axis: str, size: int) -> list[tuple[int, ...]]:
        """Split the groups over one axis into runs of `size` adjacent ranks.

        With fewer key-value heads than ranks, such a run shares one head.
        """
        groups = self.groups([axis])
        return [
            group[first : first + size] for group in groups for first in range(0, len(group), size)
        ]

    def _compute_position(self, rank: int, grid: tuple[str, ...]) -> dict[str, int]:
        position = {}
        for axis in reversed(grid):
            rank, position[axis] = divmod(rank, self.layout.degree(axis))
        return {axis: position[axis] for axis in grid}

    def _compute_rank(self, position: Mapping[str, int], grid: tuple[str, ...]) -> int:
        rank = 0
        for axis in grid:
            rank = rank * self.layout.degree(axis) + position[axis]
        return rank

    def _resolve_axes(self, axes: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Resolve `fsdp` in `axes`; return them and the grid in which each of them is an axis."""
        axes = tuple(axes)
        if not set(axes) & set(EXPERT_AXES):
            return tuple(
                part for axis in axes for part in (FSDP_AXES if axis == "fsdp" else (axis,))
            ), AXES
        return tuple(
            part for axis in axes for part in (EXPERT_AXES if axis == "fsdp" else (axis,))
        ), _EXPERT_GRID

    def data_rank(self, rank: int) -> int:
        """Return the rank's index over dp_replicate x dp_shard: its slice of the global batch."""
        coordinates = self.coordinates(rank)
        return coordinates["dp_replicate"] * self.layout.dp_shard + coordinates["dp_shard"]
