"""Muon, Adafactor, 8-bit AdamW and 4-bit matrices on the device: what the CPU makes of the same
gradients and bytes.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwright.config.training import OptimizerSection
from shardwright.model import nf4
from shardwright.optim import build_optimizer, set_learning_rate
from tests.unit.optim.test_sharded_optimizer import RATES, SingleProcessModel, make_parameters

CLOSE = {"muon": 2e-2, "adafactor": 1e-5, "adamw_8bit": 1e-3}
"""As a share of how far the weights moved. Muon multiplies in bf16; of 8-bit codes some are rounded
the other way.
"""


def moved(rule: str, device: torch.device) -> dict[str, torch.Tensor]:
    mine = {
        name: nn.Parameter(parameter.detach().to(device))
        for name, parameter in make_parameters().items()
    }
    before = {name: parameter.detach().cpu().clone() for name, parameter in mine.items()}
    options = {"block_size": 32} if rule == "adamw_8bit" else {}
    section = OptimizerSection.model_validate({"name": rule} | options)
    optimizer = build_optimizer(
        mine.items(), section, learning_rate=1.0, weight_decay=0.1, model=SingleProcessModel()
    )
    for step, rate in enumerate(RATES):
        for number, parameter in enumerate(mine.values()):
            gradient = torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(100 * step + number)
            )
            parameter.grad = gradient.to(device)
        set_learning_rate(optimizer, rate)
        optimizer.step()
    return {name: parameter.detach().cpu() - before[name] for name, parameter in mine.items()}


@pytest.mark.parametrize("rule", CLOSE)
def test_a_step_is_that_of_the_cpu(rule: str, device: torch.device) -> None:
    if rule == "adamw_8bit":
        pytest.importorskip("torchao.optim", reason="the extra `lowbit` is not installed")
    here = moved(rule, torch.device("cpu"))
    there = moved(rule, device)
    for name, distance in here.items():
        assert float((distance - there[name]).norm() / distance.norm()) <= CLOSE[rule], name


def test_bytes_mean_the_same_on_the_device(device: torch.device) -> None:
    values = torch.randn(48, 200, generator=torch.Generator().manual_seed(1))
    packed = nf4.pack(values)
    assert torch.equal(nf4.pack(values.to(device)).cpu(), packed)
    assert torch.equal(
        nf4.unpack(packed.to(device), 200, torch.bfloat16).cpu(),
        nf4.unpack(packed, 200, torch.bfloat16),
    )


def test_the_product_of_bytes_keeps_no_matrix(device: torch.device) -> None:
    x = torch.randn(8, 256, device=device, dtype=torch.bfloat16, requires_grad=True)
    packed = nf4.pack(torch.randn(512, 256)).to(device)
    weight = nf4.unpack(packed, 256, torch.bfloat16)
    out = nf4.multiply_packed(x, packed, 256)
    torch.testing.assert_close(out, x @ weight.T)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(gradient, torch.ones_like(out) @ weight)
