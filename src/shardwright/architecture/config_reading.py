"""Reading of a config.json, or of a recipe's model; fields without effect on the model."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwright.architecture.adapter_targets import add_adapters
from shardwright.architecture.config_fields import ConfigFields
from shardwright.architecture.families import MODEL_FAMILIES
from shardwright.architecture.model_shape import ModelShape
from shardwright.config import Recipe
from shardwright.errors import ArchitectureError, explain_missing_path, suggest_name
from shardwright.files import detect_file_kind, read_text

PLACEHOLDER_VOCAB_SIZE = 257
"""Vocabulary size if only the tokenizer, which is not built here, determines it."""

INERT_FIELDS = frozenset(
    {
        # bookkeeping
        "architectures", "model_type", "transformers_version", "_name_or_path", "name_or_path",
        "_commit_hash", "auto_map", "dtype", "torch_dtype", "problem_type", "id2label",
        "label2id", "task_specific_params", "unsloth_version",
        # outputs and caches of a forward pass; its results stay the same
        "use_cache", "cache_implementation", "return_dict", "output_hidden_states",
        "output_attentions", "_attn_implementation", "_attn_implementation_autoset",
        "attn_implementation", "torchscript", "gradient_checkpointing", "use_bfloat16",
        "is_llama_config", "keys_to_ignore_at_inference",
        # token ids for tokenisers and generation
        "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id",
        "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id", "prefix",
        # heads that a causal language model does not have
        "classifier_dropout", "summary_type", "summary_use_proj", "summary_activation",
        "summary_proj_to_labels", "summary_first_dropout", "num_labels",
        # slicing of matrix products to save memory; the result is the same
        "chunk_size_feed_forward", "pretraining_tp",
        # generation settings of older files
        "temperature", "top_k", "top_p", "do_sample", "max_length", "min_length", "num_beams",
        "repetition_penalty",
    }
)  # fmt: skip
"""Fields that may appear in any config.json without effect on logits, loss or gradients."""

OFF_FIELDS: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False, None),
    "alibi": (False, None),
    "attention_bias": (False, None),
    "attention_dropout": (0, 0.0, None),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "head_dim": (None,),
    "is_decoder": (False, True, None),
    "is_encoder_decoder": (False, None),
    "layer_types": (None,),
    "max_window_layers": (None,),
    "mlp_bias": (False, None),
    "moe": (None,),
    "num_experts": (0, None),
    "num_local_experts": (0, None),
    "partial_rotary_factor": (1.0, 1, None),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
    "qk_layernorm": (False, None),
    "rope_parameters": (None,),
    "rope_scaling": (None,),
    "sliding_window": (None,),
    "tie_encoder_decoder": (False, None),
    "use_bidirectional_attention": (False, None),
    "use_mrope": (False, None),
    "use_qk_norm": (False, None),
    "use_sliding_window": (False, None),
}
"""Fields of some families, with the values under which other families may have them.

