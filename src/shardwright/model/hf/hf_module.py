"""Modules of transformers' classes: configuration, construction, loading.

The only file of this package that imports transformers, inside functions.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.architecture import MODEL_FAMILIES, HFShape
from shardwright.config.model import ModelSection
from shardwright.errors import ArchitectureError


def build_hf_module(
    shape: HFShape, *, eager: bool = False, compute_dtype: torch.dtype = torch.float32
) -> nn.Module:
    """Build the class's module with parameters on the meta device and real buffers.

    Experts are multiplied one by one where torch has no grouped product for `compute_dtype` or the
    experts' sizes.

    Args:
        eager: use eager attention in place of fused kernels.
    """
    section = (
        ModelSection(config=dict(shape.config))
        if shape.code_folder is None
        else ModelSection(path=shape.code_folder, trust_remote_code=True)
    )
    config = load_configuration(dict(shape.config), section)
    if shape.is_dropout_disabled:
        disable_dropout(config)
    config.use_cache = False
    module = instantiate(config, shape.code_folder, _register_parameters_on_meta(), eager=eager)
    if has_grouped_products(module, compute_dtype):
        return module
    return instantiate(
        config,
        shape.code_folder,
        _register_parameters_on_meta(),
        eager=eager,
        eager_experts=True,
    )


def has_grouped_products(module: nn.Module, dtype: torch.dtype) -> bool:
    """Return True if torch's grouped product computes every stack of matrices of a module."""
    stacks = [parameter for parameter in module.parameters() if parameter.ndim == 3]
    return not stacks or (
        dtype != torch.float64
        and all(size * dtype.itemsize % 16 == 0 for stack in stacks for size in stack.shape[1:])
    )


@contextmanager
def load_quietly() -> Iterator[None]:
    """Let transformers load a model in the block without a progress bar, except in a terminal.

    transformers imports torchao where it is installed. What torchao logs about itself at that
    moment (kernels for GPUs, deprecations) does not concern the model.
    """
    from transformers.utils import logging as transformers_logging

    former = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        import_module("transformers.quantizers.auto")
    finally:
        logging.disable(former)
    should_hide = not sys.stderr.isatty() and transformers_logging.is_progress_bar_enabled()
    if should_hide:
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if should_hide:
            transformers_logging.enable_progress_bar()


def load_hf_folder(folder: Path, *, trust_remote_code: bool = False) -> tuple[Any, dict[str, Any]]:
    """Load a folder's model in float32 with transformers, and its report on the tensors.

    Dequantises 8-bit weights. Uses eager attention: for gemma2, older versions choose a kernel
    that ignores its soft caps. Multiplies experts one by one, whatever their sizes.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    options: dict[str, Any] = {
        "dtype": torch.float32,
        "attn_implementation": "eager",
        "experts_implementation": "eager",
        "trust_remote_code": trust_remote_code,
    }
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    loaded: Any
    is_quantised = getattr(config, "quantization_config", None) is not None
    if is_quantised:
        config.quantization_config = {**config.quantization_config, "dequantize": True}
        options["config"] = config
    with load_quietly():
        loaded = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    if is_quantised:  # transformers leaves the other tensors in the dtype of the file
        loaded[0].float()
    return loaded


def load_configuration(content: dict[str, Any], section: ModelSection) -> Any:
    """Load transformers' configuration object for a config.json.

    Raises:
        ArchitectureError: transformers does not know the family, refuses the configuration, or
            would run Python code of the folder.
    """
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    family = content.get("model_type")
    if family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            return CONFIG_MAPPING[str(family)].from_dict(dict(content))
        except Exception as error:  # whatever their validators raise
            raise ArchitectureError(
                f"transformers refuses this configuration: {error}",
                field="model_type",
                got=family,
            ) from error
    if "auto_map" in content and section.path is not None:
        if not section.trust_remote_code:
            raise ArchitectureError(
                "this model is defined by Python code in its folder, "
                "which would run with your rights",
                field="model.trust_remote_code",
                got=section.path,
                remedy="Read that code; if you trust it, set model.trust_remote_code: true",
            )
        return AutoConfig.from_pretrained(
            section.path, trust_remote_code=True, local_files_only=True
        )
    raise ArchitectureError(
        "neither our decoder nor transformers supports this family of language models",
        field="model_type",
        got=repr(family),
        allowed=f"{', '.join(sorted(MODEL_FAMILIES))}, "
        "or any causal language model of transformers",
        remedy="For your own class, save it with its code (auto_map) and set "
        "model.trust_remote_code: true",
    )


def instantiate(
    config: Any,
    code: str | None,
    context: AbstractContextManager[Any],
    *,
    eager: bool = False,
    eager_experts: bool = False,
) -> nn.Module:
    """Build the module of a configuration.

    Args:
        code: folder of its own Python code.
        context: entered while the module is built.
        eager: use eager attention in place of fused kernels.
        eager_experts: multiply experts one by one.

    Raises:
        ArchitectureError: transformers cannot build the model.
    """
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"trust_remote_code": code is not None, "dtype": torch.float32}
    if eager:
        options["attn_implementation"] = "eager"
    if eager_experts:
        options["experts_implementation"] = "eager"
    with context, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about token ids and kernels
        try:
            module: nn.Module = AutoModelForCausalLM.from_config(config, **options)
        except Exception as error:  # constructors may raise anything
            raise ArchitectureError(
                f"transformers cannot build it: {type(error).__name__}: {error}",
                field="model_type",
                got=config.model_type,
            ) from error
    return module


@contextmanager
def replace_attention(attend: Callable[..., Tensor]) -> Iterator[None]:
    """Call a function in place of the attention of transformers' classes inside this context.

    It gets the class's own function, the attention module, queries, keys and values [B, H, T, D],
    the mask and the options; it returns [B, T, H, D].
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    interface: Any = ALL_ATTENTION_FUNCTIONS

    def choose(_name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> tuple[Tensor, None]:
            return attend(default, *arguments, **options), None

        return call

    interface.get_interface = choose
    try:
        yield
    finally:
        del interface.get_interface


def rename_to_folder(module: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert tensors by the class's names to those of a Hugging Face folder.

    It is the conversion with which transformers saves the class: it renames tensors, and splits,
    joins or transposes stacks of experts.
    """
    from transformers.core_model_loading import revert_weight_conversion

    revert: Any = revert_weight_conversion  # annotated for transformers' own classes only
    converted: dict[str, Tensor] = revert(module, dict(tensors))
    return converted


@contextmanager
def _register_parameters_on_meta() -> Iterator[None]:
    """Move parameters to the meta device as they are registered; buffers stay.

    transformers computes buffers only when it builds a module: under `torch.device("meta")`
    their values would be lost.
    """
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = nn.Parameter(
                parameter.detach().to("meta"), requires_grad=parameter.requires_grad
            )
        register(self, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def list_dropout_rates(config: Any) -> dict[str, float]:
    """List a configuration's dropout fields with rates above 0."""
    inert = ("classifier", "summary", "first_dropout")
    rates = {
        name: value
        for name, value in config.to_dict().items()
        if "drop" in name and not any(word in name for word in inert)
    }
    return {name: rate for name, rate in rates.items() if isinstance(rate, float) and rate > 0.0}


def disable_dropout(config: Any) -> None:
    """Set a configuration's dropout rates to 0."""
    for name in list_dropout_rates(config):
        setattr(config, name, 0.0)
