"""Gradients of autograd functions that compute one tensor by several operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.errors import RecipeError
from shardwright.model import compiled_gradients
from shardwright.model.compiled_gradients import repair_compiled_gradients

Operation = Callable[[Tensor], Tensor]


class _Square(torch.autograd.Function):
    """Square, whose result an operation returns again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, repeat: Operation, is_saved: bool) -> Tensor:
        square = x * x
        repeated = repeat(square)
        ctx.save_for_backward(x, *([repeated] if is_saved else []))
        return square if is_saved else repeated

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return 2.0 * ctx.saved_tensors[0] * gradients[0], None, None


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("is_saved", [False, True])
@pytest.mark.parametrize(
    "repeat",
    [
        lambda square: square.mul_(1.0),
        lambda square: torch.mul(square, 1.0, out=square),
        lambda square: square.contiguous(),
        lambda square: square.to(torch.float64),
        lambda square: square.double(),
    ],
    ids=["in place", "out", "contiguous", "to", "double"],
)
def test_compiled_functions_keep_gradients(repeat: Operation, is_saved: bool) -> None:
    repair_compiled_gradients()
    torch._dynamo.reset()
    x = torch.arange(1.0, 4.0, dtype=torch.float64, requires_grad=True)

    def compute(x: Tensor) -> Any:
        return (_Square.apply(x + 0.0, repeat, is_saved) * x).sum()

    torch.compile(compute, backend="aot_eager", fullgraph=True)(x).backward()
    assert torch.equal(x.grad, 3.0 * x * x)


def test_nothing_is_compiled_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_gradients, "_leave_out_repeated_results", lambda: None)
    monkeypatch.setattr(compiled_gradients, "_keeps_gradient", lambda _dtype: False)
    with pytest.raises(RecipeError, match=r"model.compile: .*without their gradients"):
        repair_compiled_gradients.__wrapped__()
