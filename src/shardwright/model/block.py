"""Decoder block: attention and feed-forward with norms and residual connections.

Legend: B sequences, T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.architecture import ModelShape
from shardwright.model.attention.attention import Attention
from shardwright.model.attention.latent_attention import LatentAttention
from shardwright.model.compiled_gradients import repair_compiled_gradients
from shardwright.model.dropout import Dropout, DropoutSite
from shardwright.model.forward_context import ForwardContext
from shardwright.model.mlp import FeedForward
from shardwright.model.moe import MixtureOfExperts
from shardwright.model.norms import LayerNorm, RMSNorm
from shardwright.model.pointwise.functions import FusedFunctions
from shardwright.model.routing import RouterStatistics

RecomputeRunner = Callable[..., Any]
"""(function, *arguments) -> result of the function, which the backward pass recomputes."""

BlockOffload = Callable[[nn.Module, ForwardContext], AbstractContextManager[None]]
"""(block, context) -> context manager that offloads what the block saves inside it."""

BlockOutput = tuple[Tensor, RouterStatistics | None]
"""Hidden states, and the router statistics of a sparse layer in training."""


def build_norm(shape: ModelShape, *, is_absent: bool = False) -> nn.Module:
    """Build a norm over the model's width, or the identity if the family has none here."""
    if is_absent:
        return nn.Identity()
    if shape.norm == "layer":
        return LayerNorm(shape.hidden_size, shape.norm_eps)
    return RMSNorm(shape.hidden_size, shape.norm_eps, shape.norm_offset)


