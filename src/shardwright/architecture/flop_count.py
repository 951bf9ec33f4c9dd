"""Parameters per part and model FLOPs per token. Torch-free.

Convention: 6 FLOPs per token and matrix element (2 forward, 4 backward; 2 backward for a frozen
matrix), and 12 x query width x keys for the two matrix products of attention. `keys` is the mean
number of keys that a causal token attends to: (T + 1) / 2, fewer with a sliding window. PaLM
(arXiv 2204.02311, appendix B) counts T keys, including the half that the causal mask discards; we
count only necessary work, as the FlashAttention papers do. Recomputation, norms, rotary
embeddings, activations and embedding look-ups are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from shardwright.architecture.parameter_spec import ParameterRole, ParameterSpec

EXPERT_ROLES: tuple[ParameterRole, ...] = ("expert_gate_up", "expert_down")
"""Roles of parameters that stack all experts of a layer; a token uses only some of them."""

_LOOKUP_ROLES = ("embedding", "positions")


def count_matmul_parameters(
    specs: Iterable[ParameterSpec], *, is_tied: bool, active_share: float = 1.0
) -> float:
    """Count the elements of all matrices that a token is multiplied with.

    A tied embedding counts, as the head. `active_share` is the fraction of a layer's experts
    that a token uses; only this fraction of the experts' elements counts.
    """
    total = 0.0
    for spec in specs:
        is_lookup = spec.role in _LOOKUP_ROLES and not (is_tied and spec.role == "embedding")
        if len(spec.shape) >= 2 and not is_lookup and not spec.is_bias:
            total += spec.num_elements * (active_share if spec.role in EXPERT_ROLES else 1.0)
    return total


def find_first_trained_block(specs: Iterable[ParameterSpec], trained: Collection[str]) -> float:
    """Find the first block through which a gradient passes; infinity if there is none."""
    return min(
        (
            spec.layer if spec.layer is not None else 0
            for spec in specs
            if spec.name in trained and not (spec.layer is None and spec.role in ("norm", "head"))
        ),
        default=math.inf,
    )


def count_matmul_flops_per_token(
    specs: Iterable[ParameterSpec],
    trained: Collection[str],
    first_block: float,
    *,
    is_tied: bool,
    active_share: float = 1.0,
) -> float:
    """Count the model FLOPs of all matrices for one token, forward and backward.

    Args:
        trained: Names of the parameters that get a gradient.
        first_block: As `find_first_trained_block`. Blocks below it have no backward pass.
    """
    total = 0.0
    for spec in specs:
        if spec.name in trained:
            factor = 6.0
        else:
            factor = 2.0 if spec.layer is not None and spec.layer < first_block else 4.0
        total += factor * count_matmul_parameters(
            [spec], is_tied=is_tied, active_share=active_share
        )
    return total


def compute_mean_visible_keys(sequence_length: int, window: int | None) -> float:
    """Compute the mean number of keys that a causal token attends to, itself included.

    >>> compute_mean_visible_keys(4, None), compute_mean_visible_keys(4, 2)
    (2.5, 1.75)
    """
    if window is None or window >= sequence_length:
        return (sequence_length + 1) / 2
    return (window * (window + 1) / 2 + (sequence_length - window) * window) / sequence_length


def count_attention_flops_per_token(
    query_width: int,
    value_width: int,
    sequence_length: int,
    window: int | None,
    *,
    has_backward: bool = True,
) -> float:
    """Count the model FLOPs of one layer's two attention products for one token.

    `query_width` and `value_width` are summed over all heads.
    """
    factor = 6.0 if has_backward else 2.0
    return factor * (query_width + value_width) * compute_mean_visible_keys(sequence_length, window)


@dataclass(frozen=True)
class ModelFlops:
    """Forward and backward FLOPs of a whole model, for rows of any length."""

    matmul_flops_per_token: float
    query_width: int
    value_width: int
    layers: tuple[tuple[int | None, bool], ...]
    """Window of each layer's attention, and True if the layer has a backward pass."""

    def count_per_token(self, sequence_length: int) -> float:
        """Count the FLOPs per token of a causal sequence."""
        attention_flops = {
            (window, has_backward): count_attention_flops_per_token(
                self.query_width,
                self.value_width,
                sequence_length,
                window,
                has_backward=has_backward,
            )
            for window, has_backward in set(self.layers)
        }
        return self.matmul_flops_per_token + sum(attention_flops[layer] for layer in self.layers)