These values disable the feature; any other value is refused.
"""


_STATE_SPACE_FAMILIES = (
    "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "lfm2", "mamba",
    "mamba2", "nemotron_h", "qwen3_next", "rwkv", "zamba", "zamba2",
)  # fmt: skip
"""Families of state-space models and their hybrids."""

_FAMILY_REMEDIES = {
    "gemma3": "This model also reads images. Save its language model separately "
    "(model_type gemma3_text) and use that",
    "phi": "phi3 is supported; the older phi is not",
    "gemma": "gemma2 and gemma3_text are supported; the first gemma is not",
    "qwen": "qwen2 and qwen3 are supported; the first qwen is not",
    **dict.fromkeys(
        _STATE_SPACE_FAMILIES,
        "It has state-space layers in place of attention; "
        "only models whose layers all use attention are supported",
    ),
}


def read_config(config: Mapping[str, Any] | str | Path) -> ModelShape:
    """Read the shape of a model; `config` is config.json's content, its path or its folder.

    Raises:
        ArchitectureError: no such file, an unknown family, or a field that is not supported, by
            name.
    """
    content = read_content(config)
    family = content.get("model_type")
    reader = MODEL_FAMILIES.get(family) if isinstance(family, str) else None
    if reader is None:
        raise _build_family_error(family)
    fields = ConfigFields(content)
    shape = reader(fields)
    shape = replace(
        shape, family=str(family), config=copy.deepcopy(content | fields.amended_fields)
    )
    for name, values in OFF_FIELDS.items():
        if not fields.is_read(name):
            fields.require_value(name, values, f"this feature is not supported for {family} models")
    fields.reject_unread(str(family), INERT_FIELDS)
    _check_widths(shape)
    return shape


def read_content(config: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """Read the fields of a config.json unchanged; `config` as in `read_config`.

    Raises:
        ArchitectureError: no such file, its content is not a mapping, or `model_type` no name.
    """
    content = dict(config) if isinstance(config, Mapping) else _read_file(Path(config))
    family = content.get("model_type")
    if not isinstance(family, str | None):
        raise _build_family_error(family)
    return content


def _build_family_error(family: Any) -> ArchitectureError:
    return ArchitectureError(
        "this model family is not supported",
        field="model_type",
        got=repr(family),
        allowed=", ".join(sorted(MODEL_FAMILIES)),
        remedy=_find_family_remedy(family),
    )


def _find_family_remedy(family: Any) -> str:
    if isinstance(family, str) and family in _FAMILY_REMEDIES:
        return _FAMILY_REMEDIES[family]
    return suggest_name(str(family), MODEL_FAMILIES) or "Use a model of one of these families"


def _read_file(path: Path) -> dict[str, Any]:
    try:
        path = path / "config.json" if detect_file_kind(path) == "folder" else path
        content = json.loads(read_text(path))
    except OSError as error:
        raise ArchitectureError(
            f"the model's config.json cannot be read: {error.strerror}",
            field="model.path",
            got=path,
            remedy=f"{explain_missing_path(str(path))}"
            f"Name a folder that contains config.json; relative paths start at {Path.cwd()}",
        ) from error
    except (ValueError, RecursionError) as error:
        raise ArchitectureError(
            f"this is not JSON: {error}", field="model.path", got=path
        ) from error
    if not isinstance(content, dict):
        raise ArchitectureError(
            "the content of config.json must be a mapping", field="model.path", got=path
        )
    return content


_WHOLE_HEAD_FAMILIES = frozenset({"llama", "gemma2", "gemma3_text"})
"""Families whose width must be a multiple of the heads even if head_dim is set.

transformers requires this; an export of another width would not load there.
"""


def _check_widths(shape: ModelShape) -> None:
    """Refuse widths and heads that do not fit together."""
    if shape.num_heads % shape.num_kv_heads:
        raise ArchitectureError(
            "the number of query heads must be a multiple of the key-value heads",
            field="num_key_value_heads",
            got=shape.num_kv_heads,
            allowed=f"a divisor of {shape.num_heads}",
        )
    has_head_dim = "head_dim" in shape.config and shape.config["head_dim"] is not None
    if (
        shape.hidden_size % shape.num_heads
        and (not has_head_dim or shape.family in _WHOLE_HEAD_FAMILIES)
        and shape.latent is None
    ):
        raise ArchitectureError(
            "the width is not a multiple of the number of heads",
            field="hidden_size",
            got=shape.hidden_size,
            allowed=f"a multiple of {shape.num_heads}",
        )


def read_recipe_shape(recipe: Recipe) -> ModelShape:
    """Read the shape of the recipe's model, with its adapters.

    If the model's configuration has no vocab_size, `tokenizer.vocab_size` of the recipe is
    used, or `PLACEHOLDER_VOCAB_SIZE`.
    """
    return add_adapters(read_config(read_recipe_config(recipe)), recipe.adapters)


def read_recipe_config(recipe: Recipe) -> dict[str, Any]:
    """Read the model's config.json fields, with a vocab_size as in `read_recipe_shape`."""
    config = recipe.model.config if recipe.model.config is not None else recipe.model.path
    assert config is not None  # the schema requires one of them
    if isinstance(config, dict) and "vocab_size" not in config:
        config = {**config, "vocab_size": recipe.tokenizer.vocab_size or PLACEHOLDER_VOCAB_SIZE}
    return read_content(config)
