"""peft's adapter folder: its adapter_config.json and its tensors' names. Torch-free.

peft uses transformers' in-memory module names. It adapts a stacked parameter by wrapping the
parameter's module; several such parameters give nested wrappers in the order of the parameters,
the last outermost. Of two, `experts.base_layer.lora_A` belongs to the first. The matrices of E
experts are one tensor: A `[E x r, in]` expert after expert, B `[out, r x E]` with the experts
innermost.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwright.architecture.adapter_shape import ADAPTABLE_ROLES, AdapterShape, get_module_name
from shardwright.architecture.flop_count import EXPERT_ROLES
from shardwright.architecture.model_shape import ModelShape
from shardwright.architecture.parameter_spec import ParameterSpec
from shardwright.config.adapter_section import AdapterKind
from shardwright.errors import WeightsError
from shardwright.files import read_text

PEFT_CONFIG_NAME = "adapter_config.json"
PEFT_TENSORS_NAME = "adapter_model.safetensors"
_TENSOR_PREFIX = "base_model.model."
_RENAMED_MODULES = {".block_sparse_moe.": ".mlp."}
"""Module names in weight files -> transformers' names in memory, where they differ."""

_READ_FIELDS = frozenset(
    {
        "peft_type",
        "r",
        "lora_alpha",
        "use_rslora",
        "use_dora",
        "init_lora_weights",
        "bias",
        "target_parameters",
    }
)
_INERT_FIELDS = frozenset(
    {
        # bookkeeping, and the selection of modules, which the tensors' names repeat
        "auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision",
        "task_type", "target_modules", "exclude_modules", "layers_to_transform",
        "layers_pattern", "fan_in_fan_out", "ensure_weight_tying",
        # settings of training, and options of features that `_READ` fields or refusals exclude
        "lora_dropout", "megatron_core", "megatron_config", "loftq_config", "eva_config",
        "corda_config", "lora_ga_config", "qalora_group_size", "runtime_config",
    }
)  # fmt: skip
_PLAIN_INITS = (True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base weights as they are."""


@dataclass(frozen=True)
class PeftTensor:
    """Name and shape of an adapter's part in the folder."""

    name: str
    shape: tuple[int, ...]


def map_peft_tensors(shape: ModelShape) -> dict[str, PeftTensor]:
    """Map each adapter parameter of the model, by its name here, to the folder's tensor."""
    specs = [spec for spec in shape.list_parameters() if spec.adapter_part is not None]
    wrapped: dict[str, list[str]] = {}
    for spec in specs:
        if _is_stack(spec) and spec.adapter_part == "lora_A":
            owner, _, stack = _get_adapted_matrix(spec).name.rpartition(".")
            wrapped.setdefault(owner, []).append(stack)
    tensors = {}
    for spec in specs:
        name = spec.name
        size = spec.shape
        if _is_stack(spec):
            owner, _, stack = _get_adapted_matrix(spec).name.rpartition(".")
            depth = len(wrapped[owner]) - 1 - wrapped[owner].index(stack)
            name = f"{owner}.{'base_layer.' * depth}{spec.adapter_part}.weight"
            experts, rows, columns = spec.shape
            size = (
                (experts * rows, columns)
                if spec.adapter_part == "lora_A"
                else (rows, columns * experts)
            )
        for old, new in _RENAMED_MODULES.items():
            name = name.replace(old, new)
        tensors[spec.name] = PeftTensor(f"{_TENSOR_PREFIX}{name}", size)
    return tensors


def _is_stack(spec: ParameterSpec) -> bool:
    return spec.role in EXPERT_ROLES


def _get_adapted_matrix(spec: ParameterSpec) -> ParameterSpec:
    assert spec.adapted_matrix is not None
    return spec.adapted_matrix


def build_peft_config(shape: ModelShape, base: str | None) -> dict[str, Any]:
    """Build adapter_config.json; `base` is the location of the base model."""
    adapters = shape.adapters
    assert adapters is not None
    matrices = [
        spec
        for spec in shape.base_shape.list_parameters()
        if spec.role in ADAPTABLE_ROLES and not spec.is_bias
    ]
    modules = [get_module_name(spec) for spec in matrices if not _is_stack(spec)]
    stacks = [spec.name for spec in matrices if _is_stack(spec)]
    is_whole = adapters.alpha == int(adapters.alpha)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapters.rank,
        "lora_alpha": int(adapters.alpha) if is_whole else adapters.alpha,
        "lora_dropout": adapters.dropout,
        "target_modules": _shorten_names(modules, adapters.modules),
        "bias": "none",
        "fan_in_fan_out": shape.matrix_layout == "in_out",
        "use_rslora": adapters.kind == "rslora",
        "use_dora": adapters.kind == "dora",
        "init_lora_weights": True,
        "inference_mode": True,
    }
    if parameters := _shorten_names(stacks, adapters.modules):
        config["target_parameters"] = parameters
    return config


def _shorten_names(all_names: Iterable[str], chosen: frozenset[str]) -> list[str]:
    """Shorten the chosen names to their last parts if these select the same modules."""
    names = sorted(all_names)
    selected = [name for name in names if name in chosen]
    last_parts = sorted({name.rpartition(".")[2] for name in selected})
    if [name for name in names if name.rpartition(".")[2] in last_parts] == selected:
        return last_parts
    for old, new in _RENAMED_MODULES.items():
        selected = [name.replace(old, new) for name in selected]
    return selected


