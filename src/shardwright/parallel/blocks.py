"""Attention of some queries over some keys, with the log-sum-exp by which such blocks are merged: kernels, forward and backward.

A block's backward takes the output and the log-sum-exp of the whole row, not its own: with them every block's softmax weights are
exp(score - lse) of the whole, and blocks' gradients add up (Liu et al. 2023, Ring Attention, arXiv 2310.01889; Dao 2023,
FlashAttention-2, section 3.1).

Legend: B sequences, H query heads, K key/value heads, G = H / K, L queries, S keys, E head_dim, V value width.
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
class Scores:
    """What turns products of queries and keys into weights, alike for all blocks of a layer.

    `first_head` is the number, among all of the model's, of the first head that is held here: dropout decides by it.
    """

    scale: float
    soft_cap: float | None = None
    dropout: Dropout | None = None
    dropout_rate: float = 0.0
    first_head: int = 0


class Seen(NamedTuple):
    """What the queries of a block see of its keys.

    `causal`: query i sees keys 0 to i, and there are as many keys as queries. Else `visible_BLS` (B may be 1) says it by pair, None
    being everything. Dropout goes by `queries`, which rows of its keys these are, and by the keys' places in the row.
    """

    causal: bool
    visible_BLS: Tensor | None
    queries: slice
    key_places_S: Tensor


class Partial(NamedTuple):
    """Attention over some keys: normalised among them, with the log-sum-exp of their scores (-inf where a query sees none)."""

    out_BHLV: Tensor
    lse_BHL: Tensor


class Gradients(NamedTuple):
    """What a block gives to each of its inputs."""

    q_BHLE: Tensor
    k_BKSE: Tensor
    v_BKSV: Tensor


class Kernel(Protocol):
    """One way to compute blocks."""

    def forward(self, q_BHLE: Tensor, k_BKSE: Tensor, v_BKSV: Tensor, seen: Seen, scores: Scores) -> Partial:
        """Attention over the block's keys alone."""
        ...

    def backward(
        self, d_out_BHLV: Tensor, q_BHLE: Tensor, k_BKSE: Tensor, v_BKSV: Tensor, whole: Partial, seen: Seen, scores: Scores
    ) -> Gradients:
        """The block's share of the gradients; `whole` is the row's output and log-sum-exp."""
        ...


def choose_kernel(q_BHLE: Tensor, v_BKSV: Tensor, scores: Scores, *, masked: bool, explicit: bool) -> Kernel:
    """The fused kernel that computes exactly this, or the products spelled out."""
    if explicit or scores.soft_cap is not None or scores.dropout is not None or q_BHLE.shape[-1] != v_BKSV.shape[-1]:
        return SpelledOut()
    if q_BHLE.device.type == "cpu":
        return CpuFlash()
    if q_BHLE.is_cuda and q_BHLE.shape[-1] % 8 == 0 and q_BHLE.shape[-1] <= 256:
        if q_BHLE.dtype in (torch.float16, torch.bfloat16) and not masked:
            return CudaFlash()
        if q_BHLE.dtype in (torch.float16, torch.bfloat16, torch.float32):
            return CudaEfficient()
    return SpelledOut()


def merge(into: Partial, part: Partial) -> None:
    """Take one more block's keys into `into`, in place. There, every query must have seen a key already."""
    weight_BHL = torch.sigmoid(part.lse_BHL - into.lse_BHL)
    into.out_BHLV.lerp_(part.out_BHLV.to(into.out_BHLV.dtype), weight_BHL[..., None])
    torch.logaddexp(into.lse_BHL, part.lse_BHL, out=into.lse_BHL)


class SpelledOut:
    """Plain products on any device and in any precision: soft caps, dropout by token, any mask. Holds the block's scores."""

    def forward(self, q_BHLE: Tensor, k_BKSE: Tensor, v_BKSV: Tensor, seen: Seen, scores: Scores) -> Partial:
        scores_BHLS, _ = _scores(q_BHLE, k_BKSE, seen, scores)
        lse_BHL = torch.logsumexp(scores_BHLS, dim=-1)
        # Where a query sees nothing, -inf - -inf would be nan.
        weights_BHLS = torch.exp(scores_BHLS - lse_BHL.clamp(min=torch.finfo(lse_BHL.dtype).min)[..., None])
        weights_BHLS = _drop(weights_BHLS, seen, scores).to(v_BKSV.dtype)
        return Partial(_by_group(weights_BHLS, v_BKSV), lse_BHL)

    def backward(
        self, d_out_BHLV: Tensor, q_BHLE: Tensor, k_BKSE: Tensor, v_BKSV: Tensor, whole: Partial, seen: Seen, scores: Scores
    ) -> Gradients:
        scores_BHLS, bend_BHLS = _scores(q_BHLE, k_BKSE, seen, scores)
        wide = scores_BHLS.dtype
        weights_BHLS = torch.exp(scores_BHLS - whole.lse_BHL[..., None])
        dropped_BHLS = _drop(weights_BHLS, seen, scores).to(v_BKSV.dtype)
        d_v_BKSV = _to_group(dropped_BHLS, d_out_BHLV, v_BKSV.shape[1])
        d_weights_BHLS = _drop(_by_group(d_out_BHLV, v_BKSV.transpose(-1, -2)).to(wide), seen, scores)
        delta_BHL = (d_out_BHLV.to(wide) * whole.out_BHLV.to(wide)).sum(-1)
        d_scores_BHLS = weights_BHLS * (d_weights_BHLS - delta_BHL[..., None])
        if bend_BHLS is not None:
            d_scores_BHLS = d_scores_BHLS * bend_BHLS
        d_scores_BHLS = (d_scores_BHLS * scores.scale).to(q_BHLE.dtype)
        return Gradients(_by_group(d_scores_BHLS, k_BKSE), _to_group(d_scores_BHLS, q_BHLE, k_BKSE.shape[1]), d_v_BKSV)


