"""Attention over documents, windows, soft caps and sinks by fused kernels: varlen and flex.

What they need to know of the rows is built once per forward pass, not per layer
(`forward_context.build_layer_kernels`). Keys and values are not repeated: both kernels take
groups of heads.

Legend: B sequences, T tokens, N = B x T, Q blocks of a row, H query heads, K key/value heads, E
head_dim, R documents.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention import flex_attention as flex
from torch.torch_version import TorchVersion

from shardwright.architecture.attention_kernel import (
    AttentionKernelName,
    KernelSupport,
    find_flash_limit,
)

_BLOCK_TOKENS = 128
"""Tokens of a block of FlexAttention's masks: the default of its kernels."""
_FLASH_CAPABILITY = (8, 0)


@dataclass(frozen=True, eq=False)
class AttentionSettings:
    """Settings of one layer's attention.

    `window` is the number of tokens that a token attends to, itself included. `sinks_H` has one
    logit per head of this rank.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    dropout_rate: float = 0.0
    sinks_H: Tensor | None = None


class DocumentBounds(NamedTuple):
    """Bounds of the documents of a batch as one flat row of B x T tokens.

    `bounds_R` begins with 0 and ends with copies of B x T: its size and `max_tokens`, an upper
    bound of the documents' lengths, are powers of two, so that compiled code sees few values.
    """

    bounds_R: Tensor
    max_tokens: int


class LayerKernel(NamedTuple):
    """The attention kernel of one kind of layer in a forward pass, and its mask.

    The mask of `sdpa` and `explicit` is added to the scores, `[B or 1, 1, T, S]`; None for causal
    order. That of `varlen` and `flex` is in the kernel's own form.
    """

    kernel: AttentionKernelName
    mask: Tensor | None = None
    bounds: DocumentBounds | None = None
    block_mask: flex.BlockMask | None = None


def find_kernel_support(
    device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int
) -> KernelSupport:
    """Find which kernels this device and this torch have for a precision and sizes of heads."""
    if device.type != "cuda":
        return KernelSupport(
            f"it has no kernel on {device.type}",
            f"torch {torch.__version__} has no backward pass of FlexAttention on {device.type}",
        )
    return KernelSupport(
        _find_missing_varlen(device, dtype, head_dim, value_dim), _find_missing_flex(dtype)
    )


def _find_missing_varlen(
    device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int
) -> str | None:
    limit = find_flash_limit(str(dtype).removeprefix("torch."), head_dim, value_dim)
    if limit is not None:
        return limit
    capability = torch.cuda.get_device_capability(device)
    if capability < _FLASH_CAPABILITY:
        return "flash attention needs compute capability 8.0, not {}.{}".format(*capability)
    return None


def _find_missing_flex(dtype: torch.dtype) -> str | None:
    if dtype == torch.float64:
        return "FlexAttention's CUDA kernel has no float64"
    if importlib.util.find_spec("triton") is None:
        return "it needs the package triton"
    return None


def build_document_bounds(
    num_rows: int,
    num_tokens: int,
    document_ids_BT: np.ndarray | None,
    device: torch.device,
) -> DocumentBounds:
    """Build the bounds of documents from ids in host memory; None makes a row one document."""
    _import_varlen()
    begins_BT = np.zeros((num_rows, num_tokens), dtype=np.bool_)
    begins_BT[:, 0] = True
    if document_ids_BT is not None:
        begins_BT[:, 1:] = document_ids_BT[:, 1:] != document_ids_BT[:, :-1]
    starts_R = np.flatnonzero(begins_BT)
    total = num_rows * num_tokens
    longest = int(np.diff(starts_R, append=total).max())
    padded_R = np.full(_round_up_to_power_of_two(len(starts_R)) + 1, total, dtype=np.int32)
    padded_R[: len(starts_R)] = starts_R
    bounds_R = torch.from_numpy(padded_R)
    if device.type == "cuda":
        bounds_R = bounds_R.pin_memory()
    return DocumentBounds(
        bounds_R.to(device, non_blocking=True),
        min(_round_up_to_power_of_two(longest), num_tokens),
    )


def _round_up_to_power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def build_block_mask(
    window: int | None, num_tokens: int, document_ids_BT: Tensor | None, device: torch.device
) -> flex.BlockMask:
    """Build the block mask of causal order, a window and documents.

    Which blocks are visible follows from the documents at their ends, because documents are
    contiguous: no `[T, T]` mask is built, and the host does not wait for the device.
    """
    num_blocks = -(-num_tokens // _BLOCK_TOKENS)
    blocks_Q = torch.arange(num_blocks, device=device)
    distance_QQ = (blocks_Q[:, None] - blocks_Q) * _BLOCK_TOKENS
    last = _BLOCK_TOKENS - 1
    visible = (distance_QQ > 0)[None]
    full = visible
    if window is not None:
        visible = visible & (distance_QQ - last < window)
        full = full & (distance_QQ + last < window)
    if document_ids_BT is not None:
        first_BQ = document_ids_BT[:, ::_BLOCK_TOKENS]
        ends_Q = ((blocks_Q + 1) * _BLOCK_TOKENS - 1).clamp(max=num_tokens - 1)
        last_BQ = document_ids_BT[:, ends_Q]
        visible = visible & (first_BQ[:, :, None] == last_BQ[:, None, :])
        full = full & (last_BQ[:, :, None] == first_BQ[:, None, :])
    partial = (visible & ~full) | (distance_QQ == 0)

    def is_visible(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = query >= key
        if window is not None:
            seen = seen & (query - key < window)
        if document_ids_BT is not None:
            seen = seen & (document_ids_BT[row, query] == document_ids_BT[row, key])
        return seen

    return flex.BlockMask.from_kv_blocks(
        *_list_blocks(partial),
        *_list_blocks(full),
        BLOCK_SIZE=_BLOCK_TOKENS,
        mask_mod=is_visible,
        seq_lengths=(num_tokens, num_tokens),
    )


def _list_blocks(is_listed_BQQ: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of listed key blocks of each query block, and their indices first."""
    is_listed_B1QQ = is_listed_BQQ[:, None].int()
    order = is_listed_B1QQ.argsort(dim=-1, descending=True, stable=True)
    return is_listed_B1QQ.sum(-1, dtype=torch.int32), order.int()


