"""RMS and layer norms over the last dim, accumulated in fp32 or fp64.

Legend: D features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * (offset + weight); `offset` is 1 for Gemma, else 0."""

    def __init__(self, width: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.eps = eps
        self.offset = offset
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor, mean_square: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Normalise `x`.

        If features are sharded over ranks, `mean_square` maps this rank's sum of squares to the
        mean square over all features.
        """
        weight_D = self.weight.to(x.dtype)
        if self.offset != 0.0:
            # In 16 bits 1 + w would lose most of w's precision.
            weight_D = weight_D.to(_choose_accumulation_dtype(x.dtype)) + self.offset
        if mean_square is not None:
            wide = x.to(_choose_accumulation_dtype(x.dtype))
            scale = torch.rsqrt(mean_square(wide.square().sum(-1, keepdim=True)) + self.eps)
            return (wide * scale * weight_D).to(x.dtype)
        if x.is_cpu and not torch.compiler.is_compiling():
            normed: Tensor = _RMSNormOnCPU.apply(x, weight_D, self.eps)
            return normed
        return F.rms_norm(x.to(weight_D.dtype), weight_D.shape, weight_D, self.eps).to(x.dtype)


class _RMSNormOnCPU(torch.autograd.Function):
    """Eager RMS norm for CPUs, where PyTorch has no fused one.

    For the backward pass it saves its input and one number per token.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        wide = _choose_accumulation_dtype(x.dtype)
        square = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide).square_()
        scale = square.div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight_D, scale)
        return (x * scale).mul_(weight_D).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight_D, scale = ctx.saved_tensors
        gradient = gradients[0].to(scale.dtype)
        unit = x * scale
        weight_gradient_D = (gradient * unit).flatten(0, -2).sum(0)
        unit_gradient = gradient * weight_D
        # The norm removes the gradient's component along x.
        component = torch.linalg.vecdot(unit_gradient, unit).unsqueeze(-1).div_(-x.shape[-1])
        x_gradient = unit_gradient.addcmul_(unit, component).mul_(scale)
        return x_gradient.to(x.dtype), weight_gradient_D.to(weight_D.dtype), None


def _choose_accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Choose the precision of sums over features."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) * weight + bias."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(
            x, self.weight.shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps
        )
