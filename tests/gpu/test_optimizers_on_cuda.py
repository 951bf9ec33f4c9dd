"""Muon, Adafactor, 8-bit AdamW and 4-bit matrices give the same results on the device and on the
CPU, and AdamW in one compiled pass the bits of separate operations.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.config.training import OptimizerSection
from shardwright.model.products import nf4
from shardwright.model.products.product import ProductRule, multiply
from shardwright.numerics.compilation import find_compiler_obstacle
from shardwright.numerics.function_compiler import FunctionCompiler
from shardwright.optim import (
    build_optimizer,
    collect_optimizer_tensors,
    one_pass_adamw,
    set_learning_rate,
)
from shardwright.optim.sharded_optimizer import DeviceFactor
from tests.unit.optim.test_compiled_updates import RULES, SHAPES, Model
from tests.unit.optim.test_sharded_optimizer import RATES, SingleProcessModel, make_parameters

TOLERANCE = {"muon": 2e-2, "adafactor": 1e-5, "adamw_8bit": 1e-3}
"""Relative to the norm of the weight change. Muon multiplies in bf16; some 8-bit codes are rounded
in the other direction.
"""


def compute_weight_changes(rule: str, device: torch.device) -> dict[str, torch.Tensor]:
    weights = {
        name: nn.Parameter(parameter.detach().to(device))
        for name, parameter in make_parameters().items()
    }
    before = {name: parameter.detach().cpu().clone() for name, parameter in weights.items()}
    options = {"block_size": 32} if rule == "adamw_8bit" else {}
    section = OptimizerSection.model_validate({"name": rule} | options)
    optimizer = build_optimizer(
        weights.items(), section, learning_rate=1.0, weight_decay=0.1, model=SingleProcessModel()
    )
    for step, rate in enumerate(RATES):
        for number, parameter in enumerate(weights.values()):
            gradient = torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(100 * step + number)
            )
            parameter.grad = gradient.to(device)
        set_learning_rate(optimizer, rate)
        optimizer.step()
    return {name: parameter.detach().cpu() - before[name] for name, parameter in weights.items()}


@pytest.mark.parametrize("rule", TOLERANCE)
def test_a_step_equals_that_of_the_cpu(rule: str, device: torch.device) -> None:
    if rule == "adamw_8bit":
        pytest.importorskip("torchao.optim", reason="the extra `lowbit` is not installed")
    on_cpu = compute_weight_changes(rule, torch.device("cpu"))
    on_device = compute_weight_changes(rule, device)
    for name, change in on_cpu.items():
        assert float((change - on_device[name]).norm() / change.norm()) <= TOLERANCE[rule], name


def test_packed_values_are_equal_on_the_device(device: torch.device) -> None:
    values = torch.randn(48, 200, generator=torch.Generator().manual_seed(1))
    packed = nf4.pack(values)
    assert torch.equal(nf4.pack(values.to(device)).cpu(), packed)
    assert torch.equal(
        nf4.unpack(packed.to(device), 200, torch.bfloat16).cpu(),
        nf4.unpack(packed, 200, torch.bfloat16),
    )


def test_the_product_with_packed_values(device: torch.device) -> None:
    x = torch.randn(8, 256, device=device, dtype=torch.bfloat16, requires_grad=True)
    packed = nf4.pack(torch.randn(512, 256)).to(device)
    weight = nf4.unpack(packed, 256, torch.bfloat16)
    out = multiply(x, packed, None, ProductRule(256))
    torch.testing.assert_close(out, x @ weight.T)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(gradient, torch.ones_like(out) @ weight)


def update_with_skips(
    rule: str, dtype: torch.dtype, device: torch.device, compiler: FunctionCompiler | None
) -> dict[str, Tensor]:
    """Update weights three times, with a factor on the device by which the second is skipped."""
    generator = torch.Generator().manual_seed(1)

    def draw(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    weights = {name: nn.Parameter(draw(shape)) for name, shape in SHAPES.items()}
    options = RULES[rule] if rule == "adamw_8bit" else {}
    optimizer: Any = build_optimizer(
        weights.items(),
        OptimizerSection.model_validate({"name": rule} | options),
        learning_rate=0.01,
        weight_decay=0.1,
        model=Model(),
        compile_function=compiler,
    )
    for factor in (0.37, torch.nan, 0.5):
        for parameter in weights.values():
            parameter.grad = draw(tuple(parameter.shape))
        optimizer.prepare_step()
        assert optimizer.can_skip_on_device()
        optimizer.device_factor = DeviceFactor.from_value(torch.tensor(factor, device=device))
        optimizer.step()
        if factor != factor:
            optimizer.undo_counts()
    counts = {f"count of {name}": optimizer.state[each]["step"] for name, each in weights.items()}
    return weights | collect_optimizer_tensors(optimizer, weights.items()) | counts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", ["adamw", "adamw_8bit"])
def test_an_update_in_one_pass_has_the_bits_of_separate_operations(
    rule: str,
    dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if device.type == "cpu":
        pytest.skip("tests/unit/optim compares them on a CPU")
    if obstacle := find_compiler_obstacle(device):
        pytest.skip(obstacle)
    if rule == "adamw_8bit":
        pytest.importorskip("torchao.optim", reason="the extra `lowbit` is not installed")
    monkeypatch.setitem(one_pass_adamw._MIN_ELEMENTS, "cuda", 4096)
    expected = update_with_skips(rule, dtype, device, None)
    with caplog.at_level(logging.INFO, "shardwright.numerics"):
        found = update_with_skips(rule, dtype, device, FunctionCompiler(device))
    messages = [record.getMessage() for record in caplog.records]
    lines = [message for message in messages if "adamw" in message.lower()]
    assert any("bits as uncompiled" in line for line in lines), lines
    assert not any("not compiled" in line for line in lines), lines
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name
