"""Boxes: axis-aligned parts of a tensor, in elements. No torch.

Every slice of a checkpoint is a box; whether boxes lie over a tensor exactly once, and what two of them share, is decided here.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

_PRIME = 2**127 - 1


@dataclass(frozen=True, order=True)
class Box:
    """Part of a tensor: first index and number of elements in every dimension. A scalar's box has no dimensions.

    >>> Box((0, 2), (4, 3)).overlap(Box((3, 0), (4, 4)))
    Box(offsets=(3, 2), lengths=(1, 2))
    """

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Elements inside; 1 for a scalar."""
        return math.prod(self.lengths)

    def overlap(self, other: Box) -> Box | None:
        """What both hold, or None."""
        starts = tuple(max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True))
        ends = (min(a + n, b + m) for a, n, b, m in zip(self.offsets, self.lengths, other.offsets, other.lengths, strict=True))
        lengths = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return None if any(length <= 0 for length in lengths) else Box(starts, lengths)

    def within(self, outer: Box) -> Box:
        """The same elements counted from the first one of `outer`."""
        return Box(tuple(a - b for a, b in zip(self.offsets, outer.offsets, strict=True)), self.lengths)

    def __str__(self) -> str:
        return "[" + ",".join(f"{start}:{start + length}" for start, length in zip(self.offsets, self.lengths, strict=True)) + "]"


def whole(shape: Sequence[int]) -> Box:
    """The box that is all of a tensor."""
    return Box((0,) * len(shape), tuple(shape))


def fault_of_cover(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """None when every element of a tensor of `shape` lies in exactly one box; else what is wrong.

    Linear in the number of boxes, whatever their arrangement, so that a hostile manifest cannot make it slow: counting how
    often each element is covered gives a polynomial with one variable per dimension, sum over elements of count * x^index; it is
    the all-ones polynomial exactly when the cover is exact. Both are compared at a random point modulo 2^127 - 1; two different
    polynomials of degree n agree there with probability n / 2^127 (Schwartz, J. ACM 27(4), 1980, lemma 1).

    >>> fault_of_cover((4, 2), [Box((0, 0), (3, 2)), Box((3, 0), (1, 2))]) is None
    True
    >>> fault_of_cover((4, 2), [Box((0, 0), (3, 2)), Box((2, 0), (1, 2))])
    'slices overlap: [0:3,0:2] and [2:3,0:2]'
    """
    for box in boxes:
        if len(box.offsets) != len(shape) or any(
            start < 0 or length < 1 or start + length > size
            for start, length, size in zip(box.offsets, box.lengths, shape, strict=True)
        ):
            return f"slice {box} lies outside the shape {tuple(shape)}"
    covered, wanted = sum(box.num_elements for box in boxes), math.prod(shape)
    if covered < wanted:
        return f"slices hold {covered} of {wanted} elements"
    point = [2 + secrets.randbelow(_PRIME - 2) for _ in shape]
    powers: dict[tuple[int, int], int] = {}

    def power(dim: int, exponent: int) -> int:
        if (dim, exponent) not in powers:
            powers[dim, exponent] = pow(point[dim], exponent, _PRIME)
        return powers[dim, exponent]

    def value(box: Box) -> int:  # the geometric sums over one box, times the same (1 - x) per dimension everywhere
        result = 1
        for dim, (start, length) in enumerate(zip(box.offsets, box.lengths, strict=True)):
            result = result * (power(dim, start) - power(dim, start + length)) % _PRIME
        return result

    if wanted == 0 or (covered == wanted and sum(value(box) for box in boxes) % _PRIME == value(whole(shape))):
        return None
    return _name_overlap(boxes)


def _name_overlap(boxes: Sequence[Box]) -> str:
    """Names one pair that overlaps, if it is found without a long search."""
    first = sorted(boxes)[:1000]
    for index, box in enumerate(first):
        for other in first[index + 1 :]:
            if box.overlap(other) or box == other:
                return f"slices overlap: {box} and {other}"
    return "slices overlap"


@dataclass(frozen=True)
class Cut:
    """One cut of a dimension into `num_chunks`, as torch.chunk cuts (ceil-sized, the last ones short or empty), part `index` kept.

    With `stride` > 1 the dimension is first cut in `stride` parts and each of them is cut: FSDP2 over a dimension that tensor
    parallelism cuts too (torch's _StridedShard), where a later cut picks the part.
    """

    dim: int
    num_chunks: int
    index: int
    stride: int = 1


def boxes_of(shape: Sequence[int], cuts: Iterable[Cut]) -> list[Box]:
    """Boxes that are left of a tensor after cuts from left to right, in order of their indices; none if nothing is left.

    >>> [str(box) for box in boxes_of((5, 3), [Cut(0, 2, 1)])]
    ['[3:5,0:3]']
    >>> [str(box) for box in boxes_of((8,), [Cut(0, 2, 1, stride=2)])]
    ['[2:4]', '[6:8]']
    """
    runs: list[list[tuple[int, int]]] = [[(0, size)] for size in shape]
    for cut in cuts:
        size = sum(stop - start for start, stop in runs[cut.dim])
        kept: list[tuple[int, int]] = []
        for part in range(cut.stride):
            outer_start, outer_stop = _chunk(size, cut.stride, part)
            start, stop = _chunk(outer_stop - outer_start, cut.num_chunks, cut.index)
            kept += _take(runs[cut.dim], outer_start + start, outer_start + stop)
        runs[cut.dim] = kept
    found = []
    for ranges in product(*([run for run in runs_of_dim if run[1] > run[0]] for runs_of_dim in runs)):
        found.append(Box(tuple(start for start, _ in ranges), tuple(stop - start for start, stop in ranges)))
    return found


def _chunk(size: int, num_chunks: int, index: int) -> tuple[int, int]:
    """First and past-the-last element of one of torch.chunk's parts."""
    length = -(-size // num_chunks)
    return min(index * length, size), min((index + 1) * length, size)


def _take(runs: list[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    """Elements `start` to `stop` of what the runs hold one after the other, neighbours joined."""
    taken: list[tuple[int, int]] = []
    position = 0
    for run_start, run_stop in runs:
        low, high = max(start, position), min(stop, position + run_stop - run_start)
        if low < high:
            piece = (run_start + low - position, run_start + high - position)
            if taken and taken[-1][1] == piece[0]:
                piece = (taken.pop()[0], piece[1])
            taken.append(piece)
        position += run_stop - run_start
    return taken