def _scores(q_BHLE: Tensor, k_BKSE: Tensor, seen: Seen, scores: Scores) -> tuple[Tensor, Tensor | None]:
    """Scores in fp32 at least, -inf where a key is not seen; and the slope of the soft cap at them, if there is one."""
    raw_BHLS = _by_group(q_BHLE * scores.scale, k_BKSE.transpose(-1, -2))
    raw_BHLS = raw_BHLS.to(torch.promote_types(raw_BHLS.dtype, torch.float32))
    bend_BHLS = None
    if scores.soft_cap is not None:
        tanh_BHLS = torch.tanh(raw_BHLS / scores.soft_cap)
        raw_BHLS, bend_BHLS = tanh_BHLS * scores.soft_cap, 1 - tanh_BHLS.square()
    if seen.visible_BLS is not None:
        raw_BHLS = raw_BHLS.masked_fill(~seen.visible_BLS[:, None], float("-inf"))
    elif seen.causal:
        later = torch.ones(raw_BHLS.shape[-2:], dtype=torch.bool, device=raw_BHLS.device).triu(1)
        raw_BHLS = raw_BHLS.masked_fill(later, float("-inf"))
    return raw_BHLS, bend_BHLS


def _drop(weights_BHLS: Tensor, seen: Seen, scores: Scores) -> Tensor:
    if scores.dropout is None:
        return weights_BHLS
    rows = Dropout(scores.dropout.keys_BT[:, seen.queries])
    return rows.drop_attention(weights_BHLS, scores.dropout_rate, first_head=scores.first_head, key_places_S=seen.key_places_S)


def _by_group(x_BHLS: Tensor, y_BKSE: Tensor) -> Tensor:
    """x @ y where each head of y serves a group of heads of x: the group's rows are one matrix, nothing is expanded."""
    num_groups = y_BKSE.shape[1]
    return (x_BHLS.unflatten(1, (num_groups, -1)).flatten(2, 3) @ y_BKSE).unflatten(2, (-1, x_BHLS.shape[2])).flatten(1, 2)


def _to_group(x_BHLS: Tensor, y_BHLE: Tensor, num_groups: int) -> Tensor:
    """x^T @ y summed over the heads of each group, `[B, K, S, E]`."""
    rows = (part.unflatten(1, (num_groups, -1)).flatten(2, 3) for part in (x_BHLS, y_BHLE))
    x, y = rows
    return x.transpose(-1, -2) @ y


def _sees_any(visible_BLS: Tensor | None) -> Tensor | None:
    """Which queries see a key at all, `[B, 1, L]`."""
    return None if visible_BLS is None else visible_BLS.any(-1)[:, None]


def _hide_blind(part: Partial, visible_BLS: Tensor | None) -> Partial:
    """A fused kernel answers a query that sees no key with a log-sum-exp of 0, as if it had: say -inf, and give nothing."""
    sees = _sees_any(visible_BLS)
    if sees is None:
        return part
    return Partial(part.out_BHLV.masked_fill(~sees[..., None], 0.0), part.lse_BHL.masked_fill(~sees, float("-inf")))


def _additive(visible_BLS: Tensor | None, like: Tensor) -> Tensor | None:
    """The mask as the fused kernels take it: added to the scores, in the queries' precision."""
    if visible_BLS is None:
        return None
    mask = torch.zeros(visible_BLS.shape, dtype=like.dtype, device=like.device)
    return mask.masked_fill_(~visible_BLS, float("-inf"))[:, None]


class CpuFlash:
    """torch's flash kernel for the CPU. Few key/value heads need no expanding; its log-sum-exp is that of the inputs' precision."""

    def forward(self, q_BHLE: Tensor, k_BKSE: Tensor, v_BKSV: Tensor, seen: Seen, scores: Scores) -> Partial:
        mask = _additive(seen.visible_BLS, q_BHLE)
        part = _aten._scaled_dot_product_flash_attention_for_cpu(
            q_BHLE, k_BKSE, v_BKSV, 0.0, seen.causal, attn_mask=mask, scale=scores.scale
        )
        return _hide_blind(Partial(*part), seen.visible_BLS)

    def backward(
        self, d_out_BHLV: Tensor, q_BHLE: Tensor, k_BKSE: Tensor, v_BKSV: Tensor, whole: Partial, seen: Seen, scores: Scores
    ) -> Gradients:
        mask = _additive(seen.visible_BLS, q_BHLE)
        return Gradients(
            *_aten._scaled_dot_product_flash_attention_for_cpu_backward(
                d_out_BHLV,
                q_BHLE,
                k_BKSE,
                v_BKSV,
                whole.out_BHLV.to(q_BHLE.dtype),
                whole.lse_BHL,
                0.0,
                seen.causal,
                attn_mask=mask,
                scale=scores.scale,
            )
        )


