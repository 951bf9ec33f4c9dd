"""Loss, norm, clipping and optimizer state compared with a CPU in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from shardwright.config.training import OptimizerSection
from shardwright.layout import ParameterLayout
from shardwright.model.pointwise.operators import run_formula
from shardwright.numerics import (
    chunked_cross_entropy,
    compute_clip_coefficient,
    compute_global_norm,
    scale_,
)
from shardwright.numerics.compilation import find_compiler_obstacle
from shardwright.numerics.liger_loss import find_liger_obstacle, liger_cross_entropy
from shardwright.optim import (
    build_optimizer,
    collect_optimizer_tensors,
    collect_optimizer_values,
    load_optimizer_values,
)
from tests.gpu.conftest import is_gpu, measure_peak_bytes
from tests.unit.model.test_pointwise import list_calls


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 8e-3)])
def test_loss_and_gradients_equal_those_of_a_cpu_in_float64(
    device: torch.device, dtype: torch.dtype, tolerance: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden_ND = torch.randn(300, 64, generator=generator).to(device, dtype).requires_grad_()
    weight_VD = (
        (torch.randn(1000, 64, generator=generator) * 0.1).to(device, dtype).requires_grad_()
    )
    labels_N = torch.randint(0, 1000, (300,), generator=generator)
    labels_N[::3] = -100
    loss = chunked_cross_entropy(
        hidden_ND, weight_VD, None, labels_N.to(device), chunk_tokens=64, soft_cap=20.0
    )
    (loss / 200).backward()
    hidden, weight = (
        tensor.detach().cpu().double().requires_grad_() for tensor in (hidden_ND, weight_VD)
    )
    expected = F.cross_entropy(
        20.0 * torch.tanh(hidden @ weight.T / 20.0), labels_N, reduction="sum"
    )
    (expected / 200).backward()
    assert loss.dtype == torch.float32
    assert abs(loss.item() - expected.item()) <= tolerance / 4 * expected.item()
    for gradient_of_device, expected_gradient in (
        (hidden_ND.grad, hidden.grad),
        (weight_VD.grad, weight.grad),
    ):
        assert gradient_of_device is not None
        assert expected_gradient is not None
        assert (
            gradient_of_device.cpu().double() - expected_gradient
        ).norm() <= tolerance * expected_gradient.norm()


def test_peak_memory_holds_one_chunk_of_logits(device: torch.device) -> None:
    tokens, width, vocabulary, chunk_tokens = (
        (8192, 256, 32000, 512) if is_gpu(device) else (1024, 32, 2000, 64)
    )
    hidden_ND = torch.randn(tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight_VD = torch.randn(
        vocabulary, width, device=device, dtype=torch.bfloat16, requires_grad=True
    )
    labels_N = torch.randint(0, vocabulary, (tokens,), device=device)

    def differentiate() -> None:
        chunked_cross_entropy(
            hidden_ND, weight_VD, None, labels_N, chunk_tokens=chunk_tokens
        ).backward()

    whole_logits_bytes = tokens * vocabulary * torch.bfloat16.itemsize
    assert measure_peak_bytes(device, differentiate) < whole_logits_bytes / 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_fused_functions_equal_their_formulas_in_float64(
    device: torch.device, dtype: torch.dtype
) -> None:
    if not is_gpu(device):
        pytest.skip("tests/unit/model/test_pointwise.py compiles them for a CPU")
    if obstacle := find_compiler_obstacle(device):
        pytest.skip(obstacle)
    for formula, (tensors, others, constants) in list_calls(dtype).items():
        exact = formula(*(t.double() for t in (*tensors, *others)), *constants)
        on_device = [[t.to(device) for t in group] for group in (tensors, others)]
        found = run_formula(formula, *on_device, constants)
        for got, want in zip(found, exact, strict=True):
            assert got.device.type == device.type
            error = (got.cpu().double() - want).norm() / want.norm()
            assert error <= 2 * torch.finfo(dtype).eps, formula.__name__


def test_ligers_loss_equals_the_chunked_one(device: torch.device) -> None:
    if obstacle := find_liger_obstacle(device):
        pytest.skip(obstacle)
    hidden_ND = torch.randn(300, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight_VD = torch.randn(1000, 64, device=device, requires_grad=True)
    labels_N = torch.randint(0, 1000, (300,), device=device)
    labels_N[::3] = -100
    for options in ({}, {"soft_cap": 20.0}, {"label_smoothing": 0.1}):
        losses = [
            chunked_cross_entropy(hidden_ND, weight_VD, None, labels_N, chunk_tokens=64, **options),
            liger_cross_entropy(hidden_ND, weight_VD, None, labels_N, **options),
        ]
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-3, atol=0)
        wanted, found = (torch.autograd.grad(loss / 200, (hidden_ND, weight_VD)) for loss in losses)
        for got, want in zip(found, wanted, strict=True):
            assert got.dtype == want.dtype
            assert (got - want).norm() <= 1e-2 * want.norm()


def test_norm_and_clip(device: torch.device) -> None:
    gradients = [
        torch.randn(3_000_017, device=device),
        torch.randn(7, 5, device=device),
        torch.randn(4096, device=device),
    ]
    expected = torch.cat([gradient.double().flatten() for gradient in gradients]).norm().item()

    def norm() -> torch.Tensor:
        described = [
            (gradient, ParameterLayout(str(index), tuple(gradient.shape)))
            for index, gradient in enumerate(gradients)
        ]
        return compute_global_norm(described, lambda tensor, axes: tensor)

    # The test device adds one after another, as CPUs do, where CUDA adds in a tree.
    is_exact = device.type == "cpu" or is_gpu(device)
    assert norm().item() == pytest.approx(expected, rel=1e-6 if is_exact else 1e-4)
    scale_(gradients, compute_clip_coefficient(float(norm()), 1.0))
    assert norm().item() == pytest.approx(1.0, rel=1e-5 if is_exact else 1e-4)


def test_optimizer_state_is_copied_bit_for_bit(device: torch.device) -> None:
    def run(seed: int) -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        module = torch.nn.Linear(33, 17, device=device)
        return module, build_optimizer(
            module.named_parameters(), OptimizerSection(), learning_rate=1e-2, weight_decay=0.1
        )

    def step(module: torch.nn.Linear, optimizer: torch.optim.Optimizer, number: int) -> None:
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, (-1.5) ** number)
        optimizer.step()

    one, first = run(0)
    other, second = run(1)
    for number in range(3):
        step(one, first, number)
    other.load_state_dict(one.state_dict())
    saved = collect_optimizer_tensors(first, one.named_parameters())
    for name, tensor in collect_optimizer_tensors(second, other.named_parameters()).items():
        tensor.copy_(saved[name])
    load_optimizer_values(second, collect_optimizer_values(first))
    for number in range(3, 6):
        step(one, first, number)
        step(other, second, number)
    assert torch.equal(one.weight, other.weight)
    assert torch.equal(one.bias, other.bias)
