"""The chunked loss on the device: one kernel per chunk adds to the head's gradient in fp32."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.model.pointwise.formulas import differentiate_token_losses
from shardwright.numerics import wide_sums
from shardwright.numerics.loss import (
    FusedLosses,
    chunked_cross_entropy,
    compute_token_losses,
)

NUM_TOKENS = 256
CHUNK_TOKENS = 16
VOCAB_SIZE = 500
WIDTH = 32


class OperatorCounter(TorchDispatchMode):
    """Counts the operators that write a tensor of the head's shape, and selections of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        is_head = isinstance(result, Tensor) and result.shape == (VOCAB_SIZE, WIDTH)
        if is_head or func == torch.ops.aten.index_select.default:
            self.counts[str(func)] += 1
        return result


def compute(
    device: str,
    dtype: torch.dtype,
    num_ignored: int = 0,
    weights: Tensor | None = None,
    fused_losses: FusedLosses | None = None,
) -> tuple[list[Tensor], Counter[str]]:
    """Return loss and gradients in fp64 on the CPU, and the operators of the forward pass."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(NUM_TOKENS, WIDTH, generator=generator).to(device, dtype).requires_grad_()
    weight = torch.randn(VOCAB_SIZE, WIDTH, generator=generator).mul_(0.3).to(device)
    weight = weight.to(torch.float64 if dtype == torch.float64 else torch.float32).requires_grad_()
    labels = torch.randint(0, VOCAB_SIZE, (NUM_TOKENS,), generator=generator).to(device)
    labels[NUM_TOKENS // 3 : NUM_TOKENS // 3 + num_ignored] = -100
    with OperatorCounter() as counter:
        loss = chunked_cross_entropy(
            hidden,
            weight,
            None,
            labels,
            chunk_tokens=CHUNK_TOKENS,
            weights_N=None if weights is None else weights.to(device),
            num_supervised=NUM_TOKENS - num_ignored,
            fused_losses=fused_losses,
        )
    loss.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return [t.detach().double().cpu() for t in (loss, hidden.grad, weight.grad)], counter.counts


def measure_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.fixture(autouse=True)
def try_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide_sums, "_wide_sum_support", {})


def test_a_chunk_writes_the_heads_gradient_once() -> None:
    exact, _ = compute("cpu", torch.float64)
    on_cpu, _ = compute("cpu", torch.bfloat16)
    found, counts = compute("cuda", torch.bfloat16)
    assert counts["aten.addmm.dtype_out"] == NUM_TOKENS // CHUNK_TOKENS
    assert not {"aten.add_.Tensor", "aten.mm.out"} & set(counts), "rounded, then added"
    for name, index in (("loss", 0), ("hidden", 1), ("weight", 2)):
        error = measure_error(found[index], exact[index])
        assert error <= measure_error(on_cpu[index], exact[index]) * 1.01 + 1e-7, name


def test_without_such_a_kernel_products_are_rounded_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: Tensor, is_first: bool = False) -> None:
        raise NotImplementedError("no kernel for this")

    monkeypatch.setattr(wide_sums, "add_product", refuse)
    found, counts = compute("cuda", torch.bfloat16)
    on_cpu, _ = compute("cpu", torch.bfloat16)
    assert "aten.addmm.dtype_out" not in counts
    assert counts["aten.mm.out"] == NUM_TOKENS // CHUNK_TOKENS
    assert counts["aten.copy_.default"] == 1
    assert counts["aten.add_.Tensor"] == NUM_TOKENS // CHUNK_TOKENS - 1
    assert measure_error(found[2], on_cpu[2]) < 1e-6


def compute_fused_losses(
    logits_CV: Tensor, labels_C1: Tensor, factors_C1: Tensor, *constants: float
) -> Tensor:
    targets_C1 = logits_CV.gather(1, labels_C1)
    return differentiate_token_losses(logits_CV, labels_C1, targets_C1, factors_C1, *constants)[0]


@pytest.mark.parametrize("fused_losses", [None, compute_fused_losses])
@pytest.mark.parametrize("has_weights", [False, True])
@pytest.mark.parametrize(("num_ignored", "num_selections"), [(1, 0), (2, 0), (3, 2)])
def test_a_few_tokens_without_labels_are_not_worth_a_selection(
    num_ignored: int, num_selections: int, has_weights: bool, fused_losses: FusedLosses | None
) -> None:
    weights = torch.linspace(0.5, 2.0, NUM_TOKENS, dtype=torch.float64) if has_weights else None
    expected, _ = compute("cpu", torch.float64, num_ignored, weights)
    found, counts = compute("cuda", torch.float64, num_ignored, weights, fused_losses)
    assert counts["aten.index_select.default"] == num_selections * (1.5 if has_weights else 1)
    for result, value in zip(found, expected, strict=True):
        assert measure_error(result, value) <= 1e-12
    assert not found[1][NUM_TOKENS // 3 : NUM_TOKENS // 3 + num_ignored].any()


def test_losses_of_tokens_without_labels_are_zero() -> None:
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(NUM_TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCAB_SIZE, WIDTH, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, VOCAB_SIZE, (NUM_TOKENS,), generator=generator)
    labels[7] = -100
    found, expected = (
        compute_token_losses(
            *(hidden.to(device), weight.to(device), None, labels.to(device)),
            chunk_tokens=CHUNK_TOKENS,
            num_supervised=NUM_TOKENS - 1,
        ).cpu()
        for device in ("cuda", "cpu")
    )
    assert measure_error(found, expected) <= 1e-12
    assert found[7] == 0.0


def test_other_precisions_have_the_numbers_of_a_cpu() -> None:
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        for found, expected in zip(
            compute("cuda", dtype)[0], compute("cpu", dtype)[0], strict=True
        ):
            assert measure_error(found, expected) <= tolerance
