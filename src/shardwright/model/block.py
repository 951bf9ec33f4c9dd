"""Decoder block: attention and feed-forward with norms and residual connections.

Legend: B sequences, T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from shardwright.architecture import ModelShape
from shardwright.model.attention import Attention
from shardwright.model.context import ForwardContext
from shardwright.model.dropout import Dropout, Site
from shardwright.model.latent import LatentAttention
from shardwright.model.mlp import FeedForward
from shardwright.model.moe import MixtureOfExperts
from shardwright.model.norms import LayerNorm, RMSNorm

Recompute = Callable[..., Tensor]
"""(function, *arguments) -> result of the function, which the backward pass recomputes."""


def build_norm(shape: ModelShape) -> nn.Module:
    """Build a norm over the model's width."""
    if shape.norm == "layer":
        return LayerNorm(shape.hidden_size, shape.norm_eps)
    return RMSNorm(shape.hidden_size, shape.norm_eps, shape.norm_offset)


class Block(nn.Module):
    """Attention and feed-forward with norms and residual connections.

    FSDP wraps `forward`. The computation is `inner`: recomputation calls it again, and `run`
    around it is compiled.
    """

    def __init__(self, shape: ModelShape, index: int) -> None:
        super().__init__()
        names = shape.names
        self.index = index
        self.names = names
        self.parallel = shape.parallel_residual
        self.residual_scale = shape.residual_scale
        self.dropout = shape.residual_dropout
        self._add_norm(names.pre_attention_norm, shape)
        self.add_module(
            names.attention,
            Attention(shape, index) if shape.latent is None else LatentAttention(shape, index),
        )
        self._add_norm(names.post_attention_norm, shape)
        self._add_norm(names.pre_mlp_norm, shape)
        self.sparse = shape.layers[index].sparse
        self.add_module(
            names.mlp, MixtureOfExperts(shape, index) if self.sparse else FeedForward(shape)
        )
        self._add_norm(names.post_mlp_norm, shape)
        self._recompute: Recompute | None = None
        self._run: Callable[[Tensor, ForwardContext, Dropout | None], Tensor] = self.run

    def forward(self, x_BTD: Tensor, context: ForwardContext) -> Tensor:
        # The layer's number is used here and not in the compiled computation, which the
        # compiler would otherwise specialise to each number.
        dropout = None if context.dropout is None else context.dropout.of_layer(self.index)
        if context.cache is not None:
            # Generation: nothing to recompute, and shapes change with every token, so compiling
            # does not pay.
            return self.inner(x_BTD, context, dropout)
        return self._run(x_BTD, context, dropout)

    def run(self, x_BTD: Tensor, context: ForwardContext, dropout: Dropout | None) -> Tensor:
        """Compute the block, with activation recomputation if it is configured.

        Compilation includes recomputation, so the compiler knows what to keep. Outside compiled
        code, selective recomputation does not see the operations: it would keep nothing and run
        the block three times.
        """
        if self._recompute is None:
            return self.inner(x_BTD, context, dropout)
        return self._recompute(self.inner, x_BTD, context, dropout)

    def inner(self, x_BTD: Tensor, context: ForwardContext, dropout: Dropout | None) -> Tensor:
        """Compute the block; `dropout` has this layer's masks."""
        names = self.names
        normed = self._norm(names.pre_attention_norm, x_BTD)
        attention_out = self._norm(
            names.post_attention_norm, getattr(self, names.attention)(normed, context, dropout)
        )
        local_dropout = None if dropout is None else dropout.share(context.tensor)
        attention_out = self._drop(attention_out, Site.ATTENTION_OUT, local_dropout)
        if self.parallel:
            mlp_out = self._feed(self._norm(names.pre_mlp_norm, x_BTD), context, dropout)
            return self._drop(mlp_out, Site.FEED_FORWARD, local_dropout) + attention_out + x_BTD
        x_BTD = self._add(x_BTD, attention_out)
        mlp_out = self._feed(self._norm(names.pre_mlp_norm, x_BTD), context, dropout)
        mlp_out = self._drop(
            self._norm(names.post_mlp_norm, mlp_out), Site.FEED_FORWARD, local_dropout
        )
        return self._add(x_BTD, mlp_out)

    def _feed(self, x_BTD: Tensor, context: ForwardContext, dropout: Dropout | None) -> Tensor:
        module = getattr(self, self.names.mlp)
        out_BTD: Tensor = (
            module(x_BTD, context, dropout)
            if self.sparse
            else module(x_BTD, context.tensor, dropout)
        )
        return out_BTD

    def _add_norm(self, name: str | None, shape: ModelShape) -> None:
        if name is not None:
            self.add_module(name, build_norm(shape))

    def _norm(self, name: str | None, x_BTD: Tensor) -> Tensor:
        return x_BTD if name is None else getattr(self, name)(x_BTD)

    def _add(self, x_BTD: Tensor, update_BTD: Tensor) -> Tensor:
        if self.residual_scale == 1.0:
            return x_BTD + update_BTD
        return torch.add(x_BTD, update_BTD, alpha=self.residual_scale)

    def _drop(self, x_BTD: Tensor, site: Site, dropout: Dropout | None) -> Tensor:
        if dropout is None or self.dropout == 0.0:
            return x_BTD
        return dropout.drop(x_BTD, self.dropout, site)
