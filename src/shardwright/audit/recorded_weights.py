"""Weights of the recorded model before the step, by the names of transformers' class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from shardwright.architecture import read_content
from shardwright.audit.errors import AuditInputError
from shardwright.audit.parameter_places import (
    ParameterPlace,
    ParameterPlaces,
    list_persistent_buffers,
)
from shardwright.audit.record import StepRecord
from shardwright.model.hf.hf_module import load_hf_folder

_PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True)
class RecordedWeights:
    """Weights of a record.

    Attributes:
        base: Value of every parameter and persistent buffer of the module.
        adapters: Recorded names of LoRA's matrices, by module and part (`lora_A`, `lora_B`).
        places: Place in the module by recorded name.
    """

    base: dict[str, Tensor] = field(default_factory=dict)
    adapters: dict[str, dict[str, str]] = field(default_factory=dict)
    places: dict[str, ParameterPlace] = field(default_factory=dict)


def read_weights(
    record: StepRecord,
    module: nn.Module,
    places: ParameterPlaces,
    model_path: Path | None,
    dtype: torch.dtype,
) -> RecordedWeights:
    """Read every weight of the module, from the record and from a folder.

    Args:
        record: The recorded step.
        module: transformers' class of the recorded model.
        places: Places of parameters in it.
        model_path: Hugging Face folder with the weights before the step; default the record's.
        dtype: Precision of the result.

    Raises:
        AuditInputError: parameters that the module has not, that are missing, or that have
            another shape or other values.
    """
    read = RecordedWeights(list_floating(list_persistent_buffers(module), dtype))
    given = {} if model_path is None else read_folder(model_path, dtype, "--model")
    read.base.update(given)
    is_known = {
        name: torch.full(tensor.shape, name in read.base) for name, tensor in places.tensors.items()
    }
    for name in [*record.parameter_info, *record.buffer_names]:
        target = strip_peft(name)
        if _add_adapter(read, record, name, target):
            continue
        place = places.find(target)
        if place is None and name in record.buffer_names:
            continue  # such as rotary frequencies, which transformers computes
        if place is None:
            raise AuditInputError(
                f"the record has a parameter {name}, the model {type(module).__name__} has not",
                field=str(record.folder),
                remedy="With --model, give the model that was trained, or rename parameters "
                "to those of transformers' class or of its Hugging Face folder",
            )
        value = _read_value(record, name).to(dtype)
        if tuple(value.shape) != place.shape:
            raise AuditInputError(
                f"{name} has shape {list(value.shape)} in the record and {list(place.shape)} in "
                "the model",
                field=str(record.folder),
                remedy="With --model, give the model that was trained",
            )
        if name in record.parameter_info:
            _compare_with_folder(name, place, value, given, model_path)
            read.places[name] = place
        for owner in place.owners:
            read.base.setdefault(owner, torch.zeros(places.tensors[owner].shape, dtype=dtype))
        place.scatter(value, read.base)
        place.scatter(torch.ones(place.shape, dtype=torch.bool), is_known)
    missing = sorted(name for name, known in is_known.items() if not bool(known.all()))
    if missing:
        raise AuditInputError(
            f"{len(missing)} parameters of the model are not recorded, such as {missing[0]}",
            field=str(record.folder),
            remedy="Pass the weights at the start of the step with --model, or record "
            'all parameters (parameters="*")',
        )
    return read


def _read_value(record: StepRecord, name: str) -> Tensor:
    if name in record.parameter_info:
        return record.join("before", name)[0]
    return record.read_buffer(name)


def _compare_with_folder(
    name: str,
    place: ParameterPlace,
    value: Tensor,
    given: Mapping[str, Tensor],
    model_path: Path | None,
) -> None:
    """Refuse a parameter whose recorded values are not those of the folder, if one is given."""
    expected = place.gather(given) if given else None
    if expected is not None and not _is_close(expected, value):
        raise AuditInputError(
            f"the recorded values of {name} are not those of this model",
            field="--model",
            got=str(model_path),
            remedy="Pass the weights at the start of the recorded step",
        )


def list_floating(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return copies of the floating-point tensors by name. (the name says `list`)"""
    return {
        name: tensor.detach().to(dtype, copy=True)
        for name, tensor in tensors.items()
        if tensor.is_floating_point()
    }


def read_folder(path: Path, dtype: torch.dtype, field: str) -> dict[str, Tensor]:
    """Read the weights and persistent buffers of a Hugging Face folder, by the class's names.

    Raises:
        AuditInputError: weights that are absent, incomplete, damaged or of another shape; `field`
            is the option that named the folder.
    """
    remedy = "Give the folder of a model with config.json and all its weights"
    try:
        loaded, report = load_hf_folder(path)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise AuditInputError(
            f"this folder's weights cannot be loaded: {error}",
            field=field,
            got=str(path),
            remedy=remedy,
        ) from error
    tensors = dict(loaded.named_parameters()) | list_persistent_buffers(loaded)
    missing = sorted(set(report["missing_keys"]) & tensors.keys())
    if missing:  # transformers draws random values for them
        raise AuditInputError(
            f"this folder lacks {len(missing)} weights, such as {missing[0]}",
            field=field,
            got=str(path),
            remedy=remedy,
        )
    return list_floating(tensors, dtype)


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
            "not a Hugging Face folder",
            field="--reference",
            got=str(path),
            remedy="Give the folder of the reference model, with its config.json",
        )
    dtype = next(iter(weights.values())).dtype
    found = read_folder(path, dtype, "--reference")
    shapes = {name: tuple(value.shape) for name, value in weights.items()}
    other = {name for name, value in found.items() if shapes.get(name) != tuple(value.shape)}
    other |= shapes.keys() - found.keys()
    if other:
        raise AuditInputError(
            f"the reference is another model: {len(other)} parameters differ in name or shape, "
            f"such as {min(other)}",
            field="--reference",
            got=str(path),
            remedy="Pass the reference model of the trainer",
        )
    return found


def choose_config(record: StepRecord, model_path: Path | None) -> dict[str, Any]:
    """Return the config.json of the folder, else that of the record.

    Raises:
        AuditInputError: The model has no Hugging Face configuration.
    """
    if model_path is not None:
        path = model_path / "config.json"
        if not path.is_file():
            raise AuditInputError(
                "not a Hugging Face folder",
                field="--model",
                got=str(model_path),
                remedy="Give the folder of the model before the step, with config.json and weights",
            )
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
