"""Parameter descriptors: the only source for reduction, clipping, checkpoints and hashes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shardwright.layout.degrees import Layout

Bounds = tuple[tuple[int, int], ...]
"""(start, length) per dimension."""


@dataclass(frozen=True)
class DimSection:
    """Part of a dimension that is sharded separately.

    It covers `length` indices from `start`, divided into `num_pieces` pieces.

    A fused projection has several sections: each rank holds its piece of every one, side by
    side. With fewer pieces than ranks, adjacent ranks hold the same piece: the case of fewer
    key-value heads than tensor-parallel ranks.
    """

    start: int
    length: int
    num_pieces: int


@dataclass(frozen=True)
class Shard:
    """Sharding of dimension `dim` over mesh axis `axis`, by sections or, without any, evenly.

    Pieces are those of torch.chunk: all have size ceil(n / pieces) except the last ones, which
    may be shorter or empty.
    """

    axis: str
    dim: int
    sections: tuple[DimSection, ...] = ()


@dataclass(frozen=True)
class ParameterLayout:
    """Distribution of one parameter over the ranks.

    `shards` apply in order: each divides the piece that the earlier ones leave, and ZeRO's is
    last. Ranks along
    `replicated_axes` hold equal values (counted once in a norm, written once in a checkpoint). The
    gradient is the sum over `reduced_axes` (and over adjacent ranks that hold the same piece of a
    section), without division: the loss already contains the one normaliser. `pp_ranks` are the
    positions on axis pp that hold the parameter; several hold a tied embedding, whose gradient is
    then summed over them.
    """

    name: str
    shape: tuple[int, ...]
    shards: tuple[Shard, ...] = ()
    replicated_axes: tuple[str, ...] = ()
    reduced_axes: tuple[str, ...] = ()
    pp_ranks: tuple[int, ...] = (0,)

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """Axes over which the parameter is sharded."""
        return tuple(shard.axis for shard in self.shards)


@dataclass(frozen=True)
class ParameterBox:
    """One box of a parameter that a rank holds.

    `num_copies` adjacent ranks hold the same box if a section has fewer pieces than ranks;
    `is_first_copy` is True on the first of them, where a norm counts the box.
    """

    local_bounds: Bounds
    """Bounds in the rank's own tensor."""
    global_bounds: Bounds
    """Bounds in the whole parameter."""
    num_copies: int = 1
    is_first_copy: bool = True


def compute_local_boxes(
    parameter: ParameterLayout,
    layout: Layout,
    coordinates: Mapping[str, int],
    *,
    with_zero: bool = True,
) -> tuple[ParameterBox, ...]:
    """Compute the boxes of a parameter that the rank at `coordinates` holds.

    There are none if its pipeline stages do not have the parameter.

    Args:
        coordinates: from `RankGrid.coordinates`.
        with_zero: False ignores ZeRO's sharding: the tensor of the forward pass.

    >>> sections = (DimSection(0, 4, 2), DimSection(4, 2, 1), DimSection(6, 2, 1))
    >>> qkv = ParameterLayout("qkv", (8, 2), (Shard("tp", 0, sections),))
    >>> boxes = compute_local_boxes(qkv, Layout(tp=2), {"pp": 0, "tp": 1})
    >>> [(box.global_bounds[0], box.num_copies, box.is_first_copy) for box in boxes]
    [((2, 2), 1, True), ((4, 2), 2, False), ((6, 2), 2, False)]
    """
    if coordinates["pp"] not in parameter.pp_ranks:
        return ()
    bounds = tuple((0, size) for size in parameter.shape)
    boxes: tuple[ParameterBox, ...] = (ParameterBox(bounds, bounds),)
    lengths = list(parameter.shape)
    for shard in parameter.shards:
        if not with_zero and shard.axis in ZERO_AXES:
            continue
        pieces = _select_pieces(
            shard, lengths[shard.dim], layout.degree(shard.axis), coordinates[shard.axis]
        )
        boxes = tuple(part for box in boxes for part in _intersect_box(box, shard.dim, pieces))
        lengths[shard.dim] = sum(piece.length for piece in pieces)
    return boxes


ZERO_AXES = ("fsdp", "efsdp")
"""Axes over which ZeRO shards."""


def compute_local_shape(
    parameter: ParameterLayout,
    layout: Layout,
    coordinates: Mapping[str, int],
    *,
    with_zero: bool = True,
) -> tuple[int, ...]:
    """Compute the shape of the tensor that the rank at `coordinates` holds."""
    lengths = list(parameter.shape)
    for shard in parameter.shards:
        if with_zero or shard.axis not in ZERO_AXES:
            pieces = _select_pieces(
                shard, lengths[shard.dim], layout.degree(shard.axis), coordinates[shard.axis]
            )
            lengths[shard.dim] = sum(piece.length for piece in pieces)
    return tuple(lengths)


@dataclass(frozen=True)
class _SectionPiece:
    """A rank's piece of one section, in indices of the tensor before this sharding."""

    start: int
    length: int
    num_copies: int
    is_first_copy: bool


def _select_pieces(shard: Shard, size: int, degree: int, position: int) -> list[_SectionPiece]:
    pieces = []
    for section in shard.sections or (DimSection(0, size, degree),):
        copies = degree // section.num_pieces
        index = position // copies
        chunk = -(-section.length // section.num_pieces)
        offset = min(index * chunk, section.length)
        pieces.append(
            _SectionPiece(
                section.start + offset,
                min(chunk, section.length - offset),
                copies,
                position % copies == 0,
            )
        )
    return pieces


def _intersect_box(box: ParameterBox, dim: int, pieces: list[_SectionPiece]) -> list[ParameterBox]:
    """Intersect a box with runs of indices along `dim`, which become contiguous."""
    start, length = box.local_bounds[dim]
    parts = []
    offset = 0
    for piece in pieces:
        first = max(start, piece.start)
        last = min(start + length, piece.start + piece.length)
        if first < last or (first == last and length == 0):
            local_bounds = list(box.local_bounds)
            global_bounds = list(box.global_bounds)
            local_bounds[dim] = (offset + first - piece.start, last - first)
            global_bounds[dim] = (box.global_bounds[dim][0] + first - start, last - first)
            parts.append(
                replace(
                    box,
                    local_bounds=tuple(local_bounds),
                    global_bounds=tuple(global_bounds),
                    num_copies=box.num_copies * piece.num_copies,
                    is_first_copy=box.is_first_copy and piece.is_first_copy,
                )
            )
        offset += piece.length
    return parts
