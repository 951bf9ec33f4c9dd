"""One reader per family: fields of a config.json -> ModelShape. Defaults are those of transformers' configuration classes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from shardwright.architecture import names
from shardwright.architecture.fields import Fields
from shardwright.architecture.positions import read_rope_of_model, read_ropes_by_layer_type
from shardwright.architecture.shape import Activation, LayerShape, ModelShape, RopeShape
from shardwright.errors import ArchitectureError

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def _llama_like(
    fields: Fields,
    *,
    activation_field: str = "hidden_act",
    activation: str = "silu",
    theta: float = 10_000.0,
    head_dim: int | None = None,
    eps: float = 1e-6,
    tied: bool = False,
    kv_heads_default: bool = True,
    pad: int | None = None,
    ropes: tuple[RopeShape, ...] | None = None,
    original_max_positions: int | None = None,
) -> ModelShape:
    """What llama, mistral, qwen, phi3, gemma, olmo2, granite and smollm3 spell alike; the arguments are where defaults differ.

    Sizes must stand in the file: a default of another model's size would be a silent guess.
    """
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", head_dim or max(1, hidden_size // num_heads))
    max_positions = fields.integer("max_position_embeddings")
    num_layers = fields.integer("num_hidden_layers")
    vocab_size = fields.integer("vocab_size")
    rope_of_model = partial(read_rope_of_model, fields, head_dim, max_positions, original_max_positions=original_max_positions)
    may_default = kv_heads_default or "num_key_value_heads" in fields
    return ModelShape(
        family="",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads if may_default else None),
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        layers=(LayerShape(attention_scale=head_dim**-0.5, rope=0),) * num_layers,
        ropes=ropes or (rope_of_model(theta=theta),),
        activation=fields.choice(activation_field, _ACTIVATIONS, activation),
        norm_eps=fields.number("rms_norm_eps", eps),
        tied_embeddings=fields.flag("tie_word_embeddings", tied),
        attention_dropout=fields.probability("attention_dropout"),
        initializer_range=fields.number("initializer_range", 0.02, exclusive=True),
        padding_row=_padding_row(fields, pad, vocab_size),
    )


def _padding_row(fields: Fields, default: int | None, vocab_size: int) -> int | None:
    """The embedding row that starts at zero and that look-ups leave without gradient (torch.nn.Embedding's padding_idx)."""
    given = "pad_token_id" in fields
    row = fields.take("pad_token_id", default)
    if not given and row is not None and row >= vocab_size:
        # The family's default is a token of its own vocabulary; transformers would trip over it in a smaller one.
        fields.amended["pad_token_id"] = row = None
    if row is None:
        return None
    if isinstance(row, bool) or not isinstance(row, int) or not -vocab_size <= row < vocab_size:
        raise ArchitectureError(
            "the padding token is not in the vocabulary",
            field="pad_token_id",
            got=repr(row),
            allowed=f"null, or 0 to {vocab_size - 1}",
            remedy="Set it to null, or to a token of the vocabulary",
        )
    return row % vocab_size


def _biases(fields: Fields, shape: ModelShape, *, mlp: bool) -> ModelShape:
    """`attention_bias` on all four projections, `mlp_bias` on all three where the family has the field."""
    bias = fields.flag("attention_bias", False)
    return replace(shape, qkv_bias=bias, attention_out_bias=bias, mlp_bias=fields.flag("mlp_bias", False) if mlp else False)


def _windowed(fields: Fields, shape: ModelShape, default: int | None) -> ModelShape:
    """One `sliding_window` for all layers (null for none)."""
    window = None if fields.take("sliding_window", default) is None else fields.integer("sliding_window", default)
    return replace(shape, layers=tuple(replace(layer, window=window) for layer in shape.layers))


def _by_layer_type(fields: Fields, shape: ModelShape, kinds: list[str], window: int | None) -> ModelShape:
    """`layer_types`, or `kinds` without them: which layers see only a window."""
    given = fields.take("layer_types")
    kinds = kinds if given is None else given
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != shape.num_layers or any(kind not in known for kind in kinds):
        raise ArchitectureError(
            "wrong value", field="layer_types", got=repr(kinds), allowed=f"a list of {shape.num_layers} of {', '.join(known)}"
        )
    if window is None and "sliding_attention" in kinds:
        raise ArchitectureError(
            "some layers see a window only, but no window is set",
            field="layer_types",
            got=repr(kinds),
            remedy="Set sliding_window (and use_sliding_window, where the family has it), or full_attention everywhere",
        )
    windows = [window if kind == "sliding_attention" else None for kind in kinds]
    return replace(shape, layers=tuple(replace(layer, window=w) for layer, w in zip(shape.layers, windows, strict=True)))


def _llama(fields: Fields) -> ModelShape:
    return _biases(fields, _llama_like(fields), mlp=True)


def _mistral(fields: Fields) -> ModelShape:
    return _windowed(fields, _llama_like(fields, kv_heads_default=False), 4096)


def _qwen_windows(fields: Fields, shape: ModelShape) -> ModelShape:
    used, size = fields.flag("use_sliding_window", False), fields.take("sliding_window", 4096)
    window = fields.integer("sliding_window", 4096) if used and size is not None else None
    first = fields.integer("max_window_layers", 28, minimum=0)
    kinds = ["sliding_attention" if window and i >= first else "full_attention" for i in range(shape.num_layers)]
    return _by_layer_type(fields, shape, kinds, window)


def _qwen2(fields: Fields) -> ModelShape:
    return replace(_qwen_windows(fields, _llama_like(fields, kv_heads_default=False)), qkv_bias=True)


def _qwen3(fields: Fields) -> ModelShape:
    shape = _biases(fields, _llama_like(fields, kv_heads_default=False, head_dim=128), mlp=False)
    return replace(_qwen_windows(fields, shape), qk_norm="head")


def _phi3(fields: Fields) -> ModelShape:
    fields.only("embd_pdrop", (0, 0.0, None), "transformers never applies this dropout, and neither do we")
    shape = _windowed(fields, _llama_like(fields, eps=1e-5, pad=32000, original_max_positions=4096), None)
    return replace(shape, names=names.PHI3, qkv_layout="blocks", residual_dropout=fields.probability("resid_pdrop"))


def _gemma(fields: Fields, shape: ModelShape, *, final_cap: float | None) -> ModelShape:
    fields.take("hidden_act")  # older files carry it beside hidden_activation, the one that is read
    scale = fields.number("query_pre_attn_scalar", 256, exclusive=True) ** -0.5
    return replace(
        _biases(fields, shape, mlp=False),
        names=names.GEMMA,
        norm_offset=1.0,
        embedding_scale=math.sqrt(shape.hidden_size),
        layers=tuple(replace(layer, attention_scale=scale) for layer in shape.layers),
        final_soft_cap=_soft_cap(fields, "final_logit_softcapping", final_cap),
    )


def _soft_cap(fields: Fields, name: str, default: float | None) -> float | None:
    return None if fields.take(name, default) is None else fields.number(name, default, exclusive=True)


_GEMMA_DEFAULTS: dict[str, Any] = {
    "activation_field": "hidden_activation",
    "activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "tied": True,
    "kv_heads_default": False,
    "pad": 0,
}


def _gemma2(fields: Fields) -> ModelShape:
    shape = _gemma(fields, _llama_like(fields, **_GEMMA_DEFAULTS), final_cap=30.0)
    shape = replace(shape, attention_soft_cap=_soft_cap(fields, "attn_logit_softcapping", 50.0))
    kinds = ["sliding_attention" if (i + 1) % 2 else "full_attention" for i in range(shape.num_layers)]
    return _by_layer_type(fields, shape, kinds, fields.integer("sliding_window", 4096))


def _gemma3_text(fields: Fields) -> ModelShape:
    head_dim = fields.integer("head_dim", 256)
    ropes = read_ropes_by_layer_type(fields, head_dim, fields.integer("max_position_embeddings"))
    shape = _gemma(fields, _llama_like(fields, **_GEMMA_DEFAULTS, ropes=ropes), final_cap=None)
    fields.only("attn_logit_softcapping", (None,), "gemma3 has this field, but transformers never applies it")
    # What transformers calls the pattern in memory has slipped into some files under its private name.
    every = fields.integer("sliding_window_pattern", fields.integer("_sliding_window_pattern", 6))
    kinds = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(shape.num_layers)]
    shape = _by_layer_type(fields, shape, kinds, fields.integer("sliding_window", 4096))
    turned = tuple(replace(layer, rope=0 if layer.window is None else 1) for layer in shape.layers)
    return replace(shape, layers=turned, qk_norm="head")


