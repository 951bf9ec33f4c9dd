"""Feed-forward of a block: two matrix products with an activation, or three with a gate.

Legend: B sequences, T tokens, D hidden, F feed-forward width.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.architecture import Activation, ModelShape
from shardwright.model.dropout import Dropout
from shardwright.model.pointwise.formulas import ACTIVATION_BACKWARD, ACTIVATION_FUNCTIONS
from shardwright.model.pointwise.functions import FusedFunctions
from shardwright.model.products.linear import Linear, multiply_gathered
from shardwright.model.result_names import name_results
from shardwright.model.tensor_parallel_hooks import TensorParallelHooks


def apply_gate(
    activation: Activation, gate_BTF: Tensor, up_BTF: Tensor, fused: FusedFunctions | None = None
) -> Tensor:
    """Compute activation(gate) * up."""
    if torch.compiler.is_compiling() or activation not in ACTIVATION_BACKWARD:
        return ACTIVATION_FUNCTIONS[activation](gate_BTF) * up_BTF
    if fused is not None:
        return fused.apply_gate(activation, gate_BTF, up_BTF)
    gated: Tensor = _GatedActivation.apply(gate_BTF, up_BTF, activation)
    return gated


class _GatedActivation(torch.autograd.Function):
    """activation(gate) * up that saves the two projections and recomputes the activation.

    This needs one tensor of feed-forward width less per layer.
    """

    @staticmethod
    def forward(ctx: Any, gate_BTF: Tensor, up_BTF: Tensor, activation: Activation) -> Tensor:
        ctx.activation = activation
        ctx.save_for_backward(gate_BTF, up_BTF)
        return ACTIVATION_FUNCTIONS[activation](gate_BTF).mul_(up_BTF)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        gate_BTF, up_BTF = ctx.saved_tensors
        up_gradient = ACTIVATION_FUNCTIONS[ctx.activation](gate_BTF).mul_(gradients[0])
        return (
            ACTIVATION_BACKWARD[ctx.activation](gradients[0] * up_BTF, gate_BTF),
            up_gradient,
            None,
        )


def apply_clamped_gate(
    gate_BTF: Tensor,
    up_BTF: Tensor,
    limit: float,
    gain: float,
    fused: FusedFunctions | None = None,
) -> Tensor:
    """Compute min(g, limit) * sigmoid(gain * min(g, limit)) * (clamp(u, -limit, limit) + 1).

    Source: gpt-oss.
    """
    if torch.compiler.is_compiling():
        gate_BTF, share_BTF, factor_BTF = _clamp_gate(gate_BTF, up_BTF, limit, gain)
        return gate_BTF * share_BTF * factor_BTF
    if fused is not None:
        return fused.apply_clamped_gate(gate_BTF, up_BTF, limit, gain)
    gated: Tensor = _ClampedGate.apply(gate_BTF, up_BTF, limit, gain)
    return gated


def _clamp_gate(
    gate_BTF: Tensor, up_BTF: Tensor, limit: float, gain: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the clamped gate, the sigmoid of its multiple, and the clamped factor plus one."""
    gate_BTF = gate_BTF.clamp(max=limit)
    return gate_BTF, torch.sigmoid(gate_BTF * gain), up_BTF.clamp(-limit, limit) + 1


class _ClampedGate(torch.autograd.Function):
    """`apply_clamped_gate` that saves the two projections and recomputes the rest.

    Autograd would save four more tensors of feed-forward width per layer.
    """

    @staticmethod
    def forward(ctx: Any, gate_BTF: Tensor, up_BTF: Tensor, limit: float, gain: float) -> Tensor:
        ctx.limit = limit
        ctx.gain = gain
        ctx.save_for_backward(gate_BTF, up_BTF)
        gate_BTF, share_BTF, factor_BTF = _clamp_gate(gate_BTF, up_BTF, limit, gain)
        return share_BTF.mul_(gate_BTF).mul_(factor_BTF)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        gate_BTF, up_BTF = ctx.saved_tensors
        clamped_BTF, share_BTF, factor_BTF = _clamp_gate(gate_BTF, up_BTF, ctx.limit, ctx.gain)
        activation_gradient_BTF = factor_BTF.mul_(gradients[0])
        up_gradient_BTF = gradients[0] * (clamped_BTF * share_BTF)
        up_gradient_BTF.masked_fill_(up_BTF.abs() > ctx.limit, 0.0)
        share_gradient_BTF = clamped_BTF.mul_(activation_gradient_BTF)
        gate_gradient_BTF = torch.ops.aten.sigmoid_backward(share_gradient_BTF, share_BTF)
        gate_gradient_BTF.mul_(ctx.gain).add_(share_BTF.mul_(activation_gradient_BTF))
        gate_gradient_BTF.masked_fill_(gate_BTF > ctx.limit, 0.0)
        return gate_gradient_BTF, up_gradient_BTF, None, None


class FeedForward(nn.Module):
    """down(activation(gate x) * up x), or down(activation(up x)) without a gate.

    If `intermediate_size` is None, the model's is used.
    """

    fused: FusedFunctions | None = None

    def __init__(self, shape: ModelShape, intermediate_size: int | None = None) -> None:
        super().__init__()
        self.activation = shape.activation
        width = shape.hidden_size
        inner = shape.intermediate_size if intermediate_size is None else intermediate_size
        linear = partial(Linear, bias=shape.mlp_bias, transposed=shape.matrix_layout == "in_out")
        self.is_fused = shape.names.gate_up is not None
        self.is_gated = shape.is_gated
        if self.is_fused:
            self.gate_up = linear(width, 2 * inner)
        else:
            if self.is_gated:
                self.gate = linear(width, inner)
            self.up = linear(width, inner)
        self.down = linear(inner, width)

    def forward(
        self,
        x_BTD: Tensor,
        tensor_parallel: TensorParallelHooks | None = None,
        dropout: Dropout | None = None,
    ) -> Tensor:
        layers = [self.gate_up] if self.is_fused else [self.up]
        if self.is_gated and not self.is_fused:
            layers.insert(0, self.gate)
        products = multiply_gathered(layers, x_BTD, tensor_parallel, dropout, "gate_up")
        if self.is_fused:
            products = list(products[0].chunk(2, dim=-1))
        up_BTF = products[-1]
        gate_BTF = products[0] if len(products) == 2 else None
        if gate_BTF is None:
            inner_BTF = ACTIVATION_FUNCTIONS[self.activation](up_BTF)
        else:
            inner_BTF = apply_gate(self.activation, gate_BTF, up_BTF, self.fused)
        with name_results("down"):
            out_BTD: Tensor = self.down(inner_BTF, tensor_parallel, dropout)
        return out_BTD
