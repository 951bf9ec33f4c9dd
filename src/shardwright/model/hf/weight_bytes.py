"""Places of weights in safetensors files, for readers that copy bytes without converting them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from shardwright.architecture import ParameterSpec
from shardwright.layout import ParameterBox
from shardwright.model.hf.hf_weights import SAFETENSORS_DTYPES, WeightsFolder

_LENGTH_BYTES = 8
"""Bytes of the length of the header, at the beginning of a file."""


@dataclass(frozen=True)
class StoredBytes:
    """Bytes of a file, and their place in a rank's own tensor."""

    path: Path
    position: int
    num_bytes: int
    target: int


@dataclass(frozen=True)
class NotStored:
    """Reason why no file has a weight's bytes as they are computed with."""

    reason: str


class StoredWeights:
    """Places of a folder's weights in its files."""

    def __init__(self, folder: WeightsFolder) -> None:
        """
        Args:
            folder: folder that has been checked against the model.
        """
        self._folder = folder
        self._headers: dict[Path, tuple[dict[str, Any], int]] = {}

    def locate(
        self,
        spec: ParameterSpec,
        boxes: Sequence[ParameterBox],
        shape: Sequence[int],
        dtype: torch.dtype,
    ) -> tuple[StoredBytes, ...] | NotStored:
        """Find the bytes of a rank's part of a weight.

        Args:
            boxes: boxes of the part.
            shape: shape of the rank's tensor, which contains the boxes.
            dtype: dtype of that tensor.
        """
        if spec.packed_matrix is not None:
            return NotStored("quantised to 4 bits here")
        found = []
        for box in boxes:
            bounds = [(start, start + length) for start, length in box.global_bounds]
            offsets = [offset for offset, _ in box.local_bounds]
            for piece in spec.file_slices:
                overlap = piece.intersect(bounds)
                if overlap is None:
                    continue
                path, name = self._folder.find_file(piece.name)
                entry, data_position = self._find_entry(path, name)
                if SAFETENSORS_DTYPES[entry["dtype"]] != dtype:
                    computed = str(dtype).removeprefix("torch.")
                    return NotStored(f"stored as {entry['dtype']}, computed in {computed}")
                lengths = [stop - start for start, stop in overlap]
                position = _find_run(
                    _subtract(overlap, piece.box),
                    lengths,
                    [stop - start for start, stop in piece.box],
                )
                local = _subtract(overlap, bounds)
                target = _find_run(
                    [a + b for a, b in zip(local, offsets, strict=True)], lengths, shape
                )
                if position is None or target is None:
                    return NotStored("this rank has a part of each row")
                found.append(
                    StoredBytes(
                        path,
                        data_position + entry["data_offsets"][0] + position * dtype.itemsize,
                        prod(lengths) * dtype.itemsize,
                        target * dtype.itemsize,
                    )
                )
        return tuple(found)

    def _find_entry(self, path: Path, name: str) -> tuple[dict[str, Any], int]:
        """Return a tensor's entry, and the position of the file's data."""
        if path not in self._headers:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
                self._headers[path] = (json.loads(file.read(length)), _LENGTH_BYTES + length)
        entries, data_position = self._headers[path]
        return entries[name], data_position


def _subtract(bounds: Sequence[tuple[int, int]], origins: Sequence[tuple[int, int]]) -> list[int]:
    """Return the offset of each bound's start from that of its origin."""
    return [start - first for (start, _), (first, _) in zip(bounds, origins, strict=True)]


def _find_run(offsets: Sequence[int], lengths: Sequence[int], shape: Sequence[int]) -> int | None:
    """Return the first element of a box of a row-major tensor; None if it is not one run."""
    is_whole = True
    for length, size in zip(reversed(lengths), reversed(shape), strict=True):
        if not is_whole and length != 1:
            return None
        is_whole = is_whole and length == size
    first = 0
    for offset, size in zip(offsets, shape, strict=True):
        first = first * size + offset
    return first
