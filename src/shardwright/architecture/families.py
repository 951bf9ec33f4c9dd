"""One reader per model family: fields of a config.json -> ModelShape.

Defaults are those of transformers' configuration classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shardwright.architecture import names
from shardwright.architecture.fields import Fields
from shardwright.architecture.llama_like import (
    ACTIVATIONS,
    read_biases,
    read_layer_types,
    read_llama_like,
    read_one_window,
    read_qwen_windows,
)
from shardwright.architecture.positions import read_rope_of_model, read_ropes_by_layer_type
from shardwright.architecture.shape import LayerShape, ModelShape
from shardwright.architecture.sparse_families import SPARSE_FAMILIES
from shardwright.errors import ArchitectureError


def _llama(fields: Fields) -> ModelShape:
    return read_biases(fields, read_llama_like(fields), mlp=True)


def _mistral(fields: Fields) -> ModelShape:
    return read_one_window(fields, read_llama_like(fields, kv_heads_default=False), 4096)


def _qwen2(fields: Fields) -> ModelShape:
    return replace(
        read_qwen_windows(fields, read_llama_like(fields, kv_heads_default=False)), qkv_bias=True
    )


def _qwen3(fields: Fields) -> ModelShape:
    shape = read_biases(
        fields, read_llama_like(fields, kv_heads_default=False, head_dim=128), mlp=False
    )
    return replace(read_qwen_windows(fields, shape), qk_norm="head")


def _phi3(fields: Fields) -> ModelShape:
    fields.only(
        "embd_pdrop", (0, 0.0, None), "transformers ignores this dropout; it is not supported"
    )
    shape = read_one_window(
        fields, read_llama_like(fields, eps=1e-5, pad=32000, original_max_positions=4096), None
    )
    return replace(
        shape,
        names=names.PHI3,
        qkv_layout="blocks",
        residual_dropout=fields.probability("resid_pdrop"),
    )


def _gemma(fields: Fields, shape: ModelShape, *, final_cap: float | None) -> ModelShape:
    fields.take("hidden_act")  # older files have it beside hidden_activation, which is used
    scale = fields.number("query_pre_attn_scalar", 256, exclusive=True) ** -0.5
    return replace(
        read_biases(fields, shape, mlp=False),
        names=names.GEMMA,
        norm_offset=1.0,
        embedding_scale=math.sqrt(shape.hidden_size),
        layers=tuple(replace(layer, attention_scale=scale) for layer in shape.layers),
        final_soft_cap=_soft_cap(fields, "final_logit_softcapping", final_cap),
    )


def _soft_cap(fields: Fields, name: str, default: float | None) -> float | None:
    return (
        None if fields.take(name, default) is None else fields.number(name, default, exclusive=True)
    )


_GEMMA_DEFAULTS: dict[str, Any] = {
    "activation_field": "hidden_activation",
    "activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "tied": True,
    "kv_heads_default": False,
    "pad": 0,
}


def _gemma2(fields: Fields) -> ModelShape:
    shape = _gemma(fields, read_llama_like(fields, **_GEMMA_DEFAULTS), final_cap=30.0)
    shape = replace(shape, attention_soft_cap=_soft_cap(fields, "attn_logit_softcapping", 50.0))
    kinds = [
        "sliding_attention" if (i + 1) % 2 else "full_attention" for i in range(shape.num_layers)
    ]
    return read_layer_types(fields, shape, kinds, fields.integer("sliding_window", 4096))


def _gemma3_text(fields: Fields) -> ModelShape:
    head_dim = fields.integer("head_dim", 256)
    ropes = read_ropes_by_layer_type(fields, head_dim, fields.integer("max_position_embeddings"))
    shape = _gemma(fields, read_llama_like(fields, **_GEMMA_DEFAULTS, ropes=ropes), final_cap=None)
    fields.only(
        "attn_logit_softcapping",
        (None,),
        "gemma3 has this field, but transformers never applies it",
    )
    # Some files have the pattern under the private name of transformers' attribute.
    period = fields.integer("sliding_window_pattern", fields.integer("_sliding_window_pattern", 6))
    kinds = [
        "sliding_attention" if (i + 1) % period else "full_attention"
        for i in range(shape.num_layers)
    ]
    shape = read_layer_types(fields, shape, kinds, fields.integer("sliding_window", 4096))
    layers = tuple(replace(layer, rope=0 if layer.window is None else 1) for layer in shape.layers)
    return replace(shape, layers=layers, qk_norm="head")


def _olmo2(fields: Fields) -> ModelShape:
    shape = read_biases(fields, read_llama_like(fields, eps=1e-5, pad=1), mlp=False)
    return replace(shape, names=names.OLMO2, qk_norm="full")


def _granite(fields: Fields) -> ModelShape:
    shape = read_biases(fields, read_llama_like(fields), mlp=True)
    scale = fields.number("attention_multiplier", 1.0, exclusive=True)
    return replace(
        shape,
        layers=tuple(replace(layer, attention_scale=scale) for layer in shape.layers),
        embedding_scale=fields.number("embedding_multiplier", 1.0, exclusive=True),
        residual_scale=fields.number("residual_multiplier", 1.0, exclusive=True),
        logit_scale=1.0 / fields.number("logits_scaling", 1.0, exclusive=True),
    )


def _smollm3(fields: Fields) -> ModelShape:
    shape = read_llama_like(
        fields, theta=2_000_000.0, kv_heads_default=False, tied=True, pad=128004
    )
    shape = read_biases(fields, shape, mlp=True)
    period = fields.integer("no_rope_layer_interval", 4)
    # Despite the field's name, 1 stands for a layer with rotary embedding.
    has_rope = fields.take("no_rope_layers") or [
        int((i + 1) % period != 0) for i in range(shape.num_layers)
    ]
    if (
        not isinstance(has_rope, list)
        or len(has_rope) < shape.num_layers
        or any(item not in (0, 1) for item in has_rope)
    ):
        raise ArchitectureError(
            "wrong value",
            field="no_rope_layers",
            got=repr(has_rope),
            allowed=f"a list of at least {shape.num_layers} numbers, each 0 or 1",
        )
    has_window = (
        fields.flag("use_sliding_window", False) and fields.take("sliding_window") is not None
    )
    fields.take("sliding_window")
    window = fields.integer("sliding_window") if has_window else None
    kinds = [
        "full_attention" if has_rope[i] or not has_window else "sliding_attention"
        for i in range(shape.num_layers)
    ]
    layers = tuple(
        replace(layer, rope=0 if has_rope[i] else None) for i, layer in enumerate(shape.layers)
    )
    return read_layer_types(fields, replace(shape, layers=layers), kinds, window)


def _gpt2(fields: Fields) -> ModelShape:
    hidden_size = fields.integer("n_embd")
    num_heads = fields.integer("n_head")
    num_layers = fields.num_layers("n_layer")
    head_dim = max(1, hidden_size // num_heads)
    scale = head_dim**-0.5 if fields.flag("scale_attn_weights", True) else 1.0
    by_layer = fields.flag("scale_attn_by_inverse_layer_idx", False)
    # This flag scales before the product and computes softmax in fp32: the same function, and
    # our softmax accumulates in fp32 in any case.
    fields.flag("reorder_and_upcast_attn", False)
    fields.take("n_ctx")  # an older name of n_positions, without effect
    std = fields.number("initializer_range", 0.02, exclusive=True)
    return ModelShape(
        family="",
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("n_inner", 4 * hidden_size),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        max_position_embeddings=fields.integer("n_positions"),
        layers=tuple(
            LayerShape(attention_scale=scale / (i + 1) if by_layer else scale)
            for i in range(num_layers)
        ),
        names=names.GPT2,
        activation=fields.choice("activation_function", ACTIVATIONS, "gelu_new"),
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


def _gpt_neox(fields: Fields) -> ModelShape:
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    head_dim = max(1, hidden_size // num_heads)
    max_positions = fields.integer("max_position_embeddings")
    theta = fields.number("rotary_emb_base", 10_000.0, exclusive=True)
    fraction = fields.number("rotary_pct", 0.25, exclusive=True)
    dropout = fields.probability("hidden_dropout")
    bias = fields.flag("attention_bias", True)
    return ModelShape(
        family="",
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        layers=(LayerShape(attention_scale=head_dim**-0.5, rope=0),)
        * fields.num_layers("num_hidden_layers"),
        ropes=(
            read_rope_of_model(fields, head_dim, max_positions, theta=theta, fraction=fraction),
        ),
        names=names.GPT_NEOX,
        activation=fields.choice("hidden_act", ACTIVATIONS, "gelu"),
        norm="layer",
        norm_eps=fields.number("layer_norm_eps", 1e-5),
        norm_bias=True,
        qkv_layout="heads",
        parallel_residual=fields.flag("use_parallel_residual", True),
        qkv_bias=bias,
        attention_out_bias=bias,
        mlp_bias=True,
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        embedding_dropout=dropout,
        attention_dropout=fields.probability("attention_dropout"),
        residual_dropout=dropout,
        initializer_range=fields.number("initializer_range", 0.02, exclusive=True),
    )


FAMILIES: dict[str, Callable[[Fields], ModelShape]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "phi3": _phi3,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3_text,
    "olmo2": _olmo2,
    "granite": _granite,
    "smollm3": _smollm3,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    **SPARSE_FAMILIES,
}
"""Readers by `model_type`, dense and sparse families."""
