"""Rotary position embeddings (RoFormer, arXiv 2104.09864): tables once per forward pass, shared by the layers.

Legend: B sequences (or 1 where all rows share their positions), T tokens, H heads, E head_dim, R rotated features.
"""

from __future__ import annotations

import math
from typing import Any

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
    """Turn each pair of features (i, i + R / 2) of the first R by its angle; the others pass.

    The products are taken in the tables' precision and rounded once.
    """
    cos, sin = cos_BTR.unsqueeze(-2), sin_BTR.unsqueeze(-2)
    if torch.compiler.is_compiling():
        return _turn_out_of_place(x_BTHE, cos, sin)
    turned: Tensor = _Rotation.apply(x_BTHE, cos, sin)
    return turned


def _turn_out_of_place(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The plain definition, which a compiler fuses into its neighbours."""
    half = cos.shape[-1]
    first, second, passed = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
    return torch.cat([turned, passed], dim=-1) if passed.shape[-1] else turned


class _Rotation(torch.autograd.Function):
    """Eager rotation that writes each half in place and keeps nothing of its input: its gradient is turned back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(gradients[0], cos, sin, -1.0), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, direction: float) -> Tensor:
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for place, along, across, sign in ((0, first, second, -direction), (half, second, first, direction)):
        target = out[..., place : place + half]
        if x.dtype == cos.dtype:
            torch.mul(along, cos, out=target).addcmul_(across, sin, value=sign)
        else:
            target.copy_((along * cos).addcmul_(across, sin, value=sign))
    out[..., 2 * half :] = x[..., 2 * half :]
    return out
