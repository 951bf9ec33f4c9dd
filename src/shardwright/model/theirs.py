"""transformers' own classes: what they say of a model that our decoder does not know, and the module itself.

The one door of the model's room to transformers, which is imported when somebody passes through it.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.architecture import (
    FAMILIES,
    ForeignShape,
    LayerShape,
    ModelShape,
    Normal,
    ParameterSpec,
    read_config,
    read_content,
)
from shardwright.architecture.names import Names
from shardwright.architecture.parameters import ByClass, Init, Ones, Role, Zeros
from shardwright.config.model import ModelSection
from shardwright.errors import ArchitectureError

log = logging.getLogger("shardwright")

_ANY_POSITIONS = 1 << 31
"""Of a model without a longest sequence."""
_PROBE_TOKENS = 5


def read_shape(config: Mapping[str, Any] | str | Path, section: ModelSection) -> ModelShape:
    """The shape of a recipe's model: our decoder's where it knows the family, else what transformers' class says.

    Raises:
        ArchitectureError: nobody knows the family, or it has something that we cannot train exactly, by name.
    """
    content = read_content(config)
    if content.get("model_type") in FAMILIES:
        shape = read_config(content)
        if section.dropout == "off":
            shape = replace(shape, embedding_dropout=0.0, attention_dropout=0.0, residual_dropout=0.0)
        return shape
    return _read_foreign(content, section)


def _read_foreign(content: dict[str, Any], section: ModelSection) -> ForeignShape:
    family = content.get("model_type")
    config = _configuration(content, section)
    _refuse_strangers(config, content)
    if section.dropout == "off":
        _silence(config)
    module = _instantiate(config, section.path if section.trust_remote_code else None, torch.device("meta"))
    _refuse_unsound(module, config)
    ties = _ties_of(module)
    blocks = _find_blocks(module)
    _refuse_shared(ties, blocks)
    head = module.get_output_embeddings()  # type: ignore[operator]
    if head is None:
        raise ArchitectureError("has no projection to the vocabulary", field="model_type", got=repr(family))
    plain_head, called = _pass_through(module, head)
    width, heads = int(config.hidden_size), int(getattr(config, "num_attention_heads", 0) or 0)
    shape = ForeignShape(
        family=str(family),
        vocab_size=int(head.weight.shape[0]),
        hidden_size=width,
        intermediate_size=int(getattr(config, "intermediate_size", None) or 4 * width),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=width // heads if heads else 0,
        max_position_embeddings=int(getattr(config, "max_position_embeddings", None) or _ANY_POSITIONS),
        layers=(LayerShape(attention_scale=1.0),) * len(module.get_submodule(blocks)),  # type: ignore[arg-type]
        names=Names(root=str(module.base_model_prefix)),
        tied_embeddings=bool(ties),
        initializer_range=_initial_std(config),
        config=dict(content),
        specs=_specs(module, config, blocks, called),
        ties=tuple(ties.items()),
        class_name=type(module).__name__,
        blocks=blocks,
        head=_name_of(module, head),
        plain_head=plain_head,
        without_dropout=section.dropout == "off",
        code=section.path if section.trust_remote_code else None,
    )
    log.info(
        "%s is none of our families: it runs through transformers' %s, under zero_stage 0 to 3 and hybrids of it; it cannot have "
        "tp, pp, cp or ep, because how its layers may be cut is not known here%s",
        family,
        shape.class_name,
        "" if shape.plain_head else "; its logits are more than the head's product, and are held whole",
    )
    return shape


def build_module(shape: ForeignShape, *, eager: bool = False) -> nn.Module:
    """The class's module: parameters on the meta device, buffers (rotary frequencies, masks) real.

    Args:
        eager: attention spelled out in place of the fused kernels.
    """
    section = (
        ModelSection(config=dict(shape.config)) if shape.code is None else ModelSection(path=shape.code, trust_remote_code=True)
    )
    config = _configuration(dict(shape.config), section)
    if shape.without_dropout:
        _silence(config)
    config.use_cache = False
    return _instantiate(config, shape.code, _parameters_on_meta(), eager=eager)


def load_folder(folder: Path, *, trust_remote_code: bool = False) -> tuple[Any, dict[str, Any]]:
    """A folder's model in float32 as its users will load it, and what transformers says of its tensors.

    With its plain attention: older versions hand gemma2 to a kernel that leaves its soft caps out.
    """
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager", "trust_remote_code": trust_remote_code}
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    return loaded


def _configuration(content: dict[str, Any], section: ModelSection) -> Any:
    """transformers' configuration object of a config.json."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    family = content.get("model_type")
    if family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            return CONFIG_MAPPING[str(family)].from_dict(dict(content))
        except Exception as error:  # whatever their validators raise
            raise ArchitectureError(f"transformers refuses this configuration: {error}", field="model_type", got=family) from error
    if "auto_map" in content and section.path is not None:
        if not section.trust_remote_code:
            raise ArchitectureError(
                "this model is made by Python code in its own folder, which would run with your rights",
                field="model.trust_remote_code",
                got=section.path,
                remedy="Read that code; where you trust it, say model.trust_remote_code: true",
            )
        return AutoConfig.from_pretrained(section.path, trust_remote_code=True, local_files_only=True)
    raise ArchitectureError(
        "neither our decoder nor transformers knows this family of language models",
        field="model_type",
        got=repr(family),
        allowed=f"{', '.join(sorted(FAMILIES))}, or any that transformers has as a causal language model",
        remedy="A class of your own: save it with its code (auto_map) and say model.trust_remote_code: true",
    )


