"""Eager attention over part of the keys, for what no fused kernel computes.

Legend: B sequences, H query heads, K key/value heads, L queries, S keys, E head_dim, V value width.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from shardwright.architecture.attention_kernel import MAX_SCORE_BYTES
from shardwright.model.dropout import Dropout
from shardwright.parallel.context.attention_kernels import (
    AttentionGradients,
    PartialAttention,
    TileInputs,
    TileVisibility,
)


class ExplicitKernel:
    """Eager attention on any device and in any precision.

    It supports soft caps, dropout by token and any mask. Forward and backward pass hold the scores
    of one block of queries at a time, in up to six tensors.
    """

    name = "eager attention"

    def forward(self, tile: TileInputs) -> PartialAttention:
        blocks = [self._attend(block) for _, block in _divide_queries(tile)]
        if len(blocks) == 1:
            return blocks[0]
        return PartialAttention(*(torch.cat(parts, dim=2) for parts in zip(*blocks, strict=True)))

    def backward(
        self, d_out_BHLV: Tensor, tile: TileInputs, row_output: PartialAttention
    ) -> AttentionGradients:
        blocks = list(_divide_queries(tile))
        if len(blocks) == 1:
            return self._differentiate(d_out_BHLV, tile, row_output)
        wide = row_output.lse_BHL.dtype
        d_k_BKSE, d_v_BKSV = (
            torch.zeros_like(part, dtype=wide, memory_format=torch.contiguous_format)
            for part in (tile.k_BKSE, tile.v_BKSV)
        )
        d_q_blocks = []
        for rows, block in blocks:
            block_output = PartialAttention(*(part[:, :, rows] for part in row_output))
            d_q, d_k, d_v = self._differentiate(d_out_BHLV[:, :, rows], block, block_output)
            d_q_blocks.append(d_q)
            d_k_BKSE[:, :, : d_k.shape[2]] += d_k
            d_v_BKSV[:, :, : d_v.shape[2]] += d_v
        return AttentionGradients(torch.cat(d_q_blocks, dim=2), d_k_BKSE, d_v_BKSV)

    @staticmethod
    def _attend(tile: TileInputs) -> PartialAttention:
        scores_BHLS, _ = _compute_scores(tile)
        lse_BHL = torch.logsumexp(scores_BHLS, dim=-1)
        # For a query that sees no key, -inf - -inf would be nan.
        weights_BHLS = torch.exp(
            scores_BHLS - lse_BHL.clamp(min=torch.finfo(lse_BHL.dtype).min)[..., None]
        )
        weights_BHLS = _apply_dropout(weights_BHLS, tile).to(tile.v_BKSV.dtype)
        return PartialAttention(_multiply_by_group(weights_BHLS, tile.v_BKSV), lse_BHL)

    @staticmethod
    def _differentiate(
        d_out_BHLV: Tensor, tile: TileInputs, row_output: PartialAttention
    ) -> AttentionGradients:
        scores_BHLS, slope_BHLS = _compute_scores(tile)
        wide = scores_BHLS.dtype
        weights_BHLS = torch.exp(scores_BHLS - row_output.lse_BHL[..., None])
        dropped_BHLS = _apply_dropout(weights_BHLS, tile).to(tile.v_BKSV.dtype)
        d_v_BKSV = _sum_by_group(dropped_BHLS, d_out_BHLV, tile.v_BKSV.shape[1])
        d_weights_BHLS = _apply_dropout(
            _multiply_by_group(d_out_BHLV, tile.v_BKSV.transpose(-1, -2)).to(wide), tile
        )
        delta_BHL = (d_out_BHLV.to(wide) * row_output.out_BHLV.to(wide)).sum(-1)
        d_scores_BHLS = weights_BHLS * (d_weights_BHLS - delta_BHL[..., None])
        if slope_BHLS is not None:
            d_scores_BHLS = d_scores_BHLS * slope_BHLS
        d_scores_BHLS = (d_scores_BHLS * tile.scores.scale).to(tile.q_BHLE.dtype)
        return AttentionGradients(
            _multiply_by_group(d_scores_BHLS, tile.k_BKSE),
            _sum_by_group(d_scores_BHLS, tile.q_BHLE, tile.k_BKSE.shape[1]),
            d_v_BKSV,
        )


def _divide_queries(tile: TileInputs) -> Iterator[tuple[slice, TileInputs]]:
    """Yield blocks of queries with the keys that they see, and their places in the tile."""
    num_rows, num_heads, num_queries, _ = tile.q_BHLE.shape
    num_keys = tile.k_BKSE.shape[2]
    wide = torch.promote_types(tile.q_BHLE.dtype, torch.float32)
    block_queries = max(1, MAX_SCORE_BYTES // (num_rows * num_heads * num_keys * wide.itemsize))
    if block_queries >= num_queries:
        yield slice(0, num_queries), tile
        return
    visibility = tile.visibility
    for start in range(0, num_queries, block_queries):
        rows = slice(start, min(start + block_queries, num_queries))
        key_end = rows.stop if visibility.is_causal else num_keys
        visible_BLS = visibility.visible_BLS
        if visible_BLS is not None:
            visible_BLS = visible_BLS[:, rows]
        elif visibility.is_causal:
            queries_L = torch.arange(rows.start, rows.stop, device=tile.q_BHLE.device)
            keys_S = torch.arange(key_end, device=tile.q_BHLE.device)
            visible_BLS = (queries_L[:, None] >= keys_S)[None]
        first = visibility.query_slice.start
        yield (
            rows,
            TileInputs(
                tile.q_BHLE[:, :, rows],
                tile.k_BKSE[:, :, :key_end],
                tile.v_BKSV[:, :, :key_end],
                TileVisibility(
                    False,
                    visible_BLS,
                    slice(first + rows.start, first + rows.stop),
                    visibility.key_indices_S[:key_end],
                ),
                tile.scores,
            ),
        )


def _compute_scores(tile: TileInputs) -> tuple[Tensor, Tensor | None]:
    """Compute the scores in fp32 or wider, -inf for hidden keys, and the slope of the soft cap.

    The slope is None without a soft cap.
    """
    raw_BHLS = _multiply_by_group(tile.q_BHLE * tile.scores.scale, tile.k_BKSE.transpose(-1, -2))
    raw_BHLS = raw_BHLS.to(torch.promote_types(raw_BHLS.dtype, torch.float32))
    slope_BHLS = None
    if tile.scores.soft_cap is not None:
        tanh_BHLS = torch.tanh(raw_BHLS / tile.scores.soft_cap)
        raw_BHLS = tanh_BHLS * tile.scores.soft_cap
        slope_BHLS = 1 - tanh_BHLS.square()
    if tile.visibility.visible_BLS is not None:
        raw_BHLS = raw_BHLS.masked_fill(~tile.visibility.visible_BLS[:, None], float("-inf"))
    elif tile.visibility.is_causal:
        later = torch.ones(raw_BHLS.shape[-2:], dtype=torch.bool, device=raw_BHLS.device).triu(1)
        raw_BHLS = raw_BHLS.masked_fill(later, float("-inf"))
    return raw_BHLS, slope_BHLS


def _apply_dropout(weights_BHLS: Tensor, tile: TileInputs) -> Tensor:
    scores = tile.scores
    if scores.dropout is None:
        return weights_BHLS
    rows = Dropout(scores.dropout.keys_BT[:, tile.visibility.query_slice])
    return rows.drop_attention(
        weights_BHLS,
        scores.dropout_rate,
        first_head=scores.first_head,
        key_indices_S=tile.visibility.key_indices_S,
    )


def _multiply_by_group(x_BHLS: Tensor, y_BKSE: Tensor) -> Tensor:
    """Compute x @ y where each head of y serves a group of heads of x, without expanding y.

    The rows of a group form one matrix.
    """
    num_groups = y_BKSE.shape[1]
    return (
        (x_BHLS.unflatten(1, (num_groups, -1)).flatten(2, 3) @ y_BKSE)
        .unflatten(2, (-1, x_BHLS.shape[2]))
        .flatten(1, 2)
    )


def _sum_by_group(x_BHLS: Tensor, y_BHLE: Tensor, num_groups: int) -> Tensor:
    """Compute x^T @ y summed over the heads of each group, `[B, K, S, E]`."""
    x, y = (part.unflatten(1, (num_groups, -1)).flatten(2, 3) for part in (x_BHLS, y_BHLE))
    return x.transpose(-1, -2) @ y
