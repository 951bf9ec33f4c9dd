"""RMS and layer norms over the last dim, accumulated in fp32 or fp64.

Legend: D features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.model.pointwise.functions import FusedFunctions


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * (offset + weight); `offset` is 1 for Gemma, else 0."""

    fused: FusedFunctions | None = None

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
        weight_D = self._read_weight(x.dtype)
        if mean_square is not None:
            wide = x.to(_choose_accumulation_dtype(x.dtype))
            scale = torch.rsqrt(mean_square(wide.square().sum(-1, keepdim=True)) + self.eps)
            return (wide * scale * weight_D).to(x.dtype)
        if self.fused is not None and not torch.compiler.is_compiling():
            return self.fused.normalise_rms(x, weight_D, self.eps)
        if x.is_cpu and not torch.compiler.is_compiling():
            normed: Tensor = _RMSNormOnCPU.apply(x, weight_D, self.eps)
            return normed
        return F.rms_norm(x.to(weight_D.dtype), weight_D.shape, weight_D, self.eps).to(x.dtype)

    def add_and_normalise(
        self, x: Tensor, update: Tensor, update_scale: float
    ) -> tuple[Tensor, Tensor]:
        """Compute x + update_scale x update, and its norm, in one pass."""
        assert self.fused is not None
        weight_D = self._read_weight(x.dtype)
        return self.fused.add_normalise_rms(x, update, weight_D, self.eps, update_scale)

    def _read_weight(self, dtype: torch.dtype) -> Tensor:
        weight_D = self.weight.to(dtype)
        if self.offset == 0.0:
            return weight_D
        # In 16 bits 1 + w would lose most of w's precision.
        return weight_D.to(_choose_accumulation_dtype(dtype)) + self.offset


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

    fused: FusedFunctions | None = None

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(
            x, self.weight.shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps
        )

    def add_and_normalise(
        self, x: Tensor, update: Tensor, update_scale: float
    ) -> tuple[Tensor, Tensor]:
        """Compute x + update_scale x update, and its norm, in one pass."""
        assert self.fused is not None
        weight_D = self.weight.to(x.dtype)
        bias_D = self.bias.to(x.dtype)
        return self.fused.add_normalise_layer(x, update, weight_D, bias_D, self.eps, update_scale)