def attend_fused(
    q_BHTE: Tensor,
    k_BKTE: Tensor,
    v_BKTE: Tensor,
    layer: LayerKernel,
    settings: AttentionSettings,
) -> Tensor:
    """Compute attention of whole rows by the kernel `varlen` or `flex`, `[B, H, T, E]`."""
    if layer.bounds is not None:
        return _attend_varlen(q_BHTE, k_BKTE, v_BKTE, layer.bounds, settings)
    assert layer.block_mask is not None
    return _attend_flex(q_BHTE, k_BKTE, v_BKTE, layer.block_mask, settings)


def has_grouped_heads(q_BHTE: Tensor, k_BKSE: Tensor) -> bool:
    """Return True if several query heads share a key head.

    Sizes may be symbols in a compiled module that FSDP2 shards. No kernel takes a symbol for its
    switch, and only a branch makes it a bool.
    """
    is_grouped = False
    if q_BHTE.shape[1] != k_BKSE.shape[1]:
        is_grouped = True
    return is_grouped


def _attend_varlen(
    q_BHTE: Tensor,
    k_BKTE: Tensor,
    v_BKTE: Tensor,
    documents: DocumentBounds,
    settings: AttentionSettings,
) -> Tensor:
    q_NHE, k_NKE, v_NKE = (part.transpose(1, 2).flatten(0, 1) for part in (q_BHTE, k_BKTE, v_BKTE))
    # The kernel counts the tokens before a token, not the token itself.
    before = -1 if settings.window is None else settings.window - 1
    assert varlen_function is not None
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if TORCH_CHOOSES_VARLEN_KERNEL else nullcontext():
        out_NHE: Any = varlen_function.attend(
            q_NHE,
            k_NKE,
            v_NKE,
            documents.bounds_R,
            documents.bounds_R,
            documents.max_tokens,
            documents.max_tokens,
            scale=settings.scale,
            window_size=(before, 0),
            **varlen_function.group_option,
        )
    out: Tensor = out_NHE.unflatten(0, (q_BHTE.shape[0], -1)).transpose(1, 2)
    return out


