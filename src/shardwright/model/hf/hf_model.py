"""Shapes of transformers' model classes, for families our decoder lacks."""

from __future__ import annotations

import contextlib
import copy
import logging
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.architecture import (
    MODEL_FAMILIES,
    HFShape,
    LayerShape,
    ModelShape,
    NormalInit,
    ParameterSpec,
    read_config,
    read_content,
)
from shardwright.architecture.module_names import ModuleNames
from shardwright.architecture.parameter_spec import (
    FolderPrecision,
    HFClassInit,
    OnesInit,
    ParameterInit,
    ParameterRole,
    ZerosInit,
)
from shardwright.config.model import ModelSection
from shardwright.errors import ArchitectureError
from shardwright.model.hf.exported_tensors import FOLDER_DTYPES
from shardwright.model.hf.hf_module import (
    disable_dropout,
    instantiate,
    list_dropout_rates,
    load_configuration,
)

logger = logging.getLogger("shardwright")

_UNLIMITED_POSITIONS = 1 << 31
"""`max_position_embeddings` of a model without a maximum sequence length."""
_PROBE_TOKENS = 5
_REFUSAL_REASONS = {
    "is_encoder_decoder": "encoder-decoder models are not supported",
    "is_decoder": "must be true: otherwise tokens attend to later tokens",
    "quantization_config": "quantised weights cannot be trained",
    "text_config": "it has more than a language model: save the language model separately",
}


def read_model_shape(config: Mapping[str, Any] | str | Path, section: ModelSection) -> ModelShape:
    """Read the shape of a recipe's model, by transformers' class if our decoder lacks it.

    Raises:
        ArchitectureError: transformers does not know the family either, or the model has a
            feature that is not supported, by name.
    """
    content = read_content(config)
    if content.get("model_type") in MODEL_FAMILIES:
        shape = read_config(content)
        if section.dropout == "off":
            shape = replace(
                shape, embedding_dropout=0.0, attention_dropout=0.0, residual_dropout=0.0
            )
        return shape
    return _read_hf_shape(content, section)


def _read_hf_shape(content: dict[str, Any], section: ModelSection) -> HFShape:
    family = content.get("model_type")
    config = load_configuration(content, section)
    _refuse_unsupported_config(config, content)
    if section.dropout == "off":
        disable_dropout(config)
    code = section.path if section.trust_remote_code else None
    module = instantiate(config, code, torch.device("meta"))
    _refuse_unsupported_module(module, config)
    ties = _find_ties(module)
    blocks = _find_blocks(module)
    _refuse_shared_blocks(ties, blocks)
    head = module.get_output_embeddings()  # type: ignore[operator]
    if head is None:
        raise _build_error("has no projection to the vocabulary", repr(family))
    plain_head, called = _trace_head(module, head)
    num_layers = len(module.get_submodule(blocks))  # type: ignore[arg-type]
    width = int(config.hidden_size)
    heads = int(getattr(config, "num_attention_heads", 0) or 0)
    max_positions = getattr(config, "max_position_embeddings", None)
    shape = HFShape(
        family=str(family),
        vocab_size=int(head.weight.shape[0]),
        hidden_size=width,
        intermediate_size=int(getattr(config, "intermediate_size", None) or 4 * width),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=width // heads if heads else 0,
        max_position_embeddings=int(max_positions or _UNLIMITED_POSITIONS),
        layers=(LayerShape(attention_scale=1.0),) * num_layers,
        names=ModuleNames(root=str(module.base_model_prefix)),
        tied_embeddings=bool(ties),
        initializer_range=_read_initial_std(config),
        config=dict(content),
        specs=_build_specs(module, config, blocks, called),
        tied_pairs=tuple(ties.items()),
        class_name=type(module).__name__,
        blocks_module=blocks,
        head_module=_find_module_name(module, head),
        has_plain_head=plain_head,
        is_dropout_disabled=section.dropout == "off",
        code_folder=code,
    )
    logger.info(
        "%s is not a family of our decoder: it runs through transformers' %s, "
        "with zero_stage 0 to 3 and hybrid sharding; tp, pp, cp and ep are not available, "
        "because the structure of its layers is not known%s%s",
        family,
        shape.class_name,
        ""
        if shape.has_plain_head
        else "; its logits are not only the head's product, so the full logits are in memory",
        _describe_wide_weights(shape),
    )
    return shape


