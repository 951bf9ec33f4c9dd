"""Adapter folders of peft: adapter_config.json and adapter_model.safetensors.

Legend: E experts, R rank, D in, F out.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from shardwright.architecture import ModelShape, ParameterSpec
from shardwright.architecture.flop_count import EXPERT_ROLES
from shardwright.architecture.peft_folder import (
    PEFT_CONFIG_NAME,
    PEFT_TENSORS_NAME,
    build_peft_config,
    map_peft_tensors,
)
from shardwright.errors import RunFailed, WeightsError
from shardwright.model.hf.export_folder import check_export_folder, replace_folder


def write_peft_folder(
    out: str | Path,
    shape: ModelShape,
    read: Callable[[str], Tensor],
    *,
    base: str | None,
    dtype: torch.dtype = torch.float32,
    overwrite: bool = False,
    check: Callable[[Path], None] | None = None,
) -> int:
    """Write a model's adapters under a temporary name, rename to `out`; return their bytes.

    Args:
        read: returns the whole tensor of an adapter parameter by name.
        base: location of the base model; peft loads it from there.
        check: called with the complete temporary folder; if it raises, nothing is left on disk.

    Raises:
        InputError: `out` must not be written.
        WeightsError: values that are not finite.
        RunFailed: the folder cannot be written.
    """
    out = check_export_folder(out, should_overwrite=overwrite)
    names = map_peft_tensors(shape)
    specs = [spec for spec in shape.list_parameters() if spec.adapter_part is not None]
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        tensors = {
            names[spec.name].name: _to_stored_dtype(spec, read(spec.name), dtype) for spec in specs
        }
        # safetensors' save_file would make a file that only its owner can read.
        (partial / PEFT_TENSORS_NAME).write_bytes(save(tensors, metadata={"format": "pt"}))
        text = json.dumps(build_peft_config(shape, base), indent=2, sort_keys=True) + "\n"
        (partial / PEFT_CONFIG_NAME).write_text(text, encoding="utf-8")
        if check is not None:
            check(partial)
        replace_folder(partial, out)
    except OSError as error:
        raise RunFailed(f"{out} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


class PeftFolder:
    """Tensors of an adapter folder that `architecture.peft_folder` has checked."""

    def __init__(self, path: str | Path, shape: ModelShape) -> None:
        self.path = Path(path) / PEFT_TENSORS_NAME
        self._names = map_peft_tensors(shape)
        self._specs = {
            spec.name: spec for spec in shape.list_parameters() if spec.adapter_part is not None
        }
        self._file = safe_open(str(self.path), framework="pt")

    def read(self, name: str, narrow: Sequence[tuple[int, int]], dtype: torch.dtype) -> Tensor:
        """Read a slice, (start, length) per dim, of an adapter parameter.

        Raises:
            WeightsError: The file cannot be read.
        """
        spec = self._specs[name]
        inside = tuple(slice(start, start + length) for start, length in narrow)
        try:
            part = self._file.get_slice(self._names[name].name)
            if spec.role in EXPERT_ROLES:
                return stack_experts(spec, part[:])[inside].to(dtype)
            return part[inside].to(dtype)
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{name} cannot be read: {error}", field=str(self.path)) from error


def _to_stored_dtype(spec: ParameterSpec, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if spec.role in EXPERT_ROLES:
        tensor = join_experts(spec, tensor)
    converted = tensor.detach().to(device="cpu", dtype=dtype).contiguous()
    if not converted.isfinite().all():
        raise WeightsError(
            "has values that are not finite", field=spec.name, remedy="Export an earlier checkpoint"
        )
    return converted


def join_experts(spec: ParameterSpec, tensor: Tensor) -> Tensor:
    """Join experts' matrices as in peft: A `[E, R, D] -> [E R, D]`, B `[E, F, R] -> [F, R
    E]`.
    """
    return (
        tensor.flatten(0, 1)
        if spec.adapter_part == "lora_A"
        else tensor.permute(1, 2, 0).flatten(1)
    )


def stack_experts(spec: ParameterSpec, joined: Tensor) -> Tensor:
    """Invert `join_experts`."""
    num_experts, rows, columns = spec.shape
    if spec.adapter_part == "lora_A":
        return joined.view(num_experts, rows, columns)
    return joined.view(rows, columns, num_experts).permute(2, 0, 1)