TORCH_CHOOSES_VARLEN_KERNEL = TorchVersion(torch.__version__) >= "2.15"
"""True if torch would take cuDNN's kernel on Hopper and Blackwell in layers without a window. Our
bounds end with documents of no tokens, which have never run with that kernel."""


class VarlenFunction(NamedTuple):
    """Varlen attention, and the option that makes it take grouped heads.

    It is an option since torch 2.12; in 2.11 the kernel takes them without it.
    """

    attend: Callable[..., Any]
    group_option: dict[str, Any]


varlen_function: VarlenFunction | None = None
"""Imported by the first forward pass that needs it."""


def _import_varlen() -> None:
    """Import varlen attention, and with it the compiler, which takes seconds."""
    global varlen_function
    if varlen_function is None:
        from torch.nn.attention.varlen import varlen_attn

        has_option = "enable_gqa" in inspect.signature(varlen_attn).parameters
        varlen_function = VarlenFunction(varlen_attn, {"enable_gqa": True} if has_option else {})


def _attend_flex(
    q_BHTE: Tensor,
    k_BKTE: Tensor,
    v_BKTE: Tensor,
    block_mask: flex.BlockMask,
    settings: AttentionSettings,
) -> Tensor:
    """Attend by FlexAttention; a sink scales the output by its share of the softmax.

    With sinks the weights are exp(score) / (sum + exp(sink)), which is the plain softmax times
    sigmoid(log-sum-exp - sink).
    """

    soft_cap = settings.soft_cap

    def limit(score: Tensor, *_place: Tensor) -> Tensor:
        assert soft_cap is not None
        return soft_cap * torch.tanh(score / soft_cap)

    out_BHTE, aux = _get_flex_function(q_BHTE.device.type)(
        q_BHTE,
        k_BKTE,
        v_BKTE,
        score_mod=None if soft_cap is None else limit,
        block_mask=block_mask,
        scale=settings.scale,
        enable_gqa=has_grouped_heads(q_BHTE, k_BKTE),
        return_aux=flex.AuxRequest(lse=True),
    )
    if settings.sinks_H is None:
        return out_BHTE
    share_BHT = torch.sigmoid(aux.lse - settings.sinks_H.to(aux.lse.dtype)[:, None])
    return (out_BHTE * share_BHT[..., None]).to(out_BHTE.dtype)


def _get_flex_function(device_type: str) -> Callable[..., Any]:
    """Return FlexAttention, compiled where it is called outside compiled code on CUDA.

    Uncompiled it stores all scores.
    """
    if flex_replacement is not None:
        return flex_replacement
    if device_type != "cuda" or torch.compiler.is_compiling():
        return flex.flex_attention
    return _compile_flex()


flex_replacement: Callable[..., Any] | None = None
"""Called instead of FlexAttention: the rehearsal sets it, whose tensors have no values."""


@cache
def _compile_flex() -> Callable[..., Any]:
    from torch._inductor import list_options  # imports the compiler

    # The wrapped region is one operator to selective recomputation, which saves its results.
    option = "wrap_inductor_compiled_regions"
    options: dict[str, Any] = {option: True} if option in list_options() else {}
    return torch.compile(flex.flex_attention, options=options)
