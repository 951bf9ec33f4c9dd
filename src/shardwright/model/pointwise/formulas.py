"""Computations of norms, gates, rotations and losses with gradients, as a compiler fuses them.

Each computes in fp32 (fp64 for fp64 tensors) and rounds its results once. Eagerly they are correct
and slow: every operation reads and writes memory.

Legend: N tokens (or two dims of them), D features, H heads, E head_dim, R rotated features, F
feed-forward width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATION_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}
ACTIVATION_BACKWARD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": torch.ops.aten.silu_backward.default,
    "gelu": torch.ops.aten.gelu_backward.default,
    "gelu_tanh": partial(torch.ops.aten.gelu_backward.default, approximate="tanh"),
}
"""(gradient, input) -> gradient of the input; activations without an entry do not need it."""


def normalise_rms(x_ND: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute the RMS norm, and 1 / the root of each token's mean square, `[N, 1]`."""
    wide_ND = _widen(x_ND)
    scale_N1 = torch.rsqrt(wide_ND.square().mean(-1, keepdim=True) + eps)
    return (wide_ND * scale_N1 * weight_D).to(x_ND.dtype), scale_N1


def differentiate_rms(
    gradient_ND: Tensor, x_ND: Tensor, scale_N1: Tensor, weight_D: Tensor, has_weight: bool
) -> tuple[Tensor, ...]:
    """Compute the gradient of the norm's input and, with `has_weight`, of its weight."""
    gradient_ND = gradient_ND.to(scale_N1.dtype)
    x_gradient_ND = _differentiate_scaling(gradient_ND, x_ND, scale_N1, weight_D)
    return x_gradient_ND.to(x_ND.dtype), *_sum_weight_gradient(
        gradient_ND, x_ND.to(scale_N1.dtype) * scale_N1, weight_D, has_weight
    )


