"""State shared by the blocks of one forward pass: rotary tables, masks, dropout.

Legend: B sequences, T query tokens, S key tokens, R rotated features.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardwright.architecture import ModelShape
from shardwright.model.dropout import Dropout, DropoutKey
from shardwright.model.kv_cache import KeyValueCache
from shardwright.model.rope import compute_rope_tables
from shardwright.model.routing import RoutingContext
from shardwright.model.tensor_parallel_hooks import TensorParallelHooks


class ForwardContext:
    """Inputs of a forward pass that all blocks share.

    A plain class, not a dataclass or a collection: FSDP2 casts float tensors inside those to
    the compute precision, and the tables must keep their own.

    `masks` has, per window, the mask added to the scores (0 or -inf), `[B or 1, 1, T, S]`. None
    if the kernels' causal masking is enough, or if a single new token needs no mask.
    `row_chunks` comes from `ContextParallelHooks.split_rows`.
    """

    def __init__(
        self,
        *,
        rope_tables: tuple[tuple[Tensor, Tensor], ...],
        masks: dict[int | None, Tensor | None],
        dropout: Dropout | None,
        has_explicit_attention: bool,
        cache: KeyValueCache | None,
        routing: RoutingContext | None = None,
        document_ids_BT: Tensor | None = None,
        token_indices_T: Tensor | None = None,
        row_chunks: Any = None,
        tensor_parallel: TensorParallelHooks | None = None,
    ) -> None:
        self.rope_tables = rope_tables
        self.masks = masks
        self.dropout = dropout
        self.has_explicit_attention = has_explicit_attention
        self.cache = cache
        self.routing = routing
        self.document_ids_BT = document_ids_BT
        self.token_indices_T = token_indices_T
        self.row_chunks = row_chunks
        self.tensor_parallel = tensor_parallel


def build_forward_context(
    shape: ModelShape,
    x_BTD: Tensor,
    positions_BT: Tensor,
    document_ids_BT: Tensor | None,
    token_indices_T: Tensor | None,
    *,
    num_tokens: int,
    dropout: DropoutKey | None,
    has_explicit_attention: bool,
    cache: KeyValueCache | None,
    routing: RoutingContext | None = None,
    row_chunks: Any = None,
    tensor_parallel: TensorParallelHooks | None = None,
) -> ForwardContext:
    """Build the context of a forward pass.

    Tables are in fp32 (fp64 for fp64 activations), masks in the activations' precision.

    Args:
        x_BTD: activations; only device and precision are used.
        positions_BT: positions of whole rows; `document_ids_BT` covers whole rows too.
        token_indices_T: indices in the row of this context rank's tokens; None for all
            `num_tokens`.
        tensor_parallel: tensor-parallel hooks of this pass. Tables and masks cover all tokens,
            also under sequence parallelism.
    """
    seen = 0 if cache is None else cache.num_tokens
    table_dtype = torch.float64 if x_BTD.dtype == torch.float64 else torch.float32
    lengths_BT = None
    if any(rope.kind == "longrope" for rope in shape.ropes):
        lengths_BT = compute_document_lengths(positions_BT, document_ids_BT, cache)
    indices_T = token_indices_T
    if indices_T is None:
        indices_T = torch.arange(num_tokens, device=x_BTD.device)
    else:
        positions_BT = positions_BT[:, indices_T]
        lengths_BT = None if lengths_BT is None else lengths_BT[:, indices_T]
    return ForwardContext(
        rope_tables=tuple(
            compute_rope_tables(rope, positions_BT, lengths_BT, table_dtype) for rope in shape.ropes
        ),
        masks={
            window: build_attention_mask(window, num_tokens, seen, document_ids_BT, x_BTD)
            for window in {layer.window for layer in shape.layers}
            if token_indices_T is None
        },
        dropout=_build_dropout(
            dropout,
            indices_T,
            x_BTD.device,
            num_row_tokens=num_tokens
            if token_indices_T is not None and shape.attention_dropout > 0.0
            else None,
        ),
        has_explicit_attention=has_explicit_attention,
        cache=cache,
        routing=routing,
        document_ids_BT=document_ids_BT,
        token_indices_T=token_indices_T,
        row_chunks=row_chunks,
        tensor_parallel=tensor_parallel,
    )


def _build_dropout(
    key: DropoutKey | None,
    token_indices_T: Tensor,
    device: torch.device,
    *,
    num_row_tokens: int | None,
) -> Dropout | None:
    if key is None:
        return None
    dropout = Dropout.from_key(key, token_indices_T, device)
    if num_row_tokens is None:
        return dropout
    row = Dropout.from_key(key, torch.arange(num_row_tokens, device=device), device)
    return replace(dropout, row_keys_BT=row.keys_BT)


def build_default_positions(
    input_ids_BT: Tensor, document_ids_BT: Tensor | None, num_cached_tokens: int = 0
) -> Tensor:
    """Build positions `num_cached_tokens`, seen + 1... per row, or 0, 1, 2... in each document."""
    num_tokens = input_ids_BT.shape[1]
    indices_T = torch.arange(
        num_cached_tokens, num_cached_tokens + num_tokens, device=input_ids_BT.device
    )
    if document_ids_BT is None:
        return indices_T[None]
    starts_BT = torch.ones_like(document_ids_BT, dtype=torch.bool)
    starts_BT[:, 1:] = document_ids_BT[:, 1:] != document_ids_BT[:, :-1]
    first_BT = torch.where(starts_BT, indices_T, 0).cummax(dim=1).values
    return indices_T - first_BT


def compute_document_lengths(
    positions_BT: Tensor, document_ids_BT: Tensor | None, cache: KeyValueCache | None = None
) -> Tensor:
    """Compute the length of each token's document, in tokens.

    It is the position of the document's last token + 1. Documents must be contiguous. With a
    cache it is the cache's `max_tokens`.
    """
    if cache is not None:
        return torch.full_like(positions_BT, cache.max_tokens)
    if document_ids_BT is None:
        return positions_BT[:, -1:].expand_as(positions_BT) + 1
    num_tokens = document_ids_BT.shape[1]
    indices_T = torch.arange(num_tokens, device=document_ids_BT.device)
    ends_BT = torch.ones_like(document_ids_BT, dtype=torch.bool)
    ends_BT[:, :-1] = document_ids_BT[:, 1:] != document_ids_BT[:, :-1]
    last_BT = torch.where(ends_BT, indices_T, num_tokens).flip(1).cummin(dim=1).values.flip(1)
    return positions_BT.expand_as(last_BT).gather(1, last_BT) + 1


def build_attention_mask(
    window: int | None,
    num_tokens: int,
    num_cached_tokens: int,
    document_ids_BT: Tensor | None,
    like: Tensor,
) -> Tensor | None:
    """Build the mask added to the scores of `num_tokens` queries after `num_cached_tokens` cached
    tokens.

    None as in `ForwardContext`. The mask is built once, in the precision of the activations:
    from a boolean mask, `F.scaled_dot_product_attention` would build one for every layer and
    save each for the backward pass.
    """
    num_keys = num_cached_tokens + num_tokens
    needs_window = window is not None and window < num_keys
    if not needs_window and document_ids_BT is None and (num_cached_tokens == 0 or num_tokens == 1):
        return None
    visible = torch.ones(num_tokens, num_keys, dtype=torch.bool, device=like.device).tril(
        num_cached_tokens
    )
    if window is not None and needs_window:
        visible = visible.triu(num_cached_tokens + 1 - window)
    visible = visible[None, None]
    if document_ids_BT is not None:
        visible = visible & (document_ids_BT[:, None, :, None] == document_ids_BT[:, None, None, :])
    return torch.zeros(visible.shape, dtype=like.dtype, device=like.device).masked_fill_(
        ~visible, float("-inf")
    )
