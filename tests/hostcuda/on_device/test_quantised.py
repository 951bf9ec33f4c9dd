"""4-bit matrices and 8-bit moments: nothing is copied to the device again, and no host waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.config.training import OptimizerSection
from shardwright.model.products import fp8, nf4
from shardwright.model.products.fp8 import Scaling
from shardwright.model.products.product import ProductRule, multiply
from shardwright.model.products.scaled_product import RoundingTotals
from shardwright.numerics.function_compiler import build_function_compiler
from shardwright.optim import build_optimizer, one_pass_adamw
from shardwright.optim.sharded_optimizer import DeviceFactor
from tests.hostcuda import device
from tests.unit.optim.test_sharded_optimizer import SingleProcessModel, make_parameters

GPU = torch.device("cuda", 0)


def count_waits(run: Callable[[], Any]) -> dict[tuple[str, str], int]:
    """Count what makes the host wait in the second of two calls."""
    run()
    with device.log_synchronisations() as counts:
        run()
    return dict(counts)


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_product_copies_no_table(is_compiled: bool) -> None:
    weight = nf4.pack(torch.randn(32, 128, generator=torch.Generator().manual_seed(1))).to(GPU)
    x = torch.ones(4, 128, device=GPU, requires_grad=True)

    def compute(x: Tensor) -> Tensor:
        return multiply(x, weight, None, ProductRule(128)).sum()

    product = (
        torch.compile(compute, backend="aot_eager", fullgraph=True) if is_compiled else compute
    )
    assert count_waits(lambda: product(x).backward()) == {}


@pytest.mark.parametrize(("rule", "num_waits"), [("adamw_8bit", 0), ("adafactor", 1), ("adamw", 0)])
def test_an_update_waits_for_the_device_no_more_than_it_must(rule: str, num_waits: int) -> None:
    """Adafactor reads all root mean squares together. The others take a factor that only the device
    knows. Without Triton, nothing is compiled."""
    weights = {
        name: nn.Parameter(parameter.detach().to(GPU))
        for name, parameter in make_parameters().items()
    }
    for parameter in weights.values():
        parameter.grad = torch.ones_like(parameter)
    compiler = build_function_compiler("auto", GPU)
    assert compiler.obstacle == "Triton is not installed"
    optimizer: Any = build_optimizer(
        weights.items(),
        OptimizerSection.model_validate({"name": rule}),
        learning_rate=0.1,
        weight_decay=0.1,
        model=SingleProcessModel(),
        compile_function=compiler,
    )
    factor = torch.full((), 0.5, device=GPU)

    def update() -> None:
        if optimizer.can_skip_on_device():
            optimizer.device_factor = DeviceFactor.from_value(factor)
        optimizer.step()

    assert sum(count_waits(update).values()) == num_waits


def test_the_one_pass_of_adamw_follows_torchs_kernel_without_a_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Step counts are on the device. Uncompiled, the formula rounds more often. Without a factor,
    or a copy of weights to write, torch's kernel updates all parameters in one launch."""
    monkeypatch.setitem(one_pass_adamw._MIN_ELEMENTS, "cuda", 1)
    formulas = []

    def take_formula(_name: str, formula: Any, _eager: Any, _make_sample: Any) -> Any:
        formulas.append(formula)
        return formula

    def train(compile_function: Any, factor: float = 0.5) -> tuple[list[Tensor], int]:
        weights = [nn.Parameter(weight.detach().to(GPU)) for weight in make_parameters().values()]
        optimizer: Any = build_optimizer(
            [(str(index), weight) for index, weight in enumerate(weights)],
            OptimizerSection(),
            learning_rate=0.1,
            weight_decay=0.1,
            compile_function=compile_function,
        )

        def update() -> None:
            optimizer.gradient_factor = factor
            for weight in weights:
                weight.grad = weight.detach() + 1.0
            optimizer.step()

        return weights, sum(count_waits(update).values())

    expected, _ = train(None)
    found, num_waits = train(take_formula)
    assert num_waits == 0
    assert len(formulas) == 2  # of four tensors, and of one
    for wanted, weight in zip(expected, found, strict=True):
        torch.testing.assert_close(weight, wanted, rtol=1e-5, atol=1e-6)
    formulas.clear()
    assert all(map(torch.equal, train(take_formula, 1.0)[0], train(None, 1.0)[0]))
    assert formulas == []


def test_operands_are_counted_on_streams_that_do_not_wait_for_each_other() -> None:
    """Weights are quantised on the stream of their update, in the passes of other weights."""
    values = torch.randn(32, 128, generator=torch.Generator().manual_seed(1))
    expected = RoundingTotals(["a", "b"])
    found = RoundingTotals(["a", "b"])
    for name in ("a", "b", "a"):
        expected.add(name, values, fp8.quantise(values, Scaling(None, None)))
    on_device = values.to(GPU)
    operand = fp8.quantise(on_device, Scaling(None, None))
    update = torch.cuda.Stream()
    update.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(update):
        found.add("a", on_device, operand)
    found.add("b", on_device, operand)
    with torch.cuda.stream(update):
        found.add("a", on_device, operand)
    table = found.pop_table(GPU)
    assert torch.equal(table.cpu(), expected.pop_table(values.device))
    assert not found.pop_table(GPU).any()
