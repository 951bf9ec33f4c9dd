"""Whole matrices out of the pieces that ranks hold, for an update that needs them whole: Muon's.

Each matrix (each of a stack) comes together on one of the ranks that hold a piece of it, the one with the least to do so far, which
sends everybody's piece of the result back: two all-to-alls per set of axes, no matrix computed twice among the ranks that cut it. A
matrix that one rank holds whole travels nowhere. Who does what is computed from the descriptors by every rank alike.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.layout import Bounds, Layout, ParameterLayout, RankGrid, held
from shardwright.parallel.mesh import Mesh
from shardwright.parallel.reduce import narrow


@dataclass(frozen=True)
class _Piece:
    """What a rank holds of one matrix."""

    local: Bounds
    """Where it lies in the rank's tensor of the parameter."""
    whole: Bounds
    """Where it lies in the matrix, as (start, length) of rows and of columns."""
    first: bool
    """Whether the matrix is put together from this copy."""

    @property
    def num_elements(self) -> int:
        """Rows times columns."""
        return self.whole[0][1] * self.whole[1][1]


@dataclass(frozen=True)
class _Matrix:
    """One matrix: of which parameter, its shape, each rank's pieces of it, and who puts it together (a place in the group)."""

    name: str
    shape: tuple[int, int]
    pieces: tuple[tuple[_Piece, ...], ...]
    owner: int


