"""Assembly of whole tensors from the ranks' shards: of matrices for an optimizer, Muon.

Each matrix (each of a stack) is assembled on one of the ranks that hold a piece of it, the one
with the least work so far, which sends every rank its piece of the result: two all-to-alls per
set of axes, and no matrix is computed twice among the ranks that shard it. A matrix that one
rank holds whole is not sent. Every rank computes the same assignment from the descriptors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.architecture import ModelShape
from shardwright.layout import (
    Bounds,
    Layout,
    ParameterBox,
    ParameterLayout,
    RankGrid,
    compute_local_boxes,
)
from shardwright.parallel.gradient_reduction import narrow_to_box
from shardwright.parallel.mesh import Mesh


def list_exchanged_matrices(shape: ModelShape) -> frozenset[str]:
    """List the names of matrices, and of experts' stacks of them, of all blocks."""
    return frozenset(spec.name for spec in shape.list_parameters() if spec.is_block_matrix)


def assemble_tensor(local: Tensor | None, boxes: Iterable[ParameterBox], zeros: Tensor) -> Tensor:
    """Assemble a tensor of all ranks' boxes on every rank (a collective).

    Args:
        local: this rank's part of the tensor; None for nan in its boxes.
        boxes: boxes of `local` that this rank contributes; those of all ranks cover the tensor
            once.
        zeros: memory of the result.
    """
    for box in boxes:
        part = narrow_to_box(zeros, box.global_bounds)
        if local is None:
            part.fill_(torch.nan)
        else:
            part.copy_(narrow_to_box(local, box.local_bounds))
    dist.all_reduce(zeros)
    return zeros


def choose_assembly_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """Choose the dtype in which tensors are assembled: fp32, or fp64 if one has it.

    Packed bytes and bf16 are assembled as wider numbers, of the same dtype on all ranks.
    """
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


@dataclass(frozen=True)
class _MatrixPiece:
    """One rank's piece of one matrix."""

    local_bounds: Bounds
    """Bounds of the piece in the rank's tensor of the parameter."""
    matrix_bounds: Bounds
    """Bounds of the piece in the matrix, as (start, length) of rows and of columns."""
    is_first_copy: bool
    """True if the matrix is assembled from this copy."""

    @property
    def num_elements(self) -> int:
        """Elements of the piece: rows times columns."""
        return self.matrix_bounds[0][1] * self.matrix_bounds[1][1]


@dataclass(frozen=True)
class _Matrix:
    """One matrix: its parameter, shape, pieces by rank, and owner.

    The owner is the position in the group of the rank that assembles the matrix.
    """

    name: str
    shape: tuple[int, int]
    pieces: tuple[tuple[_MatrixPiece, ...], ...]
    owner: int


