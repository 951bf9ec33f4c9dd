"""Operators that only CUDA has a kernel for, by plain operators: attention, RMS norm, wide sums,
8-bit and 4-bit products.

Arguments, checks, shapes and dtypes are CUDA's. Import it after the library is loaded: it imports
torch. Legend: B sequences, H query heads, K key/value heads, T queries, S keys, E head_dim, N rows,
D features.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.hostcuda import scaled_kernels

_LSE_ALIGNMENT = 32
_BIAS_ALIGNMENT_BYTES = 16


def _expand(x_BKSE: Tensor, q_BHTE: Tensor) -> Tensor:
    return x_BKSE.float().repeat_interleave(q_BHTE.shape[1] // x_BKSE.shape[1], dim=1)


def _sum_groups(gradient_BHSE: Tensor, like_BKSE: Tensor) -> Tensor:
    groups = gradient_BHSE.unflatten(1, (like_BKSE.shape[1], -1))
    return groups.sum(2).to(like_BKSE.dtype)


def _compute_scores(
    q: Tensor, k: Tensor, bias: Tensor | None, is_causal: bool, scale: float
) -> Tensor:
    scores_BHTS = (q.float() @ _expand(k, q).mT) * scale
    if bias is not None:
        scores_BHTS = scores_BHTS + bias.float()
    if is_causal:
        later = torch.ones(scores_BHTS.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores_BHTS = scores_BHTS.masked_fill(later, float("-inf"))
    return scores_BHTS


def _attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp; a query that sees no key has 0 in both."""
    scores_BHTS = _compute_scores(q, k, bias, is_causal, scale or q.shape[-1] ** -0.5)
    lse_BHT = torch.logsumexp(scores_BHTS, -1)
    lse_BHT = lse_BHT.masked_fill(lse_BHT == float("-inf"), 0.0)
    out_BHTE = (torch.exp(scores_BHTS - lse_BHT[..., None]) @ _expand(v, q)).to(q.dtype)
    return _copy_to_rows(out_BHTE), lse_BHT


