"""Models by name: block features of families, public configurations, sizes.

Models that a table's columns cannot describe (latent attention, alternating layers) are listed
with the numbers of their public config.json, the sizes of others in `named_sizes.yaml`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

import yaml


@dataclass(frozen=True)
class FamilyStyle:
    """Block features that a model family implies."""

    is_gated: bool = True
    has_tied_embeddings: bool = False
    has_learned_positions: bool = False
    has_layer_norm: bool = False
    has_bias: bool = False
    has_parallel_residual: bool = False


_GPT_STYLE = FamilyStyle(
    is_gated=False,
    has_tied_embeddings=True,
    has_learned_positions=True,
    has_layer_norm=True,
    has_bias=True,
)

FAMILY_STYLES: dict[str, FamilyStyle] = {
    r"mpt": replace(_GPT_STYLE, has_bias=False),
    r"bloom": replace(_GPT_STYLE, has_learned_positions=False),
    r"nemotron-?(3|4)?-?(8|15|22|340)b|nemotron-4": FamilyStyle(
        is_gated=False, has_layer_norm=True
    ),
    r"phi-?[12](?!\d)|stablelm-alpha|pythia|dolly|neox|gpt-j": FamilyStyle(
        is_gated=False, has_layer_norm=True, has_bias=True, has_parallel_residual=True
    ),
    r"falcon(?!-?3)": FamilyStyle(
        is_gated=False, has_tied_embeddings=True, has_layer_norm=True, has_parallel_residual=True
    ),
    r"starcoder-?2": FamilyStyle(is_gated=False, has_layer_norm=True, has_bias=True),
    r"gpt|opt-|turing|mt-nlg|santacoder|starcoder|granite-(20|34)b": _GPT_STYLE,
    r"command-r": FamilyStyle(
        has_tied_embeddings=True, has_layer_norm=True, has_parallel_residual=True
    ),
    r"gemma": FamilyStyle(has_tied_embeddings=True),
}
"""Patterns of names -> style; the first match counts. Other names are treated as Llama."""


def find_style(name: str) -> FamilyStyle:
    """Return the block style of a model name's family.

    >>> find_style("gpt3-175b").is_gated, find_style("llama-3-8b").is_gated
    (False, True)
    """
    return next(
        (style for pattern, style in FAMILY_STYLES.items() if re.search(pattern, name.lower())),
        FamilyStyle(),
    )


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
    r"qwen3-?(moe-)?30b": _QWEN3_MOE,
    r"qwen3-?(moe-)?235b": _QWEN3_MOE
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

SHARED_EXPERT_WIDTHS = {r"llama-?4": 8192}
"""Width of shared experts that a config above has no key for."""

SIZE_COLUMNS = ("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab")
"""Columns that `named_sizes.yaml` lists for every model, in its order."""

BILLIONS_PATTERN = r"(?<![\dx.a-z])(\d+(?:\.\d+)?) ?b(?![a-z0-9]|[ -]*activ)"
"""Number of billions in a model's name, but not the experts of a mixture (8x7b) or active
parameters (a3b)."""
MILLIONS_PATTERN = r"(?<![\dx.a-z])(\d+(?:\.\d+)?) ?m(?![a-z0-9])"
_SIZE_PATTERN = r"(?<![\dx.a-z])\d+(?:\.\d+)? ?[bm](?![a-z0-9]|[ -]*activ)"


@cache
def load_named_sizes() -> dict[str, dict[str, Any]]:
    """Load `named_sizes.yaml`: patterns of names -> sizes of the matching models."""
    text = (files("shardwright.planner.published") / "named_sizes.yaml").read_text(encoding="utf-8")
    return dict(yaml.safe_load(text))


@cache
def _compile_patterns() -> tuple[tuple[re.Pattern[str], dict[str, Any]], ...]:
    # A point between digits is no separator: Llama 2 7B is not Llama 2.7B.
    separator = r"(?:[-_ /()]|\.(?!\d)|(?<!\d)\.)*"
    return tuple(
        (
            re.compile(
                f"(?<![a-z0-9])(?:{re.sub(' [?]?', lambda _: separator, words)})(?![a-z0-9])"
            ),
            sizes,
        )
        for words, sizes in load_named_sizes().items()
    )


@cache
def find_sizes(name: str) -> dict[str, Any] | None:
    """Return the sizes of the model that a lower-case name denotes, None if unknown.

    An additional size in the name denotes another model: GPT-3 has 175 billion parameters,
    GPT-3 6.7B does not.

    >>> (find_sizes("meta-llama-3.1-8b-instruct") or {})["sizes"], find_sizes("gpt-3-6.7b")
    ([32, 4096, 32, 8, 14336, 128256], None)
    """
    for pattern, sizes in _compile_patterns():
        match = pattern.search(name)
        if match and not re.search(_SIZE_PATTERN, f"{name[: match.start()]} {name[match.end() :]}"):
            return sizes
    return None
