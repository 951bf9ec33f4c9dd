"""Ulysses: all-to-alls between local tokens of all heads and all tokens of local heads.

Source: Jacobs et al. 2023, DeepSpeed Ulysses (arXiv 2309.14509).

Legend: B sequences, H query heads, K key/value heads, L tokens of this rank, T of the row, E
features, R ranks, X elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.parallel.comm_timing import time_wait


def exchange_to_heads(parts_BHLE: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Return all tokens of this rank's share of the heads, `[B, H / R, T, E]` each.

    All parts go through one exchange. Rank r takes the r-th share. With fewer heads than ranks
    it takes the head that serves its query heads, and the backward pass sums the gradients of
    the ranks that share a head.
    """
    num_ranks = group.size()
    shares = [_split_heads(part_BHLE, num_ranks) for part_BHLE in parts_BHLE]
    sizes = [share.shape[1:] for share in shares]
    received_RX = exchange_rows(torch.cat([share.flatten(1) for share in shares], dim=1), group)
    pieces = received_RX.split([size.numel() for size in sizes], dim=1)
    # Rank r sent the r-th chunk of tokens.
    return [
        piece.unflatten(1, size).movedim(0, 2).flatten(2, 3)
        for piece, size in zip(pieces, sizes, strict=True)
    ]


def exchange_to_tokens(x_BHTE: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's tokens of all heads, `[B, H, L, E]`: the inverse of
    `exchange_to_heads`.
    """
    by_token_RBHLE = x_BHTE.unflatten(2, (group.size(), -1)).movedim(2, 0)
    received_RX = exchange_rows(by_token_RBHLE.flatten(1), group)
    # Rank r sent the r-th share of the heads.
    return received_RX.unflatten(1, by_token_RBHLE.shape[1:]).movedim(0, 1).flatten(1, 2)


def _split_heads(x_BHLE: Tensor, num_ranks: int) -> Tensor:
    """Split the heads by the rank that takes them, `[R, B, heads, L, E]`."""
    num_heads = x_BHLE.shape[1]
    if num_heads % num_ranks:
        assert num_ranks % num_heads == 0, "`check_context_parallel` refuses it"
        x_BHLE = x_BHLE.repeat_interleave(num_ranks // num_heads, dim=1)
    return x_BHLE.unflatten(1, (num_ranks, -1)).movedim(1, 0)


def exchange_rows(x_RX: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send row r to rank r; row r of the result came from it. Gradients take the reverse way."""
    received_RX: Tensor = _RowExchange.apply(x_RX, group)
    return received_RX


class _RowExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RX: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(x_RX, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(gradients[0], ctx.group), None


def _all_to_all(x_RX: Tensor, group: dist.ProcessGroup) -> Tensor:
    received_RX = torch.empty_like(x_RX, memory_format=torch.contiguous_format)
    with time_wait("context"):
        dist.all_to_all_single(received_RX, x_RX.contiguous(), group=group)
    return received_RX
