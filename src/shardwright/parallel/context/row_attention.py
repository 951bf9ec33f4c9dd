"""Attention over rows that ranks share, as an autograd function and as a compiled operator.

Both call the same computation (`ring_attention`). The operator is for compiled code: it contains
communication and reads of the host, which a compiler cannot trace, so that a block is one graph,
and selective recompute saves its output by its name.

Legend: B sequences, H query heads, K key/value heads, L tokens of this rank, E head_dim, V value
width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.model.dropout import Dropout
from shardwright.parallel.context.attention_kernels import ScoreSettings
from shardwright.parallel.context.block_mask import RowChunks
from shardwright.parallel.context.ring_attention import (
    RowAttentionSettings,
    RowRanks,
    compute_row_gradients,
    compute_row_output,
)


def attend_row(
    q_BHLE: Tensor,
    k_BKLE: Tensor,
    v_BKLV: Tensor,
    sinks_H: Tensor | None,
    settings: RowAttentionSettings,
) -> Tensor:
    """Compute attention of this rank's queries over the whole row, `[B, H, L, V]`.

    `sinks_H` adds a term to each softmax denominator, with no value.
    """
    if not torch.compiler.is_compiling():
        out: Tensor = _RowAttentionFunction.apply(q_BHLE, k_BKLE, v_BKLV, sinks_H, settings)
        return out
    scores = settings.scores
    out, _ = _attend(
        q_BHLE,
        k_BKLE,
        v_BKLV,
        sinks_H,
        settings.row_chunks.chunks_RN,
        settings.row_chunks.document_ids_BT,
        settings.row_chunks.shared_documents_2CC,
        None if scores.dropout is None else scores.dropout.keys_BT,
        settings.ranks.name,
        scores.scale,
        scores.soft_cap,
        scores.dropout_rate,
        scores.first_head,
        settings.window,
        settings.is_explicit,
    )
    return out


class _RowAttentionFunction(torch.autograd.Function):
    """Autograd function that saves inputs, output and log-sum-exp of this rank's tokens only.

    A flash kernel saves the same.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q_BHLE: Tensor,
        k_BKLE: Tensor,
        v_BKLV: Tensor,
        sinks_H: Tensor | None,
        settings: RowAttentionSettings,
    ) -> Tensor:
        out_BHLV, lse_BHL = compute_row_output(q_BHLE, k_BKLE, v_BKLV, sinks_H, settings)
        ctx.save_for_backward(q_BHLE, k_BKLE, v_BKLV, sinks_H, out_BHLV, lse_BHL)
        ctx.settings = settings
        return out_BHLV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out_BHLV: Tensor) -> tuple[Tensor | None, ...]:
        q_BHLE, k_BKLE, v_BKLV, sinks_H, out_BHLV, lse_BHL = ctx.saved_tensors
        gradients = compute_row_gradients(
            d_out_BHLV, q_BHLE, k_BKLE, v_BKLV, sinks_H, out_BHLV, lse_BHL, ctx.settings
        )
        return *gradients, None


_SETTINGS_SCHEMA = (
    "Tensor chunks, Tensor? documents, Tensor? shared_documents, Tensor? dropout_keys, str ranks, "
    "float scale, float? soft_cap, float dropout_rate, int first_head, int? window, "
    "bool is_explicit"
)
"""Row attention settings as arguments of an operator; `ranks` is the name of `RowRanks`."""


def _build_settings(
    q_BHLE: Tensor,
    chunks_RN: Tensor,
    documents_BT: Tensor | None,
    shared_documents_2CC: Tensor | None,
    dropout_keys_BT: Tensor | None,
    ranks_name: str,
    scale: float,
    soft_cap: float | None,
    dropout_rate: float,
    first_head: int,
    window: int | None,
    is_explicit: bool,
) -> RowAttentionSettings:
    chunk_tokens = q_BHLE.shape[2] // chunks_RN.shape[1]
    return RowAttentionSettings(
        RowRanks.by_name[ranks_name],
        RowChunks(chunk_tokens, chunks_RN, documents_BT, shared_documents_2CC),
        ScoreSettings(
            scale,
            soft_cap,
            None if dropout_keys_BT is None else Dropout(dropout_keys_BT),
            dropout_rate,
            first_head,
        ),
        window,
        is_explicit,
    )


@torch.library.custom_op(
    "shardwright::row_attention",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, Tensor? sinks, {_SETTINGS_SCHEMA}) -> (Tensor, Tensor)",
)
def _attend(
    q_BHLE: Tensor, k_BKLE: Tensor, v_BKLV: Tensor, sinks_H: Tensor | None, *settings: Any
) -> tuple[Tensor, Tensor]:
    """Compute the output and the log-sum-exp of this rank's tokens."""
    return compute_row_output(q_BHLE, k_BKLE, v_BKLV, sinks_H, _build_settings(q_BHLE, *settings))


@torch.library.custom_op(
    "shardwright::row_attention_backward",
    mutates_args=(),
    schema="(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor out, Tensor lse, "
    f"{_SETTINGS_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _attend_backward(
    d_out_BHLV: Tensor,
    q_BHLE: Tensor,
    k_BKLE: Tensor,
    v_BKLV: Tensor,
    sinks_H: Tensor | None,
    out_BHLV: Tensor,
    lse_BHL: Tensor,
    *settings: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of queries, keys, values and sinks (empty without sinks)."""
    *gradients, d_sinks_H = compute_row_gradients(
        d_out_BHLV,
        q_BHLE,
        k_BKLE,
        v_BKLV,
        sinks_H,
        out_BHLV,
        lse_BHL,
        _build_settings(q_BHLE, *settings),
    )
    d_q, d_k, d_v = gradients
    return d_q, d_k, d_v, q_BHLE.new_empty(0) if d_sinks_H is None else d_sinks_H


@_attend.register_fake
def _fake_attend(
    q_BHLE: Tensor, k_BKLE: Tensor, v_BKLV: Tensor, sinks_H: Tensor | None, *settings: Any
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q_BHLE.dtype, torch.float32)
    return (
        q_BHLE.new_empty((*q_BHLE.shape[:3], v_BKLV.shape[3])),
        q_BHLE.new_empty(q_BHLE.shape[:3], dtype=wide),
    )


@_attend_backward.register_fake
def _fake_attend_backward(
    d_out_BHLV: Tensor,
    q_BHLE: Tensor,
    k_BKLE: Tensor,
    v_BKLV: Tensor,
    sinks_H: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_sinks = q_BHLE.new_empty(0) if sinks_H is None else sinks_H.new_empty(sinks_H.shape)
    d_q, d_k, d_v = (part.new_empty(part.shape) for part in (q_BHLE, k_BKLE, v_BKLV))
    return d_q, d_k, d_v, d_sinks


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.ranks, ctx.scale, ctx.soft_cap, ctx.rate, ctx.head, ctx.window, ctx.explicit = (
        inputs
    )
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: Any, d_out_BHLV: Tensor, _d_lse: Tensor) -> tuple[Any, ...]:
    q, k, v, sinks, *row, out, lse = ctx.saved_tensors
    *gradients, d_sinks = _attend_backward(
        d_out_BHLV,
        q,
        k,
        v,
        sinks,
        out,
        lse,
        *row,
        ctx.ranks,
        ctx.scale,
        ctx.soft_cap,
        ctx.rate,
        ctx.head,
        ctx.window,
        ctx.explicit,
    )
    return *gradients, None if sinks is None else d_sinks, *[None] * 11


_attend.register_autograd(_differentiate, setup_context=_save_for_backward)
