"""One reader per model family: fields of a config.json -> ModelShape.

Defaults are those of transformers' configuration classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shardwright.architecture import module_names
from shardwright.architecture.config_fields import ConfigFields
from shardwright.architecture.llama_like import (
    ACTIVATIONS,
    read_biases,
    read_layer_types,
    read_llama_like,
    read_qwen_windows,
    read_single_window,
)
from shardwright.architecture.model_shape import LayerShape, ModelShape
from shardwright.architecture.rope_config import read_rope, read_ropes_by_layer_type
from shardwright.architecture.sparse_families import SPARSE_MODEL_FAMILIES
from shardwright.errors import ArchitectureError


def _read_llama(fields: ConfigFields) -> ModelShape:
    return read_biases(fields, read_llama_like(fields), has_mlp_bias_field=True)


def _read_mistral(fields: ConfigFields) -> ModelShape:
    return read_single_window(fields, read_llama_like(fields, kv_heads_default=False), 4096)


def _read_qwen2(fields: ConfigFields) -> ModelShape:
    return replace(
        read_qwen_windows(fields, read_llama_like(fields, kv_heads_default=False)), qkv_bias=True
    )


def _read_qwen3(fields: ConfigFields) -> ModelShape:
    shape = read_biases(
        fields,
        read_llama_like(fields, kv_heads_default=False, head_dim=128),
        has_mlp_bias_field=False,
    )
    return replace(read_qwen_windows(fields, shape), qk_norm="head")


def _read_phi3(fields: ConfigFields) -> ModelShape:
    fields.require_value(
        "embd_pdrop", (0, 0.0, None), "transformers ignores this dropout; it is not supported"
    )
    shape = read_single_window(
        fields, read_llama_like(fields, eps=1e-5, pad=32000, original_max_positions=4096), None
    )
    return replace(
        shape,
        names=module_names.PHI3,
        qkv_layout="blocks",
        residual_dropout=fields.read_probability("resid_pdrop"),
    )


def _read_gemma(fields: ConfigFields, shape: ModelShape, *, final_cap: float | None) -> ModelShape:
    fields.read("hidden_act")  # older files have it next to hidden_activation, which is used
    scale = fields.read_number("query_pre_attn_scalar", 256, is_exclusive=True) ** -0.5
    return replace(
        read_biases(fields, shape, has_mlp_bias_field=False),
        names=module_names.GEMMA,
        norm_offset=1.0,
        embedding_scale=math.sqrt(shape.hidden_size),
        layers=tuple(replace(layer, attention_scale=scale) for layer in shape.layers),
        final_soft_cap=_read_soft_cap(fields, "final_logit_softcapping", final_cap),
    )


def _read_soft_cap(fields: ConfigFields, name: str, default: float | None) -> float | None:
    return (
        None
        if fields.read(name, default) is None
        else fields.read_number(name, default, is_exclusive=True)
    )


_GEMMA_DEFAULTS: dict[str, Any] = {
    "activation_field": "hidden_activation",
    "activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "tied": True,
    "kv_heads_default": False,
    "pad": 0,
}


def _read_gemma2(fields: ConfigFields) -> ModelShape:
    shape = _read_gemma(fields, read_llama_like(fields, **_GEMMA_DEFAULTS), final_cap=30.0)
    shape = replace(
        shape, attention_soft_cap=_read_soft_cap(fields, "attn_logit_softcapping", 50.0)
    )
    kinds = [
        "sliding_attention" if (i + 1) % 2 else "full_attention" for i in range(shape.num_layers)
    ]
    return read_layer_types(fields, shape, kinds, fields.read_integer("sliding_window", 4096))


def _read_gemma3_text(fields: ConfigFields) -> ModelShape:
    head_dim = fields.read_integer("head_dim", 256)
    ropes = read_ropes_by_layer_type(
        fields, head_dim, fields.read_integer("max_position_embeddings")
    )
    shape = _read_gemma(
        fields, read_llama_like(fields, **_GEMMA_DEFAULTS, ropes=ropes), final_cap=None
    )
    fields.require_value(
        "attn_logit_softcapping",
        (None,),
        "gemma3 has this field, but transformers never applies it",
    )
    # Some files have the pattern under the private name of transformers' attribute.
    period = fields.read_integer(
        "sliding_window_pattern", fields.read_integer("_sliding_window_pattern", 6)
    )
    kinds = [
        "sliding_attention" if (i + 1) % period else "full_attention"
        for i in range(shape.num_layers)
    ]
    shape = read_layer_types(fields, shape, kinds, fields.read_integer("sliding_window", 4096))
    layers = tuple(replace(layer, rope=0 if layer.window is None else 1) for layer in shape.layers)
    return replace(shape, layers=layers, qk_norm="head")


def _read_olmo2(fields: ConfigFields) -> ModelShape:
    shape = read_biases(fields, read_llama_like(fields, eps=1e-5, pad=1), has_mlp_bias_field=False)
    return replace(shape, names=module_names.OLMO2, qk_norm="full")


def _read_granite(fields: ConfigFields) -> ModelShape:
    shape = read_biases(fields, read_llama_like(fields), has_mlp_bias_field=True)
    scale = fields.read_number("attention_multiplier", 1.0, is_exclusive=True)
    return replace(
        shape,
        layers=tuple(replace(layer, attention_scale=scale) for layer in shape.layers),
        embedding_scale=fields.read_number("embedding_multiplier", 1.0, is_exclusive=True),
        residual_scale=fields.read_number("residual_multiplier", 1.0, is_exclusive=True),
        logit_scale=1.0 / fields.read_number("logits_scaling", 1.0, is_exclusive=True),
    )


def _read_smollm3(fields: ConfigFields) -> ModelShape:
    shape = read_llama_like(
        fields, theta=2_000_000.0, kv_heads_default=False, tied=True, pad=128004
    )
    shape = read_biases(fields, shape, has_mlp_bias_field=True)
    period = fields.read_integer("no_rope_layer_interval", 4)
    # Despite the field's name, 1 stands for a layer with rotary embedding.
    has_rope = fields.read("no_rope_layers") or [
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
        fields.read_flag("use_sliding_window", False) and fields.read("sliding_window") is not None
    )
    fields.read("sliding_window")
    window = fields.read_integer("sliding_window") if has_window else None
    kinds = [
        "full_attention" if has_rope[i] or not has_window else "sliding_attention"
        for i in range(shape.num_layers)
    ]
    layers = tuple(
        replace(layer, rope=0 if has_rope[i] else None) for i, layer in enumerate(shape.layers)
    )
    return read_layer_types(fields, replace(shape, layers=layers), kinds, window)


def _read_gpt2(fields: ConfigFields) -> ModelShape:
    hidden_size = fields.read_integer("n_embd")
    num_heads = fields.read_integer("n_head")
    num_layers = fields.read_num_layers("n_layer")
    head_dim = max(1, hidden_size // num_heads)
    scale = head_dim**-0.5 if fields.read_flag("scale_attn_weights", True) else 1.0
    by_layer = fields.read_flag("scale_attn_by_inverse_layer_idx", False)
    # This flag scales before the product and computes softmax in fp32: the same function, and
    # our softmax accumulates in fp32 in any case.
    fields.read_flag("reorder_and_upcast_attn", False)
    fields.read("n_ctx")  # an older name of n_positions, without effect
    std = fields.read_number("initializer_range", 0.02, is_exclusive=True)
    return ModelShape(
        family="",
        vocab_size=fields.read_integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.read_integer("n_inner", 4 * hidden_size),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        max_position_embeddings=fields.read_integer("n_positions"),
        layers=tuple(
            LayerShape(attention_scale=scale / (i + 1) if by_layer else scale)
            for i in range(num_layers)
        ),
        names=module_names.GPT2,
        activation=fields.read_choice("activation_function", ACTIVATIONS, "gelu_new"),
        norm="layer",
        norm_eps=fields.read_number("layer_norm_epsilon", 1e-5),
        norm_bias=True,
        qkv_layout="blocks",
        matrix_layout="in_out",
        qkv_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        tied_embeddings=fields.read_flag("tie_word_embeddings", True),
        embedding_dropout=fields.read_probability("embd_pdrop", 0.1),
        attention_dropout=fields.read_probability("attn_pdrop", 0.1),
        residual_dropout=fields.read_probability("resid_pdrop", 0.1),
        initializer_range=std,
        residual_init_std=std / math.sqrt(2 * num_layers),
    )


def _read_gpt_neox(fields: ConfigFields) -> ModelShape:
    hidden_size = fields.read_integer("hidden_size")
    num_heads = fields.read_integer("num_attention_heads")
    head_dim = max(1, hidden_size // num_heads)
    max_positions = fields.read_integer("max_position_embeddings")
    theta = fields.read_number("rotary_emb_base", 10_000.0, is_exclusive=True)
    fraction = fields.read_number("rotary_pct", 0.25, is_exclusive=True)
    dropout = fields.read_probability("hidden_dropout")
    bias = fields.read_flag("attention_bias", True)
    return ModelShape(
        family="",
        vocab_size=fields.read_integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.read_integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        layers=(LayerShape(attention_scale=head_dim**-0.5, rope=0),)
        * fields.read_num_layers("num_hidden_layers"),
        ropes=(read_rope(fields, head_dim, max_positions, theta=theta, fraction=fraction),),
        names=module_names.GPT_NEOX,
        activation=fields.read_choice("hidden_act", ACTIVATIONS, "gelu"),
        norm="layer",
        norm_eps=fields.read_number("layer_norm_eps", 1e-5),
        norm_bias=True,
        qkv_layout="heads",
        parallel_residual=fields.read_flag("use_parallel_residual", True),
        qkv_bias=bias,
        attention_out_bias=bias,
        mlp_bias=True,
        tied_embeddings=fields.read_flag("tie_word_embeddings", False),
        embedding_dropout=dropout,
        attention_dropout=fields.read_probability("attention_dropout"),
        residual_dropout=dropout,
        initializer_range=fields.read_number("initializer_range", 0.02, is_exclusive=True),
    )


MODEL_FAMILIES: dict[str, Callable[[ConfigFields], ModelShape]] = {
    "llama": _read_llama,
    "mistral": _read_mistral,
    "qwen2": _read_qwen2,
    "qwen3": _read_qwen3,
    "phi3": _read_phi3,
    "gemma2": _read_gemma2,
    "gemma3_text": _read_gemma3_text,
    "olmo2": _read_olmo2,
    "granite": _read_granite,
    "smollm3": _read_smollm3,
    "gpt2": _read_gpt2,
    "gpt_neox": _read_gpt_neox,
    **SPARSE_MODEL_FAMILIES,
}
"""Readers by `model_type`, dense and sparse families."""
