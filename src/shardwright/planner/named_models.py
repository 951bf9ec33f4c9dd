"""Model shapes of published rows, from their columns and model names.

A table of measurements gives sizes (layers, widths, heads, vocabulary) and a name. The name's
family determines whether the feed-forward is gated, embeddings are tied, and positions are
learned. Models that columns cannot describe (latent attention, alternating layers) are listed
here with the numbers of their public config.json. Missing sizes are those of the named model
(`named_sizes.yaml`), unless a stated size contradicts it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from shardwright.architecture import LayerShape, ModelShape, read_config
from shardwright.architecture.experts import ExpertShape
from shardwright.architecture.names import LLAMA
from shardwright.errors import ArchitectureError
from shardwright.planner.named_sizes import BILLIONS, SIZES, sizes_of_name


@dataclass(frozen=True)
class Style:
    """Block features that a model family implies."""

    gated: bool = True
    tied: bool = False
    learned_positions: bool = False
    layer_norm: bool = False
    biased: bool = False
    parallel_residual: bool = False


_GPT = Style(gated=False, tied=True, learned_positions=True, layer_norm=True, biased=True)

STYLES: dict[str, Style] = {
    r"mpt": replace(_GPT, biased=False),
    r"bloom": replace(_GPT, learned_positions=False),
    r"nemotron-?(3|4)?-?(8|15|22|340)b|nemotron-4": Style(gated=False, layer_norm=True),
    r"phi-?[12](?!\d)|stablelm-alpha|pythia|dolly|neox|gpt-j": Style(
        gated=False, layer_norm=True, biased=True, parallel_residual=True
    ),
    r"falcon(?!-?3)": Style(gated=False, tied=True, layer_norm=True, parallel_residual=True),
    r"starcoder-?2": Style(gated=False, layer_norm=True, biased=True),
    r"gpt|opt-|turing|mt-nlg|santacoder|starcoder|granite-(20|34)b": _GPT,
    r"command-r": Style(tied=True, layer_norm=True, parallel_residual=True),
    r"gemma": Style(tied=True),
}
"""Patterns of names -> style; the first match counts. Other names are treated as Llama."""

_QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}
_DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "first_k_dense_replace": 3,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
}
_GPT_OSS = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 36,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}

PUBLIC_CONFIGS: dict[str, dict[str, Any]] = {
    r"deepseek-?v3|deepseek-?r1(?!.*distill)": _DEEPSEEK_V3,
    r"deepseek-?v2-?lite|deepseek-?v2-16b": _DEEPSEEK_V3
    | {
        "num_hidden_layers": 27,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "vocab_size": 102400,
    },
    r"deepseek-?v2(\.5)?(?!.*lite)": _DEEPSEEK_V3
    | {
        "num_hidden_layers": 60,
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 160,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "topk_group": 3,
        "first_k_dense_replace": 1,
        "vocab_size": 102400,
    },
    r"kimi-?k2": _DEEPSEEK_V3
    | {
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "n_routed_experts": 384,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.827,
        "vocab_size": 163840,
        "max_position_embeddings": 131072,
    },
    r"qwen3-?30b-?a3b": _QWEN3_MOE,
    r"qwen3-?235b": _QWEN3_MOE
    | {
        "num_hidden_layers": 94,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_attention_heads": 64,
    },
    r"gpt-?oss-?120b": _GPT_OSS,
    r"gpt-?oss-?20b": _GPT_OSS | {"num_hidden_layers": 24, "num_local_experts": 32},
    r"llama-?4-?maverick": _QWEN3_MOE
    | {
        "hidden_size": 5120,
        "intermediate_size": 16384,
        "moe_intermediate_size": 8192,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "num_experts_per_tok": 1,
        "decoder_sparse_step": 2,
        "vocab_size": 202048,
    },
}
"""config.json of models that columns cannot describe. Llama 4 is expressed as qwen3_moe; its
shared experts are added below."""

SHARED_WIDTHS = {r"llama-?4": 8192}
"""Width of shared experts that a config above has no key for."""


@dataclass(frozen=True)
class _StandIn:
    """Substitute for a hybrid model (Mamba-2 and experts), made of supported layers: the same
    number of parameters, matmuls and expert bytes.

    A pair of one Mamba-2 and one sparse layer becomes one layer whose attention has a window of
    256 tokens and as many parameters as the Mamba-2 layer's projections. Experts without a gate
    become gated ones of two thirds of the width. The scan itself is not counted. Numbers:
    NVIDIA Nemotron 3 technical reports and config.json, 2025-12 to 2026-06.
    """

    pairs: int
    attention_layers: int
    hidden_size: int
    mixer_heads: int
    num_experts: int
    experts_per_token: int
    expert_width: int
    shared_width: int
    vocab_size: int = 131072


_HYBRIDS = {
    r"nemotron_?-?3_?-?nano": _StandIn(23, 6, 2688, 54, 128, 6, 1237, 2475),
    r"nemotron_?-?3_?-?super": _StandIn(40, 8, 4096, 104, 512, 22, 448, 3584),
    r"nemotron_?-?3_?-?ultra": _StandIn(48, 12, 8192, 192, 512, 22, 853, 6827),
    r"deepseek[-_ ]?v4[-_ ]?flash": _StandIn(43, 0, 4096, 96, 256, 6, 2048, 2048, 129280),
}


def has_latent_experts(name: str) -> bool:
    """Return True if experts use a quarter of the model's width as input and output (LatentMoE
    of Nemotron 3 Super and Ultra)."""
    return re.search(r"nemotron_?-?3_?-?(super|ultra)", name.lower()) is not None


def is_hybrid(name: str) -> bool:
    """Return True for models planned with a `_StandIn`, whose mixers have their own fitted
    attention efficiency."""
    return any(re.search(pattern, name.lower()) for pattern in _HYBRIDS)


def shape_of_row(row: Mapping[str, str], *, tied: bool | None = None, expert_width: int | None = None) -> ModelShape:
    """Return the shape of a row's model: by name if the name is known, else from its columns.

    Args:
        row: columns model_name, layers, hidden, heads, kv_heads, ffn_hidden, vocab, seq_len,
            num_experts, top_k, params_b.
        tied: embeddings as stated in the row's notes; None follows the name.
        expert_width: expert width as stated in the row's notes; None uses ffn_hidden.

    Raises:
        ArchitectureError: name and columns do not determine the shape.
    """
    name = re.sub(r"[\s_/]+", "-", row["model_name"].lower())
    for pattern in PUBLIC_CONFIGS:
        if re.search(pattern, name) and _agrees(row, shape := _with_shared_experts(name, _read_public(pattern))):
            return _with_depth(shape, _integer(row, "layers", 0))
    for pattern, stand_in in _HYBRIDS.items():
        if re.search(pattern, name):
            return _hybrid(stand_in)
    sizes = sizes_of_name(name) or sizes_of_name(f"{name} {float(row.get('params_b') or 0):.0f}b")
    if sizes is not None and not _contradicts(row, sizes):
        columns = dict(zip(SIZES, sizes["sizes"], strict=True))
        row = {**row, **{column: row.get(column) or str(size) for column, size in columns.items()}}
        return _from_columns(row, name, tied, expert_width, sizes)
    return _from_columns(row, name, tied, expert_width)


@cache
def _read_public(pattern: str) -> ModelShape:
    return read_config(PUBLIC_CONFIGS[pattern])


def _agrees(row: Mapping[str, str], shape: ModelShape) -> bool:
    """Return True if the row's width and the size in its model's name match the shape
    (`DeepSeek-V3-16B` does not)."""
    name = row["model_name"].lower()
    # `17b-128e` counts active parameters.
    stated_size = None if re.search(r"\d+e\b", name) else re.search(BILLIONS, name)
    is_near = stated_size is None or 0.8 < float(stated_size[1]) * 1e9 / shape.num_parameters < 1.25
    return _integer(row, "hidden", 0) in (0, shape.hidden_size) and is_near


def _with_depth(shape: ModelShape, layers: int) -> ModelShape:
    """Return the shape with as many layers as the row states, repeating the last kind:
    scaled-down proxies have fewer layers."""
    if layers in (0, shape.num_layers):
        return shape
    return replace(shape, layers=(shape.layers + shape.layers[-2:] * layers)[:layers])


def _contradicts(row: Mapping[str, str], sizes: Mapping[str, Any]) -> bool:
    """Return True if the row's width, heads or experts differ from the named model's. Depth and
    vocabulary may differ."""
    named_sizes = dict(zip(SIZES, sizes["sizes"], strict=True)) | {"num_experts": sizes.get("experts", (0,))[0]}
    return any(_integer(row, column, 0) not in (0, named_sizes[column]) for column in ("hidden", "heads", "num_experts"))


def _with_shared_experts(name: str, shape: ModelShape) -> ModelShape:
    for pattern, width in SHARED_WIDTHS.items():
        if re.search(pattern, name) and shape.experts is not None:
            return replace(shape, experts=replace(shape.experts, shared_intermediate_size=width))
    return shape


def _hybrid(parts: _StandIn) -> ModelShape:
    mixers = (LayerShape(attention_scale=1.0, window=256, sparse=True),) * parts.pairs
    attention = (LayerShape(attention_scale=1.0),) * parts.attention_layers
    return ModelShape(
        family="planning",
        vocab_size=parts.vocab_size,
        hidden_size=parts.hidden_size,
        intermediate_size=128,
        num_heads=parts.mixer_heads,
        num_kv_heads=2,
        head_dim=128,
        max_position_embeddings=1 << 20,
        layers=mixers + attention,
        experts=ExpertShape(
            parts.num_experts,
            parts.experts_per_token,
            # The true width fills matmul tiles, two thirds of it may not: round to a multiple
            # of 64.
            64 * round(parts.expert_width / 64),
            shared_intermediate_size=64 * round(parts.shared_width / 64),
        ),
    )


def _from_columns(
    row: Mapping[str, str], name: str, tied: bool | None, expert_width: int | None, named: Mapping[str, Any] | None = None
) -> ModelShape:
    """Build the shape from a row's columns. The family, or the `named` model if known, supplies
    the rest."""
    style = style_of(name)
    named = named or {}
    if tied is None and named:
        tied = named.get("tied", style.tied)
    vocab = _integer(row, "vocab")
    layers, hidden = _depth_and_width(row)
    heads = min(_integer(row, "heads", max(1, hidden // 128)), hidden)
    kv_heads = _integer(row, "kv_heads", heads)
    inner = _integer(row, "ffn_hidden", (4 if not style.gated else 3) * hidden)
    known_experts, known_top, known_width = named.get("experts", (0, 2, None))
    num_experts = _integer(row, "num_experts", known_experts)
    width = expert_width or known_width or inner
    shared = named.get("shared", 0)
    experts = ExpertShape(num_experts, _integer(row, "top_k", known_top), width, shared) if num_experts else None
    layer = LayerShape(attention_scale=1.0, sparse=experts is not None)
    dense = (replace(layer, sparse=False),) * min(layers, named.get("dense", 0))
    shape = ModelShape(
        family="planning",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_heads=heads,
        num_kv_heads=heads if heads % kv_heads else kv_heads,
        head_dim=named.get("head_dim", hidden // heads),
        max_position_embeddings=_integer(row, "seq_len", 4096),
        layers=dense + (layer,) * (layers - len(dense)),
        names=replace(LLAMA, gate=LLAMA.gate if style.gated else None, positions="positions" if style.learned_positions else None),
        norm="layer" if style.layer_norm else "rms",
        norm_bias=style.biased,
        qkv_bias=style.biased,
        attention_out_bias=style.biased,
        mlp_bias=style.biased,
        activation="silu" if style.gated else "gelu",
        parallel_residual=style.parallel_residual,
        tied_embeddings=style.tied if tied is None else tied,
        experts=experts,
    )
    num_parameters = _stated_parameters(row)
    return shape if tied is not None or not num_parameters or not shape.tied_embeddings else _nearer_in_size(shape, num_parameters)


def _nearer_in_size(shape: ModelShape, stated: float) -> ModelShape:
    """Return the shape with an untied head if that is much closer to the stated number of
    parameters."""
    untied = replace(shape, tied_embeddings=False)
    tied_error, untied_error = (abs(each.num_parameters / stated - 1) for each in (shape, untied))
    return untied if untied_error < 0.5 * tied_error and tied_error > 0.004 else shape


def _depth_and_width(row: Mapping[str, str]) -> tuple[int, int]:
    """Return layers and model width. Missing ones follow from the stated parameters with
    GPT-3's 128 features per layer."""
    num_parameters = _stated_parameters(row)
    layers = _integer(row, "layers", 0)
    default_width = (num_parameters / 12 / layers) ** (1 / 2) if layers else (128 * num_parameters / 12) ** (1 / 3)
    width = _integer(row, "hidden", 128 * round(default_width / 128) or None)
    if (layers := _integer(row, "layers", round(num_parameters / (12 * width**2)) or None)) > _MOST_LAYERS:
        raise ArchitectureError("too many layers", field="measurements.layers", got=layers, allowed=f"at most {_MOST_LAYERS}")
    return layers, width


_MOST_LAYERS = 1000


def _stated_parameters(row: Mapping[str, str]) -> float:
    """Return the number of parameters in the row or the model's name (`7B`). 0 if neither
    states it."""
    match = re.search(BILLIONS, row["model_name"].lower())
    return float(row.get("params_b") or (match[1] if match else 0)) * 1e9


def style_of(name: str) -> Style:
    """Return the block style of a model name's family.

    >>> style_of("gpt3-175b").gated, style_of("llama-3-8b").gated
    (False, True)
    """
    return next((style for pattern, style in STYLES.items() if re.search(pattern, name.lower())), Style())


_USUAL = {"vocab": 51200}
"""Defaults of sizes with little effect: the padded GPT-2 vocabulary."""


def _integer(row: Mapping[str, str], key: str, default: int | None = None) -> int:
    text = row.get(key) or ""
    if text:
        return round(float(text))
    default = _USUAL.get(key) if default is None else default
    if default is None:
        raise ArchitectureError(
            "neither the model's name nor this column gives its size",
            field=f"measurements.{key}",
            got=f"an empty field for {row['model_name']!r}",
            allowed="a whole number",
            remedy="Fill in layers, hidden, heads, ffn_hidden and vocab, or name a known model",
        )
    return default
