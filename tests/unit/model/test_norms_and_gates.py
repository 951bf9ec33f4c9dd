"""Norms and feed-forward: our gradients equal autograd's of the plain definitions."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
import torch.nn.functional as F

from shardwright.architecture import Activation
from shardwright.model.mlp import ACTIVATION_FUNCTIONS, apply_clamped_gate, apply_gate
from shardwright.model.norms import RMSNorm


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(3, 5, 8), (2, 3, 4, 8)])
def test_rms_norm_and_its_gradients(shape: tuple[int, ...], offset: float) -> None:
    norm = RMSNorm(8, eps=0.1, offset=offset).double()
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    expected = x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt() * (norm.weight + offset)
    torch.testing.assert_close(norm(x), expected, rtol=1e-12, atol=0)
    output_gradient = torch.randn_like(x)
    gradients = torch.autograd.grad(norm(x), (x, norm.weight), output_gradient)
    expected_gradients = torch.autograd.grad(expected, (x, norm.weight), output_gradient)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-11, atol=1e-12)


def test_rms_norm_in_bf16_rounds_at_the_end_only() -> None:
    norm = RMSNorm(64, eps=1e-6, offset=1.0)
    torch.nn.init.normal_(norm.weight, std=0.01)
    x = torch.randn(4, 64).bfloat16()
    weight = norm.weight.bfloat16().float() + 1
    expected = F.rms_norm(x.float(), (64,), weight, 1e-6).bfloat16()
    # fp32 sums in another order may round to a neighbour.
    assert (norm(x) == expected).float().mean() > 0.99
    assert norm(x).dtype == torch.bfloat16


def test_large_activations_do_not_overflow_in_16_bits() -> None:
    norm = RMSNorm(64, eps=1e-6)
    torch.nn.init.ones_(norm.weight)
    x = torch.full((2, 64), 3e4, dtype=torch.float16, requires_grad=True)
    normed = norm(x)
    normed.sum().backward()
    torch.testing.assert_close(normed, torch.ones_like(normed))
    assert x.grad is not None
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("activation", get_args(Activation))
def test_gate_and_its_gradients(activation: Activation) -> None:
    first = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    second = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    expected = ACTIVATION_FUNCTIONS[activation](first) * second
    torch.testing.assert_close(apply_gate(activation, first, second), expected)
    output_gradient = torch.randn_like(expected)
    gradients = torch.autograd.grad(
        apply_gate(activation, first, second), (first, second), output_gradient
    )
    torch.testing.assert_close(
        gradients,
        torch.autograd.grad(expected, (first, second), output_gradient),
        rtol=1e-12,
        atol=1e-14,
    )


def test_clamped_gate_and_its_gradients_save_only_the_projections() -> None:
    projections = (3 * torch.randn(6, 10, dtype=torch.float64)).requires_grad_()
    gate = projections[..., ::2]
    up = projections[..., 1::2]
    limit = 2.0
    gain = 1.7
    assert (gate > limit).any()
    assert (up.abs() > limit).any()
    bounded = gate.clamp(max=limit)
    expected = bounded * torch.sigmoid(gain * bounded) * (up.clamp(-limit, limit) + 1)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor.untyped_storage().data_ptr()) or tensor, lambda x: x
    ):
        got = apply_clamped_gate(gate, up, limit, gain)
    assert set(saved) == {projections.untyped_storage().data_ptr()}
    torch.testing.assert_close(got, expected)
    output_gradient = torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad(got, projections, output_gradient),
        torch.autograd.grad(expected, projections, output_gradient),
        rtol=1e-12,
        atol=1e-14,
    )
