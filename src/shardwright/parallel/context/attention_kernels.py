"""Attention kernels over part of the keys, forward and backward.

Each returns the log-sum-exp by which such parts are merged. The backward pass of a part takes
the output and the log-sum-exp of the whole row, not its own: with them the softmax weights of
every part are exp(score - lse) of the whole row, and the gradients of the parts add up (Liu et
al. 2023, Ring Attention, arXiv 2310.01889; Dao 2023, FlashAttention-2, section 3.1).

Legend: B sequences, H query heads, K key/value heads, G = H / K, L queries, S keys, E head_dim,
V value width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.model.dropout import Dropout

_aten = torch.ops.aten


@dataclass(frozen=True)
class ScoreSettings:
    """Settings that turn query-key products into weights; the same for all parts of a layer.

    `first_head` is the model-wide index of the first head on this rank; dropout masks depend on
    it.
    """

    scale: float
    soft_cap: float | None = None
    dropout: Dropout | None = None
    dropout_rate: float = 0.0
    first_head: int = 0


class TileVisibility(NamedTuple):
    """Visibility of a tile's keys to its queries.

    If `is_causal`, query i sees keys 0 to i, and there are as many keys as queries. Otherwise
    `visible_BLS` (B may be 1) states it per pair; None means every key. Dropout masks depend on
    `query_slice`, the rows of the dropout keys that belong to these queries, and on the positions
    of the keys in the row.
    """

    is_causal: bool
    visible_BLS: Tensor | None
    query_slice: slice
    key_indices_S: Tensor


class TileInputs(NamedTuple):
    """Queries, keys and values of a tile, with the settings of their scores."""

    q_BHLE: Tensor
    k_BKSE: Tensor
    v_BKSV: Tensor
    visibility: TileVisibility
    scores: ScoreSettings


class PartialAttention(NamedTuple):
    """Attention over some keys, normalised among them, with the log-sum-exp of their scores.

    The log-sum-exp is -inf for a query that sees none of the keys.
    """

    out_BHLV: Tensor
    lse_BHL: Tensor


class AttentionGradients(NamedTuple):
    """Gradients of a tile's queries, keys and values."""

    q_BHLE: Tensor
    k_BKSE: Tensor
    v_BKSV: Tensor


class AttentionKernel(Protocol):
    """One implementation of attention over a tile, forward and backward.

    `name` is its name in logs.
    """

    @property
    def name(self) -> str: ...

    def forward(self, tile: TileInputs) -> PartialAttention:
        """Compute attention over the tile's keys alone."""
        ...

    def backward(
        self, d_out_BHLV: Tensor, tile: TileInputs, row_output: PartialAttention
    ) -> AttentionGradients:
        """Compute the tile's gradients.

        `row_output` has the output and the log-sum-exp of the whole row.
        """
        ...


def merge_partial(into: PartialAttention, part: PartialAttention) -> None:
    """Merge the attention over further keys into `into`, in place.

    Every query of `into` must have seen a key already.
    """
    weight_BHL = torch.sigmoid(part.lse_BHL - into.lse_BHL)
    into.out_BHLV.lerp_(part.out_BHLV.to(into.out_BHLV.dtype), weight_BHL[..., None])
    torch.logaddexp(into.lse_BHL, part.lse_BHL, out=into.lse_BHL)


def _find_queries_with_keys(visible_BLS: Tensor | None) -> Tensor | None:
    """Find the queries that see at least one key, `[B, 1, L]`; None without a mask."""
    return None if visible_BLS is None else visible_BLS.any(-1)[:, None]


def _mask_queries_without_keys(
    part: PartialAttention, visible_BLS: Tensor | None
) -> PartialAttention:
    """Set the output to 0 and the log-sum-exp to -inf for queries that see no key.

    The fused kernels return a log-sum-exp of 0 for them, as if they had seen a key.
    """
    has_keys = _find_queries_with_keys(visible_BLS)
    if has_keys is None:
        return part
    return PartialAttention(
        part.out_BHLV.masked_fill(~has_keys[..., None], 0.0),
        part.lse_BHL.masked_fill(~has_keys, float("-inf")),
    )


def _build_additive_mask(visible_BLS: Tensor | None, like: Tensor) -> Tensor | None:
    """Build the mask that fused kernels add to the scores, in the dtype of the queries."""
    if visible_BLS is None:
        return None
    mask = torch.zeros(visible_BLS.shape, dtype=like.dtype, device=like.device)
    return mask.masked_fill_(~visible_BLS, float("-inf"))[:, None]


class CpuFlashKernel:
    """PyTorch's flash kernel for CPUs; supports fewer key/value heads than query heads.

    Its log-sum-exp has the dtype of the inputs.
    """

    name = "flash attention"

    def forward(self, tile: TileInputs) -> PartialAttention:
        mask = _build_additive_mask(tile.visibility.visible_BLS, tile.q_BHLE)
        part = _aten._scaled_dot_product_flash_attention_for_cpu(
            tile.q_BHLE,
            tile.k_BKSE,
            tile.v_BKSV,
            0.0,
            tile.visibility.is_causal,
            attn_mask=mask,
            scale=tile.scores.scale,
        )
        return _mask_queries_without_keys(PartialAttention(*part), tile.visibility.visible_BLS)

    def backward(
        self, d_out_BHLV: Tensor, tile: TileInputs, row_output: PartialAttention
    ) -> AttentionGradients:
        mask = _build_additive_mask(tile.visibility.visible_BLS, tile.q_BHLE)
        return AttentionGradients(
            *_aten._scaled_dot_product_flash_attention_for_cpu_backward(
                d_out_BHLV,
                tile.q_BHLE,
                tile.k_BKSE,
                tile.v_BKSV,
                row_output.out_BHLV.to(tile.q_BHLE.dtype),
                row_output.lse_BHL,
                0.0,
                tile.visibility.is_causal,
                attn_mask=mask,
                scale=tile.scores.scale,
            )
        )