class Block(nn.Module):
    """Attention and feed-forward with norms and residual connections.

    FSDP wraps `forward`. The computation is `compute`: recomputation calls it again, and
    `forward_with_recompute` around it is compiled.
    """

    fused: FusedFunctions | None = None

    def __init__(self, shape: ModelShape, index: int) -> None:
        super().__init__()
        names = shape.names
        self.layer_index = index
        self.has_parallel_residual = shape.parallel_residual
        self.residual_scale = shape.residual_scale
        self.dropout_rate = shape.residual_dropout
        self.pre_attention_norm = build_norm(shape, is_absent=names.pre_attention_norm is None)
        self.attention = (
            Attention(shape, index) if shape.latent is None else LatentAttention(shape, index)
        )
        self.post_attention_norm = build_norm(shape, is_absent=names.post_attention_norm is None)
        self.pre_mlp_norm = build_norm(shape, is_absent=names.pre_mlp_norm is None)
        self.mlp: MixtureOfExperts | FeedForward = (
            MixtureOfExperts(shape) if shape.layers[index].sparse else FeedForward(shape)
        )
        self.post_mlp_norm = build_norm(shape, is_absent=names.post_mlp_norm is None)
        self._recompute_runner: RecomputeRunner | None = None
        self.offload_block: BlockOffload | None = None
        self._forward_function: Callable[[Tensor, ForwardContext, Dropout | None], BlockOutput] = (
            self.forward_with_recompute
        )

    def forward(self, x_BTD: Tensor, context: ForwardContext) -> Tensor:
        # The layer's number is used here and not in the compiled computation, of which the
        # compiler would otherwise make one graph per number.
        dropout = (
            None if context.dropout is None else context.dropout.select_layer(self.layer_index)
        )
        if context.cache is not None:
            # Generation: nothing to recompute, and shapes change with every token, so compiling
            # does not pay.
            return self.compute(x_BTD, context, dropout)[0]
        offload = self.offload_block
        with nullcontext() if offload is None else offload(self, context):
            x_BTD, statistics = self._forward_function(x_BTD, context, dropout)
        if statistics is not None:
            assert context.routing is not None
            context.routing.statistics[self.layer_index] = statistics
        return x_BTD

    def set_recompute(self, run: RecomputeRunner | None) -> None:
        """Call `compute` through `run(function, *arguments)`; None calls it directly."""
        self._recompute_runner = run

    @property
    def is_recomputed(self) -> bool:
        """True if the backward pass computes parts of the block again."""
        return self._recompute_runner is not None

    @property
    def is_compiled(self) -> bool:
        """True if `compile_forward` has compiled the block."""
        return self._forward_function != self.forward_with_recompute

    def compile_forward(self, **options: Any) -> None:
        """Apply torch.compile to `forward_with_recompute`, with options of torch.compile."""
        repair_compiled_gradients()
        function = torch.compile(self.forward_with_recompute, **options)
        # Rates, scales and bounds stay constants where the sizes of rows change, and the limit of
        # padded rows where a run raises it: torch would make inputs of them, and cannot read one
        # input in several functions of autograd.
        settings: dict[str, Any] = {"specialize_float": True}
        if isinstance(self.mlp, MixtureOfExperts):
            # Operators read numbers of rows on the host. Unless this is allowed, torch breaks the
            # graph there instead of making the number a symbol.
            settings["capture_dynamic_output_shape_ops"] = True
        self._forward_function = torch._dynamo.config.patch(settings)(function)

    def forward_with_recompute(
        self, x_BTD: Tensor, context: ForwardContext, dropout: Dropout | None
    ) -> BlockOutput:
        """Compute the block, with activation recomputation if it is configured.

        Compilation includes recomputation, so the compiler knows what to keep. Outside compiled
        code, selective recomputation does not see the operations: it would keep nothing and run
        the block three times.
        """
        if self._recompute_runner is None:
            return self.compute(x_BTD, context, dropout)
        output: BlockOutput = self._recompute_runner(self.compute, x_BTD, context, dropout)
        return output

    def compute(
        self, x_BTD: Tensor, context: ForwardContext, dropout: Dropout | None
    ) -> BlockOutput:
        """Compute the block; `dropout` has this layer's masks."""
        local_dropout = (
            None if dropout is None else dropout.select_local_tokens(context.tensor_parallel)
        )
        attention_out = self.attention(self.pre_attention_norm(x_BTD), context, dropout)
        attention_out = self.post_attention_norm(attention_out)
        attention_out = self._apply_dropout(attention_out, DropoutSite.ATTENTION_OUT, local_dropout)
        if self.has_parallel_residual:
            mlp_out, statistics = self._apply_mlp(self.pre_mlp_norm(x_BTD), context, dropout)
            mlp_out = self._apply_dropout(mlp_out, DropoutSite.FEED_FORWARD, local_dropout)
            return mlp_out + attention_out + x_BTD, statistics
        x_BTD, normed_BTD = self._add_and_normalise(x_BTD, attention_out)
        del attention_out  # freed before the feed-forward allocates
        mlp_out, statistics = self._apply_mlp(normed_BTD, context, dropout)
        mlp_out = self.post_mlp_norm(mlp_out)
        mlp_out = self._apply_dropout(mlp_out, DropoutSite.FEED_FORWARD, local_dropout)
        return self._add_residual(x_BTD, mlp_out), statistics

    def _apply_mlp(
        self, x_BTD: Tensor, context: ForwardContext, dropout: Dropout | None
    ) -> BlockOutput:
        if isinstance(self.mlp, MixtureOfExperts):
            output: BlockOutput = self.mlp(x_BTD, context, dropout)
            return output
        return self.mlp(x_BTD, context.tensor_parallel, dropout), None

    def _add_and_normalise(self, x_BTD: Tensor, update_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Add the residual connection of attention, and normalise the sum for the feed-forward."""
        norm = self.pre_mlp_norm
        is_fused = self.fused is not None and not torch.compiler.is_compiling()
        if is_fused and isinstance(norm, RMSNorm | LayerNorm):
            return norm.add_and_normalise(x_BTD, update_BTD, self.residual_scale)
        x_BTD = self._add_residual(x_BTD, update_BTD)
        return x_BTD, norm(x_BTD)

    def _add_residual(self, x_BTD: Tensor, update_BTD: Tensor) -> Tensor:
        if self.residual_scale == 1.0:
            return x_BTD + update_BTD
        return torch.add(x_BTD, update_BTD, alpha=self.residual_scale)

    def _apply_dropout(self, x_BTD: Tensor, site: DropoutSite, dropout: Dropout | None) -> Tensor:
        if dropout is None or self.dropout_rate == 0.0:
            return x_BTD
        return dropout.drop(x_BTD, self.dropout_rate, site)