class DistributedMatrixExchange:
    """`optim.MatrixExchange` over the ranks of a mesh; without a mesh one rank has
    everything.

    Every rank builds it with the same names of the whole model, because all ranks must take
    part in creating groups.
    """

    def __init__(
        self,
        layouts: Mapping[str, ParameterLayout],
        names: Collection[str],
        mesh: Mesh | None,
        layout: Layout,
    ) -> None:
        stage = 0 if mesh is None else mesh.coordinates["pp"]
        self._axis_sets: list[tuple[dist.ProcessGroup | None, int, list[_Matrix]]] = []
        by_axes: dict[tuple[str, ...], list[ParameterLayout]] = {}
        for name, parameter_layout in layouts.items():
            if name in names:
                by_axes.setdefault(parameter_layout.shard_axes, []).append(parameter_layout)
        for axes, members in by_axes.items():
            group = None if mesh is None or not axes else mesh.join_group(mesh.grid.groups(axes))
            rank = 0 if mesh is None else mesh.rank
            ranks = (rank,) if group is None else RankGrid(layout).group_of(rank, axes)
            stage_layouts = [
                parameter_layout
                for parameter_layout in members
                if stage in parameter_layout.pp_ranks
            ]
            self._axis_sets.append(
                (group, ranks.index(rank), _assign_owners(stage_layouts, layout, ranks))
            )

    def apply(
        self, function: Callable[[Tensor], Tensor], tensors: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Apply `function` to every whole matrix of the parameters in `tensors`.

        Returns:
            This rank's parts of the results, shaped like `tensors`.
        """
        results = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
        for group, position, matrices in self._axis_sets:
            selected = [matrix for matrix in matrices if matrix.name in tensors]
            if selected:
                _apply_over_group(group, position, selected, function, tensors, results)
        return results


def _assign_owners(
    parameter_layouts: list[ParameterLayout], layout: Layout, ranks: tuple[int, ...]
) -> list[_Matrix]:
    """List the matrices of parameters sharded over the same axes, each with its owner."""
    grid = RankGrid(layout)
    loads = [0.0] * len(ranks)
    matrices = []
    for parameter_layout in parameter_layouts:
        rows, columns = parameter_layout.shape[-2:]
        boxes = [
            compute_local_boxes(parameter_layout, layout, grid.coordinates(rank)) for rank in ranks
        ]
        for index in range(parameter_layout.shape[0] if len(parameter_layout.shape) == 3 else 1):
            pieces = tuple(
                tuple(
                    piece
                    for box in of_rank
                    if (
                        piece := _make_piece(
                            box.local_bounds, box.global_bounds, box.is_first_copy, index
                        )
                    ).num_elements
                )
                for of_rank in (
                    [box for box in rank_boxes if _has_matrix(box.global_bounds, index)]
                    for rank_boxes in boxes
                )
            )
            positions = [
                position
                for position, of_rank in enumerate(pieces)
                if any(piece.is_first_copy for piece in of_rank)
            ]
            owner = min(positions, key=lambda position: (loads[position], position))
            loads[owner] += float(rows) * columns * min(rows, columns)
            matrices.append(_Matrix(parameter_layout.name, (rows, columns), pieces, owner))
    return matrices


def _has_matrix(whole: Bounds, index: int) -> bool:
    return len(whole) == 2 or whole[0][0] <= index < whole[0][0] + whole[0][1]


def _make_piece(local: Bounds, whole: Bounds, first: bool, index: int) -> _MatrixPiece:
    """Return a box's part of matrix `index` of a stack; for a single matrix the box itself."""
    if len(whole) == 2:
        return _MatrixPiece(local, whole, first)
    return _MatrixPiece(((local[0][0] + index - whole[0][0], 1), *local[1:]), whole[1:], first)


def _apply_over_group(
    group: dist.ProcessGroup | None,
    position: int,
    matrices: list[_Matrix],
    function: Callable[[Tensor], Tensor],
    tensors: Mapping[str, Tensor],
    results: dict[str, Tensor],
) -> None:
    """Apply `function` to the matrices of one set of axes.

    Pieces are sent to the owners, and pieces of the results back to all ranks that hold them.
    """
    size = 1 if group is None else group.size()
    like = tensors[matrices[0].name]
    # A rank's own pieces are not sent.
    remote_matrices = [
        [matrix for matrix in matrices if matrix.owner == other and other != position]
        for other in range(size)
    ]
    own_matrices = [matrix for matrix in matrices if matrix.owner == position]
    pieces_to_send = [
        [
            narrow_to_box(tensors[m.name], piece.local_bounds)
            for m in remote_matrices[other]
            for piece in m.pieces[position]
            if piece.is_first_copy
        ]
        for other in range(size)
    ]
    counts = [
        0 if other == position else _count_elements(own_matrices, other, first_only=True)
        for other in range(size)
    ]
    gathered = _exchange_pieces(pieces_to_send, counts, like, group)
    cursors = [0] * size
    results_to_send: list[list[Tensor]] = [[] for _ in range(size)]
    for matrix in own_matrices:
        whole = like.new_empty(matrix.shape)
        for other, piece in _list_pieces(matrix):
            if piece.is_first_copy:
                local = (
                    narrow_to_box(tensors[matrix.name], piece.local_bounds)
                    if other == position
                    else _pop_piece(gathered, cursors, other, piece)
                )
                target = narrow_to_box(whole, piece.matrix_bounds)
                target.copy_(local.view(target.shape))
        result = function(whole)
        for other, piece in _list_pieces(matrix):
            part = narrow_to_box(result, piece.matrix_bounds)
            if other == position:
                target = narrow_to_box(results[matrix.name], piece.local_bounds)
                target.copy_(part.view_as(target))
            else:
                results_to_send[other].append(part)
    counts = [
        0
        if other == position
        else sum(p.num_elements for m in remote_matrices[other] for p in m.pieces[position])
        for other in range(size)
    ]
    returned = _exchange_pieces(results_to_send, counts, like, group)
    cursors = [0] * size
    for other in range(size):
        for matrix in remote_matrices[other]:
            for piece in matrix.pieces[position]:
                target = narrow_to_box(results[matrix.name], piece.local_bounds)
                target.copy_(_pop_piece(returned, cursors, other, piece).view(target.shape))


def _list_pieces(matrix: _Matrix) -> Iterator[tuple[int, _MatrixPiece]]:
    """Yield (rank in the group, piece) of every piece of a matrix."""
    for rank, pieces in enumerate(matrix.pieces):
        for piece in pieces:
            yield rank, piece


def _count_elements(matrices: list[_Matrix], source: int, *, first_only: bool) -> int:
    return sum(
        piece.num_elements
        for matrix in matrices
        for piece in matrix.pieces[source]
        if piece.is_first_copy or not first_only
    )


def _pop_piece(
    parts: tuple[Tensor, ...], cursors: list[int], source: int, piece: _MatrixPiece
) -> Tensor:
    """Return the next piece of those received from a rank."""
    start = cursors[source]
    cursors[source] += piece.num_elements
    return parts[source][start : cursors[source]]


def _exchange_pieces(
    send: list[list[Tensor]], counts: list[int], like: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, ...]:
    """Send tensors to every rank and return what each rank sent, `counts` elements from it."""
    if group is None:
        return (like.new_empty(0),)
    flat = torch.cat(
        [tensor.reshape(-1) for tensors in send for tensor in tensors] or [like.new_empty(0)]
    )
    received = like.new_empty(sum(counts))
    splits = [sum(tensor.numel() for tensor in tensors) for tensors in send]
    dist.all_to_all_single(received, flat, counts, splits, group=group)
    return received.split(counts)
