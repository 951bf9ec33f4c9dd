"""One block of the decoder: attention and feed-forward with their norms and residuals.

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
"""(function, *arguments) -> what the function returns."""


def build_norm(shape: ModelShape) -> nn.Module:
    """A norm over the model's width."""
    if shape.norm == "layer":
        return LayerNorm(shape.hidden_size, shape.norm_eps)
    return RMSNorm(shape.hidden_size, shape.norm_eps, shape.norm_offset)


class Block(nn.Module):
    """Attention and feed-forward with their norms and residuals.

    `forward` is what FSDP wraps; the computation itself is `inner`, which recomputation calls again and compilation replaces.
    """

    def __init__(self, shape: ModelShape, index: int) -> None:
        super().__init__()
        self.index, self.names = index, shape.names
        self.parallel, self.residual_scale = shape.parallel_residual, shape.residual_scale
        self.dropout = shape.residual_dropout
        names = shape.names
        self._add_norm(names.pre_attention_norm, shape)
        self.add_module(names.attention, Attention(shape, index) if shape.latent is None else LatentAttention(shape, index))
        self._add_norm(names.post_attention_norm, shape)
        self._add_norm(names.pre_mlp_norm, shape)
        self.sparse = shape.layers[index].sparse
        self.add_module(names.mlp, MixtureOfExperts(shape, index) if self.sparse else FeedForward(shape))
        self._add_norm(names.post_mlp_norm, shape)
        self._recompute: Recompute | None = None
        self._run: Callable[[Tensor, ForwardContext, Dropout | None], Tensor] = self.run

    def forward(self, x_BTD: Tensor, context: ForwardContext) -> Tensor:
        # The layer's number enters here and not in the computation, which a compiler would otherwise specialise to it.
        dropout = None if context.dropout is None else context.dropout.of_layer(self.index)
        if context.cache is not None:
            # Shapes change with every token: nothing to recompute, nothing worth compiling.
            return self.inner(x_BTD, context, dropout)
        return self._run(x_BTD, context, dropout)

    def run(self, x_BTD: Tensor, context: ForwardContext, dropout: Dropout | None) -> Tensor:
        """The block's function, recomputed in the backward pass where that was asked for.

        What is compiled is this, recomputation included: the compiler then knows what to keep. Around compiled code, selective
        recomputation cannot see the operations: it would keep nothing and run the block three times.
        """
        if self._recompute is None:
            return self.inner(x_BTD, context, dropout)
        return self._recompute(self.inner, x_BTD, context, dropout)

    def inner(self, x_BTD: Tensor, context: ForwardContext, dropout: Dropout | None) -> Tensor:
        """The block's function; `dropout` holds this layer's masks."""
        names = self.names
        normed = self._norm(names.pre_attention_norm, x_BTD)
        attended = self._norm(names.post_attention_norm, getattr(self, names.attention)(normed, context, dropout))
        own = None if dropout is None else dropout.share(context.tensor)
        attended = self._drop(attended, Site.ATTENTION_OUT, own)
        if self.parallel:
            fed = self._feed(self._norm(names.pre_mlp_norm, x_BTD), context, dropout)
            return self._drop(fed, Site.FEED_FORWARD, own) + attended + x_BTD
        x_BTD = self._add(x_BTD, attended)
        fed = self._feed(self._norm(names.pre_mlp_norm, x_BTD), context, dropout)
        fed = self._drop(self._norm(names.post_mlp_norm, fed), Site.FEED_FORWARD, own)
        return self._add(x_BTD, fed)

    def _feed(self, x_BTD: Tensor, context: ForwardContext, dropout: Dropout | None) -> Tensor:
        module = getattr(self, self.names.mlp)
        fed: Tensor = module(x_BTD, context, dropout) if self.sparse else module(x_BTD, context.tensor, dropout)
        return fed

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
