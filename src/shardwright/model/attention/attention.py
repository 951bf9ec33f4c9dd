"""Causal self-attention of one block, by fused kernels or eagerly.

Legend: B sequences, T query tokens, S key tokens, D hidden, H query heads, K key/value heads, E
head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.architecture import ModelShape
from shardwright.model.attention.fused_attention import (
    AttentionSettings,
    attend_fused,
    has_grouped_heads,
)
from shardwright.model.attention.rope import rotate
from shardwright.model.dropout import Dropout
from shardwright.model.forward_context import ForwardContext
from shardwright.model.norms import RMSNorm
from shardwright.model.parallel_hooks import NO_PARALLEL_HOOKS, ParallelHooks
from shardwright.model.pointwise.functions import FusedFunctions
from shardwright.model.products.linear import Linear, multiply_gathered
from shardwright.model.result_names import name_results
from shardwright.model.tensor_parallel_hooks import TensorParallelHooks


class Attention(nn.Module):
    """Projections, optional q/k norms, rotary embedding, attention and output projection."""

    fused: FusedFunctions | None = None
    parallel_hooks: ParallelHooks = NO_PARALLEL_HOOKS

    def __init__(self, shape: ModelShape, index: int) -> None:
        super().__init__()
        self.layer_index = index
        self.layer = shape.layers[index]
        self.head_dim = shape.head_dim
        self.qk_norm = shape.qk_norm
        self.qkv_layout = shape.qkv_layout
        self.num_heads = shape.num_heads
        self.num_kv_heads = shape.num_kv_heads
        self.soft_cap = shape.attention_soft_cap
        self.dropout_rate = shape.attention_dropout
        self.has_fused_qkv = shape.names.qkv is not None
        self.sinks = nn.Parameter(torch.empty(shape.num_heads)) if shape.attention_sinks else None
        self.add_projections(shape)

    def add_projections(self, shape: ModelShape) -> None:
        """Add projections and norms, in the order of the weight files."""
        width = shape.hidden_size
        q_width = shape.query_width
        kv_width = shape.kv_width
        linear = partial(Linear, transposed=shape.matrix_layout == "in_out")
        if self.has_fused_qkv:
            self.qkv = linear(width, q_width + 2 * kv_width, bias=shape.qkv_bias)
        else:
            self.query = linear(width, q_width, bias=shape.qkv_bias)
            self.key = linear(width, kv_width, bias=shape.qkv_bias)
            self.value = linear(width, kv_width, bias=shape.qkv_bias)
        self.attention_out = linear(q_width, width, bias=shape.attention_out_bias)
        if shape.qk_norm is not None:
            if shape.qk_norm == "head":
                q_width = kv_width = shape.head_dim
            self.query_norm = RMSNorm(q_width, shape.norm_eps, shape.norm_offset)
            self.key_norm = RMSNorm(kv_width, shape.norm_eps, shape.norm_offset)

    def forward(
        self, x_BTD: Tensor, context: ForwardContext, dropout: Dropout | None = None
    ) -> Tensor:
        tensor = context.tensor_parallel
        q_BTHE, k_BTKE, v_BTKE = self._project(x_BTD, tensor, dropout)
        if self.layer.rope is not None:
            cos, sin = context.rope_tables[self.layer.rope]
            q_BTHE = rotate(q_BTHE, cos, sin, self.fused)
            k_BTKE = rotate(k_BTKE, cos, sin, self.fused)
        q_BHTE = q_BTHE.transpose(1, 2)
        k_BKSE = k_BTKE.transpose(1, 2)
        v_BKSE = v_BTKE.transpose(1, 2)
        if context.cache is not None:
            k_BKSE, v_BKSE = context.cache.extend(self.layer_index, k_BKSE, v_BKSE)
        with name_results("attention"):
            out_BHTE = self._attend(q_BHTE, k_BKSE, v_BKSE, context, dropout)
        return self._project_output(out_BHTE, tensor, dropout)

    def _project_output(
        self, out_BHTE: Tensor, tensor: TensorParallelHooks | None, dropout: Dropout | None
    ) -> Tensor:
        with name_results("attention_out"):
            out: Tensor = self.attention_out(out_BHTE.transpose(1, 2).flatten(2), tensor, dropout)
        return out

    def _project(
        self, x_BTD: Tensor, tensor_parallel: TensorParallelHooks | None, dropout: Dropout | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute queries, keys and values of this rank's heads, for all tokens."""
        head_dim = self.head_dim
        if not self.has_fused_qkv:
            layers = [self.query, self.key, self.value]
            q, k, v = multiply_gathered(layers, x_BTD, tensor_parallel, dropout, "projections")
        else:
            (fused,) = multiply_gathered([self.qkv], x_BTD, tensor_parallel, dropout, "projections")
            if self.qkv_layout == "heads":
                q, k, v = fused.unflatten(-1, (-1, 3 * head_dim)).chunk(3, dim=-1)
                return q, k, v
            degree = 1 if tensor_parallel is None else tensor_parallel.degree
            # With fewer key-value heads than ranks, each rank has one.
            q_width, kv_width = (
                max(1, heads // degree) * head_dim for heads in (self.num_heads, self.num_kv_heads)
            )
            q, k, v = fused.split([q_width, kv_width, kv_width], dim=-1)
        if self.qk_norm == "full":
            q = self.query_norm(q, self._build_mean_square(tensor_parallel, self.num_heads))
            k = self.key_norm(k, self._build_mean_square(tensor_parallel, self.num_kv_heads))
        q, k, v = (part.unflatten(-1, (-1, head_dim)) for part in (q, k, v))
        if self.qk_norm == "head":
            q = self.query_norm(q)
            k = self.key_norm(k)
        return q, k, v

    def _build_mean_square(
        self, tensor_parallel: TensorParallelHooks | None, num_heads: int
    ) -> Callable[[Tensor], Tensor] | None:
        """Return a function for the mean square over all heads, on all ranks."""
        if tensor_parallel is None:
            return None
        # Several ranks may have the same key-value head; each of them adds its squares.
        features = max(num_heads, tensor_parallel.degree) * self.head_dim
        return lambda squares: tensor_parallel.sum_over_ranks(squares) / features

    def _attend(
        self,
        q_BHTE: Tensor,
        k_BKSE: Tensor,
        v_BKSE: Tensor,
        context: ForwardContext,
        dropout: Dropout | None,
    ) -> Tensor:
        if self.parallel_hooks.context is not None:
            return self.parallel_hooks.context.attend(
                self._build_settings(), q_BHTE, k_BKSE, v_BKSE, context, dropout
            )
        layer_kernel = context.kernels[self.layer.window]
        if layer_kernel.kernel == "explicit":
            return self._attend_explicitly(
                q_BHTE,
                k_BKSE,
                v_BKSE,
                layer_kernel.mask,
                dropout if self.dropout_rate > 0.0 else None,
                context.tensor_parallel,
            )
        if layer_kernel.kernel != "sdpa":
            return attend_fused(q_BHTE, k_BKSE, v_BKSE, layer_kernel, self._build_settings())
        mask = layer_kernel.mask
        # Of the CUDA kernels only flash supports grouped heads, in 16 bits and without a mask;
        # otherwise eager attention would store all scores.
        group_size = q_BHTE.shape[1] // k_BKSE.shape[1]
        is_grouped = has_grouped_heads(q_BHTE, k_BKSE)
        needs_equal_heads = mask is not None or q_BHTE.dtype == torch.float32
        if is_grouped and needs_equal_heads and q_BHTE.is_cuda:
            k_BKSE, v_BKSE = (
                part.repeat_interleave(group_size, dim=1) for part in (k_BKSE, v_BKSE)
            )
            is_grouped = False
        # Only with a cache may a single query see several keys. Compiled code has no cache, and the
        # number of queries may be symbolic there, which no kernel takes for its switch.
        is_causal = mask is None and (context.cache is None or q_BHTE.shape[2] > 1)
        return F.scaled_dot_product_attention(
            q_BHTE,
            k_BKSE,
            v_BKSE,
            mask,
            is_causal=is_causal,
            scale=self.layer.attention_scale,
            enable_gqa=is_grouped,
        )

    def _build_settings(self) -> AttentionSettings:
        layer = self.layer
        return AttentionSettings(
            layer.attention_scale,
            layer.window,
            self.soft_cap,
            self.dropout_rate,
            self.sinks,
        )

    def _attend_explicitly(
        self,
        q_BHTE: Tensor,
        k_BKSE: Tensor,
        v_BKSE: Tensor,
        mask: Tensor | None,
        dropout: Dropout | None,
        tensor_parallel: TensorParallelHooks | None,
    ) -> Tensor:
        """Compute eager attention; the softmax accumulates in fp32 or fp64."""
        num_heads = q_BHTE.shape[1]
        k_BHSE, v_BHSE = (
            part.repeat_interleave(num_heads // part.shape[1], dim=1) for part in (k_BKSE, v_BKSE)
        )
        scores_BHTS = (q_BHTE * self.layer.attention_scale) @ k_BHSE.transpose(-1, -2)
        if self.soft_cap is not None:
            scores_BHTS = torch.tanh(scores_BHTS / self.soft_cap) * self.soft_cap
        if mask is None:
            num_cached = k_BHSE.shape[2] - q_BHTE.shape[2]
            visible = torch.ones(
                scores_BHTS.shape[-2:], dtype=torch.bool, device=scores_BHTS.device
            ).tril(num_cached)
            scores_BHTS = scores_BHTS.masked_fill(~visible, float("-inf"))
        else:
            scores_BHTS = scores_BHTS + mask
        accumulate = torch.float64 if scores_BHTS.dtype == torch.float64 else torch.float32
        weights_BHTS = self._softmax(scores_BHTS, accumulate).to(v_BHSE.dtype)
        if dropout is not None:
            first_head = 0 if tensor_parallel is None else tensor_parallel.rank * num_heads
            weights_BHTS = dropout.drop_attention(
                weights_BHTS, self.dropout_rate, first_head=first_head
            )
        return weights_BHTS @ v_BHSE

    def _softmax(self, scores_BHTS: Tensor, dtype: torch.dtype) -> Tensor:
        """Compute the softmax over keys; a sink adds one logit per head to the denominator."""
        if self.sinks is None:
            return torch.softmax(scores_BHTS, dim=-1, dtype=dtype)
        sinks_H = self.sinks.to(scores_BHTS.dtype)
        sinks_BHT1 = sinks_H[:, None, None].expand(*scores_BHTS.shape[:-1], 1)
        return torch.softmax(torch.cat([scores_BHTS, sinks_BHT1], dim=-1), dim=-1, dtype=dtype)[
            ..., :-1
        ]


_TILES = "tiles of shared rows: cuDNN, flash or memory-efficient attention, or eager attention"


def describe_attention(context: ForwardContext) -> str:
    """Describe in one line the kernels of a forward pass and the reasons for them."""
    if not context.kernels:
        return _TILES
    reasons_by_kernel: dict[str, list[str]] = {}
    for window, (kernel, *_) in context.kernels.items():
        is_tiled = context.row_chunks is not None and kernel in ("sdpa", "explicit")
        reasons = reasons_by_kernel.setdefault(_TILES if is_tiled else kernel, [])
        if context.kernel_reasons[window] not in reasons:
            reasons.append(context.kernel_reasons[window])
    return "; ".join(
        f"{kernel} ({' / '.join(reasons)})" for kernel, reasons in reasons_by_kernel.items()
    )
