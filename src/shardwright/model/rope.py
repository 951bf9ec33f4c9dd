"""Rotary position embeddings (RoFormer, arXiv 2104.09864): tables once per forward pass, shared by the layers.

Legend: B sequences (or 1 where all rows share their positions), T tokens, H heads, E head_dim, R rotated features.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shardwright.architecture import RopeShape


def inverse_frequencies(rope: RopeShape, device: torch.device | str | None = None) -> Tensor:
    """Radians per position of each pair of features, fp64, `[R / 2]`; longrope's are those of short documents."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float64, device=device) / rope.rotary_dim
    plain = rope.theta**-exponents
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, plain)
    if rope.kind == "longrope":
        return plain / plain.new_tensor(rope.short_factors)
    return plain


def _llama3(rope: RopeShape, plain: Tensor) -> Tensor:
    """Llama 3.1's: long wavelengths divided by the factor, short ones kept, a straight line in between."""
    turns = rope.original_max_position_embeddings * plain / (2 * math.pi)
    kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
    return plain * (kept + (1 - kept) / rope.factor)


def _yarn(rope: RopeShape, plain: Tensor) -> Tensor:
    """YaRN (arXiv 2309.00071, section 3.2): pairs that turn often keep their pace, slow ones are divided by the factor."""
    dim, context = rope.rotary_dim, rope.original_max_position_embeddings

    def pair_that_turns(times: float) -> float:
        return dim * math.log(context / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # transformers' guard against a division by zero
    pairs = torch.arange(dim // 2, dtype=torch.float64, device=plain.device)
    kept = 1 - ((pairs - low) / (high - low)).clamp(0.0, 1.0)
    return plain * (kept + (1 - kept) / rope.factor)


def rope_tables(rope: RopeShape, positions_BT: Tensor, lengths_BT: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of every position's angles, `[B, T, R / 2]`, computed in fp64 and rounded once to `dtype`.

    `lengths_BT` is the length of each token's document, by which longrope chooses its factors. transformers chooses once for
    a whole batch, by its largest position; then the same document would turn differently in other company. Where a batch
    holds one document per row, all of one length, the two agree.
    """
    frequencies = inverse_frequencies(rope, positions_BT.device)
    if rope.kind == "longrope":
        assert lengths_BT is not None
        short = frequencies.new_tensor(rope.short_factors)
        long_frequencies = frequencies * short / frequencies.new_tensor(rope.long_factors)
        is_long = (lengths_BT > rope.original_max_position_embeddings)[..., None]
        frequencies = torch.where(is_long, long_frequencies, frequencies)
    angles = positions_BT.to(torch.float64)[..., None] * frequencies
    return (angles.cos() * rope.attention_factor).to(dtype), (angles.sin() * rope.attention_factor).to(dtype)


def rotate(x_BTHE: Tensor, cos_BTR: Tensor, sin_BTR: Tensor) -> Tensor:
    """Turn each pair (i, i + R / 2) of the first R features; the others pass."""
    cos, sin = cos_BTR.unsqueeze(-2), sin_BTR.unsqueeze(-2)
    half = cos_BTR.shape[-1]
    first, second = x_BTHE[..., :half], x_BTHE[..., half : 2 * half]
    turned = [first * cos - second * sin, second * cos + first * sin]
    if 2 * half < x_BTHE.shape[-1]:
        turned.append(x_BTHE[..., 2 * half :].to(turned[0].dtype))
    return torch.cat(turned, dim=-1).to(x_BTHE.dtype)