def _olmo2(fields: Fields) -> ModelShape:
    shape = _biases(fields, _llama_like(fields, eps=1e-5, pad=1), mlp=False)
    return replace(shape, names=names.OLMO2, qk_norm="full")


def _granite(fields: Fields) -> ModelShape:
    shape = _biases(fields, _llama_like(fields), mlp=True)
    scale = fields.number("attention_multiplier", 1.0, exclusive=True)
    return replace(
        shape,
        layers=tuple(replace(layer, attention_scale=scale) for layer in shape.layers),
        embedding_scale=fields.number("embedding_multiplier", 1.0, exclusive=True),
        residual_scale=fields.number("residual_multiplier", 1.0, exclusive=True),
        logit_scale=1.0 / fields.number("logits_scaling", 1.0, exclusive=True),
    )


def _smollm3(fields: Fields) -> ModelShape:
    shape = _llama_like(fields, theta=2_000_000.0, kv_heads_default=False, tied=True, pad=128004)
    shape = _biases(fields, shape, mlp=True)
    every = fields.integer("no_rope_layer_interval", 4)
    turned = fields.take("no_rope_layers") or [int((i + 1) % every != 0) for i in range(shape.num_layers)]
    if not isinstance(turned, list) or len(turned) < shape.num_layers or any(item not in (0, 1) for item in turned):
        raise ArchitectureError(
            "wrong value", field="no_rope_layers", got=repr(turned), allowed=f"a list of at least {shape.num_layers} of 0 and 1"
        )
    used = fields.flag("use_sliding_window", False) and fields.take("sliding_window") is not None
    fields.take("sliding_window")
    window = fields.integer("sliding_window") if used else None
    kinds = ["full_attention" if turned[i] or not used else "sliding_attention" for i in range(shape.num_layers)]
    layers = tuple(replace(layer, rope=0 if turned[i] else None) for i, layer in enumerate(shape.layers))
    return _by_layer_type(fields, replace(shape, layers=layers), kinds, window)


