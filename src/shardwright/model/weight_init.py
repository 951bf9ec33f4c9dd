"""Initial weights that depend only on a parameter's name and the seed.

The name is that of the weights file: stacked experts get the same values as separate ones.

A parameter is divided into tiles of 256 x 256 elements over its last two dims; leading dims are
processed one matrix at a time. Every tile has its own random stream: the counter-based
generator Philox-4x64, keyed by a hash of (seed, name), with its 256-bit counter starting at
tile_number << 128, so streams never overlap. A rank with a shard, by rows or by columns,
generates only the tiles that overlap its shard; it needs neither memory nor time for the whole
tensor.

Normal values come from NumPy's ziggurat method in single precision. It uses table look-ups and
products, so machines agree. Box-Muller would depend on the vector width behind `log` and `cos`;
torch's CPU generator is not used because its formula changes with the instruction set.
`tests/unit/model/test_weight_init.py` checks fixed values and so detects a changed stream of NumPy.
Values are scaled in float32 and then cast, so a float64 run starts from exactly the float32
weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import numpy as np
import torch
from torch import Tensor

from shardwright.architecture import (
    NormalInit,
    OnesInit,
    ParameterSpec,
    UniformInit,
    WeightFileSlice,
    ZerosInit,
)

TILE_SIZE = 256
"""Rows and columns of a tile. Changing it changes every initial weight."""

DimRanges = Sequence[tuple[int, int] | None]
"""(start, length) per dim, or None for the whole dim."""


def initialise_parameter(
    spec: ParameterSpec,
    seed: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str | None = None,
    narrow: DimRanges | None = None,
) -> Tensor:
    """Compute the initial values of a parameter or of a slice of it.

    Args:
        spec: name, whole shape and scheme (`NormalInit`, `UniformInit`, `OnesInit`,
            `ZerosInit`).
        seed: seed of the run.
        dtype: dtype of the result, cast from float32 values.
        device: device of the result. Values are always generated on the CPU, so that devices
            agree.
        narrow: (start, length) per dim; the result is bit-equal to that slice of the whole.

    >>> spec = ParameterSpec("lm_head.weight", (4, 8), "head", layer=None, init=NormalInit(0.02))
    >>> whole = initialise_parameter(spec, seed=0, dtype=torch.float32)
    >>> rows = initialise_parameter(spec, seed=0, dtype=torch.float32, narrow=[(1, 2), None])
    >>> torch.equal(rows, whole[1:3])
    True
    """
    bounds = resolve_bounds(spec.name, spec.shape, narrow)
    lengths = tuple(stop - start for start, stop in bounds)
    if device is not None and torch.device(device).type == "meta":
        return torch.empty(lengths, dtype=dtype, device="meta")
    init = spec.init
    if isinstance(init, OnesInit):
        return torch.ones(lengths, dtype=dtype, device=device)
    if isinstance(init, ZerosInit):
        return torch.zeros(lengths, dtype=dtype, device=device)
    if isinstance(init, NormalInit | UniformInit):
        value = torch.empty(lengths, dtype=dtype)
        for piece in spec.file_slices:
            _fill_piece(value, piece, bounds, seed, init)
        if (
            isinstance(init, NormalInit)
            and init.zero_row is not None
            and bounds[0][0] <= init.zero_row < bounds[0][1]
        ):
            value[init.zero_row - bounds[0][0]] = 0.0
        return value if device is None else value.to(device)
    raise TypeError(f"{spec.name}: no rule for {init!r}")


def resolve_bounds(
    name: str, shape: Sequence[int], narrow: DimRanges | None
) -> tuple[tuple[int, int], ...]:
    """Convert (start, length) per dim to (start, stop).

    >>> resolve_bounds("w", (4, 8), [(1, 2), None])
    ((1, 3), (0, 8))
    """
    if narrow is None:
        narrow = (None,) * len(shape)
    bounds = tuple(
        (0, size) if part is None else (part[0], part[0] + part[1])
        for part, size in zip(narrow, shape, strict=True)
    )
    for (start, stop), size in zip(bounds, shape, strict=True):
        assert 0 <= start <= stop <= size, f"{name}: slice {start}:{stop} of a dim of {size}"
    return bounds


def _fill_piece(
    value: Tensor,
    piece: WeightFileSlice,
    bounds: tuple[tuple[int, int], ...],
    seed: int,
    init: NormalInit | UniformInit,
) -> None:
    """Fill what `value`, slice `bounds` of a parameter, has of one tensor of the files."""
    overlap = piece.intersect(bounds)
    if overlap is None:
        return
    target = value[
        tuple(
            slice(a - start, b - start) for (a, b), (start, _) in zip(overlap, bounds, strict=True)
        )
    ]
    inside = tuple(
        (a - first, b - first) for (a, b), (first, _) in zip(overlap, piece.box, strict=True)
    )
    leading = len(piece.box) - len(
        piece.shape
    )  # each stacked expert is a separate tensor in a file
    _fill_tiles(target[(0,) * leading], piece.name, piece.shape, inside[leading:], seed, init)


def _fill_tiles(
    value: Tensor,
    name: str,
    shape: tuple[int, ...],
    bounds: tuple[tuple[int, int], ...],
    seed: int,
    init: NormalInit | UniformInit,
) -> None:
    """Generate every tile that overlaps `bounds` and copy the overlap."""
    # Vectors and scalars become matrices: tiles need two dims.
    matrix_shape = (1, 1, *shape)[-max(2, len(shape)) :]
    matrix_bounds = ((0, 1), (0, 1), *bounds)[-max(2, len(bounds)) :]
    value = value[(None,) * (len(matrix_shape) - len(shape))]
    key = _hash_stream_key(seed, name)

    def draw(tile: _Tile) -> None:
        generator = np.random.Generator(np.random.Philox(key=key, counter=tile.number << 128))
        if isinstance(init, NormalInit):
            values = generator.standard_normal(tile.shape, dtype=np.float32)
            values *= np.float32(init.std)
        else:
            values = generator.random(tile.shape, dtype=np.float32)
            values *= np.float32(2.0 * init.bound)
            values -= np.float32(init.bound)
        target = value[tile.leading][tile.target_rows, tile.target_columns]
        target.copy_(torch.from_numpy(values)[tile.rows, tile.columns])

    # NumPy's generator releases the GIL, so threads help. torchrun sets OMP_NUM_THREADS=1, so
    # the ranks of a node do not compete.
    workers = min(torch.get_num_threads(), value.numel() // TILE_SIZE**2)
    tiles = _iterate_tiles(matrix_shape, matrix_bounds)
    if workers <= 1:
        for tile in tiles:
            draw(tile)
    else:
        with ThreadPoolExecutor(workers) as pool:
            for _ in pool.map(draw, tiles):
                pass


def _hash_stream_key(seed: int, name: str) -> int:
    """Hash seed and name to 128 bits; unlike `hash`, the same in every process."""
    return int.from_bytes(
        hashlib.sha256(f"shardwright initial weights\n{seed}\n{name}".encode()).digest()[:16],
        "little",
    )


class _Tile:
    """Tile: number in the whole tensor, size, the part to copy, and its place in the slice."""

    __slots__ = ("columns", "leading", "number", "rows", "shape", "target_columns", "target_rows")

    def __init__(self, number: int, leading: tuple[int, ...], rows: _Span, columns: _Span) -> None:
        self.number = number
        self.leading = leading
        self.shape = (rows.size, columns.size)
        self.rows = rows.part
        self.target_rows = rows.target
        self.columns = columns.part
        self.target_columns = columns.target


class _Span:
    """Extent of a tile along one dim, and its overlap with the requested range."""

    __slots__ = ("index", "part", "size", "target")

    def __init__(self, index: int, size: int, requested: tuple[int, int]) -> None:
        first = index * TILE_SIZE
        self.index = index
        self.size = min(TILE_SIZE, size - first)
        start = max(requested[0], first)
        stop = min(requested[1], first + self.size)
        self.part = slice(start - first, stop - first)
        self.target = slice(start - requested[0], stop - requested[0])


def _list_spans(size: int, requested: tuple[int, int]) -> list[_Span]:
    if requested[0] == requested[1]:
        return []
    return [
        _Span(index, size, requested)
        for index in range(requested[0] // TILE_SIZE, -(-requested[1] // TILE_SIZE))
    ]


def _iterate_tiles(shape: tuple[int, ...], bounds: tuple[tuple[int, int], ...]) -> Iterator[_Tile]:
    *leading_shape, num_rows, num_columns = shape
    *leading_bounds, row_bounds, column_bounds = bounds
    tiles_per_row = -(-num_columns // TILE_SIZE)
    tiles_per_column = -(-num_rows // TILE_SIZE)
    row_spans = _list_spans(num_rows, row_bounds)
    column_spans = _list_spans(num_columns, column_bounds)
    for position in product(*(range(start, stop) for start, stop in leading_bounds)):
        matrix_index = 0
        for index, size in zip(position, leading_shape, strict=True):
            matrix_index = matrix_index * size + index
        leading = tuple(
            index - start for index, (start, _) in zip(position, leading_bounds, strict=True)
        )
        for rows, columns in product(row_spans, column_spans):
            number = (matrix_index * tiles_per_column + rows.index) * tiles_per_row + columns.index
            yield _Tile(number, leading, rows, columns)
