"""Reduction of a model shape to a small one of the same family and features, for checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwright.architecture.config_reading import read_config
from shardwright.architecture.latent_shape import LatentShape
from shardwright.architecture.model_shape import ModelShape
from shardwright.errors import ArchitectureError

_MIN_HEAD_DIM = 4
_MAX_KV_HEADS = 4
_GPT2_FIELD_NAMES = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "intermediate_size": "n_inner",
}


def shrink_model(
    shape: ModelShape,
    *,
    num_layers: int | None = None,
    hidden_size: int | None = None,
    vocab_size: int | None = None,
    sequence_length: int | None = None,
) -> ModelShape:
    """Shrink `shape` to the given sizes; None leaves a size as it is, and no size grows.

    The remaining layers cover all kinds of layers (with and without window, rotary embedding
    and experts) as far as `num_layers` allows. A narrower model keeps the ratios of query heads
    to key heads, of head width to model width and of feed-forward width to model width. Experts
    become narrower; their number stays. With `sequence_length`, sliding windows that are not
    shorter than a sequence become half of it.

    Raises:
        ArchitectureError: `hidden_size` is not divisible as these ratios require.
    """
    config = shape.to_config()
    if num_layers is not None and num_layers < shape.num_layers:
        config.update(_build_layer_fields(shape, num_layers))
    if hidden_size is not None and hidden_size < shape.hidden_size:
        config.update(_build_width_fields(shape, config, hidden_size))
    if vocab_size is not None and vocab_size < shape.vocab_size:
        config["vocab_size"] = vocab_size
        if shape.padding_row is not None:
            config["pad_token_id"] = min(shape.padding_row, vocab_size - 1)
    if sequence_length is not None and any(
        (layer.window or 0) >= sequence_length for layer in shape.layers
    ):
        config["sliding_window"] = max(1, sequence_length // 2)
    return read_config(config)


def _rename_fields(shape: ModelShape, values: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the fields as in the family's config.json."""
    if shape.family != "gpt2":
        return dict(values)
    return {_GPT2_FIELD_NAMES.get(name, name): value for name, value in values.items()}


def _build_layer_fields(shape: ModelShape, num_layers: int) -> dict[str, Any]:
    first_of_kind: dict[tuple[object, ...], int] = {}
    for index, layer in enumerate(shape.layers):
        first_of_kind.setdefault((layer.window, layer.rope, layer.sparse), index)
    first = sorted(first_of_kind.values())
    rest = [index for index in range(shape.num_layers) if index not in first]
    layers = [shape.layers[index] for index in sorted((first + rest)[:num_layers])]
    fields = _rename_fields(shape, {"num_hidden_layers": num_layers})
    if len({layer.window for layer in shape.layers}) > 1:
        fields["layer_types"] = [
            "full_attention" if layer.window is None else "sliding_attention" for layer in layers
        ]
    if any(layer.rope is None for layer in shape.layers) and shape.ropes:
        fields["no_rope_layers"] = [int(layer.rope is not None) for layer in layers]
    if shape.experts is not None and not all(layer.sparse for layer in shape.layers):
        dense = [index for index, layer in enumerate(layers) if not layer.sparse]
        if shape.latent is not None:
            fields["first_k_dense_replace"] = len(dense)
        else:
            fields |= {"mlp_only_layers": dense, "decoder_sparse_step": 1}
    return fields


def _build_width_fields(
    shape: ModelShape, config: Mapping[str, Any], hidden_size: int
) -> dict[str, Any]:
    group = shape.num_heads // shape.num_kv_heads
    relative_width = shape.query_width / shape.hidden_size
    kv_heads = min(shape.num_kv_heads, _MAX_KV_HEADS)
    while kv_heads > 1 and (
        hidden_size % (kv_heads * group) or hidden_size // (kv_heads * group) < _MIN_HEAD_DIM
    ):
        kv_heads -= 1
    heads = kv_heads * group
    if hidden_size % (2 * heads):
        raise ArchitectureError(
            f"the width cannot be divided into {heads} heads of even width "
            f"({group} query heads per key head)",
            field="hidden_size",
            got=hidden_size,
            allowed=f"a multiple of {2 * heads}",
        )
    head_dim = max(2, round(hidden_size * relative_width / heads / 2) * 2)
    inner = _scale_width(shape.intermediate_size, shape, hidden_size)
    sizes = {"hidden_size": hidden_size, "num_attention_heads": heads, "intermediate_size": inner}
    fields = _rename_fields(shape, sizes)
    if shape.experts is not None and "moe_intermediate_size" in config:
        fields["moe_intermediate_size"] = _scale_width(
            shape.experts.intermediate_size, shape, hidden_size
        )
    if shape.latent is not None:
        fields |= {"num_key_value_heads": kv_heads} | _scale_latents(
            shape.latent, head_dim, shape.head_dim
        )
    elif shape.family not in ("gpt2", "gpt_neox"):
        fields |= {"num_key_value_heads": kv_heads, "head_dim": head_dim}
    if "query_pre_attn_scalar" in config or shape.attention_soft_cap is not None:
        scalar = shape.layers[0].attention_scale ** -2
        fields["query_pre_attn_scalar"] = max(1, round(scalar * head_dim / shape.head_dim))
    for name in ("rope_scaling", "rope_parameters"):
        if config.get(name) and "short_factor" in config[name]:
            fields[name] = _thin_factors(config[name], head_dim / shape.head_dim)
    return fields


def _scale_width(inner: int, shape: ModelShape, hidden_size: int) -> int:
    """Scale a feed-forward width with the model's width, to a multiple of 8."""
    return max(8, round(inner * hidden_size / shape.hidden_size / 8) * 8)


def _scale_latents(
    latent: LatentShape, head_dim: int, original_head_dim: int
) -> dict[str, int | None]:
    """Scale head parts and latent ranks with the head's width; `rope_dim` stays even."""
    ratio = head_dim / original_head_dim
    rope_dim = min(max(2, round(latent.rope_dim * ratio / 2) * 2), head_dim - 1)
    return {
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": head_dim - rope_dim,
        "v_head_dim": max(1, round(latent.value_dim * ratio)),
        "kv_lora_rank": max(2, round(latent.key_value_rank * ratio)),
        "q_lora_rank": None
        if latent.query_rank is None
        else max(2, round(latent.query_rank * ratio)),
        "head_dim": rope_dim,
        "qk_head_dim": head_dim,
    }


def _thin_factors(rope: Mapping[str, Any], ratio: float) -> dict[str, Any]:
    """Select evenly spaced longrope factors for the feature pairs of a narrower head."""
    thinned = dict(rope)
    for name in ("short_factor", "long_factor"):
        factors = rope[name]
        length = max(1, round(len(factors) * ratio))
        thinned[name] = [factors[i * len(factors) // length] for i in range(length)]
    return thinned