def _describe_wide_weights(shape: HFShape) -> str:
    """Name weights that the class itself keeps in fp32 in a bf16 model; a run casts them."""
    wide = [spec.name for spec in shape.specs if "bf16" in spec.fp32_folders]
    return f"; in bf16 also {wide[0]} is cast, which its class keeps in fp32" if wide else ""


def _refuse_unsupported_config(config: Any, content: Mapping[str, Any]) -> None:
    """Refuse a configuration that is not a causal language model of one stack of blocks."""
    is_refused = {
        "is_encoder_decoder": bool(getattr(config, "is_encoder_decoder", False)),
        "is_decoder": getattr(config, "is_decoder", True) is False,
        "quantization_config": content.get("quantization_config") is not None,
        "text_config": config.get_text_config() is not config,
    }
    for field, reason in _REFUSAL_REASONS.items():
        if is_refused[field]:
            got = repr(content.get(field))
            if field == "text_config":  # a whole configuration
                got = f"model_type: {config.get_text_config().model_type}"
            raise ArchitectureError(reason, field=field, got=got)


def _refuse_unsupported_module(module: nn.Module, config: Any) -> None:
    """Refuse dropout, which depends on the layout, and saved state that is not a parameter."""
    rates = [f"{name}: {rate:g}" for name, rate in list_dropout_rates(config).items()]
    rates += [
        f"{name}: {part.p:g}"
        for name, part in module.named_modules()
        if isinstance(part, nn.Dropout) and part.p > 0.0
    ][:3]
    if rates:
        raise ArchitectureError(
            "its dropout uses torch's random state, so its masks would depend on the layout",
            field="model.dropout",
            got=", ".join(rates),
            remedy="Train without it: model.dropout: off",
        )
    root_parameters = [name for name, value in module._parameters.items() if value is not None]
    if root_parameters:
        got = f"{config.model_type}: {root_parameters[0]}"
        raise _build_error("has a parameter outside its submodules", got)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    if buffers := sorted(set(module.state_dict()) - set(parameters)):
        got = f"{config.model_type}: {buffers[0]}"
        raise _build_error("has saved state that is not a parameter", got)


def _build_error(reason: str, got: str) -> ArchitectureError:
    return ArchitectureError(reason, field="model_type", got=got)


def _find_ties(module: nn.Module) -> dict[str, str]:
    """Map further names of tied parameters to the first name."""
    owners: dict[int, str] = {}
    ties: dict[str, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owner = owners.setdefault(id(parameter), name)
        if owner != name:
            ties[name] = owner
    return ties


def _find_blocks(module: nn.Module) -> str:
    """Find the blocks: the module list with the most parameter elements."""
    modules = module.named_modules()
    lists = {name: part for name, part in modules if isinstance(part, nn.ModuleList) and len(part)}
    if not lists:
        raise _build_error("has no list of blocks to shard separately", type(module).__name__)
    sizes = {name: sum(p.numel() for p in part.parameters()) for name, part in lists.items()}
    return max(lists, key=lambda name: (sizes[name], -len(name)))


def _refuse_shared_blocks(ties: dict[str, str], blocks: str) -> None:
    names = [name for pair in ties.items() for name in pair]
    shared = next((name for name in names if name.startswith(f"{blocks}.")), None)
    if shared is not None:
        raise _build_error("blocks share a parameter, but are sharded separately", shared)


def _find_module_name(module: nn.Module, target: nn.Module) -> str:
    return next(name for name, part in module.named_modules() if part is target)


def _trace_head(module: nn.Module, head: nn.Module) -> tuple[bool, set[str]]:
    """Trace a forward pass on the meta device: is the head plain, and which Linears are called?

    The head is replaced by the identity; it is plain if the logits are then its input. If the
    class reads values of tensors, no pass succeeds: the result is False and no Linears.
    """
    head_inputs: list[Tensor] = []
    called: set[str] = set()

    def return_input(x: Tensor) -> Tensor:
        head_inputs.append(x)
        return x

    def record(name: str) -> Callable[..., None]:
        return lambda *_arguments: called.add(name)

    handles = [
        part.register_forward_pre_hook(record(name))
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear) and part is not head
    ]
    ids = torch.zeros(1, _PROBE_TOKENS, dtype=torch.long, device="meta")
    # To build a mask, many classes read values; with a mask given, some compute positions from
    # it, unless these are given too.
    mask = torch.zeros(1, 1, _PROBE_TOKENS, _PROBE_TOKENS, device="meta")
    positions = torch.arange(_PROBE_TOKENS, device="meta")[None]
    head.forward = return_input
    is_plain = False
    masked = {"attention_mask": mask}
    for inputs in ({}, masked, masked | {"position_ids": positions}):
        head_inputs.clear()
        called.clear()
        with torch.no_grad(), contextlib.suppress(Exception):
            is_plain = module(input_ids=ids, use_cache=False, **inputs).logits is head_inputs[0]
            break
    else:
        called.clear()
    del head.forward
    for handle in handles:
        handle.remove()
    return is_plain and type(head) is nn.Linear, called


