"""torchtune 0.6.1: its models, chunked loss, compilation and step, as its recipes
full_finetune_single_device and lora_finetune_single_device put them together.

Its recipes do not support mixed precision. Weights, gradients and moments have the precision of
compute: in bf16 it moves about half the bytes of contenders with fp32 weights and moments, which
is in its favour.

The recipes' tokenisers, data sets, images, configuration files and quantised weights are not used
here. `import_torchtune` replaces the packages for them that are absent, and torchao where it is
newer than torchtune, by stand-ins.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from benchmarks.case import Case, make_tokens, read_model_config, select_batch
from benchmarks.contenders.with_torch import build_adamw_settings, group_parameters
from benchmarks.pace import Pace

IGNORED_LABEL = -100
ATTENTION_PROJECTIONS = ["q_proj", "k_proj", "v_proj", "output_proj"]
UNUSED_PACKAGES = {
    "datasets": "",
    "omegaconf": "",
    "PIL": "",
    "sentencepiece": "",
    "tiktoken": "",
    "torchvision": "",
    "torchao": "dtypes/nf4tensor.py",
}
"""Package that torchtune imports and a step does not use -> file that it must have."""


def run(case: Case, pace: Pace) -> None:
    """Train until `pace` returns False."""
    if case.world_size != 1 or case.optimizer != "adamw" or case.has_offloaded_moments:
        raise ValueError("torchtune is measured on one device, with plain AdamW")
    import_torchtune()
    training = importlib.import_module("torchtune.training")
    losses = importlib.import_module("torchtune.modules.loss")
    utils = importlib.import_module("torchtune.utils")

    device = torch.device(case.device)
    model = build_model(case)
    optimizer = torch.optim.AdamW(group_parameters(case, model), **build_adamw_settings(case))
    loss_function = losses.CEWithChunkedOutputLoss(ignore_index=IGNORED_LABEL)
    if case.compile:
        training.compile_loss(loss_function)
    model.set_num_output_chunks(loss_function.num_output_chunks)
    ignored = torch.full((case.micro_batch_size, 1), IGNORED_LABEL, device=device)
    tokens = make_tokens(read_model_config(case)["vocab_size"], case.sequence_length)
    pace.attention = ["sdpa"]  # its choice where a batch has no mask
    step = 0
    is_running = pace.begin()
    while is_running:
        input_ids_BT = select_batch(tokens, case, step, rank=0)
        batch = {"tokens": input_ids_BT, "labels": input_ids_BT}
        utils.batch_to_device(batch, device)
        labels_BT = batch.pop("labels")
        num_tokens = (labels_BT != IGNORED_LABEL).sum()
        logits = model(**batch)
        labels_BT = torch.hstack((labels_BT[..., 1:], ignored))
        loss = loss_function(logits, labels_BT) * num_tokens
        del logits
        loss.backward()
        training.scale_grads(model, 1 / num_tokens)
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=case.optimisation.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        # The recipes read the loss of every step.
        is_running = pace.step_done(loss.item() / float(case.tokens_per_step))
        step += 1


def build_model(case: Case) -> Any:
    """Build torchtune's model on the case's device with weights, compilation and recompute."""
    modules = importlib.import_module("torchtune.modules")
    peft = importlib.import_module("torchtune.modules.peft")
    training = importlib.import_module("torchtune.training")
    dtype = torch.bfloat16 if case.precision == "bf16" else torch.float32
    config = read_model_config(case)
    torch.manual_seed(0)
    with training.set_default_dtype(dtype), torch.device(case.device):
        model = _call_builder(config, case.lora_rank)
    _set_weights(case, config, model)
    if case.lora_rank is not None:
        peft.set_trainable_params(model, peft.get_adapter_params(model))
    if case.compile:
        training.compile_model(model)
    if case.recompute != "none":
        training.set_activation_checkpointing(
            model, auto_wrap_policy={modules.TransformerSelfAttentionLayer}
        )
    return model


def _call_builder(config: dict[str, Any], lora_rank: int | None) -> Any:
    """Call the builder of Llama 3.2 (tied embeddings, scaled RoPE) or Llama 3 (neither), with
    adapters of the targets and the scale of shardwright's default.

    Raises:
        ValueError: No builder has the config's RoPE and embeddings.
    """
    rope = config["rope_parameters"]
    options = {
        "vocab_size": config["vocab_size"],
        "num_layers": config["num_hidden_layers"],
        "num_heads": config["num_attention_heads"],
        "num_kv_heads": config["num_key_value_heads"],
        "embed_dim": config["hidden_size"],
        "intermediate_dim": config["intermediate_size"],
        "max_seq_len": config["max_position_embeddings"],
        "norm_eps": config["rms_norm_eps"],
        "rope_base": rope["rope_theta"],
    }
    if rope["rope_type"] == "llama3" and (
        rope["low_freq_factor"],
        rope["high_freq_factor"],
        rope["original_max_position_embeddings"],
    ) == (1, 4, 8192):
        family = "llama3_2"
        options["scale_factor"] = rope["factor"]
        options["tie_word_embeddings"] = config["tie_word_embeddings"]
    elif rope["rope_type"] == "default" and not config["tie_word_embeddings"]:
        family = "llama3"
    else:
        raise ValueError(f"torchtune has no builder for a Llama with rope_parameters {rope}")
    components = importlib.import_module(f"torchtune.models.{family}")
    if lora_rank is None:
        return getattr(components, family)(**options)
    return getattr(components, f"lora_{family}")(
        lora_attn_modules=ATTENTION_PROJECTIONS,
        apply_lora_to_mlp=True,
        lora_rank=lora_rank,
        lora_alpha=2 * lora_rank,
        **options,
    )


def _set_weights(case: Case, config: dict[str, Any], model: nn.Module) -> None:
    """Draw weights on the device like the other contenders', or read the case's."""
    if case.random_weights:
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and "lora_" not in name:
                nn.init.normal_(parameter, std=config["initializer_range"])
        return
    converter = importlib.import_module("torchtune.models.convert_weights")
    weights = load_file(Path(case.weights_dir) / "model.safetensors")
    if config["tie_word_embeddings"]:
        weights.pop("lm_head.weight", None)
    converted = converter.hf_to_tune(
        weights,
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        dim=config["hidden_size"],
    )
    missing, unexpected = model.load_state_dict(converted, strict=False)
    if unexpected or any("lora_" not in name for name in missing):
        raise ValueError(f"weights missing: {missing}; unexpected: {unexpected}")


def import_torchtune() -> None:
    """Import torchtune, with stand-ins for the packages of `UNUSED_PACKAGES` that it cannot use."""
    absent = tuple(
        package for package, file in UNUSED_PACKAGES.items() if not _is_present(package, file)
    )
    installed = _pop_modules(absent)
    finder = _StandInFinder(absent)
    sys.meta_path.insert(0, finder)
    try:
        importlib.import_module("torchtune.training")
    finally:
        sys.meta_path.remove(finder)
        _pop_modules(absent)
        sys.modules.update(installed)


def _pop_modules(packages: tuple[str, ...]) -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.partition(".")[0] in packages]
    return {name: sys.modules.pop(name) for name in names}


def _is_present(package: str, file: str) -> bool:
    spec = find_spec(package)
    folders = [] if spec is None else spec.submodule_search_locations or []
    return any((Path(folder) / file).exists() for folder in folders)


class _StandIn:
    """A class or function of an absent package, which torchtune imports, subclasses or applies as
    a decorator while it is imported.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, function: Any) -> Any:
        return function


class _StandInModule(ModuleType):
    """A module of an absent package: each public name is a new stand-in."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_StandIn,), {})


class _StandInFinder(MetaPathFinder, Loader):
    """Finder of modules of the absent packages."""

    def __init__(self, packages: tuple[str, ...]) -> None:
        self._packages = packages

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for the packages and their modules."""
        if fullname.partition(".")[0] not in self._packages:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return an empty module."""
        return _StandInModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Execute nothing."""
