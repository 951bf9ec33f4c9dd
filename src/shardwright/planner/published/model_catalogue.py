"""Models by name: block features of families, public configurations, sizes.

Models that a table's columns cannot describe (latent attention, alternating layers) are in
`public_configs.yaml`, the sizes of others in `named_sizes.yaml`.
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
    """Features of a block that follow from the model's family."""

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
def _load_table(file_name: str) -> dict[str, dict[str, Any]]:
    text = (files("shardwright.planner.published") / file_name).read_text(encoding="utf-8")
    return dict(yaml.safe_load(text))


def load_public_configs() -> dict[str, dict[str, Any]]:
    """Load `public_configs.yaml`: patterns of names -> config.json of the matching models."""
    return _load_table("public_configs.yaml")


def load_named_sizes() -> dict[str, dict[str, Any]]:
    """Load `named_sizes.yaml`: patterns of names -> sizes of the matching models."""
    return _load_table("named_sizes.yaml")


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
