"""FlexAttention of a rehearsal: its tensors, without values and without compiled kernels.

Legend: B sequences, T tokens, H query heads, E head_dim, V value width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput

from shardwright.model import fused_attention


@contextmanager
def replace_flex_attention() -> Iterator[None]:
    """Replace FlexAttention, which would be compiled, by a function that allocates its tensors."""
    fused_attention.flex_replacement = _attend
    try:
        yield
    finally:
        fused_attention.flex_replacement = None


def _attend(q_BHTE: Tensor, k_BKTE: Tensor, v_BKTV: Tensor, **_options: Any) -> Any:
    out_BHTV, lse_BHT = _FakeFlexAttention.apply(q_BHTE, k_BKTE, v_BKTV)
    return out_BHTV, AuxOutput(lse=lse_BHT)


class _FakeFlexAttention(torch.autograd.Function):
    """Save and allocate what the CUDA kernel does."""

    @staticmethod
    def forward(ctx: Any, q_BHTE: Tensor, k_BKTE: Tensor, v_BKTV: Tensor) -> tuple[Tensor, Tensor]:
        out_BHTV = q_BHTE.new_empty((*q_BHTE.shape[:3], v_BKTV.shape[3]))
        lse_BHT = q_BHTE.new_empty(q_BHTE.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(q_BHTE, k_BKTE, v_BKTV, out_BHTV, lse_BHT)
        return out_BHTV, lse_BHT

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        q_BHTE, k_BKTE, v_BKTV, _, lse_BHT = ctx.saved_tensors
        _delta_BHT = torch.empty_like(lse_BHT)
        return tuple(torch.empty_like(part) for part in (q_BHTE, k_BKTE, v_BKTV))
