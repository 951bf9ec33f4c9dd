"""State shared by the blocks of one forward pass: rotary tables, attention kernels, dropout.

Legend: B sequences, T query tokens, S key tokens, R rotated features.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwright.architecture import ModelShape
from shardwright.architecture.attention_kernel import (
    AttentionKernelChoice,
    AttentionRequirements,
    choose_attention_kernel,
    get_attended_value_dim,
)
from shardwright.config.model import AttentionSetting
from shardwright.model.attention.fused_attention import (
    LayerKernel,
    build_block_mask,
    build_document_bounds,
    find_kernel_support,
)
from shardwright.model.attention.kv_cache import KeyValueCache
from shardwright.model.attention.rope import compute_rope_tables
from shardwright.model.dropout import Dropout, DropoutKey
from shardwright.model.routing import RoutingContext
from shardwright.model.tensor_parallel_hooks import TensorParallelHooks


class ForwardContext:
    """Inputs of a forward pass that all blocks share.

    A plain class, not a dataclass or a collection: FSDP2 casts float tensors inside those to
    the compute precision, and the tables must keep their own.

    `kernels` has, per window, the attention kernel of those layers and its mask. It is empty if
    context-parallel ranks share rows. `kernel_reasons` has the reasons for them. `row_chunks`
    comes from `ContextParallelHooks.split_rows`.
    """

    def __init__(
        self,
        *,
        rope_tables: tuple[tuple[Tensor, Tensor], ...],
        kernels: dict[int | None, LayerKernel],
        kernel_reasons: dict[int | None, str],
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
        self.kernels = kernels
        self.kernel_reasons = kernel_reasons
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
    attention: AttentionSetting = "auto",
    cache: KeyValueCache | None,
    routing: RoutingContext | None = None,
    row_chunks: Any = None,
    tensor_parallel: TensorParallelHooks | None = None,
    host_document_ids_BT: np.ndarray | None = None,
    has_whole_rows: bool = True,
) -> ForwardContext:
    """Build the context of a forward pass.

    Tables are in fp32 (fp64 for fp64 activations), masks in the activations' precision.

    Args:
        x_BTD: activations; only number of rows, device and precision are used.
        positions_BT: positions of whole rows; `document_ids_BT` covers whole rows too.
        token_indices_T: indices in the row of this context rank's tokens; None for all
            `num_tokens`.
        attention: `model.attention` of the recipe.
        tensor_parallel: tensor-parallel hooks of this pass. Tables and masks cover all tokens,
            also under sequence parallelism.
        host_document_ids_BT: `document_ids_BT` in host memory; None reads them from the device if
            the kernel needs them.
        has_whole_rows: attention computes whole rows on this rank. Otherwise it needs no kernels.
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
    choices = {}
    if has_whole_rows:
        choices = choose_layer_kernels(
            shape,
            attention,
            x_BTD.device,
            x_BTD.dtype,
            num_keys=seen + num_tokens,
            is_packed=document_ids_BT is not None,
            has_dropout=dropout is not None,
            is_cached=cache is not None,
        )
    kernels = build_layer_kernels(
        choices,
        x_BTD,
        num_tokens,
        seen,
        document_ids_BT,
        host_document_ids_BT,
        has_masks=token_indices_T is None,
    )
    return ForwardContext(
        rope_tables=tuple(
            compute_rope_tables(rope, positions_BT, lengths_BT, table_dtype) for rope in shape.ropes
        ),
        kernels=kernels,
        kernel_reasons={window: choice.reason for window, choice in choices.items()},
        dropout=_build_dropout(
            dropout,
            indices_T,
            x_BTD.device,
            num_row_tokens=num_tokens
            if token_indices_T is not None and shape.attention_dropout > 0.0
            else None,
        ),
        has_explicit_attention=attention == "explicit",
        cache=cache,
        routing=routing,
        document_ids_BT=document_ids_BT,
        token_indices_T=token_indices_T,
        row_chunks=row_chunks,
        tensor_parallel=tensor_parallel,
    )


def choose_layer_kernels(
    shape: ModelShape,
    attention: AttentionSetting,
    device: torch.device,
    dtype: torch.dtype,
    *,
    num_keys: int,
    is_packed: bool,
    has_dropout: bool,
    is_cached: bool = False,
) -> dict[int | None, AttentionKernelChoice]:
    """Choose the attention kernel of each kind of layer, by its window.

    Args:
        dtype: precision of the activations.
        num_keys: tokens that a query can see at most.

    Raises:
        RecipeError: as `choose_attention_kernel`.
    """
    support = find_kernel_support(device, dtype, shape.head_dim, get_attended_value_dim(shape))
    choices = {}
    for window in sorted({layer.window for layer in shape.layers}, key=lambda window: window or 0):
        needs = AttentionRequirements(
            window=window if window is not None and window < num_keys else None,
            is_packed=is_packed,
            soft_cap=shape.attention_soft_cap,
            has_sinks=shape.attention_sinks,
            has_dropout=has_dropout and shape.attention_dropout > 0.0,
            is_cached=is_cached,
        )
        choices[window] = choose_attention_kernel(needs, support, attention)
    return choices


def build_layer_kernels(
    choices: dict[int | None, AttentionKernelChoice],
    like: Tensor,
    num_tokens: int,
    num_cached_tokens: int,
    document_ids_BT: Tensor | None,
    host_document_ids_BT: np.ndarray | None,
    *,
    has_masks: bool = True,
) -> dict[int | None, LayerKernel]:
    """Build the mask of each kind of layer, once per forward pass, in the form of its kernel.

    Without `has_masks` the kernels `sdpa` and `explicit` get no mask: under context parallelism
    they build the masks of their tiles.
    """
    kernels = {}
    bounds = None
    for window, (kernel, _) in choices.items():
        if kernel == "varlen":
            if bounds is None:
                if document_ids_BT is not None and host_document_ids_BT is None:
                    host_document_ids_BT = document_ids_BT.cpu().numpy()
                num_rows = like.shape[0]
                bounds = build_document_bounds(
                    num_rows, num_tokens, host_document_ids_BT, like.device
                )
            kernels[window] = LayerKernel(kernel, bounds=bounds)
        elif kernel == "flex":
            block_mask = build_block_mask(window, num_tokens, document_ids_BT, like.device)
            kernels[window] = LayerKernel(kernel, block_mask=block_mask)
        else:
            mask = None
            if has_masks:
                mask = build_attention_mask(
                    window, num_tokens, num_cached_tokens, document_ids_BT, like
                )
            kernels[window] = LayerKernel(kernel, mask)
    return kernels


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
    """Build the mask added to the scores (0 or -inf), `[B or 1, 1, T, S]`.

    It is for `num_tokens` queries after `num_cached_tokens` cached tokens; None if the kernels'
    causal masking is enough, or if a single new token needs no mask. It is built once, in the
    precision of the activations: from a boolean mask, `F.scaled_dot_product_attention` would
    build one for every layer and save each for the backward pass.
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
