"""Candidates of a diagnosis: gradients that mistakes lead to, and where they differ.

Shapes: P numbers of all compared gradients.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from shardwright.audit.evidence import Evidence

_KINDS = {
    "norms": r"norm|\bln_|layernorm",
    "experts": r"experts",
    "routers": r"router|mlp\.gate\.|block_sparse_moe\.gate",
    "embeddings": r"embed|\bwte\b|\bwpe\b",
    "the head": r"lm_head|embed_out",
    "adapters": r"lora_",
    "biases": r"bias$",
    "attention projections": r"attn|attention",
    "feed-forward projections": r"mlp|feed_forward",
}
"""Kinds of parameters by the pattern of their names; the first that matches."""


@dataclass(frozen=True)
class GradientCandidate:
    """Gradients [P] that a combination of mistakes leads to, one per copy that ranks have."""

    mistakes: tuple[str, ...]
    copies: tuple[Tensor, ...]
    subject: str = ""


def classify_parameter(name: str) -> str:
    """Return the kind of a parameter by its name.

    >>> classify_parameter("model.layers.0.input_layernorm.weight")
    'norms'
    """
    for kind, pattern in _KINDS.items():
        if re.search(pattern, name):
            return kind
    return "other parameters"


def describe_subset(names: Sequence[str], everything: Sequence[str]) -> str:
    """Describe some parameters in words: a kind, or their names."""
    kinds = {classify_parameter(name) for name in names}
    if len(kinds) == 1:
        kind = kinds.pop()
        if len(names) > 1 and set(names) == {
            n for n in everything if classify_parameter(n) == kind
        }:
            return f"all {kind}" if not kind.startswith("the ") else kind
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def find_wrong(evidence: Evidence, candidate: Sequence[Tensor]) -> list[str]:
    """List the parameters that differ in any recorded copy."""
    wrong = {
        name
        for number, recorded in enumerate(evidence.copies)
        for name in evidence.list_wrong(recorded, candidate[number % len(candidate)])
    }
    return [name for name in evidence.model.names if name in wrong]