def _differentiate(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse_BHT: Tensor,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    assert d_out.dtype == q.dtype == out.dtype
    assert lse_BHT.dtype == torch.float32
    scale = scale or q.shape[-1] ** -0.5
    scores_BHTS = _compute_scores(q, k, bias, is_causal, scale)
    weights_BHTS = torch.exp(scores_BHTS - lse_BHT[..., None])
    weights_BHTS = weights_BHTS.masked_fill(scores_BHTS == float("-inf"), 0.0)
    d_out, out = d_out.float(), out.float()
    d_weights_BHTS = d_out @ _expand(v, q).mT
    d_scores_BHTS = weights_BHTS * (d_weights_BHTS - (d_out * out).sum(-1, keepdim=True)) * scale
    return (
        (d_scores_BHTS @ _expand(k, q)).to(q.dtype),
        _sum_groups(d_scores_BHTS.mT @ q.float(), k),
        _sum_groups(weights_BHTS.mT @ d_out, v),
    )


def _copy_to_layout_of(parts: Iterable[Tensor], like: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Copy tensors to the strides of others: flash attention allocates what it returns so."""
    return tuple(
        torch.empty_like(tensor).copy_(part) for part, tensor in zip(parts, like, strict=True)
    )


def _copy_to_rows(x_BHTE: Tensor) -> Tensor:
    """Copy to a tensor whose tokens come before its heads in memory."""
    return x_BHTE.transpose(1, 2).contiguous().transpose(1, 2)


def _run_flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    assert dropout_p == 0.0
    assert q.dtype in (torch.float16, torch.bfloat16), "FlashAttention supports fp16 and bf16 only"
    assert q.shape[-1] % 8 == 0, "FlashAttention needs head_dim to be a multiple of 8"
    assert q.shape[-1] <= 256, "FlashAttention supports head_dim up to 256"
    out, lse = _attend(q, k, v, None, is_causal, scale)
    (out,) = _copy_to_layout_of([out], [q])
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
    unused = q.new_empty(0)
    return out, lse, None, None, q.shape[2], k.shape[2], seed, seed[:0].clone(), unused


def _run_flash_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    assert logsumexp.is_contiguous()
    gradients = _differentiate(d_out, q, k, v, None, out, logsumexp, is_causal, scale)
    return _copy_to_layout_of(gradients, (q, k, v))


def _run_efficient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    assert dropout_p == 0.0
    assert q.shape[1] == k.shape[1] == v.shape[1], "the kernel has no grouped heads"
    if attn_bias is not None:
        assert attn_bias.dtype == q.dtype, "invalid dtype for bias - should match query's dtype"
        assert attn_bias.shape == (*q.shape[:3], k.shape[2]), attn_bias.shape
        alignment = _BIAS_ALIGNMENT_BYTES // attn_bias.element_size()
        assert attn_bias.stride(-2) % alignment == 0, "attn_bias is not correctly aligned"
    out, lse = _attend(q, k, v, attn_bias, is_causal, scale)
    lse = F.pad(lse, (0, -q.shape[2] % _LSE_ALIGNMENT), value=float("inf"))
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    return out, lse if compute_log_sumexp else lse[..., :0].clone(), seed, seed.clone()


def _run_efficient_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor | None, ...]:
    assert not grad_input_mask[3], "the gradient of the mask is not supported"
    assert logsumexp.shape[-1] % _LSE_ALIGNMENT == 0, "logsumexp is not padded to a multiple of 32"
    if out.element_size() == 2:
        assert out.stride(2) == out.shape[1] * out.shape[3], "wrong layout of the output"
    lse = logsumexp[..., : q.shape[2]]
    gradients = _differentiate(d_out, q, k, v, attn_bias, out, lse, is_causal, scale)
    return (*map(_copy_to_rows, gradients), None)


def _list_documents(
    bounds: Tensor, window: tuple[int, int], device: torch.device
) -> Iterator[tuple[slice, Tensor]]:
    """Yield the tokens of each document, and the mask added to its scores."""
    before, after = window
    for start, end in pairwise(_read_integers(bounds)):
        places = torch.arange(end - start, device=device)
        distance = places[:, None] - places
        hidden = distance < -after if after >= 0 else torch.zeros_like(distance, dtype=torch.bool)
        if before >= 0:
            hidden = hidden | (distance > before)
        if start < end:
            yield (
                slice(start, end),
                torch.zeros(hidden.shape, device=device).masked_fill(hidden, float("-inf")),
            )


def _select_document(x_NHE: Tensor, tokens: slice) -> Tensor:
    return x_NHE[tokens].transpose(0, 1)[None]


def _read_integers(x: Tensor) -> list[int]:
    """Read int32 values without a wait, as a kernel does: the device's memory is the host's."""
    return list((ctypes.c_int32 * x.numel()).from_address(x.data_ptr()))


def _get_window(is_causal: bool, left: int | None, right: int | None) -> tuple[int, int]:
    return -1 if left is None else left, 0 if is_causal or right is None else right


def _run_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **unused: Any,
) -> tuple[Tensor, ...]:
    assert dropout_p == 0.0
    assert q.dtype in (torch.float16, torch.bfloat16), "FlashAttention supports fp16 and bf16 only"
    assert q.shape[-1] % 8 == 0, "FlashAttention needs head_dim to be a multiple of 8"
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert cum_seq_q.dtype == cum_seq_k.dtype == torch.int32
    bounds = _read_integers(cum_seq_q)
    assert max(end - start for start, end in pairwise(bounds)) <= max_q == max_k
    window = _get_window(is_causal, window_size_left, window_size_right)
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[1], q.shape[0], device=q.device)
    for tokens, bias in _list_documents(cum_seq_q, window, q.device):
        parts = (_select_document(part, tokens) for part in (q, k, v))
        part_out, part_lse = _attend(*parts, bias, False, scale)
        out[tokens] = part_out[0].transpose(0, 1)
        lse[:, tokens] = part_lse[0]
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return out, lse, seed, seed[:0].clone(), q.new_empty(0)


def _run_varlen_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    assert d_out.dtype == q.dtype == out.dtype
    assert logsumexp.shape == (q.shape[1], q.shape[0])
    window = _get_window(is_causal, window_size_left, window_size_right)
    gradients = [torch.zeros_like(part) for part in (q, k, v)]
    for tokens, bias in _list_documents(cum_seq_q, window, q.device):
        d_out_part, q_part, k_part, v_part, out_part = (
            _select_document(part, tokens) for part in (d_out, q, k, v, out)
        )
        lse = logsumexp[None, :, tokens]
        found = _differentiate(
            d_out_part, q_part, k_part, v_part, bias, out_part, lse, False, scale
        )
        for gradient, part in zip(gradients, found, strict=True):
            gradient[tokens] = part[0].transpose(0, 1)
    return tuple(gradients)


def _run_rms_norm(
    x: Tensor, normalized_shape: list[int], weight_D: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    assert weight_D is None or weight_D.dtype == x.dtype
    assert len(normalized_shape) == 1
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed = wide * scale
    return (normed if weight_D is None else normed * weight_D).to(x.dtype), scale


def _run_rms_norm_backward(
    d_out: Tensor,
    x: Tensor,
    normalized_shape: list[int],
    scale: Tensor,
    weight_D: Tensor | None,
    output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None]:
    wide = d_out.to(scale.dtype)
    unit = x * scale
    d_unit = wide if weight_D is None else wide * weight_D
    d_x = (d_unit - unit * (d_unit * unit).mean(-1, keepdim=True)) * scale
    d_weight_D = (wide * unit).flatten(0, -2).sum(0)
    return (
        d_x.to(x.dtype) if output_mask[0] else None,
        d_weight_D.to(weight_D.dtype) if weight_D is not None and output_mask[1] else None,
    )


_ROWS_AT_ONCE = 64


def _run_wide_addmm(
    self: Tensor,
    mat1: Tensor,
    mat2: Tensor,
    out_dtype: torch.dtype,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: Tensor,
) -> Tensor:
    """Add a product of 16-bit operands to an fp32 sum.

    By rows, because CUDA's kernel allocates nothing and the memory of this one is counted.
    """
    assert mat1.dtype == mat2.dtype
    assert mat1.dtype in (torch.float16, torch.bfloat16)
    assert self.dtype == out.dtype == out_dtype == torch.float32
    wide = mat2.float()
    for rows in torch.arange(len(mat1)).split(_ROWS_AT_ONCE):
        part = slice(int(rows[0]), int(rows[-1]) + 1)
        product = (mat1[part].float() @ wide) * alpha
        out[part] = product if beta == 0 else self[part] * beta + product
    return out


def _run_wide_mm(self: Tensor, mat2: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Multiply 16-bit operands, and write the fp32 sums."""
    product = torch.zeros((self.shape[0], mat2.shape[1]), dtype=out_dtype, device=self.device)
    return _run_wide_addmm(product, self, mat2, out_dtype, out=product)


def _run_silu_backward(d_out: Tensor, x: Tensor) -> Tensor:
    """Differentiate silu as torch composes it on a device type without a kernel for it.

    Registered so that a rehearsal counts one result, as CUDA's kernel has.
    """
    gate = torch.sigmoid(x)
    return d_out * (gate * (1 + x * (1 - gate)))


def register() -> torch.library.Library:
    """Register the operators; they exist as long as the result."""
    library = torch.library.Library("aten", "IMPL")
    name = "_scaled_dot_product_{}_attention{}"
    library.impl(name.format("flash", ""), _run_flash, "CUDA")
    library.impl(name.format("flash", "_backward"), _run_flash_backward, "CUDA")
    library.impl(name.format("efficient", ""), _run_efficient, "CUDA")
    library.impl(name.format("efficient", "_backward"), _run_efficient_backward, "CUDA")
    library.impl("_flash_attention_forward", _run_varlen, "CUDA")
    library.impl("_flash_attention_backward", _run_varlen_backward, "CUDA")
    library.impl("addmm.dtype_out", _run_wide_addmm, "CUDA")
    library.impl("mm.dtype", _run_wide_mm, "CUDA")
    library.impl("_fused_rms_norm", _run_rms_norm, "CUDA")
    library.impl("_fused_rms_norm_backward", _run_rms_norm_backward, "CUDA")
    library.impl("silu_backward", _run_silu_backward, "CUDA")
    scaled_kernels.register(library)
    return library
