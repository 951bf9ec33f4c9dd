"""Model shapes of published rows, from their columns and model names.

A table of measurements gives sizes (layers, widths, heads, vocabulary) and a name. The name's
family determines whether the feed-forward is gated, embeddings are tied, and positions are
learned. Missing sizes are those of the named model (`planner.published.model_catalogue`),
unless a stated size contradicts it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import log
from typing import Any

from shardwright.architecture import LayerShape, ModelShape, read_config
from shardwright.architecture.expert_shape import ExpertShape
from shardwright.architecture.module_names import LLAMA
from shardwright.errors import ArchitectureError
from shardwright.planner.published.model_catalogue import (
    BILLIONS_PATTERN,
    MILLIONS_PATTERN,
    SHARED_EXPERT_WIDTHS,
    SIZE_COLUMNS,
    find_sizes,
    find_style,
    load_public_configs,
)


@dataclass(frozen=True)
class _HybridStandIn:
    """Substitute for a hybrid model (Mamba-2 and experts), made of supported layers: the same
    number of parameters, matmuls and expert bytes.

    A pair of one Mamba-2 and one sparse layer becomes one layer whose attention has a window of
    256 tokens and as many parameters as the Mamba-2 layer's projections. Experts without a gate
    become gated ones of two thirds of the width. The scan itself is not counted. Numbers:
    NVIDIA Nemotron 3 technical reports and config.json, 2025-12 to 2026-06.
    """

    num_pairs: int
    num_attention_layers: int
    hidden_size: int
    num_mixer_heads: int
    num_experts: int
    experts_per_token: int
    expert_width: int
    shared_width: int
    vocab_size: int = 131072


_HYBRIDS = {
    r"nemotron[-_ ]?v?3[-_ ]?nano": _HybridStandIn(23, 6, 2688, 54, 128, 6, 1237, 2475),
    r"nemotron[-_ ]?v?3[-_ ]?super": _HybridStandIn(40, 8, 4096, 104, 512, 22, 448, 3584),
    r"nemotron[-_ ]?v?3[-_ ]?ultra": _HybridStandIn(48, 12, 8192, 192, 512, 22, 853, 6827),
    r"deepseek[-_ ]?v4[-_ ]?flash": _HybridStandIn(43, 0, 4096, 96, 256, 6, 2048, 2048, 129280),
}


def has_latent_experts(name: str) -> bool:
    """Return True if experts use a quarter of the model's width as input and output (LatentMoE
    of Nemotron 3 Super and Ultra)."""
    return re.search(r"nemotron[-_ ]?v?3[-_ ]?(super|ultra)", name.lower()) is not None


def is_hybrid(name: str) -> bool:
    """Return True for models planned with a `_HybridStandIn`, whose mixers have their own fitted
    attention efficiency."""
    return any(re.search(pattern, name.lower()) for pattern in _HYBRIDS)


def build_row_shape(
    row: Mapping[str, str],
    *,
    has_tied_embeddings: bool | None = None,
    expert_width: int | None = None,
) -> ModelShape:
    """Return the shape of a row's model: by name if the name is known, else from its columns.

    Args:
        row: columns model_name, layers, hidden, heads, kv_heads, ffn_hidden, vocab, seq_len,
            num_experts, top_k, params_b.
        has_tied_embeddings: embeddings as stated in the row's notes; None follows the name.
        expert_width: expert width as stated in the row's notes; None uses ffn_hidden.

    Raises:
        ArchitectureError: name and columns do not determine the shape.
    """
    name = re.sub(r"[\s_/]+", "-", row["model_name"].lower())
    for pattern in load_public_configs():
        if re.search(pattern, name) and _is_consistent(
            row, shape := _add_shared_experts(name, _read_public_config(pattern))
        ):
            return _set_depth(shape, _read_integer(row, "layers", 0))
    for pattern, stand_in in _HYBRIDS.items():
        if re.search(pattern, name):
            return _build_hybrid_shape(stand_in)
    sizes = find_sizes(name) or find_sizes(f"{name} {float(row.get('params_b') or 0):.0f}b")
    if sizes is not None and not _has_contradiction(row, sizes):
        columns = dict(zip(SIZE_COLUMNS, sizes["sizes"], strict=True))
        row = {**row, **{column: row.get(column) or str(size) for column, size in columns.items()}}
        return _build_shape_from_columns(row, name, has_tied_embeddings, expert_width, sizes)
    return _build_shape_from_columns(row, name, has_tied_embeddings, expert_width)


@cache
def _read_public_config(pattern: str) -> ModelShape:
    return read_config(load_public_configs()[pattern])


def _is_consistent(row: Mapping[str, str], shape: ModelShape) -> bool:
    """Return True if the row's width and the size in its model's name match the shape
    (`DeepSeek-V3-16B` does not)."""
    name = row["model_name"].lower()
    # `17b-128e` counts active parameters.
    stated_size = None if re.search(r"\d+e\b", name) else re.search(BILLIONS_PATTERN, name)
    is_near = stated_size is None or 0.8 < float(stated_size[1]) * 1e9 / shape.num_parameters < 1.25
    return _read_integer(row, "hidden", 0) in (0, shape.hidden_size) and is_near


def _set_depth(shape: ModelShape, layers: int) -> ModelShape:
    """Return the shape with as many layers as the row states, repeating the last kind:
    scaled-down proxies have fewer layers."""
    if layers in (0, shape.num_layers):
        return shape
    return replace(shape, layers=(shape.layers + shape.layers[-2:] * layers)[:layers])


def _has_contradiction(row: Mapping[str, str], sizes: Mapping[str, Any]) -> bool:
    """Return True if the row's width, heads or experts differ from the named model's. Depth and
    vocabulary may differ."""
    named_sizes = dict(zip(SIZE_COLUMNS, sizes["sizes"], strict=True)) | {
        "num_experts": sizes.get("experts", (0,))[0]
    }
    return any(
        _read_integer(row, column, 0) not in (0, named_sizes[column])
        for column in ("hidden", "heads", "num_experts")
    )


def _add_shared_experts(name: str, shape: ModelShape) -> ModelShape:
    for pattern, width in SHARED_EXPERT_WIDTHS.items():
        if re.search(pattern, name) and shape.experts is not None:
            return replace(shape, experts=replace(shape.experts, shared_intermediate_size=width))
    return shape


def _build_hybrid_shape(stand_in: _HybridStandIn) -> ModelShape:
    mixers = (LayerShape(attention_scale=1.0, window=256, sparse=True),) * stand_in.num_pairs
    attention = (LayerShape(attention_scale=1.0),) * stand_in.num_attention_layers
    return ModelShape(
        family="planning",
        vocab_size=stand_in.vocab_size,
        hidden_size=stand_in.hidden_size,
        intermediate_size=128,
        num_heads=stand_in.num_mixer_heads,
        num_kv_heads=2,
        head_dim=128,
        max_position_embeddings=1 << 20,
        layers=mixers + attention,
        experts=ExpertShape(
            stand_in.num_experts,
            stand_in.experts_per_token,
            # The true width fills matmul tiles, two thirds of it may not: round to a multiple
            # of 64.
            64 * round(stand_in.expert_width / 64),
            shared_intermediate_size=64 * round(stand_in.shared_width / 64),
        ),
    )


def _build_shape_from_columns(
    row: Mapping[str, str],
    name: str,
    has_tied_embeddings: bool | None,
    expert_width: int | None,
    named_sizes: Mapping[str, Any] | None = None,
) -> ModelShape:
    """Build the shape from a row's columns. The family, or the `named_sizes` model if known,
    supplies the rest."""
    style = find_style(name)
    named_sizes = named_sizes or {}
    if has_tied_embeddings is None and named_sizes:
        has_tied_embeddings = named_sizes.get("tied", style.has_tied_embeddings)
    vocab = _read_integer(row, "vocab")
    layers, hidden = _read_depth_and_width(row)
    heads = min(_read_integer(row, "heads", _guess_heads(hidden)), hidden)
    kv_heads = _read_integer(row, "kv_heads", heads)
    known_experts, known_top, known_width = named_sizes.get("experts", (0, 2, None))
    num_experts = _read_integer(row, "num_experts", known_experts)
    default_inner = _choose_feed_forward_width(
        layers, hidden, vocab, _read_num_parameters(row), num_experts, is_gated=style.is_gated
    )
    inner = _read_integer(row, "ffn_hidden", default_inner)
    width = expert_width or known_width or inner
    shared = named_sizes.get("shared", 0)
    experts = (
        ExpertShape(num_experts, _read_integer(row, "top_k", known_top), width, shared)
        if num_experts
        else None
    )
    layer = LayerShape(attention_scale=1.0, sparse=experts is not None)
    dense = (replace(layer, sparse=False),) * min(layers, named_sizes.get("dense", 0))
    shape = ModelShape(
        family="planning",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_heads=heads,
        num_kv_heads=heads if heads % kv_heads else kv_heads,
        head_dim=named_sizes.get("head_dim", hidden // heads),
        max_position_embeddings=_read_integer(row, "seq_len", 4096),
        layers=dense + (layer,) * (layers - len(dense)),
        names=replace(
            LLAMA,
            gate=LLAMA.gate if style.is_gated else None,
            positions="positions" if style.has_learned_positions else None,
        ),
        norm="layer" if style.has_layer_norm else "rms",
        norm_bias=style.has_bias,
        qkv_bias=style.has_bias,
        attention_out_bias=style.has_bias,
        mlp_bias=style.has_bias,
        activation="silu" if style.is_gated else "gelu",
        parallel_residual=style.has_parallel_residual,
        tied_embeddings=style.has_tied_embeddings
        if has_tied_embeddings is None
        else has_tied_embeddings,
        experts=experts,
    )
    num_parameters = _read_num_parameters(row)
    return (
        shape
        if has_tied_embeddings is not None or not num_parameters or not shape.tied_embeddings
        else _choose_tied_embeddings(shape, num_parameters)
    )


def _choose_tied_embeddings(shape: ModelShape, num_parameters: float) -> ModelShape:
    """Return the shape with an untied head if that is much closer to the stated number of
    parameters."""
    untied = replace(shape, tied_embeddings=False)
    tied_error, untied_error = (
        abs(each.num_parameters / num_parameters - 1) for each in (shape, untied)
    )
    return untied if untied_error < 0.5 * tied_error and tied_error > 0.004 else shape


def _choose_feed_forward_width(
    layers: int, hidden: int, vocab: int, num_parameters: float, num_experts: int, *, is_gated: bool
) -> int:
    """Return the feed-forward width (of an expert, if there are any) that gives the stated number
    of parameters. Without one, or if it leaves none for the feed-forward, the usual ratio to the
    model's width."""
    usual = (3 if is_gated else 4) * hidden
    rest = num_parameters - 2 * vocab * hidden - layers * 4 * hidden**2
    matrices = (3 if is_gated else 2) * hidden * layers * max(1, num_experts)
    width = 64 * round(rest / matrices / 64)
    is_plausible = width >= 64 and (num_experts or hidden // 2 <= width <= 8 * hidden)
    return width if num_parameters and is_plausible else usual


def _read_depth_and_width(row: Mapping[str, str]) -> tuple[int, int]:
    """Return layers and model width. Missing ones follow from the stated parameters (the active
    ones, if experts are named) with GPT-3's 128 features per layer; without parameters, one from
    the other."""
    num_parameters = _read_num_active_parameters(row) or _read_num_parameters(row)
    layers = _read_integer(row, "layers", 0)
    default_width = (
        (num_parameters / 12 / layers) ** (1 / 2)
        if layers
        else (_FEATURES_PER_LAYER * num_parameters / 12) ** (1 / 3)
    )
    if layers and not num_parameters:
        default_width = _FEATURES_PER_LAYER * layers
    width = _read_integer(row, "hidden", 128 * round(default_width / 128) or None)
    default_layers = (
        num_parameters / (12 * width**2) if num_parameters else width / _FEATURES_PER_LAYER
    )
    if (layers := _read_integer(row, "layers", max(1, round(default_layers)))) > _MAX_LAYERS:
        raise ArchitectureError(
            "too many layers",
            field="measurements.layers",
            got=layers,
            allowed=f"at most {_MAX_LAYERS}",
        )
    return layers, width


_MAX_LAYERS = 1000
_FEATURES_PER_LAYER = 128


def _read_num_parameters(row: Mapping[str, str]) -> float:
    """Return the number of parameters in the row or the model's name (`7B`, `350M`). 0 if neither
    states it."""
    name = row["model_name"].lower()
    if row.get("params_b"):
        return float(row["params_b"]) * 1e9
    if match := re.search(BILLIONS_PATTERN, name):
        return float(match[1]) * 1e9
    match = re.search(MILLIONS_PATTERN, name)
    return float(match[1]) * 1e6 if match else 0.0


def _read_num_active_parameters(row: Mapping[str, str]) -> float:
    """Return the active parameters in the name of a model with experts (`30B-A3B`), else 0."""
    match = re.search(r"(?<![a-z0-9])a(\d+(?:\.\d+)?)b\b", row["model_name"].lower())
    return float(match[1]) * 1e9 if match and row.get("num_experts") else 0.0


_DEFAULT_SIZES = {"vocab": 51200}
"""Defaults of sizes with little effect: the padded GPT-2 vocabulary."""


def _guess_heads(hidden: int) -> int:
    """Return the number of heads that divides the model width and gives the head size closest to
    128, which most models have."""
    return min(
        (heads for heads in range(1, min(hidden, 1000) + 1) if hidden % heads == 0),
        key=lambda heads: abs(log(hidden / heads / 128)),
    )


def _read_integer(row: Mapping[str, str], key: str, default: int | None = None) -> int:
    text = row.get(key) or ""
    if text:
        return round(float(text))
    default = _DEFAULT_SIZES.get(key) if default is None else default
    if default is None:
        raise ArchitectureError(
            "neither the model's name nor this column gives its size",
            field=f"measurements.{key}",
            got=f"an empty field for {row['model_name']!r}",
            allowed="a whole number",
            remedy="Fill in layers, hidden, heads, ffn_hidden and vocab, or name a known model",
        )
    return default