def add_normalise_rms(
    x_ND: Tensor, update_ND: Tensor, weight_D: Tensor, eps: float, update_scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute x + update_scale x update, its RMS norm, and its scale, `[N, 1]`."""
    total_ND = _add(x_ND, update_ND, update_scale)
    return total_ND, *normalise_rms(total_ND, weight_D, eps)


def add_differentiate_rms(
    total_gradient_ND: Tensor,
    gradient_ND: Tensor,
    total_ND: Tensor,
    scale_N1: Tensor,
    weight_D: Tensor,
    has_weight: bool,
) -> tuple[Tensor, ...]:
    """Compute the gradient of the sum, through itself and its norm, and of the weight."""
    gradient_ND = gradient_ND.to(scale_N1.dtype)
    through_norm_ND = _differentiate_scaling(gradient_ND, total_ND, scale_N1, weight_D)
    unit_ND = total_ND.to(scale_N1.dtype) * scale_N1
    return (through_norm_ND + total_gradient_ND).to(total_ND.dtype), *_sum_weight_gradient(
        gradient_ND, unit_ND, weight_D, has_weight
    )


def add_normalise_layer(
    x_ND: Tensor,
    update_ND: Tensor,
    weight_D: Tensor,
    bias_D: Tensor,
    eps: float,
    update_scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute x + update_scale x update, its layer norm, and its mean and scale, `[N, 1]`."""
    total_ND = _add(x_ND, update_ND, update_scale)
    wide_ND = _widen(total_ND)
    mean_N1 = wide_ND.mean(-1, keepdim=True)
    centred_ND = wide_ND - mean_N1
    scale_N1 = torch.rsqrt(centred_ND.square().mean(-1, keepdim=True) + eps)
    normed_ND = (centred_ND * scale_N1 * weight_D + bias_D).to(x_ND.dtype)
    return total_ND, normed_ND, mean_N1, scale_N1


def add_differentiate_layer(
    total_gradient_ND: Tensor,
    gradient_ND: Tensor,
    total_ND: Tensor,
    mean_N1: Tensor,
    scale_N1: Tensor,
    weight_D: Tensor,
    has_weight: bool,
) -> tuple[Tensor, ...]:
    """Compute the gradient of the sum, through itself and its norm, and of weight and bias."""
    gradient_ND = gradient_ND.to(scale_N1.dtype)
    unit_ND = (total_ND.to(scale_N1.dtype) - mean_N1) * scale_N1
    unit_gradient_ND = gradient_ND * weight_D
    # The norm removes the gradient's mean, and its component along the normalised input.
    component_N1 = (unit_gradient_ND * unit_ND).mean(-1, keepdim=True)
    mean_gradient_N1 = unit_gradient_ND.mean(-1, keepdim=True)
    through_norm_ND = (unit_gradient_ND - mean_gradient_N1 - unit_ND * component_N1) * scale_N1
    total = ((through_norm_ND + total_gradient_ND).to(total_ND.dtype),)
    if not has_weight:
        return total
    tokens = tuple(range(gradient_ND.ndim - 1))
    bias_gradient_D = gradient_ND.sum(tokens).to(weight_D.dtype)
    return (
        *total,
        *_sum_weight_gradient(gradient_ND, unit_ND, weight_D, has_weight),
        bias_gradient_D,
    )


def _differentiate_scaling(
    gradient_ND: Tensor, x_ND: Tensor, scale_N1: Tensor, weight_D: Tensor
) -> Tensor:
    """Compute the gradient of an RMS norm's input in the scale's precision."""
    unit_ND = x_ND.to(scale_N1.dtype) * scale_N1
    unit_gradient_ND = gradient_ND * weight_D
    # The norm removes the gradient's component along x.
    component_N1 = (unit_gradient_ND * unit_ND).mean(-1, keepdim=True)
    return (unit_gradient_ND - unit_ND * component_N1) * scale_N1


def _sum_weight_gradient(
    gradient_ND: Tensor, unit_ND: Tensor, weight_D: Tensor, has_weight: bool
) -> tuple[Tensor, ...]:
    if not has_weight:
        return ()
    tokens = tuple(range(gradient_ND.ndim - 1))
    return ((gradient_ND * unit_ND).sum(tokens).to(weight_D.dtype),)


def _add(x_ND: Tensor, update_ND: Tensor, update_scale: float) -> Tensor:
    """Add in the wider precision and round once, as PyTorch's addition does."""
    total_ND = _widen(x_ND) + update_scale * _widen(update_ND)
    return total_ND.to(torch.promote_types(x_ND.dtype, update_ND.dtype))


def apply_gate(gate_NF: Tensor, up_NF: Tensor, activation: str) -> tuple[Tensor]:
    """Compute activation(gate) * up."""
    return ((ACTIVATION_FUNCTIONS[activation](_widen(gate_NF)) * _widen(up_NF)).to(gate_NF.dtype),)


def differentiate_gate(
    gradient_NF: Tensor, gate_NF: Tensor, up_NF: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of gate and up."""
    gate = _widen(gate_NF)
    gradient = _widen(gradient_NF)
    up_gradient = gradient * ACTIVATION_FUNCTIONS[activation](gate)
    gate_gradient = ACTIVATION_BACKWARD[activation](gradient * _widen(up_NF), gate)
    return gate_gradient.to(gate_NF.dtype), up_gradient.to(up_NF.dtype)


def apply_clamped_gate(gate_NF: Tensor, up_NF: Tensor, limit: float, gain: float) -> tuple[Tensor]:
    """Compute min(g, limit) * sigmoid(gain * min(g, limit)) * (clamp(u, -limit, limit) + 1)."""
    gate = _widen(gate_NF).clamp(max=limit)
    factor = _widen(up_NF).clamp(-limit, limit) + 1
    return ((gate * torch.sigmoid(gate * gain) * factor).to(gate_NF.dtype),)


def differentiate_clamped_gate(
    gradient_NF: Tensor, gate_NF: Tensor, up_NF: Tensor, limit: float, gain: float
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of gate and up, which are zero where they are clamped."""
    wide_gate = _widen(gate_NF)
    wide_up = _widen(up_NF)
    gradient = _widen(gradient_NF)
    gate = wide_gate.clamp(max=limit)
    share = torch.sigmoid(gate * gain)
    activation_gradient = gradient * (wide_up.clamp(-limit, limit) + 1)
    gate_gradient = activation_gradient * share * (1 + gate * gain * (1 - share))
    up_gradient = gradient * (gate * share)
    return (
        gate_gradient.masked_fill(wide_gate > limit, 0.0).to(gate_NF.dtype),
        up_gradient.masked_fill(wide_up.abs() > limit, 0.0).to(up_NF.dtype),
    )


def rotate(x_NHE: Tensor, cos_NR: Tensor, sin_NR: Tensor, direction: float) -> tuple[Tensor]:
    """Rotate each feature pair (i, i + R / 2) of the first R features; -1 rotates back."""
    cos = cos_NR.unsqueeze(-2)
    sin = sin_NR.unsqueeze(-2) * direction
    half = cos.shape[-1]
    first = x_NHE[..., :half]
    second = x_NHE[..., half : 2 * half]
    parts = [first * cos - second * sin, second * cos + first * sin]
    parts = [part.to(x_NHE.dtype) for part in parts]
    if 2 * half < x_NHE.shape[-1]:
        parts.append(x_NHE[..., 2 * half :])
    return (torch.cat(parts, dim=-1).contiguous(),)


def _widen(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def differentiate_token_losses(
    logits_NV: Tensor,
    labels_N1: Tensor,
    targets_N1: Tensor,
    factors_N1: Tensor,
    logit_scale: float,
    soft_cap: float,
    label_smoothing: float,
) -> tuple[Tensor, ...]:
    """Compute the cross-entropy of each token, `[N, 1]`, and replace logits by their gradient.

    The formulas are those of `shardwright.numerics.loss`; a `soft_cap` of 0 is none. The gradient
    is rounded once, to the logits' dtype.

    Args:
        targets_N1: the labels' logits. torch 2.11 fails to compile a look-up in a tensor that the
            formula changes.
        factors_N1: factors of the gradient, not of the losses.
    """
    final_NV = _transform_logits(logits_NV, logit_scale, soft_cap)
    log_sum_N1 = torch.logsumexp(final_NV, 1, keepdim=True)
    losses_N1 = log_sum_N1 - _transform_logits(targets_N1, logit_scale, soft_cap)
    if label_smoothing:
        mean_N1 = final_NV.mean(1, keepdim=True)
        losses_N1 = (1.0 - label_smoothing) * losses_N1 + label_smoothing * (log_sum_N1 - mean_N1)
    probs_NV = torch.exp(final_NV - log_sum_N1)
    is_target_NV = torch.arange(logits_NV.shape[1], device=logits_NV.device) == labels_N1
    gradient_NV = torch.where(is_target_NV, probs_NV - (1.0 - label_smoothing), probs_NV)
    if label_smoothing:
        gradient_NV = gradient_NV - label_smoothing / logits_NV.shape[1]
    if soft_cap:
        gradient_NV = gradient_NV * (1.0 - (final_NV / soft_cap).square())
    logits_NV.copy_(gradient_NV * (factors_N1 * logit_scale))
    return (losses_N1,)


def _transform_logits(logits: Tensor, logit_scale: float, soft_cap: float) -> Tensor:
    scaled = _widen(logits) * logit_scale
    return torch.tanh(scaled / soft_cap) * soft_cap if soft_cap else scaled
