"""Parameter descriptors: the only source for reduction, clipping, checkpoints and hashes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shardwright.layout.degrees import Layout

Bounds = tuple[tuple[int, int], ...]
"""(start, length) per dimension."""


@dataclass(frozen=True)
class Section:
    """Part of a dimension that is sharded separately.

    It has `length` indices from `start` on, in `pieces` pieces.

    A fused projection has several sections: each rank holds its piece of every one, side by
    side. With fewer pieces than ranks, adjacent ranks hold the same piece: the case of fewer
    key-value heads than tensor-parallel ranks.
    """

    start: int
    length: int
    pieces: int


@dataclass(frozen=True)
class Shard:
    """Sharding of dimension `dim` over mesh axis `axis`, by sections or, without any, evenly.

    Pieces are those of torch.chunk: all have size ceil(n / pieces) except the last ones, which
    may be shorter or empty.
    """

    axis: str
    dim: int
    sections: tuple[Section, ...] = ()


@dataclass(frozen=True)
class ParameterLayout:
    """Distribution of one parameter over the ranks.

    `shards` apply in order, each to what the earlier ones left, so ZeRO's comes last. Ranks
    along `copy_axes` hold equal values (counted once in a norm, written once in a checkpoint).
    The gradient is the sum over `sum_axes` (and over adjacent ranks that hold the same piece of
    a section), without division: the loss already contains the one normaliser. `stages` are the
    positions on axis pp that hold the parameter; several hold a tied embedding, whose gradient
    is then summed over them.
    """

    name: str
    shape: tuple[int, ...]
    shards: tuple[Shard, ...] = ()
    copy_axes: tuple[str, ...] = ()
    sum_axes: tuple[str, ...] = ()
    stages: tuple[int, ...] = (0,)

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """Axes over which the parameter is sharded."""
        return tuple(shard.axis for shard in self.shards)


@dataclass(frozen=True)
class Held:
    """One box of a parameter that a rank holds.

    `copies` adjacent ranks hold the same box if a section has fewer pieces than ranks; `first`
    is True on the first of them, where a norm counts the box.
    """

    local: Bounds
    """Bounds in the rank's own tensor."""
    whole: Bounds
    """Bounds in the whole parameter."""
    copies: int = 1
    first: bool = True


def held(parameter: ParameterLayout, layout: Layout, coordinates: Mapping[str, int], *, zero: bool = True) -> tuple[Held, ...]:
    """Compute the boxes of a parameter that the rank at `coordinates` holds.

    There are none if its pipeline stages do not have the parameter.

    Args:
        coordinates: from `RankGrid.coordinates`.
        zero: False ignores ZeRO's sharding: the tensor of the forward pass.

    >>> sections = (Section(0, 4, 2), Section(4, 2, 1), Section(6, 2, 1))
    >>> qkv = ParameterLayout("qkv", (8, 2), (Shard("tp", 0, sections),))
    >>> boxes = held(qkv, Layout(tp=2), {"pp": 0, "tp": 1})
    >>> [(box.whole[0], box.copies, box.first) for box in boxes]
    [((2, 2), 1, True), ((4, 2), 2, False), ((6, 2), 2, False)]
    """
    if coordinates["pp"] not in parameter.stages:
        return ()
    bounds = tuple((0, size) for size in parameter.shape)
    boxes: tuple[Held, ...] = (Held(bounds, bounds),)
    lengths = list(parameter.shape)
    for shard in parameter.shards:
        if not zero and shard.axis in ZERO_AXES:
            continue
        pieces = _kept(shard, lengths[shard.dim], layout.degree(shard.axis), coordinates[shard.axis])
        boxes = tuple(part for box in boxes for part in _cut(box, shard.dim, pieces))
        lengths[shard.dim] = sum(piece.length for piece in pieces)
    return boxes


ZERO_AXES = ("fsdp", "efsdp")
"""Axes over which ZeRO shards."""


def local_shape(
    parameter: ParameterLayout, layout: Layout, coordinates: Mapping[str, int], *, zero: bool = True
) -> tuple[int, ...]:
    """Compute the shape of the tensor that the rank at `coordinates` holds."""
    lengths = list(parameter.shape)
    for shard in parameter.shards:
        if zero or shard.axis not in ZERO_AXES:
            pieces = _kept(shard, lengths[shard.dim], layout.degree(shard.axis), coordinates[shard.axis])
            lengths[shard.dim] = sum(piece.length for piece in pieces)
    return tuple(lengths)


@dataclass(frozen=True)
class _Piece:
    """A rank's piece of one section, in indices of the tensor before this sharding."""

    start: int
    length: int
    copies: int
    first: bool


def _kept(shard: Shard, size: int, degree: int, position: int) -> list[_Piece]:
    pieces = []
    for section in shard.sections or (Section(0, size, degree),):
        copies = degree // section.pieces
        index = position // copies
        chunk = -(-section.length // section.pieces)
        offset = min(index * chunk, section.length)
        pieces.append(_Piece(section.start + offset, min(chunk, section.length - offset), copies, position % copies == 0))
    return pieces


def _cut(box: Held, dim: int, kept: list[_Piece]) -> list[Held]:
    """Intersect a box with runs of indices along `dim`, which become contiguous."""
    start, length = box.local[dim]
    parts = []
    offset = 0
    for piece in kept:
        first = max(start, piece.start)
        last = min(start + length, piece.start + piece.length)
        if first < last or (first == last and length == 0):
            local_bounds = list(box.local)
            global_bounds = list(box.whole)
            local_bounds[dim] = (offset + first - piece.start, last - first)
            global_bounds[dim] = (box.whole[dim][0] + first - start, last - first)
            parts.append(
                replace(
                    box,
                    local=tuple(local_bounds),
                    whole=tuple(global_bounds),
                    copies=box.copies * piece.copies,
                    first=box.first and piece.first,
                )
            )
        offset += piece.length
    return parts
