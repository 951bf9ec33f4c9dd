"""Autograd functions of the fused operators; each saves what the separate form saves.

Legend: D features, F feed-forward width, H heads, E head_dim, R rotated features; dots are tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.model.pointwise import operators


def normalise_rms(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Compute x / sqrt(mean(x^2) + eps) * weight."""
    normed: Tensor = _RMSNorm.apply(x, weight_D, eps)
    return normed


def add_normalise_rms(
    x: Tensor, update: Tensor, weight_D: Tensor, eps: float, update_scale: float
) -> tuple[Tensor, Tensor]:
    """Compute x + update_scale x update, and its RMS norm."""
    total, normed = _AddRMSNorm.apply(x, update, weight_D, eps, update_scale)
    return total, normed


def add_normalise_layer(
    x: Tensor, update: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float, update_scale: float
) -> tuple[Tensor, Tensor]:
    """Compute x + update_scale x update, and its layer norm."""
    total, normed = _AddLayerNorm.apply(x, update, weight_D, bias_D, eps, update_scale)
    return total, normed


def apply_gate(activation: str, gate: Tensor, up: Tensor) -> Tensor:
    """Compute activation(gate) * up."""
    gated: Tensor = _Gate.apply(gate, up, activation)
    return gated


def apply_clamped_gate(gate: Tensor, up: Tensor, limit: float, gain: float) -> Tensor:
    """Compute min(g, limit) * sigmoid(gain * min(g, limit)) * (clamp(u, -limit, limit) + 1)."""
    gated: Tensor = _ClampedGate.apply(gate, up, limit, gain)
    return gated


def rotate(x_BTHE: Tensor, cos_BTR: Tensor, sin_BTR: Tensor) -> Tensor:
    """Rotate each feature pair (i, i + R / 2) of the first R features; the others stay."""
    rotated: Tensor = _Rotation.apply(x_BTHE, cos_BTR, sin_BTR)
    return rotated


class _RMSNorm(torch.autograd.Function):
    """Saves the input and one number per token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        normed, scale = operators.rms_norm(x, weight_D, eps)
        ctx.save_for_backward(x, scale, weight_D)
        result: Tensor = normed
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_gradient, *weight_gradients = operators.rms_norm_backward(
            gradients[0], *ctx.saved_tensors, ctx.needs_input_grad[1]
        )
        return x_gradient, *(weight_gradients or [None]), None


class _AddRMSNorm(torch.autograd.Function):
    """Saves the sum and one number per token."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, update: Tensor, weight_D: Tensor, eps: float, update_scale: float
    ) -> tuple[Tensor, Tensor]:
        total, normed, scale = operators.add_rms_norm(x, update, weight_D, eps, update_scale)
        ctx.save_for_backward(total, scale, weight_D)
        ctx.update_scale = update_scale
        return total, normed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient, *weight_gradients = operators.add_rms_norm_backward(
            *gradients, *ctx.saved_tensors, ctx.needs_input_grad[2]
        )
        update_gradient = gradient if ctx.update_scale == 1.0 else gradient * ctx.update_scale
        return gradient, update_gradient, *(weight_gradients or [None]), None, None


class _AddLayerNorm(torch.autograd.Function):
    """Saves the sum and two numbers per token."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        update: Tensor,
        weight_D: Tensor,
        bias_D: Tensor,
        eps: float,
        update_scale: float,
    ) -> tuple[Tensor, Tensor]:
        total, normed, mean, scale = operators.add_layer_norm(
            x, update, weight_D, bias_D, eps, update_scale
        )
        ctx.save_for_backward(total, mean, scale, weight_D)
        ctx.update_scale = update_scale
        return total, normed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        has_weight = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]
        gradient, *weight_gradients = operators.add_layer_norm_backward(
            *gradients, *ctx.saved_tensors, has_weight
        )
        update_gradient = gradient if ctx.update_scale == 1.0 else gradient * ctx.update_scale
        return gradient, update_gradient, *(weight_gradients or [None, None]), None, None


class _Gate(torch.autograd.Function):
    """Saves the two projections."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        gated: Tensor = operators.gate(gate, up, activation)
        return gated

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return *operators.gate_backward(gradients[0], *ctx.saved_tensors, ctx.activation), None


class _ClampedGate(torch.autograd.Function):
    """Saves the two projections."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, limit: float, gain: float) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.constants = limit, gain
        gated: Tensor = operators.clamped_gate(gate, up, limit, gain)
        return gated

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (
            *operators.clamped_gate_backward(gradients[0], *ctx.saved_tensors, *ctx.constants),
            None,
            None,
        )


class _Rotation(torch.autograd.Function):
    """Saves the tables; the backward pass rotates the gradient back."""

    @staticmethod
    def forward(ctx: Any, x_BTHE: Tensor, cos_BTR: Tensor, sin_BTR: Tensor) -> Tensor:
        ctx.save_for_backward(cos_BTR, sin_BTR)
        rotated: Tensor = operators.rotate(x_BTHE, cos_BTR, sin_BTR, 1.0)
        return rotated

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return operators.rotate(gradients[0], *ctx.saved_tensors, -1.0), None, None


@dataclass(frozen=True)
class FusedFunctions:
    """Functions that modules call in place of separate operations; None where they have no such
    function."""

    normalise_rms: Callable[[Tensor, Tensor, float], Tensor]
    add_normalise_rms: Callable[[Tensor, Tensor, Tensor, float, float], tuple[Tensor, Tensor]]
    add_normalise_layer: Callable[
        [Tensor, Tensor, Tensor, Tensor, float, float], tuple[Tensor, Tensor]
    ]
    apply_gate: Callable[[str, Tensor, Tensor], Tensor]
    apply_clamped_gate: Callable[[Tensor, Tensor, float, float], Tensor]
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor]


COMPILED_FUNCTIONS = FusedFunctions(
    normalise_rms,
    add_normalise_rms,
    add_normalise_layer,
    apply_gate,
    apply_clamped_gate,
    rotate,
)
"""Functions that torch.compile fuses, each by itself."""
