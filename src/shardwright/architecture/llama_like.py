"""Readers of config.json fields that most families share."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from shardwright.architecture.config_fields import ConfigFields
from shardwright.architecture.model_shape import Activation, LayerShape, ModelShape, RopeShape
from shardwright.architecture.rope_config import read_rope
from shardwright.errors import ArchitectureError

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
"""Activations by their names in config.json."""


def read_llama_like(
    fields: ConfigFields,
    *,
    activation_field: str = "hidden_act",
    activation: str = "silu",
    theta: float = 10_000.0,
    head_dim: int | None = None,
    fixed_head_dim: bool = False,
    eps: float = 1e-6,
    tied: bool = False,
    kv_heads_default: bool = True,
    pad: int | None = None,
    ropes: tuple[RopeShape, ...] | None = None,
    original_max_positions: int | None = None,
) -> ModelShape:
    """Read the fields common to llama, mistral, qwen, phi3, gemma, olmo2, granite and smollm3.

    The keyword arguments are the family's defaults. Sizes have none: the size of another model
    would be a silent guess.
    """
    hidden_size = fields.read_integer("hidden_size")
    num_heads = fields.read_integer("num_attention_heads")
    if head_dim is None or not fixed_head_dim:
        head_dim = fields.read_integer("head_dim", head_dim or max(1, hidden_size // num_heads))
    max_positions = fields.read_integer("max_position_embeddings")
    num_layers = fields.read_num_layers("num_hidden_layers")
    vocab_size = fields.read_integer("vocab_size")
    rope_of_model = partial(
        read_rope, fields, head_dim, max_positions, original_max_positions=original_max_positions
    )
    may_default = kv_heads_default or "num_key_value_heads" in fields
    return ModelShape(
        family="",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.read_integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=fields.read_integer("num_key_value_heads", num_heads if may_default else None),
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        layers=(LayerShape(attention_scale=head_dim**-0.5, rope=0),) * num_layers,
        ropes=ropes or (rope_of_model(theta=theta),),
        activation=fields.read_choice(activation_field, ACTIVATIONS, activation),
        norm_eps=fields.read_number("rms_norm_eps", eps),
        tied_embeddings=fields.read_flag("tie_word_embeddings", tied),
        attention_dropout=fields.read_probability("attention_dropout"),
        initializer_range=fields.read_number("initializer_range", 0.02, is_exclusive=True),
        padding_row=_read_padding_row(fields, pad, vocab_size),
    )


def _read_padding_row(fields: ConfigFields, default: int | None, vocab_size: int) -> int | None:
    """Read the embedding row that is initialised to zero and gets no gradient (padding_idx)."""
    row = fields.read("pad_token_id", default)
    if "pad_token_id" not in fields and row is not None and row >= vocab_size:
        # The family's default is a token of its own vocabulary; with a smaller vocabulary
        # transformers would fail on it.
        row = None
        fields.amended_fields["pad_token_id"] = None
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


def read_biases(fields: ConfigFields, shape: ModelShape, *, has_mlp_bias_field: bool) -> ModelShape:
    """Read `attention_bias` (all four projections) and `mlp_bias` (all three, if
    `has_mlp_bias_field`).
    """
    bias = fields.read_flag("attention_bias", False)
    return replace(
        shape,
        qkv_bias=bias,
        attention_out_bias=bias,
        mlp_bias=fields.read_flag("mlp_bias", False) if has_mlp_bias_field else False,
    )


def read_single_window(fields: ConfigFields, shape: ModelShape, default: int | None) -> ModelShape:
    """Read the `sliding_window` of all layers, in tokens; null for none."""
    window = (
        None
        if fields.read("sliding_window", default) is None
        else fields.read_integer("sliding_window", default)
    )
    return replace(shape, layers=tuple(replace(layer, window=window) for layer in shape.layers))


def read_layer_types(
    fields: ConfigFields, shape: ModelShape, kinds: list[str], window: int | None
) -> ModelShape:
    """Read the layers with a sliding window from `layer_types`; `kinds` if it is absent.

    Raises:
        ArchitectureError: A layer type is unknown, or the window of sliding layers is missing.
    """
    layer_types = fields.read("layer_types")
    kinds = kinds if layer_types is None else layer_types
    known = ("full_attention", "sliding_attention")
    if (
        not isinstance(kinds, list)
        or len(kinds) != shape.num_layers
        or any(kind not in known for kind in kinds)
    ):
        raise ArchitectureError(
            "wrong value",
            field="layer_types",
            got=repr(kinds),
            allowed=f"a list of {shape.num_layers} names, each {' or '.join(known)}",
        )
    if window is None and "sliding_attention" in kinds:
        raise ArchitectureError(
            "some layers use sliding-window attention, but no window is set",
            field="layer_types",
            got=repr(kinds),
            remedy="Set sliding_window (and use_sliding_window, if the family has it), "
            "or use full_attention for all layers",
        )
    windows = [window if kind == "sliding_attention" else None for kind in kinds]
    return replace(
        shape,
        layers=tuple(
            replace(layer, window=w) for layer, w in zip(shape.layers, windows, strict=True)
        ),
    )


def read_qwen_windows(fields: ConfigFields, shape: ModelShape) -> ModelShape:
    """Read Qwen's sliding window, used in layers from `max_window_layers` on."""
    is_used = fields.read_flag("use_sliding_window", False)
    size = fields.read("sliding_window", 4096)
    window = fields.read_integer("sliding_window", 4096) if is_used and size is not None else None
    first = fields.read_integer("max_window_layers", 28, minimum=0)
    kinds = [
        "sliding_attention" if window and i >= first else "full_attention"
        for i in range(shape.num_layers)
    ]
    return read_layer_types(fields, shape, kinds, window)
