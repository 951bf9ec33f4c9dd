"""Root-mean-square and layer norms over the last dimension, accumulated in at least fp32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * (offset + weight); `offset` 1 is Gemma's, whose weights begin at 0."""

    def __init__(self, width: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype)
        if self.offset == 0.0 or x.dtype in (torch.float32, torch.float64):
            return F.rms_norm(x, weight.shape, weight if self.offset == 0.0 else weight + self.offset, self.eps)
        # 1 + w in 16 bits would lose most of what w holds.
        return F.rms_norm(x.float(), weight.shape, weight.float() + self.offset, self.eps).to(x.dtype)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) * weight + bias."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)