class CudaFlash:
    """FlashAttention-2 on CUDA: half precision, no mask; few key/value heads need no expanding."""

    def forward(self, q_BHLE: Tensor, k_BKSE: Tensor, v_BKSV: Tensor, seen: Seen, scores: Scores) -> Partial:
        assert seen.visible_BLS is None
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(
            q_BHLE, k_BKSE, v_BKSV, 0.0, seen.causal, False, scale=scores.scale
        )
        return Partial(out, lse)

    def backward(
        self, d_out_BHLV: Tensor, q_BHLE: Tensor, k_BKSE: Tensor, v_BKSV: Tensor, whole: Partial, seen: Seen, scores: Scores
    ) -> Gradients:
        # Nothing is dropped, so the random state is never read; the kernel wants tensors in its place.
        unread = torch.zeros(2, dtype=torch.uint64, device=q_BHLE.device)
        return Gradients(
            *_aten._scaled_dot_product_flash_attention_backward(
                d_out_BHLV,
                q_BHLE,
                k_BKSE,
                v_BKSV,
                whole.out_BHLV.to(q_BHLE.dtype),
                whole.lse_BHL.contiguous(),
                None,
                None,
                q_BHLE.shape[2],
                k_BKSE.shape[2],
                0.0,
                seen.causal,
                unread,
                unread[:0],
                scale=scores.scale,
            )
        )


_LSE_ALIGNMENT = 32
"""The efficient kernel wants log-sum-exps in rows of a multiple of this, filled up with +inf: exp(score - lse) is then 0."""
_BIAS_ALIGNMENT = 16
"""Elements to which the rows of a mask must be aligned for the same kernel."""


class CudaEfficient:
    """The memory-efficient kernel on CUDA: single precision and masks. It wants a key/value head for every query head."""

    def forward(self, q_BHLE: Tensor, k_BKSE: Tensor, v_BKSV: Tensor, seen: Seen, scores: Scores) -> Partial:
        k_BHSE, v_BHSV = self._expand(k_BKSE, q_BHLE), self._expand(v_BKSV, q_BHLE)
        bias = self._bias(seen.visible_BLS, q_BHLE)
        out, lse, *_ = _aten._scaled_dot_product_efficient_attention(
            q_BHLE, k_BHSE, v_BHSV, bias, True, 0.0, seen.causal, scale=scores.scale
        )
        return _hide_blind(Partial(out, lse[..., : q_BHLE.shape[2]]), seen.visible_BLS)

    def backward(
        self, d_out_BHLV: Tensor, q_BHLE: Tensor, k_BKSE: Tensor, v_BKSV: Tensor, whole: Partial, seen: Seen, scores: Scores
    ) -> Gradients:
        k_BHSE, v_BHSV = self._expand(k_BKSE, q_BHLE), self._expand(v_BKSV, q_BHLE)
        lse = F.pad(whole.lse_BHL, (0, -q_BHLE.shape[2] % _LSE_ALIGNMENT), value=float("inf"))
        unread = torch.zeros((), dtype=torch.int64, device=q_BHLE.device)
        d_q, d_k, d_v, _ = _aten._scaled_dot_product_efficient_attention_backward(
            d_out_BHLV,
            q_BHLE,
            k_BHSE,
            v_BHSV,
            self._bias(seen.visible_BLS, q_BHLE),
            whole.out_BHLV.to(q_BHLE.dtype),
            lse,
            unread,
            unread,
            0.0,
            [True, True, True, False],
            seen.causal,
            scale=scores.scale,
        )
        num_groups = k_BKSE.shape[1]
        return Gradients(d_q, *(part.unflatten(1, (num_groups, -1)).sum(2) for part in (d_k, d_v)))

    @staticmethod
    def _expand(x_BKSE: Tensor, q_BHLE: Tensor) -> Tensor:
        return x_BKSE.repeat_interleave(q_BHLE.shape[1] // x_BKSE.shape[1], dim=1)

    @staticmethod
    def _bias(visible_BLS: Tensor | None, q_BHLE: Tensor) -> Tensor | None:
        mask = _additive(visible_BLS, q_BHLE)
        if mask is None:
            return None
        num_keys = mask.shape[-1]
        aligned = F.pad(mask, (0, -num_keys % _BIAS_ALIGNMENT))[..., :num_keys]
        return aligned.expand(q_BHLE.shape[0], q_BHLE.shape[1], -1, -1)
