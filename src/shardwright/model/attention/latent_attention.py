"""Multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434, section 2.1).

Legend: B sequences, T query tokens, S key tokens, D hidden, H heads, E width of a query head
(unrotated and rotated part), R rotated part, V width of a value head, L width of the latent of
keys and values.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.architecture import ModelShape
from shardwright.architecture.latent_shape import LATENT_NORM_EPS
from shardwright.model.attention.attention import Attention
from shardwright.model.attention.rope import rotate
from shardwright.model.dropout import Dropout
from shardwright.model.forward_context import ForwardContext
from shardwright.model.norms import RMSNorm
from shardwright.model.products.linear import Linear
from shardwright.model.result_names import name_results


class LatentAttention(Attention):
    """Attention with keys and values from one latent per token; the cache stores latents."""

    def add_projections(self, shape: ModelShape) -> None:
        """Add projections and norms, in the order of the weight files."""
        latent = shape.latent
        width = shape.hidden_size
        bias = shape.attention_out_bias
        assert latent is not None
        self.latent = latent
        if latent.query_rank is None:
            self.query = Linear(width, shape.query_width, bias=False)
        else:
            self.query_latent = Linear(width, latent.query_rank, bias=bias)
            self.query_latent_norm = RMSNorm(latent.query_rank, LATENT_NORM_EPS)
            self.query_from_latent = Linear(latent.query_rank, shape.query_width, bias=False)
        rank = latent.key_value_rank
        self.key_value_latent = Linear(width, rank + latent.rope_dim, bias=bias)
        self.key_value_latent_norm = RMSNorm(rank, LATENT_NORM_EPS)
        heads_width = shape.num_heads * (latent.nope_dim + latent.value_dim)
        self.key_value = Linear(rank, heads_width, bias=False)
        self.attention_out = Linear(shape.value_width, width, bias=bias)

    def forward(
        self, x_BTD: Tensor, context: ForwardContext, dropout: Dropout | None = None
    ) -> Tensor:
        latent = self.latent
        tensor = context.tensor_parallel
        if tensor is not None:
            x_BTD = tensor.prepare_input(x_BTD)
        with name_results("projections"):
            queries = self._project_queries(x_BTD, dropout).unflatten(-1, (-1, self.head_dim))
            compressed = self.key_value_latent(x_BTD, None, dropout)
        q_nope, q_rope = queries.split([latent.nope_dim, latent.rope_dim], dim=-1)
        latent_BTL, k_rope_BTR = compressed.split([latent.key_value_rank, latent.rope_dim], dim=-1)
        latent_BTL = self.key_value_latent_norm(latent_BTL)
        q_rope = self._rotate(q_rope, context)
        k_rope_BT1R = self._rotate(k_rope_BTR.unsqueeze(2), context)
        latent_B1SL = latent_BTL.unsqueeze(1)
        k_rope_B1SR = k_rope_BT1R.transpose(1, 2)
        if context.cache is not None:
            latent_B1SL, k_rope_B1SR = context.cache.extend(
                self.layer_index, latent_B1SL, k_rope_B1SR
            )
        q_BHTE = torch.cat([q_nope, q_rope], dim=-1).transpose(1, 2)
        k_BHSE, v_BHSV = self._expand_latent(latent_B1SL.squeeze(1), k_rope_B1SR, dropout)
        # The fused kernels need values as wide as keys; the outputs of zero features are zero.
        padding = q_BHTE.shape[-1] - v_BHSV.shape[-1]
        if padding > 0:
            v_BHSV = F.pad(v_BHSV, (0, padding))
        with name_results("attention"):
            out_BHTV = self._attend(q_BHTE, k_BHSE, v_BHSV, context, dropout)
        return self._project_output(out_BHTV[..., : latent.value_dim], tensor, dropout)

    def _project_queries(self, x_BTD: Tensor, dropout: Dropout | None) -> Tensor:
        if self.latent.query_rank is None:
            queries: Tensor = self.query(x_BTD, None, dropout)
            return queries
        latent = self.query_latent_norm(self.query_latent(x_BTD, None, dropout))
        queries = self.query_from_latent(latent, None, dropout)
        return queries

    def _rotate(self, x_BTHR: Tensor, context: ForwardContext) -> Tensor:
        if self.layer.rope is None:
            return x_BTHR
        if self.latent.interleaved:
            # Pairs (0, 1), (2, 3)... become (i, i + R / 2). Queries and keys are permuted
            # alike, so their products stay the same.
            x_BTHR = x_BTHR.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        cos, sin = context.rope_tables[self.layer.rope]
        return rotate(x_BTHR, cos, sin, self.fused)

    def _expand_latent(
        self, latent_BSL: Tensor, k_rope_B1SR: Tensor, dropout: Dropout | None
    ) -> tuple[Tensor, Tensor]:
        """Compute keys `[B, H, S, E]` and values `[B, H, S, V]` of all heads."""
        latent = self.latent
        with name_results("projections"):
            key_value = self.key_value(latent_BSL, None, dropout)
        key_value = key_value.unflatten(-1, (-1, latent.nope_dim + latent.value_dim))
        k_nope, v_BHSV = key_value.transpose(1, 2).split(
            [latent.nope_dim, latent.value_dim], dim=-1
        )
        k_rope_BHSR = k_rope_B1SR.expand(-1, k_nope.shape[1], -1, -1)
        return torch.cat([k_nope, k_rope_BHSR], dim=-1), v_BHSV