def _instantiate(config: Any, code: str | None, context: AbstractContextManager[Any], *, eager: bool = False) -> nn.Module:
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"trust_remote_code": code is not None, "dtype": torch.float32}
    if eager:
        options["attn_implementation"] = "eager"
    with context, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tokens and kernels; what matters to training is checked here
        try:
            module: nn.Module = AutoModelForCausalLM.from_config(config, **options)
        except Exception as error:  # their constructors raise anything
            raise ArchitectureError(
                f"transformers cannot build it: {type(error).__name__}: {error}", field="model_type", got=config.model_type
            ) from error
    return module


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters lose their memory as they are registered, before anything is written to it; buffers keep theirs.

    transformers computes buffers where it builds a module and never again: under `torch.device("meta")` they would be lost.
    """
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        register(self, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _refuse_strangers(config: Any, content: Mapping[str, Any]) -> None:
    """What no causal language model of one stack of blocks is."""
    refusals = {
        "is_encoder_decoder": (
            bool(getattr(config, "is_encoder_decoder", False)),
            "an encoder beside the decoder is not trained here",
        ),
        "is_decoder": (getattr(config, "is_decoder", True) is False, "without this its tokens see those that follow them"),
        "quantization_config": (content.get("quantization_config") is not None, "quantised weights take no gradients"),
        "text_config": (config.get_text_config() is not config, "it holds more than a language model: save that part alone"),
    }
    for field, (wrong, reason) in refusals.items():
        if wrong:
            raise ArchitectureError(reason, field=field, got=repr(content.get(field)))


def _dropouts(config: Any) -> dict[str, float]:
    """Fields of a configuration that drop something in training, with their rates."""
    inert = ("classifier", "summary", "first_dropout")
    rates = {name: value for name, value in config.to_dict().items() if "drop" in name and not any(word in name for word in inert)}
    return {name: rate for name, rate in rates.items() if isinstance(rate, float) and rate > 0.0}


def _silence(config: Any) -> None:
    for name in _dropouts(config):
        setattr(config, name, 0.0)


def _refuse_unsound(module: nn.Module, config: Any) -> None:
    """Dropout that no layout could repeat, and state that is neither a parameter nor made by the class anew."""
    rates = [f"{name}: {rate:g}" for name, rate in _dropouts(config).items()]
    rates += [f"{name}: {part.p:g}" for name, part in module.named_modules() if isinstance(part, nn.Dropout) and part.p > 0.0][:3]
    if rates:
        raise ArchitectureError(
            "its dropout draws from one stream of random numbers, so its masks would depend on the layout",
            field="model.dropout",
            got=", ".join(rates),
            remedy="Train without it: model.dropout: off",
        )
    if own := [name for name, parameter in module._parameters.items() if parameter is not None]:
        raise ArchitectureError(
            "has a parameter outside all of its modules", field="model_type", got=f"{config.model_type}: {own[0]}"
        )
    parameters = dict(module.named_parameters(remove_duplicate=False))
    if stored := sorted(set(module.state_dict()) - set(parameters)):
        raise ArchitectureError("keeps state that is no parameter", field="model_type", got=f"{config.model_type}: {stored[0]}")


def _ties_of(module: nn.Module) -> dict[str, str]:
    """The further names of tied parameters -> their owner's."""
    owners: dict[int, str] = {}
    ties: dict[str, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owner = owners.setdefault(id(parameter), name)
        if owner != name:
            ties[name] = owner
    return ties


def _find_blocks(module: nn.Module) -> str:
    """The list of modules that holds most of the parameters: the blocks."""
    lists = {name: part for name, part in module.named_modules() if isinstance(part, nn.ModuleList) and len(part)}
    if not lists:
        raise ArchitectureError("has no list of blocks to shard one by one", field="model_type", got=type(module).__name__)
    return max(lists, key=lambda name: (sum(p.numel() for p in lists[name].parameters()), -len(name)))


def _refuse_shared(ties: dict[str, str], blocks: str) -> None:
    within = [name for pair in ties.items() for name in pair if name.startswith(f"{blocks}.")]
    if within:
        raise ArchitectureError(
            "blocks share a parameter, and each of them is sharded by itself", field="model_type", got=within[0]
        )


def _name_of(module: nn.Module, wanted: nn.Module) -> str:
    return next(name for name, part in module.named_modules() if part is wanted)


def _pass_through(module: nn.Module, head: nn.Module) -> tuple[bool, set[str]]:
    """A pass on the meta device with a head that gives back what it is given: whether the logits are that and nothing more, and
    which linear modules were called.

    A class that asks for values on the way cannot be passed through so; nothing is known of it then.
    """
    seen: list[Tensor] = []
    called: set[str] = set()

    def give_back(x: Tensor) -> Tensor:
        seen.append(x)
        return x

    def note(name: str) -> Callable[..., None]:
        return lambda *_arguments: called.add(name)

    linear = [(name, part) for name, part in module.named_modules() if isinstance(part, nn.Linear) and part is not head]
    handles = [part.register_forward_pre_hook(note(name)) for name, part in linear]
    ids = torch.zeros(1, _PROBE_TOKENS, dtype=torch.long, device="meta")
    # Given a mask, most classes ask for no values to make theirs; some count positions from it, unless they are given, too.
    mask = torch.zeros(1, 1, _PROBE_TOKENS, _PROBE_TOKENS, device="meta")
    positions = torch.arange(_PROBE_TOKENS, device="meta")[None]
    head.forward = give_back
    plain = False
    for given in ({}, {"attention_mask": mask}, {"attention_mask": mask, "position_ids": positions}):
        seen.clear()
        called.clear()
        with torch.no_grad(), contextlib.suppress(Exception):
            plain = module(input_ids=ids, use_cache=False, **given).logits is seen[0]
            break
    else:
        called.clear()
    del head.forward
    for handle in handles:
        handle.remove()
    return plain and type(head) is nn.Linear, called


def _initial_std(config: Any) -> float:
    for name in ("initializer_range", "init_std", "initializer_std"):
        if isinstance(value := getattr(config, name, None), float):
            return value
    return 0.02


def _specs(module: nn.Module, config: Any, blocks: str, called: Collection[str]) -> tuple[ParameterSpec, ...]:
    std, specs, seen = _initial_std(config), [], set()
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()  # type: ignore[operator]
    for prefix, part in module.named_modules():
        vectors = _initial_vectors(module, part)
        for leaf, parameter in part.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            name = f"{prefix}.{leaf}" if prefix else leaf
            role: Role = "embedding" if part is embedding else "head" if part is head else "other"
            inside = name.removeprefix(f"{blocks}.") if name.startswith(f"{blocks}.") else None
            layer = None if inside is None else int(inside.split(".", 1)[0])
            if layer is not None and prefix in called:
                role = "projection"
            init = vectors.get(leaf) or _initial_matrix(part, std)
            specs.append(ParameterSpec(name, tuple(parameter.shape), role, layer, init))
    order = {name: place for place, (name, _) in enumerate(module.named_parameters())}
    return tuple(sorted(specs, key=lambda spec: order[spec.name]))


def _initial_matrix(part: nn.Module, std: float) -> Init:
    if isinstance(part, nn.Embedding):
        return Normal(std, part.padding_idx)
    matrix = isinstance(part, nn.Linear | nn.Conv1d) or type(part).__name__ in ("Conv1D", "FalconLinear")
    return Normal(std) if matrix else ByClass()


def _initial_vectors(module: nn.Module, part: nn.Module) -> dict[str, Init]:
    """How biases and norm weights of one module begin: the class's own rule, run on a copy of that module alone."""
    vectors = [name for name, parameter in part.named_parameters(recurse=False) if parameter.ndim == 1]
    if not vectors:
        return {}
    alone = copy.copy(part)
    alone._modules = {}
    alone._parameters = {name: None if parameter is None else _unset(parameter) for name, parameter in part._parameters.items()}
    with contextlib.suppress(Exception):  # a rule that wants more than this module: nothing is known
        module._init_weights(alone)  # type: ignore[operator]
    found: dict[str, Init] = {}
    for name in vectors:
        value = alone._parameters[name]
        assert value is not None
        found[name] = Ones() if bool((value == 1.0).all()) else Zeros() if bool((value == 0.0).all()) else ByClass()
    return found


def _unset(parameter: nn.Parameter) -> nn.Parameter:
    """A stand-in with a value that no rule gives; of a matrix one element is enough, since only vectors are read."""
    shape = parameter.shape if parameter.ndim == 1 else (1,) * parameter.ndim
    return nn.Parameter(torch.full(shape, torch.nan), requires_grad=False)
