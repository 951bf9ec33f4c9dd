"""Rotary position embeddings (RoFormer, arXiv 2104.09864): tables once per forward pass, shared by the layers.

Legend: B sequences (or 1 where all rows share their positions), T tokens, H heads, E head_dim, R rotated features.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shardwright.architecture import RopeShape


def inverse_frequencies(rope: RopeShape, device: torch.device | str | None = None) -> Tensor:
    """Radians per position of each pair of features, fp64, `[R / 2]`."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float64, device=device) / rope.rotary_dim
    plain = rope.theta**-exponents
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    raise AssertionError(rope.kind)


def _llama3(rope: RopeShape, plain: Tensor) -> Tensor:
    """Llama 3.1's: long wavelengths divided by the factor, short ones kept, a straight line in between."""
    context = rope.original_max_position_embeddings
    wavelength = 2 * math.pi / plain
    kept = (context / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return (1 - kept) * plain / rope.factor + kept * plain


def rope_tables(rope: RopeShape, positions_BT: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of every position's angles, `[B, T, R / 2]`, computed in fp64 and rounded once to `dtype`."""
    angles = positions_BT.to(torch.float64)[..., None] * inverse_frequencies(rope, positions_BT.device)
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
