"""Parameters per part and model FLOPs per token. Torch-free.

The convention: 6 FLOPs per token and element of a matrix (2 forward, 4 backward), and 12 x query width x keys for the two
products of attention, `keys` being those that a causal token sees on average: (T + 1) / 2, fewer under a window. PaLM (arXiv
2204.02311, appendix B) counts T keys, the half that the causal mask discards included; we count only work that the function
needs, as the FlashAttention papers do. Recomputation, norms, rotations, activations and look-ups are not counted.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardwright.architecture.parameters import ParameterSpec, Role

EXPERT_ROLES: tuple[Role, ...] = ("expert_gate_up", "expert_down")
"""Roles of parameters that hold all experts of a layer, of which a token meets a few."""

_PARTS = {
    "embedding": ("embedding", "positions"),
    "attention": (
        "query", "key", "value", "qkv", "attention_out", "query_norm", "key_norm", "sinks",
        "query_latent", "query_latent_norm", "key_value_latent", "key_value_latent_norm", "key_value",
    ),
    "feed_forward": ("gate", "up", "gate_up", "down"),
    "experts": EXPERT_ROLES,
    "router": ("router", "balance_bias"),
    "norm": ("norm",),
    "head": ("head",),
    "other": ("projection", "other"),
}  # fmt: skip
_LOOKED_UP = ("embedding", "positions")


def parameters_by_part(specs: Iterable[ParameterSpec]) -> dict[str, int]:
    """Elements of the parameters per part: embedding, attention, feed_forward, experts, router, norm, head."""
    counts = dict.fromkeys(_PARTS, 0)
    part_of = {role: part for part, roles in _PARTS.items() for role in roles}
    for spec in specs:
        counts[part_of[spec.role]] += spec.num_elements
    return counts


def matmul_parameters(specs: Iterable[ParameterSpec], *, tied: bool, active_share: float = 1.0) -> float:
    """Elements of the matrices that each token is multiplied with; a tied embedding counts as the head that it serves as.

    `active_share` is the share of a layer's experts that a token is sent to: the others' matrices cost it nothing.
    """
    total = 0.0
    for spec in specs:
        looked_up = spec.role in _LOOKED_UP and not (tied and spec.role == "embedding")
        if len(spec.shape) >= 2 and not looked_up and not spec.is_bias:
            total += spec.num_elements * (active_share if spec.role in EXPERT_ROLES else 1.0)
    return total


def mean_visible_keys(sequence_length: int, window: int | None) -> float:
    """Keys that a token of a causal sequence sees on average, itself included.

    >>> mean_visible_keys(4, None), mean_visible_keys(4, 2)
    (2.5, 1.75)
    """
    if window is None or window >= sequence_length:
        return (sequence_length + 1) / 2
    return (window * (window + 1) / 2 + (sequence_length - window) * window) / sequence_length


def attention_flops_per_token(query_width: int, value_width: int, sequence_length: int, window: int | None) -> float:
    """Model FLOPs, forward and backward, of one layer's two attention products for one token; widths are of all heads."""
    return 6.0 * (query_width + value_width) * mean_visible_keys(sequence_length, window)
