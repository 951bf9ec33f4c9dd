"""Stochastic rounding of fp32 numbers to bf16: up or down, so that the mean is exact.

To nearest, an update of less than half a step of bf16 (2^-9 of a weight) changes nothing, and a
second moment with beta2 = 0.999 never falls. The random bits of an element are a hash of seed,
update, parameter, and the element's place in the whole tensor: every layout rounds alike.

Source: Zamirai et al. 2021, Revisiting BFloat16 Training (arXiv 2010.06192).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from shardwright.hashing import mix_bits, mix_number, to_int32
from shardwright.layout import ParameterBox
from shardwright.numerics import get_local_tensor
from shardwright.optim.sharded_optimizer import (
    ParameterPiece,
    ShardedModel,
    count_elements,
)

_LOW_BITS = 0xFFFF
"""Bits of an fp32 number that bf16 lacks."""


class RandomBits(NamedTuple):
    """Random numbers from 0 to 65535 for three roundings of each element, int32.

    Any two are independent of each other: the third is the exclusive or of the others.
    """

    first: Tensor
    second: Tensor
    third: Tensor


def draw_bits(places: Tensor, key: Tensor) -> RandomBits:
    """Hash places of elements, int32, to the random numbers of their roundings."""
    bits = mix_bits(places ^ key)
    high = (bits >> 16) & _LOW_BITS
    low = bits & _LOW_BITS
    return RandomBits(high, low, high ^ low)


def round_to_bf16(values: Tensor, bits: Tensor) -> Tensor:
    """Round fp32 numbers to bf16, away from zero if `bits` carries into bf16's own bits.

    Numbers of bf16 stay as they are, and so do infinity and NaN.
    """
    carried = ((values.view(torch.int32) + bits) & ~_LOW_BITS).view(torch.float32)
    return torch.where(values.isnan(), values, carried).to(torch.bfloat16)


class PlaceRuns(NamedTuple):
    """Places of elements: runs of consecutive numbers at a constant distance."""

    first: int
    """Place of the first element, in the whole tensor."""
    length: int
    """Elements of a run."""
    distance: int
    """Between the first places of neighbouring runs."""


def find_runs(
    local_shape: Sequence[int], shape: Sequence[int], boxes: Sequence[ParameterBox]
) -> PlaceRuns | None:
    """Find the runs of places of a local tensor's elements; None if they are not as regular."""
    if len(boxes) != 1:
        return None
    first = 0
    partial_dims = []
    for dim, (start, size) in enumerate(boxes[0].global_bounds):
        first = first * shape[dim] + start
        if size != shape[dim]:
            partial_dims.append(dim)
    inner = partial_dims[-1] if partial_dims else 0
    # Runs begin at a constant distance if all dims between two partial ones are whole.
    if len(partial_dims) > 1 and any(size != 1 for size in local_shape[: partial_dims[-2]]):
        return None
    return PlaceRuns(first, count_elements(local_shape[inner:]), count_elements(shape[inner:]))


class PlaceTable(NamedTuple):
    """Places of elements: runs of consecutive numbers at any distances, int64 [runs] each."""

    starts: Tensor
    """Element of the flattened local part with which a run begins, ascending."""
    shifts: Tensor
    """Place of each of its elements less that number."""

    def list_places(self, begin: int, end: int, device: torch.device) -> Tensor:
        """List the places of some elements, int32 that wrap around, as a sum of steps."""
        steps = torch.ones(end - begin, dtype=torch.int32, device=device)
        if begin == end:
            return steps
        first = int(torch.searchsorted(self.starts, begin, right=True)) - 1
        last = int(torch.searchsorted(self.starts, end))
        starts = self.starts[first:last].clamp(min=begin) - begin
        shifts = self.shifts[first:last]
        jumps = shifts.diff(prepend=shifts.new_tensor([1 - begin])) + 1
        steps[starts.to(device)] = jumps.to(torch.int32).to(device)
        return steps.cumsum(0, dtype=torch.int32)


def tabulate_places(
    local_shape: Sequence[int], shape: Sequence[int], boxes: Sequence[ParameterBox]
) -> PlaceTable:
    """Tabulate the runs of places of a local tensor's elements, as few as its boxes have rows."""
    starts = [torch.empty(0, dtype=torch.int64)]
    places = [torch.empty(0, dtype=torch.int64)]
    for box in boxes:
        # A run goes through all dims after the last one that is partial here or in the whole.
        inner = len(shape) - 1
        while inner > 0 and box.local_bounds[inner][1] == local_shape[inner] == shape[inner]:
            inner -= 1
        for listed, sizes, bounds in (
            (starts, local_shape, box.local_bounds),
            (places, shape, box.global_bounds),
        ):
            numbers = torch.zeros((), dtype=torch.int64)
            for dim, (start, size) in enumerate(bounds[: inner + 1]):
                indices = torch.arange(start, start + (size if dim < inner else min(size, 1)))
                numbers = numbers[..., None] + indices * count_elements(sizes[dim + 1 :])
            listed.append(numbers.flatten())
    ordered, order = torch.cat(starts).sort()
    return PlaceTable(ordered, torch.cat(places)[order] - ordered)


