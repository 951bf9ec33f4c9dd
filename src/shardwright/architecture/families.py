"""config.json -> ModelShape, one reader per family. Defaults are those of transformers' configuration classes."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwright.architecture import names
from shardwright.architecture.fields import Fields
from shardwright.architecture.positions import read_ropes
from shardwright.architecture.shape import LayerShape, ModelShape
from shardwright.errors import ArchitectureError, nearest

INERT_FIELDS = frozenset(
    {
        # bookkeeping
        "architectures", "model_type", "transformers_version", "_name_or_path", "name_or_path", "_commit_hash", "auto_map",
        "dtype", "torch_dtype", "problem_type", "id2label", "label2id", "task_specific_params", "unsloth_version",
        # what a forward pass returns or keeps, not what it computes
        "use_cache", "cache_implementation", "return_dict", "output_hidden_states", "output_attentions",
        "_attn_implementation", "_attn_implementation_autoset", "attn_implementation", "torchscript", "gradient_checkpointing",
        "use_bfloat16", "is_llama_config", "keys_to_ignore_at_inference",
        # token ids that tokenisers and generation use
        "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "forced_bos_token_id",
        "forced_eos_token_id", "prefix",
        # heads that a causal language model does not have
        "classifier_dropout", "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels",
        "summary_first_dropout", "num_labels",
        # slicing of products for memory; the result is the same
        "chunk_size_feed_forward", "pretraining_tp",
        # generation settings of older files
        "temperature", "top_k", "top_p", "do_sample", "max_length", "min_length", "num_beams", "repetition_penalty",
    }
)  # fmt: skip
"""Fields that any family's config.json may carry without effect on logits, loss or gradients."""

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def read_config(config: Mapping[str, Any] | str | Path) -> ModelShape:
    """The shape that a config.json describes; `config` is its content, its path, or the folder that holds it.

    Raises:
        ArchitectureError: no such file, an unknown family, or a field that we do not compute exactly, by name.
    """
    content = dict(config) if isinstance(config, Mapping) else _read_file(Path(config))
    family = content.get("model_type")
    reader = FAMILIES.get(family) if isinstance(family, str) else None
    if reader is None:
        raise ArchitectureError(
            "this family of models is not supported",
            field="model_type",
            got=repr(family),
            allowed=", ".join(sorted(FAMILIES)),
            remedy=_family_remedy(family),
        )
    fields = Fields(content)
    fields.only("is_encoder_decoder", (False, None), "encoder-decoder models are not supported")
    fields.only("is_decoder", (False, True, None), "wrong value")
    fields.only("add_cross_attention", (False, None), "cross-attention is not supported")
    fields.only("pruned_heads", ({}, None), "pruned heads are not supported")
    fields.only("quantization_config", (None,), "quantised weights are not supported")
    shape = replace(reader(fields), family=str(family), config=copy.deepcopy(content))
    fields.refuse_rest(str(family), INERT_FIELDS)
    _check(shape)
    return shape


def _family_remedy(family: Any) -> str:
    near = nearest(str(family), FAMILIES)
    return f"Did you mean `{near}`?" if near else "Take a model of one of these families"


def _read_file(path: Path) -> dict[str, Any]:
    path = path / "config.json" if path.is_dir() else path
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArchitectureError(
            f"the model's config.json cannot be read: {error.strerror}",
            field="model.path",
            got=path,
            remedy="Give a folder that holds config.json",
        ) from error
    except ValueError as error:
        raise ArchitectureError(f"this is not JSON: {error}", field="model.path", got=path) from error
    if not isinstance(content, dict):
        raise ArchitectureError("a config.json holds one mapping", field="model.path", got=path)
    return content


def _llama_like(fields: Fields, *, default_theta: float = 10_000.0, head_dim: int | None = None) -> ModelShape:
    """What llama, mistral, qwen, phi3, gemma, olmo2, granite and smollm3 spell alike."""
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", head_dim or max(1, hidden_size // num_heads))
    max_positions = fields.integer("max_position_embeddings")
    num_layers = fields.integer("num_hidden_layers")
    ropes = read_ropes(fields, head_dim, max_positions, default_theta=default_theta)
    return ModelShape(
        family="",
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        layers=(LayerShape(attention_scale=head_dim**-0.5, rope=0),) * num_layers,
        ropes=ropes,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        attention_dropout=fields.probability("attention_dropout"),
        initializer_range=fields.number("initializer_range", 0.02),
        padding_row=_padding_row(fields),
    )


def _padding_row(fields: Fields) -> int | None:
    row = fields.take("pad_token_id")
    return row if isinstance(row, int) and not isinstance(row, bool) and row >= 0 else None


def _llama(fields: Fields) -> ModelShape:
    attention_bias = fields.flag("attention_bias", False)
    return replace(
        _llama_like(fields),
        activation=fields.choice("hidden_act", _ACTIVATIONS, "silu"),
        qkv_bias=attention_bias,
        attention_out_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )


def _gpt2(fields: Fields) -> ModelShape:
    hidden_size = fields.integer("n_embd", 768)
    num_heads = fields.integer("n_head", 12)
    num_layers = fields.integer("n_layer", 12)
    head_dim = max(1, hidden_size // num_heads)
    scale = head_dim**-0.5 if fields.flag("scale_attn_weights", True) else 1.0
    by_layer = fields.flag("scale_attn_by_inverse_layer_idx", False)
    # Keys are scaled before the product and the softmax runs in fp32: in exact arithmetic the same function, and ours
    # accumulates in fp32 anyway.
    fields.flag("reorder_and_upcast_attn", False)
    fields.take("n_ctx")  # older name of n_positions; transformers ignores it
    std = fields.number("initializer_range", 0.02)
    return ModelShape(
        family="",
        vocab_size=fields.integer("vocab_size", 50257),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("n_inner", 4 * hidden_size),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        max_position_embeddings=fields.integer("n_positions", 1024),
        layers=tuple(LayerShape(attention_scale=scale / (i + 1) if by_layer else scale) for i in range(num_layers)),
        names=names.GPT2,
        activation=fields.choice("activation_function", _ACTIVATIONS, "gelu_new"),
        norm="layer",
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        norm_bias=True,
        qkv_layout="blocks",
        matrix_layout="in_out",
        qkv_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        tied_embeddings=fields.flag("tie_word_embeddings", True),
        embedding_dropout=fields.probability("embd_pdrop", 0.1),
        attention_dropout=fields.probability("attn_pdrop", 0.1),
        residual_dropout=fields.probability("resid_pdrop", 0.1),
        initializer_range=std,
        residual_init_std=std / math.sqrt(2 * num_layers),
    )


FAMILIES: dict[str, Callable[[Fields], ModelShape]] = {
    "llama": _llama,
    "gpt2": _gpt2,
}
"""Readers by `model_type`."""


def _check(shape: ModelShape) -> None:
    """Refuse widths that do not fit together."""
    if shape.num_heads % shape.num_kv_heads:
        raise ArchitectureError(
            "query heads must be a multiple of key and value heads",
            field="num_key_value_heads",
            got=shape.num_kv_heads,
            allowed=f"a divisor of {shape.num_heads}",
        )
    given = "head_dim" in shape.config and shape.config["head_dim"] is not None
    if not given and shape.hidden_size % shape.num_heads:
        raise ArchitectureError(
            "the width is not a multiple of the heads",
            field="hidden_size",
            got=shape.hidden_size,
            allowed=f"a multiple of {shape.num_heads}",
        )
