"""A smaller model of the same family with the same odd features, for checks that need the function and not the size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwright.architecture.reading import read_config
from shardwright.architecture.shape import ModelShape
from shardwright.errors import ArchitectureError

_MIN_HEAD_DIM = 4
_MAX_KV_HEADS = 4
_GPT2_NAMES = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "intermediate_size": "n_inner",
}


def cut(
    shape: ModelShape,
    *,
    num_layers: int | None = None,
    hidden_size: int | None = None,
    vocab_size: int | None = None,
    sequence_length: int | None = None,
) -> ModelShape:
    """`shape` with fewer layers, less width, fewer tokens; None keeps what it is, and nothing ever grows.

    The layers that stay cover every kind there is (window or none, rotation or none), as far as their number allows. A
    narrower model keeps the ratios of query to key heads, of the heads' width to the model's and of the feed-forward's.
    With `sequence_length`, windows that would not bite in such a sequence shrink to half of it.

    Raises:
        ArchitectureError: a width that these ratios do not divide.
    """
    config = shape.to_config()
    if num_layers is not None and num_layers < shape.num_layers:
        config.update(_fewer_layers(shape, config, num_layers))
    if hidden_size is not None and hidden_size < shape.hidden_size:
        config.update(_less_width(shape, config, hidden_size))
    if vocab_size is not None and vocab_size < shape.vocab_size:
        config["vocab_size"] = vocab_size
        if shape.padding_row is not None:
            config["pad_token_id"] = min(shape.padding_row, vocab_size - 1)
    if sequence_length is not None and any((layer.window or 0) >= sequence_length for layer in shape.layers):
        config["sliding_window"] = max(1, sequence_length // 2)
    return read_config(config)


def _named(shape: ModelShape, values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields under the names that the family's file uses."""
    if shape.family != "gpt2":
        return dict(values)
    return {_GPT2_NAMES.get(name, name): value for name, value in values.items()}


def _fewer_layers(shape: ModelShape, config: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    first_of_kind: dict[tuple[object, object], int] = {}
    for index, layer in enumerate(shape.layers):
        first_of_kind.setdefault((layer.window, layer.rope), index)
    first = sorted(first_of_kind.values())
    rest = [index for index in range(shape.num_layers) if index not in first]
    kept = [shape.layers[index] for index in sorted((first + rest)[:num_layers])]
    fields = _named(shape, {"num_hidden_layers": num_layers})
    if len(first) > 1 and shape.family not in ("mistral", "phi3"):
        fields["layer_types"] = ["full_attention" if layer.window is None else "sliding_attention" for layer in kept]
    if any(layer.rope is None for layer in shape.layers) and shape.ropes:
        fields["no_rope_layers"] = [int(layer.rope is not None) for layer in kept]
    return fields


def _less_width(shape: ModelShape, config: Mapping[str, Any], hidden_size: int) -> dict[str, Any]:
    group = shape.num_heads // shape.num_kv_heads
    relative_width = shape.query_width / shape.hidden_size
    kv_heads = min(shape.num_kv_heads, _MAX_KV_HEADS)
    while kv_heads > 1 and (hidden_size % (kv_heads * group) or hidden_size // (kv_heads * group) < _MIN_HEAD_DIM):
        kv_heads -= 1
    heads = kv_heads * group
    if hidden_size % (2 * heads):
        raise ArchitectureError(
            f"{heads} heads of even width do not fit ({group} query heads share one key head)",
            field="hidden_size",
            got=hidden_size,
            allowed=f"a multiple of {2 * heads}",
        )
    head_dim = max(2, round(hidden_size * relative_width / heads / 2) * 2)
    inner = max(8, round(shape.intermediate_size * hidden_size / shape.hidden_size / 8) * 8)
    sizes = {"hidden_size": hidden_size, "num_attention_heads": heads, "intermediate_size": inner}
    fields = _named(shape, sizes)
    if shape.family not in ("gpt2", "gpt_neox"):
        fields |= {"num_key_value_heads": kv_heads, "head_dim": head_dim}
    if "query_pre_attn_scalar" in config or shape.attention_soft_cap is not None:
        scalar = shape.layers[0].attention_scale ** -2
        fields["query_pre_attn_scalar"] = max(1, round(scalar * head_dim / shape.head_dim))
    for name in ("rope_scaling", "rope_parameters"):
        if config.get(name) and "short_factor" in config[name]:
            fields[name] = _fewer_factors(config[name], head_dim / shape.head_dim)
    return fields


def _fewer_factors(rope: Mapping[str, Any], ratio: float) -> dict[str, Any]:
    """longrope's lists, thinned out evenly to the pairs of a narrower head."""
    thinned = dict(rope)
    for name in ("short_factor", "long_factor"):
        factors = rope[name]
        length = max(1, round(len(factors) * ratio))
        thinned[name] = [factors[i * len(factors) // length] for i in range(length)]
    return thinned