def _read_initial_std(config: Any) -> float:
    for name in ("initializer_range", "init_std", "initializer_std"):
        if isinstance(value := getattr(config, name, None), float):
            return value
    return 0.02


def _build_specs(
    module: nn.Module, config: Any, blocks: str, called: Collection[str]
) -> tuple[ParameterSpec, ...]:
    std = _read_initial_std(config)
    specs: list[ParameterSpec] = []
    seen: set[int] = set()
    embedding = module.get_input_embeddings()  # type: ignore[operator]
    head = module.get_output_embeddings()  # type: ignore[operator]
    for prefix, part in module.named_modules():
        vectors = _find_vector_inits(module, part)
        for leaf, parameter in part.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            name = f"{prefix}.{leaf}" if prefix else leaf
            role: ParameterRole = (
                "embedding" if part is embedding else "head" if part is head else "other"
            )
            inside = name.removeprefix(f"{blocks}.") if name.startswith(f"{blocks}.") else None
            layer = None if inside is None else int(inside.split(".", 1)[0])
            if layer is not None and prefix in called:
                role = "projection"
            init = vectors.get(leaf) or _choose_matrix_init(part, std)
            folders = _find_fp32_folders(module, name)
            specs.append(
                ParameterSpec(name, tuple(parameter.shape), role, layer, init, fp32_folders=folders)
            )
    order = {name: index for index, (name, _) in enumerate(module.named_parameters())}
    return tuple(sorted(specs, key=lambda spec: order[spec.name]))


def _find_fp32_folders(module: nn.Module, name: str) -> tuple[FolderPrecision, ...]:
    """Find the precisions of folders from which the class reads a parameter as fp32."""
    return tuple(
        precision
        for precision, dtype in FOLDER_DTYPES.items()
        if any(
            re.search(pattern.replace("*", ".*"), name)
            for pattern in module._get_dtype_plan(dtype)  # type: ignore[operator]
        )
    )


def _choose_matrix_init(part: nn.Module, std: float) -> ParameterInit:
    if isinstance(part, nn.Embedding):
        return NormalInit(std, part.padding_idx)
    class_names = ("Conv1D", "FalconLinear")
    is_linear = isinstance(part, nn.Linear | nn.Conv1d) or type(part).__name__ in class_names
    return NormalInit(std) if is_linear else HFClassInit()


def _find_vector_inits(module: nn.Module, part: nn.Module) -> dict[str, ParameterInit]:
    """Find the initial values of a module's biases and norm weights.

    Runs the class's initialisation on a copy of the module without its children.
    """
    parameters = part.named_parameters(recurse=False)
    vectors = [name for name, parameter in parameters if parameter.ndim == 1]
    if not vectors:
        return {}
    copied = copy.copy(part)
    copied._modules = {}
    copied._parameters = {
        name: None if parameter is None else _make_unset_parameter(parameter)
        for name, parameter in part._parameters.items()
    }
    with contextlib.suppress(Exception):  # initialisation that needs more than this module
        module._init_weights(copied)  # type: ignore[operator]
    inits: dict[str, ParameterInit] = {}
    for name in vectors:
        value = copied._parameters[name]
        assert value is not None
        is_one = bool((value == 1.0).all())
        is_zero = bool((value == 0.0).all())
        inits[name] = OnesInit() if is_one else ZerosInit() if is_zero else HFClassInit()
    return inits


def _make_unset_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """Make a NaN placeholder; a matrix becomes one element, since only vectors are read."""
    shape = parameter.shape if parameter.ndim == 1 else (1,) * parameter.ndim
    return nn.Parameter(torch.full(shape, torch.nan), requires_grad=False)
