"""Weights of the recorded model before the step, by the names of transformers' class."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.architecture import read_content
from shardwright.audit.record import AuditInputError, StepRecord
from shardwright.model.hf.hf_module import load_hf_folder

_PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True)
class RecordedWeights:
    """Weights of a record.

    Attributes:
        base: Weight of every parameter of the module.
        adapters: Recorded names of LoRA's matrices, by module and part (`lora_A`, `lora_B`).
        names: Parameter of the module by recorded name.
    """

    base: dict[str, Tensor] = field(default_factory=dict)
    adapters: dict[str, dict[str, str]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)


def read_weights(
    record: StepRecord,
    module: nn.Module,
    owners: dict[str, str],
    model_path: Path | None,
    dtype: torch.dtype,
) -> RecordedWeights:
    """Read every weight of the module, from the record and from a folder.

    Args:
        record: The recorded step.
        module: transformers' class of the recorded model.
        owners: Name of the parameter that owns a tensor, by the names of all its uses.
        model_path: Hugging Face folder with the weights before the step; default the record's.
        dtype: Precision of the result.

    Raises:
        AuditInputError: parameters that the module has not, that are missing, or that have
            another shape or other values.
    """
    read = RecordedWeights()
    if model_path is not None:
        read.base.update(read_folder(model_path, dtype))
    for name in record.parameter_info:
        target = strip_peft(name)
        if _add_adapter(read, record, name, target):
            continue
        if target not in owners:
            raise AuditInputError(
                f"the record has a parameter {name}, the model {type(module).__name__} has not",
                field=str(record.folder),
                remedy="Give the model that was trained with --model, or rename parameters "
                "to those of transformers' class",
            )
        owner = owners[target]
        value = record.join("before", name)[0].to(dtype)
        expected = module.get_parameter(owner).shape
        if value.shape != expected:
            raise AuditInputError(
                f"{name} has shape {list(value.shape)} in the record and {list(expected)} in "
                "the model",
                field=str(record.folder),
                remedy="Give the model that was trained with --model",
            )
        if owner in read.base and not _is_close(read.base[owner], value):
            raise AuditInputError(
                f"the recorded values of {name} are not those of this model",
                field="--model",
                got=str(model_path),
                remedy="Give the weights from which the recorded step started",
            )
        read.base[owner] = value
        read.names[name] = owner
    missing = sorted(set(owners.values()) - set(read.base))
    if missing:
        raise AuditInputError(
            f"{len(missing)} parameters of the model are not recorded, such as {missing[0]}",
            field=str(record.folder),
            remedy="Give the weights from which the step started with --model, or record "
            'all parameters (parameters="*")',
        )
    return read


def read_folder(path: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """Read the weights of a Hugging Face folder, by name."""
    loaded, _ = load_hf_folder(path)
    return {name: p.detach().to(dtype) for name, p in loaded.named_parameters()}


def read_reference_weights(path: Path, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Read the weights of a preference loss's reference model.

    Args:
        path: Hugging Face folder of the reference.
        weights: Weights of the trained model.

    Raises:
        AuditInputError: no such folder, or another model.
    """
    if not (path / "config.json").is_file():
        raise AuditInputError(
            "no Hugging Face folder",
            field="--reference",
            got=str(path),
            remedy="Give the folder of the reference model, with its config.json",
        )
    dtype = next(iter(weights.values())).dtype
    found = read_folder(path, dtype)
    shapes = {name: tuple(value.shape) for name, value in weights.items()}
    other = {name for name, value in found.items() if shapes.get(name) != tuple(value.shape)}
    other |= shapes.keys() - found.keys()
    if other:
        raise AuditInputError(
            f"the reference is another model: {len(other)} parameters differ in name or shape, "
            f"such as {min(other)}",
            field="--reference",
            got=str(path),
            remedy="Give the model that the trainer compares with",
        )
    return found


def choose_config(record: StepRecord, model_path: Path | None) -> dict[str, Any]:
    """Return the config.json of the folder, else that of the record."""
    if model_path is not None:
        path = model_path / "config.json" if model_path.is_dir() else model_path
        return dict(read_content(path))
    config = record.values["config"]
    if not config or "model_type" not in config:
        raise AuditInputError(
            "the recorded model has no Hugging Face configuration",
            field=str(record.folder),
            remedy="Give the folder of the model with --model, or pass Recorder(config={...})",
        )
    return dict(config)


def strip_peft(name: str) -> str:
    """Return the name of a parameter without the parts that PEFT adds."""
    return name.removeprefix(_PEFT_PREFIX).replace(".base_layer.", ".")


def _add_adapter(read: RecordedWeights, record: StepRecord, name: str, target: str) -> bool:
    """Add a matrix of LoRA; return False if the parameter is none."""
    part = next((p for p in ("lora_A", "lora_B") if f".{p}." in target), None)
    if part is None:
        return False
    module = target.partition(f".{part}.")[0]
    parts = read.adapters.setdefault(module, {})
    if part in parts:
        raise AuditInputError(
            f"{module} has several adapters: {parts[part]} and {name}",
            field=str(record.folder),
            remedy="Record a run with one adapter",
        )
    parts[part] = name
    return True


def _is_close(one: Tensor, other: Tensor) -> bool:
    """Compare at the precision of bf16, in which a model may have been loaded."""
    return bool((one - other).norm() <= 0.01 * one.norm() + 1e-12)