def _gpt2(fields: Fields) -> ModelShape:
    hidden_size, num_heads, num_layers = fields.integer("n_embd"), fields.integer("n_head"), fields.integer("n_layer")
    head_dim = max(1, hidden_size // num_heads)
    scale = head_dim**-0.5 if fields.flag("scale_attn_weights", True) else 1.0
    by_layer = fields.flag("scale_attn_by_inverse_layer_idx", False)
    # Scaling before the product and a softmax in fp32 are the same function; our softmax accumulates in fp32 anyway.
    fields.flag("reorder_and_upcast_attn", False)
    fields.take("n_ctx")  # an older name of n_positions that nothing reads
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


def _gpt_neox(fields: Fields) -> ModelShape:
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    head_dim = max(1, hidden_size // num_heads)
    max_positions = fields.integer("max_position_embeddings")
    theta = fields.number("rotary_emb_base", 10_000.0, exclusive=True)
    fraction = fields.number("rotary_pct", 0.25, exclusive=True)
    dropout, bias = fields.probability("hidden_dropout"), fields.flag("attention_bias", True)
    return ModelShape(
        family="",
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        layers=(LayerShape(attention_scale=head_dim**-0.5, rope=0),) * fields.integer("num_hidden_layers"),
        ropes=(read_rope_of_model(fields, head_dim, max_positions, theta=theta, fraction=fraction),),
        names=names.GPT_NEOX,
        activation=fields.choice("hidden_act", _ACTIVATIONS, "gelu"),
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
}
"""Readers by `model_type`."""
