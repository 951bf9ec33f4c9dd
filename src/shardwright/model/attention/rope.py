"""Rotary position embeddings (RoFormer, arXiv 2104.09864).

Legend: B sequences (or 1 if all rows share their positions), T tokens, H heads, E head_dim, R
rotated features.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from shardwright.architecture import RopeShape
from shardwright.model.pointwise.functions import FusedFunctions


def compute_inverse_frequencies(
    rope: RopeShape, device: torch.device | str | None = None
) -> Tensor:
    """Compute the radians per position of each feature pair, fp64, `[R / 2]`.

    For longrope those of short documents.
    """
    exponents = (
        torch.arange(0, rope.rotary_dim, 2, dtype=torch.float64, device=device) / rope.rotary_dim
    )
    frequencies = rope.theta**-exponents
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _scale_llama3(rope, frequencies)
    if rope.kind == "yarn":
        return _scale_yarn(rope, frequencies)
    if rope.kind == "longrope":
        return frequencies / frequencies.new_tensor(rope.short_factors)
    return frequencies


def _scale_llama3(rope: RopeShape, frequencies: Tensor) -> Tensor:
    """Scale frequencies as Llama 3.1: divide low ones, keep high ones, interpolate linearly."""
    turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
    unscaled = (
        (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    ).clamp(0.0, 1.0)
    return frequencies * (unscaled + (1 - unscaled) / rope.factor)


def _scale_yarn(rope: RopeShape, frequencies: Tensor) -> Tensor:
    """Scale frequencies as YaRN: keep high ones, divide low ones by the factor.

    Source: arXiv 2309.00071, section 3.2.
    """
    dim = rope.rotary_dim
    context_length = rope.original_max_position_embeddings

    def find_pair(num_turns: float) -> float:
        return (
            dim * math.log(context_length / (num_turns * 2 * math.pi)) / (2 * math.log(rope.theta))
        )

    low = find_pair(rope.beta_fast)
    high = find_pair(rope.beta_slow)
    if rope.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, dim - 1)
    if low == high:
        high += 0.001  # avoids a division by zero, as in transformers
    pairs = torch.arange(dim // 2, dtype=torch.float64, device=frequencies.device)
    unscaled = 1 - ((pairs - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (unscaled + (1 - unscaled) / rope.factor)


def compute_rope_tables(
    rope: RopeShape, positions_BT: Tensor, lengths_BT: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Compute cos and sin of all angles, `[B, T, R / 2]`, in fp64, then cast to `dtype`.

    `lengths_BT` is the length of each token's document, by which longrope chooses its factors.
    transformers chooses them once per batch, by its largest position, so a document's rotation
    depends on the rest of the batch. Both agree if every row is one document and all have the
    same length.
    """
    frequencies = compute_inverse_frequencies(rope, positions_BT.device)
    if rope.kind == "longrope":
        assert lengths_BT is not None
        short = frequencies.new_tensor(rope.short_factors)
        long_frequencies = frequencies * short / frequencies.new_tensor(rope.long_factors)
        is_long = (lengths_BT > rope.original_max_position_embeddings)[..., None]
        frequencies = torch.where(is_long, long_frequencies, frequencies)
    angles = positions_BT.to(torch.float64)[..., None] * frequencies
    return (angles.cos() * rope.attention_factor).to(dtype), (
        angles.sin() * rope.attention_factor
    ).to(dtype)


def rotate(
    x_BTHE: Tensor, cos_BTR: Tensor, sin_BTR: Tensor, fused: FusedFunctions | None = None
) -> Tensor:
    """Rotate each feature pair (i, i + R / 2) of the first R features; the others stay.

    Products are computed in the tables' precision and rounded once.
    """
    cos = cos_BTR.unsqueeze(-2)
    sin = sin_BTR.unsqueeze(-2)
    if torch.compiler.is_compiling():
        return _rotate_out_of_place(x_BTHE, cos, sin)
    if fused is not None:
        return fused.rotate(x_BTHE, cos_BTR, sin_BTR)
    rotated: Tensor = _Rotation.apply(x_BTHE, cos, sin)
    return rotated


def _rotate_out_of_place(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate without in-place operations; a compiler fuses this into its neighbours."""
    half = cos.shape[-1]
    first = x[..., :half]
    second = x[..., half : 2 * half]
    rest = x[..., 2 * half :]
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(
        x.dtype
    )
    return torch.cat([rotated, rest], dim=-1) if rest.shape[-1] else rotated


class _Rotation(torch.autograd.Function):
    """Eager rotation that writes each half in place and does not save its input.

    The backward pass rotates the gradient in the opposite direction.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate_halves(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate_halves(gradients[0], cos, sin, -1.0), None, None


def _rotate_halves(x: Tensor, cos: Tensor, sin: Tensor, direction: float) -> Tensor:
    half = cos.shape[-1]
    first = x[..., :half]
    second = x[..., half : 2 * half]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for start, cos_factor, sin_factor, sign in (
        (0, first, second, -direction),
        (half, second, first, direction),
    ):
        target = out[..., start : start + half]
        if x.dtype == cos.dtype:
            torch.mul(cos_factor, cos, out=target).addcmul_(sin_factor, sin, value=sign)
        else:
            target.copy_((cos_factor * cos).addcmul_(sin_factor, sin, value=sign))
    out[..., 2 * half :] = x[..., 2 * half :]
    return out