class CudaFlashKernel:
    """FlashAttention-2 on CUDA, in half precision and without masks.

    It supports fewer key/value heads than query heads.
    """

    name = "flash attention"

    def forward(self, tile: TileInputs) -> PartialAttention:
        assert tile.visibility.visible_BLS is None
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(
            tile.q_BHLE,
            tile.k_BKSE,
            tile.v_BKSV,
            0.0,
            tile.visibility.is_causal,
            False,
            scale=tile.scores.scale,
        )
        return PartialAttention(out, lse)

    def backward(
        self, d_out_BHLV: Tensor, tile: TileInputs, row_output: PartialAttention
    ) -> AttentionGradients:
        # Without dropout the random state is never read, but the kernel requires tensors for
        # it.
        unread = torch.zeros(2, dtype=torch.uint64, device=tile.q_BHLE.device)
        return AttentionGradients(
            *_aten._scaled_dot_product_flash_attention_backward(
                d_out_BHLV,
                tile.q_BHLE,
                tile.k_BKSE,
                tile.v_BKSV,
                row_output.out_BHLV.to(tile.q_BHLE.dtype),
                row_output.lse_BHL.contiguous(),
                None,
                None,
                tile.q_BHLE.shape[2],
                tile.k_BKSE.shape[2],
                0.0,
                tile.visibility.is_causal,
                unread,
                unread[:0],
                scale=tile.scores.scale,
            )
        )


_LSE_ALIGNMENT = 32
"""The efficient kernel takes log-sum-exps in rows of a multiple of this, padded with +inf:
exp(score - lse) is then 0."""
_BIAS_ALIGNMENT = 16
"""Elements to which that kernel requires the rows of a mask to be aligned."""


class CudaEfficientKernel:
    """The memory-efficient kernel on CUDA: single precision and masks.

    It requires a key/value head for every query head.
    """

    name = "memory-efficient attention"

    def forward(self, tile: TileInputs) -> PartialAttention:
        k_BHSE = self._expand_heads(tile.k_BKSE, tile.q_BHLE)
        v_BHSV = self._expand_heads(tile.v_BKSV, tile.q_BHLE)
        bias = self._build_bias(tile.visibility.visible_BLS, tile.q_BHLE)
        out, lse, *_ = _aten._scaled_dot_product_efficient_attention(
            tile.q_BHLE,
            k_BHSE,
            v_BHSV,
            bias,
            True,
            0.0,
            tile.visibility.is_causal,
            scale=tile.scores.scale,
        )
        return _mask_queries_without_keys(
            PartialAttention(out, lse[..., : tile.q_BHLE.shape[2]]), tile.visibility.visible_BLS
        )

    def backward(
        self, d_out_BHLV: Tensor, tile: TileInputs, row_output: PartialAttention
    ) -> AttentionGradients:
        k_BHSE = self._expand_heads(tile.k_BKSE, tile.q_BHLE)
        v_BHSV = self._expand_heads(tile.v_BKSV, tile.q_BHLE)
        lse = F.pad(
            row_output.lse_BHL, (0, -tile.q_BHLE.shape[2] % _LSE_ALIGNMENT), value=float("inf")
        )
        unread = torch.zeros((), dtype=torch.int64, device=tile.q_BHLE.device)
        d_q, d_k, d_v, _ = _aten._scaled_dot_product_efficient_attention_backward(
            d_out_BHLV,
            tile.q_BHLE,
            k_BHSE,
            v_BHSV,
            self._build_bias(tile.visibility.visible_BLS, tile.q_BHLE),
            self._arrange_output(row_output.out_BHLV, tile.q_BHLE.dtype),
            lse,
            unread,
            unread,
            0.0,
            [True, True, True, False],
            tile.visibility.is_causal,
            scale=tile.scores.scale,
        )
        num_groups = tile.k_BKSE.shape[1]
        return AttentionGradients(
            d_q, *(part.unflatten(1, (num_groups, -1)).sum(2) for part in (d_k, d_v))
        )

    @staticmethod
    def _arrange_output(out_BHLV: Tensor, dtype: torch.dtype) -> Tensor:
        """Copy an output to the memory order of the kernel's own: token, head, width.

        In 16 bits the backward kernel reads this order whatever the strides are.
        """
        return out_BHLV.to(dtype).transpose(1, 2).contiguous().transpose(1, 2)

    @staticmethod
    def _expand_heads(x_BKSE: Tensor, q_BHLE: Tensor) -> Tensor:
        return x_BKSE.repeat_interleave(q_BHLE.shape[1] // x_BKSE.shape[1], dim=1)

    @staticmethod
    def _build_bias(visible_BLS: Tensor | None, q_BHLE: Tensor) -> Tensor | None:
        mask = _build_additive_mask(visible_BLS, q_BHLE)
        if mask is None:
            return None
        num_keys = mask.shape[-1]
        aligned = F.pad(mask, (0, -num_keys % _BIAS_ALIGNMENT))[..., :num_keys]
        return aligned.expand(q_BHLE.shape[0], q_BHLE.shape[1], -1, -1)