class MatrixExchange:
    """Keeps `optim.MatrixExchange` over the ranks of a mesh; None is one rank, which has everything.

    Every rank builds it with the same names of the whole model, because groups are made by all.
    """

    def __init__(self, layouts: Mapping[str, ParameterLayout], names: Collection[str], mesh: Mesh | None, layout: Layout) -> None:
        stage = 0 if mesh is None else mesh.coordinates["pp"]
        self._place = 0
        self._sets: list[tuple[dist.ProcessGroup | None, int, list[_Matrix]]] = []
        by_axes: dict[tuple[str, ...], list[ParameterLayout]] = {}
        for name, described in layouts.items():
            if name in names:
                by_axes.setdefault(described.shard_axes, []).append(described)
        for axes, members in by_axes.items():
            group = None if mesh is None or not axes else mesh.join(mesh.grid.groups(axes))
            rank = 0 if mesh is None else mesh.rank
            ranks = (rank,) if group is None else RankGrid(layout).group_of(rank, axes)
            here = [described for described in members if stage in described.stages]
            self._sets.append((group, ranks.index(rank), _assign(here, layout, ranks)))

    def apply(self, function: Callable[[Tensor], Tensor], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`function` of every whole matrix; this rank's part of the results, shaped like `tensors`."""
        results = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
        for group, place, matrices in self._sets:
            known = [matrix for matrix in matrices if matrix.name in tensors]
            assert len(known) == len(matrices), "every rank has a gradient of every matrix of its stage"
            if known:
                _apply_over(group, place, known, function, tensors, results)
        return results


def _assign(members: list[ParameterLayout], layout: Layout, ranks: tuple[int, ...]) -> list[_Matrix]:
    """The matrices of parameters that are cut over the same axes, each given to a rank that holds some of it."""
    grid, loads, matrices = RankGrid(layout), [0.0] * len(ranks), []
    for described in members:
        rows, columns = described.shape[-2:]
        boxes = [held(described, layout, grid.coordinates(rank)) for rank in ranks]
        for index in range(described.shape[0] if len(described.shape) == 3 else 1):
            pieces = tuple(
                tuple(piece for box in of_rank if (piece := _piece_of(box.local, box.whole, box.first, index)).num_elements)
                for of_rank in ([box for box in one if _has(box.whole, index)] for one in boxes)
            )
            holders = [place for place, of_rank in enumerate(pieces) if any(piece.first for piece in of_rank)]
            owner = min(holders, key=lambda place: (loads[place], place))
            loads[owner] += float(rows) * columns * min(rows, columns)
            matrices.append(_Matrix(described.name, (rows, columns), pieces, owner))
    return matrices


def _has(whole: Bounds, index: int) -> bool:
    return len(whole) == 2 or whole[0][0] <= index < whole[0][0] + whole[0][1]


def _piece_of(local: Bounds, whole: Bounds, first: bool, index: int) -> _Piece:
    """A box's part of matrix `index` of a stack, or the box itself of a parameter that is one matrix."""
    if len(whole) == 2:
        return _Piece(local, whole, first)
    return _Piece(((local[0][0] + index - whole[0][0], 1), *local[1:]), whole[1:], first)


def _apply_over(
    group: dist.ProcessGroup | None,
    place: int,
    matrices: list[_Matrix],
    function: Callable[[Tensor], Tensor],
    tensors: Mapping[str, Tensor],
    results: dict[str, Tensor],
) -> None:
    """One set of axes: pieces to the owners, the function, pieces of what it gave to all that hold them."""
    size = 1 if group is None else group.size()
    like = tensors[matrices[0].name]
    # A rank's own pieces stay where they are.
    away = [[matrix for matrix in matrices if matrix.owner == other and other != place] for other in range(size)]
    mine = [matrix for matrix in matrices if matrix.owner == place]
    sent = [
        [narrow(tensors[m.name], piece.local) for m in away[other] for piece in m.pieces[place] if piece.first]
        for other in range(size)
    ]
    counts = [0 if other == place else _count(mine, other, first_only=True) for other in range(size)]
    gathered = _exchange(sent, counts, like, group)
    cursors = [0] * size
    back: list[list[Tensor]] = [[] for _ in range(size)]
    for matrix in mine:
        whole = like.new_empty(matrix.shape)
        for other, pieces in enumerate(matrix.pieces):
            for piece in pieces:
                if piece.first:
                    local = narrow(tensors[matrix.name], piece.local) if other == place else _take(gathered, cursors, other, piece)
                    narrow(whole, piece.whole).copy_(local.view(piece.whole[0][1], piece.whole[1][1]))
        made = function(whole)
        for other, pieces in enumerate(matrix.pieces):
            for piece in pieces:
                if other == place:
                    narrow(results[matrix.name], piece.local).copy_(
                        narrow(made, piece.whole).view_as(narrow(results[matrix.name], piece.local))
                    )
                else:
                    back[other].append(narrow(made, piece.whole))
    counts = [0 if other == place else sum(p.num_elements for m in away[other] for p in m.pieces[place]) for other in range(size)]
    returned = _exchange(back, counts, like, group)
    cursors = [0] * size
    for other in range(size):
        for matrix in away[other]:
            for piece in matrix.pieces[place]:
                target = narrow(results[matrix.name], piece.local)
                target.copy_(_take(returned, cursors, other, piece).view(target.shape))


def _count(matrices: list[_Matrix], other: int, *, first_only: bool) -> int:
    return sum(piece.num_elements for matrix in matrices for piece in matrix.pieces[other] if piece.first or not first_only)


def _take(parts: tuple[Tensor, ...], cursors: list[int], other: int, piece: _Piece) -> Tensor:
    """The next piece out of what came from a rank."""
    start = cursors[other]
    cursors[other] += piece.num_elements
    return parts[other][start : cursors[other]]


def _exchange(send: list[list[Tensor]], counts: list[int], like: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, ...]:
    """Every rank's tensors for every other, `counts` elements from each, as they came."""
    if group is None:
        return (like.new_empty(0),)
    flat = torch.cat([tensor.reshape(-1) for tensors in send for tensor in tensors] or [like.new_empty(0)])
    received = like.new_empty(sum(counts))
    splits = [sum(tensor.numel() for tensor in tensors) for tensors in send]
    dist.all_to_all_single(received, flat, counts, splits, group=group)
    return received.split(counts)
