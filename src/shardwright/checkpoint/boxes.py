"""Boxes: axis-aligned parts of a tensor, in elements. No torch.

Every slice of a checkpoint is a box. This module intersects boxes, checks that boxes cover a
tensor exactly once, and computes the boxes of sharded tensors.
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
    """Part of a tensor: first index and number of elements per dimension.

    The box of a scalar has no dimensions.

    >>> Box((0, 2), (4, 3)).intersect(Box((3, 0), (4, 4)))
    Box(offsets=(3, 2), lengths=(1, 2))
    """

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.lengths)

    def intersect(self, other: Box) -> Box | None:
        """Return the intersection, or None if it is empty."""
        starts = tuple(max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True))
        ends = (
            min(a + n, b + m)
            for a, n, b, m in zip(
                self.offsets, self.lengths, other.offsets, other.lengths, strict=True
            )
        )
        lengths = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return None if any(length <= 0 for length in lengths) else Box(starts, lengths)

    def halve(self) -> tuple[Box, Box]:
        """Return two halves along the first dimension of more than one element.

        >>> [str(half) for half in Box((0, 2), (1, 3)).halve()]
        ['[0:1,2:3]', '[0:1,3:5]']
        """
        dim = next(dim for dim, length in enumerate(self.lengths) if length > 1)
        half = self.lengths[dim] // 2

        def select(begin: int, length: int) -> Box:
            offsets = tuple(offset + begin * (d == dim) for d, offset in enumerate(self.offsets))
            lengths = tuple(length if d == dim else full for d, full in enumerate(self.lengths))
            return Box(offsets, lengths)

        return select(0, half), select(half, self.lengths[dim] - half)

    def rebase(self, outer: Box) -> Box:
        """Return this box relative to the first element of `outer`."""
        return Box(
            tuple(a - b for a, b in zip(self.offsets, outer.offsets, strict=True)), self.lengths
        )

    def __str__(self) -> str:
        return (
            "["
            + ",".join(
                f"{start}:{start + length}"
                for start, length in zip(self.offsets, self.lengths, strict=True)
            )
            + "]"
        )


def build_full_box(shape: Sequence[int]) -> Box:
    """Return the box of a whole tensor."""
    return Box((0,) * len(shape), tuple(shape))


def find_cover_fault(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Return None if every element of a tensor lies in exactly one box, else the fault.

    Linear in the number of boxes for any arrangement, so that a malicious manifest cannot make
    it slow: the number of boxes that cover each element defines a polynomial with one variable
    per dimension, the sum over elements of count * x^index; the cover is exact if and only if
    all coefficients are 1. Both polynomials are compared at a random point modulo 2^127 - 1,
    where two different polynomials of degree n are equal with probability n / 2^127 (Schwartz,
    J. ACM 27(4), 1980, lemma 1).

    >>> find_cover_fault((4, 2), [Box((0, 0), (3, 2)), Box((3, 0), (1, 2))]) is None
    True
    >>> find_cover_fault((4, 2), [Box((0, 0), (3, 2)), Box((2, 0), (1, 2))])
    'slices overlap: [0:3,0:2] and [2:3,0:2]'
    """
    for box in boxes:
        if len(box.offsets) != len(shape) or any(
            start < 0 or length < 1 or start + length > size
            for start, length, size in zip(box.offsets, box.lengths, shape, strict=True)
        ):
            return f"slice {box} lies outside the shape {tuple(shape)}"
    num_covered = sum(box.num_elements for box in boxes)
    num_elements = math.prod(shape)
    if num_covered < num_elements:
        return f"slices hold {num_covered} of {num_elements} elements"
    point = [2 + secrets.randbelow(_PRIME - 2) for _ in shape]
    powers: dict[tuple[int, int], int] = {}

    def power(dim: int, exponent: int) -> int:
        if (dim, exponent) not in powers:
            powers[dim, exponent] = pow(point[dim], exponent, _PRIME)
        return powers[dim, exponent]

    def evaluate(box: Box) -> int:
        # Geometric sums over one box, times a factor (1 - x) per dimension common to all boxes.
        result = 1
        for dim, (start, length) in enumerate(zip(box.offsets, box.lengths, strict=True)):
            result = result * (power(dim, start) - power(dim, start + length)) % _PRIME
        return result

    if num_elements == 0 or (
        num_covered == num_elements
        and sum(evaluate(box) for box in boxes) % _PRIME == evaluate(build_full_box(shape))
    ):
        return None
    return _describe_overlap(boxes)


def _describe_overlap(boxes: Sequence[Box]) -> str:
    """Describe one pair of overlapping boxes, if a search among the first 1000 finds one."""
    searched = sorted(boxes)[:1000]
    for index, box in enumerate(searched):
        for other in searched[index + 1 :]:
            if box.intersect(other) or box == other:
                return f"slices overlap: {box} and {other}"
    return "slices overlap"


@dataclass(frozen=True)
class DimSplit:
    """Split of a dimension into `num_chunks` as by torch.chunk, keeping chunk `index`.

    Chunks have ceil size; the last ones may be short or empty. With `stride` > 1 the dimension
    is first divided into `stride` parts, and each of them is split. This is FSDP2 over a
    dimension that tensor parallelism shards too (torch's _StridedShard), where a later split
    selects the part.
    """

    dim: int
    num_chunks: int
    index: int
    stride: int = 1


def compute_boxes(shape: Sequence[int], splits: Iterable[DimSplit]) -> list[Box]:
    """Apply splits to a tensor from left to right; return the remaining boxes in order.

    >>> [str(box) for box in compute_boxes((5, 3), [DimSplit(0, 2, 1)])]
    ['[3:5,0:3]']
    >>> [str(box) for box in compute_boxes((8,), [DimSplit(0, 2, 1, stride=2)])]
    ['[2:4]', '[6:8]']
    """
    runs: list[list[tuple[int, int]]] = [[(0, size)] for size in shape]
    for split in splits:
        size = sum(stop - start for start, stop in runs[split.dim])
        remaining: list[tuple[int, int]] = []
        for outer_index in range(split.stride):
            outer_start, outer_stop = _compute_chunk(size, split.stride, outer_index)
            start, stop = _compute_chunk(outer_stop - outer_start, split.num_chunks, split.index)
            remaining += _slice_runs(runs[split.dim], outer_start + start, outer_start + stop)
        runs[split.dim] = remaining
    boxes = []
    for ranges in product(
        *([run for run in runs_of_dim if run[1] > run[0]] for runs_of_dim in runs)
    ):
        boxes.append(
            Box(tuple(start for start, _ in ranges), tuple(stop - start for start, stop in ranges))
        )
    return boxes


def _compute_chunk(size: int, num_chunks: int, index: int) -> tuple[int, int]:
    """Return start and stop of chunk `index` as of torch.chunk."""
    length = -(-size // num_chunks)
    return min(index * length, size), min((index + 1) * length, size)


def _slice_runs(runs: list[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    """Return elements `start` to `stop` of the concatenated runs; adjacent runs are merged."""
    selected: list[tuple[int, int]] = []
    position = 0
    for run_start, run_stop in runs:
        low = max(start, position)
        high = min(stop, position + run_stop - run_start)
        if low < high:
            piece = (run_start + low - position, run_start + high - position)
            if selected and selected[-1][1] == piece[0]:
                piece = (selected.pop()[0], piece[1])
            selected.append(piece)
        position += run_stop - run_start
    return selected