def read_peft_folder(path: str | Path, shape: ModelShape, *, dropout: float = 0.0) -> AdapterShape:
    """Read the adapters of a folder for this model, from its configuration and tensor headers.

    Raises:
        WeightsError: no such folder, a setting that is not supported, or tensors that do not
            fit the model, by name.
    """
    folder = Path(path)
    config = _read_config(folder / PEFT_CONFIG_NAME)
    _check_config(config, folder / PEFT_CONFIG_NAME)
    sizes = read_tensor_shapes(folder / PEFT_TENSORS_NAME)
    kind: AdapterKind = (
        "dora" if config.get("use_dora") else "rslora" if config.get("use_rslora") else "lora"
    )
    modules = _find_adapted_modules(shape, sizes, config.get("target_parameters") or [])
    adapters = AdapterShape(kind, int(config["r"]), float(config["lora_alpha"]), modules, dropout)
    if not modules:
        raise WeightsError(
            "has no adapter of any matrix of this model",
            field=str(folder),
            got=", ".join(sorted(sizes)[:3]),
        )
    expected = {
        tensor.name: tensor.shape
        for tensor in map_peft_tensors(replace(shape, adapters=adapters)).values()
    }
    faults = [
        f"missing {name} {list(size)}" for name, size in expected.items() if name not in sizes
    ]
    faults += [
        f"surplus {name} {list(size)}" for name, size in sizes.items() if name not in expected
    ]
    faults += [
        f"{name} is {list(sizes[name])}, the model expects {list(size)}"
        for name, size in expected.items()
        if name in sizes and sizes[name] != size
    ]
    if faults:
        listed = "; ".join(faults[:20]) + (
            f" and {len(faults) - 20} more" if len(faults) > 20 else ""
        )
        raise WeightsError(
            f"its tensors do not fit adapters of this model: {listed}", field=str(folder)
        )
    return adapters


def _find_adapted_modules(
    shape: ModelShape, sizes: Mapping[str, Any], parameters: Iterable[str]
) -> frozenset[str]:
    """Find the matrices that have an A in the folder.

    Tensor names do not identify stacked parameters; `target_parameters` lists these.
    """
    suffixes = tuple(parameters)
    matrices = [
        spec
        for spec in shape.base_shape.list_parameters()
        if spec.role in ADAPTABLE_ROLES and not spec.is_bias
    ]
    modules = {
        spec.name
        for spec in matrices
        if _is_stack(spec) and any(_has_suffix(spec.name, suffix) for suffix in suffixes)
    }
    candidates = frozenset(get_module_name(spec) for spec in matrices if not _is_stack(spec))
    probe = replace(shape.base_shape, adapters=AdapterShape("lora", 1, 1.0, candidates))
    names = {spec.name: spec for spec in probe.list_parameters() if spec.adapter_part == "lora_A"}
    tensors = map_peft_tensors(probe)
    modules |= {
        get_module_name(_get_adapted_matrix(spec))
        for name, spec in names.items()
        if tensors[name].name in sizes
    }
    return frozenset(modules)


def _has_suffix(name: str, suffix: str) -> bool:
    for old, new in _RENAMED_MODULES.items():
        name = name.replace(old, new)
    return name == suffix or name.endswith(f".{suffix}")


def _read_config(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsError(
            f"cannot be read: {getattr(error, 'strerror', None) or error}",
            field=str(path),
            allowed=f"a folder with {PEFT_CONFIG_NAME} and {PEFT_TENSORS_NAME}",
            remedy=f"Name the adapter's folder; relative paths start at {Path.cwd()}",
        ) from error
    if not isinstance(content, dict) or not {"peft_type", "r", "lora_alpha"} <= set(content):
        raise WeightsError(
            "not an adapter configuration: peft_type, r or lora_alpha is missing", field=str(path)
        )
    return content


def _check_config(config: Mapping[str, Any], path: Path) -> None:
    """Refuse settings under which the adapter is not W + scale x B A."""
    faults = [
        ("peft_type", config["peft_type"] == "LORA", "LORA"),
        ("bias", config.get("bias", "none") == "none", "none"),
        (
            "init_lora_weights",
            config.get("init_lora_weights", True) in _PLAIN_INITS,
            "an initialisation that does not change the base weights",
        ),
        (
            "use_rslora",
            not (config.get("use_rslora") and config.get("use_dora")),
            "use_dora or use_rslora, not both",
        ),
    ]
    faults += [
        (key, not value, "off")
        for key, value in config.items()
        if key not in _READ_FIELDS and key not in _INERT_FIELDS
    ]
    for key, is_allowed, allowed in faults:
        if not is_allowed:
            raise WeightsError(
                "changes the adapter's output and is not supported",
                field=f"{path}: {key}",
                got=config.get(key),
                allowed=allowed,
            )


def read_tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Read names and shapes of a safetensors file's tensors, without torch.

    Raises:
        WeightsError: the file is absent, truncated or not a safetensors file.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > path.stat().st_size:
                raise ValueError("the header is longer than the file")
            header = json.loads(file.read(length))
        sizes = {
            name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"
        }
        ends = [
            entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"
        ]
        if path.stat().st_size != 8 + length + max(ends, default=0):
            expected = 8 + length + max(ends, default=0)
            raise ValueError(f"{path.stat().st_size} bytes, its header implies {expected}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(
            f"damaged, truncated or not a safetensors file: {error}", field=str(path)
        ) from error
    if any(math.prod(size) == 0 for size in sizes.values()):
        raise WeightsError(
            "contains empty tensors: it was saved from a sharded model", field=str(path)
        )
    return sizes