class PlaceNumbers(NamedTuple):
    """Places of elements in rows of one length, modulo 2^32: int32 scalars on the host."""

    first: Tensor
    rows_per_run: Tensor | None = None
    """None if there is one run."""
    distance: Tensor | None = None


def compute_places(rows: PlaceNumbers, shape: Sequence[int], device: torch.device) -> Tensor:
    """Compute the places of elements `[rows, columns]`, int32."""
    # The compiler's C++ may assume that int32 numbers do not overflow; a GPU's wrap around.
    dtype = torch.int64 if device.type == "cpu" else torch.int32
    numbers_N = torch.arange(shape[0], device=device, dtype=dtype)
    columns_C = torch.arange(shape[1], device=device, dtype=dtype)
    if rows.rows_per_run is None or rows.distance is None:
        offsets_N = numbers_N * shape[1]
    else:
        runs_N = numbers_N // rows.rows_per_run
        numbers_N = numbers_N - runs_N * rows.rows_per_run
        offsets_N = runs_N * rows.distance.to(dtype) + numbers_N * shape[1]
    return (rows.first.to(dtype) + offsets_N[:, None] + columns_C).to(torch.int32)


@dataclass(frozen=True)
class PieceRounding:
    """Random numbers of one update of a piece of a parameter."""

    key: Tensor
    """int32 scalar on the host."""
    offset: int
    """Place of the piece's first element in the flattened local part."""
    num_elements: int
    runs: PlaceRuns | PlaceTable
    """Places of the flattened local part."""

    def narrow(self, start: int, stop: int) -> PieceRounding:
        """Return the random numbers of elements of the flattened piece."""
        return replace(self, offset=self.offset + start, num_elements=stop - start)

    def draw_bits(self, start: int, stop: int, device: torch.device) -> RandomBits:
        """Draw the random numbers of elements of the flattened piece."""
        return draw_bits(self.list_places(start, stop, device), self.key)

    def list_places(self, start: int, stop: int, device: torch.device) -> Tensor:
        """List the places of elements of the flattened piece, int32."""
        begin = self.offset + start
        end = self.offset + stop
        if isinstance(self.runs, PlaceTable):
            return self.runs.list_places(begin, end, device)
        numbers = torch.arange(begin, end, device=device)
        runs = numbers // self.runs.length
        places = numbers + runs * (self.runs.distance - self.runs.length) + self.runs.first
        return places.to(torch.int32)  # wraps around

    def describe_rows(self, length: int) -> PlaceNumbers | None:
        """Describe the places by rows of `length` elements; None if they are not so regular."""
        runs = self.runs
        if isinstance(runs, PlaceTable):
            return None
        if self.offset + self.num_elements <= runs.length:
            return PlaceNumbers(_to_scalar(runs.first + self.offset))
        if self.offset % runs.length or runs.length % length:
            return None
        return PlaceNumbers(
            _to_scalar(runs.first + self.offset // runs.length * runs.distance),
            _to_scalar(runs.length // length),
            _to_scalar(runs.distance),
        )


def make_sample_places(shape: Sequence[int], *, has_one_run: bool) -> tuple[PlaceNumbers, Tensor]:
    """Make places that pass 2^31, and a key, to compare a compiled function on."""
    rows, columns = shape
    length = rows * columns if has_one_run else 3 * columns
    runs = PlaceRuns(2**31 - 77, length, 7 * columns)
    key = _to_scalar(mix_number(1))
    places = PieceRounding(key, 0, rows * columns, runs).describe_rows(columns)
    assert places is not None
    return places, key


def _to_scalar(number: int) -> Tensor:
    return torch.tensor(to_int32(number), dtype=torch.int32)


class StochasticRounding:
    """Random numbers of all parameters' updates."""

    def __init__(self, seed: int, model: ShardedModel, parameters: Mapping[str, Tensor]) -> None:
        self._seed = seed
        self._model = model
        self._parameters = parameters
        self._keys: dict[str, int] = {}
        """Keys of seed and parameter, to which an update adds its number."""
        self._runs: dict[str, PlaceRuns | PlaceTable] = {}

    def compute_key(self, name: str, num_updates: int) -> Tensor:
        """Compute the key of a parameter's update (1 for the first), an int32 scalar on the
        host."""
        if name not in self._keys:
            text = f"{self._seed} {name}".encode()
            digest = hashlib.blake2b(text, digest_size=4).digest()
            self._keys[name] = int.from_bytes(digest, "little")
        return _to_scalar(mix_number(self._keys[name] ^ mix_number(num_updates)))

    def prepare(self, piece: ParameterPiece, num_updates: int) -> PieceRounding:
        """Return the random numbers of a piece's update (1 for the first)."""
        name = piece.name
        if name not in self._runs:
            described = self._describe(name)
            self._runs[name] = find_runs(*described) or tabulate_places(*described)
        return PieceRounding(
            self.compute_key(name, num_updates),
            piece.first_element or 0,
            piece.local.numel(),
            self._runs[name],
        )

    def _describe(self, name: str) -> tuple[Sequence[int], Sequence[int], Sequence[ParameterBox]]:
        """Return the local shape, the whole shape and the boxes of a parameter."""
        local = get_local_tensor(self._parameters[name].detach())
        return tuple(local.shape), self._model.layouts[name].shape, self._model.local_boxes(name)
