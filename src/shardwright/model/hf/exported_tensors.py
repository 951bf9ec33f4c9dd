"""Tensors of an exported folder: names, shapes, dtypes, order and files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

import torch
from torch import Tensor

from shardwright.architecture import ParameterSpec, WeightFileSlice
from shardwright.architecture.parameter_spec import FolderPrecision
from shardwright.model.hf.fp8_weights import FP8Weights


@dataclass(frozen=True)
class ExportedTensor:
    """One exported tensor: its parameter, the slice, and the part: values, codes or scales.

    `codes` are the 8-bit numbers of a quantised matrix, `scales` its scales.
    """

    spec: ParameterSpec
    piece: WeightFileSlice
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    values_dtype: torch.dtype
    """Dtype to which the values are rounded before a quantisation."""
    part: Literal["values", "codes", "scales"] = "values"

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor in the file."""
        return prod(self.shape) * self.dtype.itemsize


FOLDER_DTYPES: dict[FolderPrecision, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""Dtypes of folders that are narrower than fp32."""


def choose_stored_dtype(spec: ParameterSpec, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a parameter in a folder of `dtype`.

    It is fp32 where transformers' class of the family keeps the parameter in fp32, and so reads
    it without rounding (`_keep_in_fp32_modules` for fp16, `_keep_in_fp32_modules_strict` for
    both).
    """
    is_fp32 = any(FOLDER_DTYPES[precision] == dtype for precision in spec.fp32_folders)
    return torch.float32 if is_fp32 else dtype


def list_exported_tensors(
    specs: Sequence[ParameterSpec], dtype: torch.dtype, quantisation: FP8Weights | None = None
) -> list[ExportedTensor]:
    """List the tensors of a folder in order, stacked experts one by one, codes before scales."""
    tensors = []
    for spec in specs:
        values_dtype = choose_stored_dtype(spec, dtype)
        for piece in spec.file_slices:
            tensor = ExportedTensor(
                spec, piece, piece.name, piece.shape, values_dtype, values_dtype
            )
            if quantisation is None or piece.name not in quantisation.names:
                tensors.append(tensor)
                continue
            tensors += [
                replace(tensor, dtype=torch.float8_e4m3fn, part="codes"),
                replace(
                    tensor,
                    name=quantisation.name_scales(piece.name),
                    shape=quantisation.compute_scales_shape(piece.shape),
                    dtype=torch.float32,
                    part="scales",
                ),
            ]
    return tensors


def convert_parameter(
    whole: Tensor, tensors: Sequence[ExportedTensor], quantisation: FP8Weights | None
) -> Iterator[Tensor]:
    """Yield the stored tensors of one parameter, one at a time.

    Args:
        whole: the parameter, rounded to the dtype of the stored values.
        tensors: some of the parameter's, in the order of the list.
    """
    quantised_name: str | None = None
    quantised: dict[str, Tensor] = {}
    for tensor in tensors:
        part = whole[tuple(slice(start, stop) for start, stop in tensor.piece.box)]
        part = part.reshape(tensor.piece.shape)
        if tensor.part == "values" or quantisation is None:
            yield part
            continue
        if quantised_name != tensor.piece.name:
            quantised_name = tensor.piece.name
            codes, scales = quantisation.quantise(part)
            quantised = {"codes": codes, "scales": scales}
        yield quantised[tensor.part]


def plan_shards(
    tensors: Sequence[ExportedTensor], max_shard_bytes: int
) -> list[list[ExportedTensor]]:
    """Split tensors, in order, into files of at most `max_shard_bytes`.

    A larger tensor gets its own file.
    """
    shards: list[list[ExportedTensor]] = []
    free_bytes = 0
    for tensor in tensors:
        if not shards or tensor.size_bytes > free_bytes:
            shards.append([])
            free_bytes = max_shard_bytes
        shards[-1].append(tensor)
        free_bytes -= tensor.size_bytes
    return shards
