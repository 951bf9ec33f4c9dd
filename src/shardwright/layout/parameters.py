"""One descriptor per parameter. Reduction, clip, checkpoint and hash read it; nothing else decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shardwright.layout.degrees import Layout

Bounds = tuple[tuple[int, int], ...]
"""(start, length) per dimension."""


@dataclass(frozen=True)
class Section:
    """Part of a dimension that is cut by itself: `length` indices from `start` on, in `pieces` pieces.

    A fused projection has several sections: each rank holds its piece of every one, side by side. With fewer pieces than ranks,
    neighbours hold the same piece: key-value heads of which there are fewer than tensor-parallel ranks.
    """

    start: int
    length: int
    pieces: int


@dataclass(frozen=True)
class Shard:
    """Dimension `dim` is cut over mesh axis `axis`: section by section, or evenly where none are named.

    Pieces are torch.chunk's: all of the size ceil(n / pieces) but the last ones, which may be shorter or empty.
    """

    axis: str
    dim: int
    sections: tuple[Section, ...] = ()


@dataclass(frozen=True)
class ParameterLayout:
    """How one parameter lies over the ranks.

    `shards` apply in order: a later one cuts what the earlier ones left, so ZeRO's comes last. `copy_axes` hold equal values (count
    once in a norm, write once in a checkpoint). The gradient is the sum over `sum_axes` (and over neighbours that hold the same
    piece of a section), divided by nothing: the loss already carries the one normaliser. `stages` are the positions on axis pp that
    hold it; several share a tied embedding, whose gradient is then summed over them.
    """

    name: str
    shape: tuple[int, ...]
    shards: tuple[Shard, ...] = ()
    copy_axes: tuple[str, ...] = ()
    sum_axes: tuple[str, ...] = ()
    stages: tuple[int, ...] = (0,)

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """Axes over which it is cut."""
        return tuple(shard.axis for shard in self.shards)


@dataclass(frozen=True)
class Held:
    """One box of a parameter that a rank holds.

    `copies` neighbours hold the same box because a section has fewer pieces than ranks; `first` says that this rank is the first of
    them: a norm counts it there.
    """

    local: Bounds
    """Where it lies in the rank's own tensor."""
    whole: Bounds
    """Where it lies in the parameter."""
    copies: int = 1
    first: bool = True


def held(parameter: ParameterLayout, layout: Layout, coordinates: Mapping[str, int], *, zero: bool = True) -> tuple[Held, ...]:
    """The boxes that the rank at `coordinates` holds; none where its pipeline stages do not have the parameter.

    Args:
        coordinates: as `RankGrid.coordinates` gives them.
        zero: False leaves ZeRO's cuts out: the tensor that a forward pass works with.

    >>> qkv = ParameterLayout("qkv", (8, 2), (Shard("tp", 0, (Section(0, 4, 2), Section(4, 2, 1), Section(6, 2, 1))),))
    >>> [(box.whole[0], box.copies, box.first) for box in held(qkv, Layout(tp=2), {"pp": 0, "tp": 1})]
    [((2, 2), 1, True), ((4, 2), 2, False), ((6, 2), 2, False)]
    """
    if coordinates["pp"] not in parameter.stages:
        return ()
    everything = tuple((0, size) for size in parameter.shape)
    boxes: tuple[Held, ...] = (Held(everything, everything),)
    lengths = list(parameter.shape)
    for shard in parameter.shards:
        if not zero and shard.axis in ZERO_AXES:
            continue
        kept = _kept(shard, lengths[shard.dim], layout.degree(shard.axis), coordinates[shard.axis])
        boxes = tuple(part for box in boxes for part in _cut(box, shard.dim, kept))
        lengths[shard.dim] = sum(piece.length for piece in kept)
    return boxes


ZERO_AXES = ("fsdp", "efsdp")
"""Axes over which ZeRO cuts."""


def local_shape(
    parameter: ParameterLayout, layout: Layout, coordinates: Mapping[str, int], *, zero: bool = True
) -> tuple[int, ...]:
    """Shape of the tensor that the rank at `coordinates` holds."""
    lengths = list(parameter.shape)
    for shard in parameter.shards:
        if zero or shard.axis not in ZERO_AXES:
            kept = _kept(shard, lengths[shard.dim], layout.degree(shard.axis), coordinates[shard.axis])
            lengths[shard.dim] = sum(piece.length for piece in kept)
    return tuple(lengths)


@dataclass(frozen=True)
class _Piece:
    """What a rank keeps of one section, in indices of the tensor as it was before this cut."""

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
    """What is left of a box when only some runs of indices along `dim` stay, and move together."""
    start, length = box.local[dim]
    parts, before = [], 0
    for piece in kept:
        first, last = max(start, piece.start), min(start + length, piece.start + piece.length)
        if first < last or (first == last and length == 0):
            local, whole = list(box.local), list(box.whole)
            local[dim] = (before + first - piece.start, last - first)
            whole[dim] = (box.whole[dim][0] + first - start, last - first)
            parts.append(
                replace(
                    box,
                    local=tuple(local),
                    whole=tuple(whole),
                    copies=box.copies * piece.copies,
                    first=box.first and piece.first,
                )
            )
        before += piece.length
    return parts
