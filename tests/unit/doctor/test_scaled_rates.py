"""Rates of 8-bit products: measured where a kernel exists, otherwise the reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from shardwright.doctor.rates import scaled_rates
from shardwright.doctor.rates.scaled_rates import (
    MEASURED_RECIPES,
    ScaledRate,
    judge_scaled_products,
    time_scaled_products,
)
from shardwright.hardware import MatmulRate
from shardwright.model.products import scaled_product
from shardwright.model.products.kernel_support import explain_missing_cpu_kernel
from shardwright.model.products.operand import Operand
from shardwright.model.products.scaled_product import ScaledProducts

CPU = torch.device("cpu")
BF16 = [MatmulRate("fp32", 256, 256, 256, 1e9), MatmulRate("bf16", 128, 128, 128, 2e9)]
LARGE = MatmulRate("bf16", 1024, 1024, 1024, 3e9)
UNEVEN = MatmulRate("bf16", 256, 128, 128, 5e9)


@pytest.mark.skipif(
    explain_missing_cpu_kernel("tensorwise") is not None, reason="torch lacks 8-bit CPU kernels"
)
def test_a_cpu_measures_the_recipes_that_it_has_kernels_for() -> None:
    rates = {rate.recipe: rate for rate in time_scaled_products(CPU, [*BF16, LARGE, UNEVEN])}
    assert tuple(rates) == MEASURED_RECIPES
    for recipe in ("tensorwise", "rowwise"):
        rate = rates[recipe]
        assert (rate.side, rate.bf16_flops_per_second, rate.obstacle) == (128, 2e9, None)
        assert rate.kernel_flops_per_second is not None
        assert rate.whole_flops_per_second is not None
        assert rate.kernel_flops_per_second > 0 < rate.whole_flops_per_second
    for recipe in ("blockwise", "mxfp8", "nvfp4"):
        assert rates[recipe].obstacle == f"torch has no CPU kernel for {recipe} scales"
        assert not rates[recipe].is_unexpected
    assert list(time_scaled_products(CPU, [LARGE])) == []


def test_a_build_without_cpu_kernels_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda *_operator_and_key: False
    )
    (finding, *_) = judge_scaled_products({0: list(time_scaled_products(CPU, BF16))}, "cpu")
    assert (finding.name, finding.verdict) == ("products, fp8 tensorwise", "pass")
    assert f"torch {torch.__version__} has no CPU kernel for 8-bit operands" in finding.value


def test_a_kernel_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: object, **options: object) -> None:
        assert options == {"is_fast": True}, "the output is measured as it is trained"
        raise RuntimeError("cuBLAS: not supported\nmore")

    monkeypatch.setattr(scaled_rates, "explain_missing_cpu_kernel", lambda _recipe: None)
    monkeypatch.setattr(scaled_rates, "multiply_on_device", fail)
    rate = next(time_scaled_products(CPU, BF16))
    assert (rate.obstacle, rate.is_unexpected) == ("cuBLAS: not supported", True)
    (finding,) = judge_scaled_products({0: [rate]}, "cuda")
    assert finding.verdict == "warn"
    assert "not measured: cuBLAS" in finding.value


def test_the_gradients_of_nvfp4_are_rounded_stochastically(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With kernels that answer for a GPU's, the input gradient alone draws random numbers."""
    keys = []
    quantise = ScaledProducts.quantise

    def record(self: ScaledProducts, *arguments: Any, **options: Any) -> Operand:
        keys.append(options.get("rounding_key"))
        return quantise(self, *arguments, **options)

    monkeypatch.setattr(ScaledProducts, "quantise", record)
    monkeypatch.setattr(scaled_rates, "explain_missing_cpu_kernel", lambda _recipe: None)
    monkeypatch.setattr(scaled_rates, "MEASURED_RECIPES", ("nvfp4",))
    for module in (scaled_rates, scaled_product):
        monkeypatch.setattr(module, "multiply_on_device", lambda *_, **__: None)
    (rate,) = time_scaled_products(CPU, BF16)
    assert rate.obstacle is None
    assert rate.stochastic_flops_per_second is not None
    assert rate.stochastic_flops_per_second > 0
    assert any(key is not None for key in keys)


def test_findings_compare_with_bf16_and_between_ranks() -> None:
    rate = ScaledRate("rowwise", 8192, 7e14, 1.19e15, 8.4e14)
    (finding,) = judge_scaled_products({0: [rate], 1: [rate]}, "cuda")
    assert finding.name == "products, fp8 rowwise"
    assert "1.70 times bf16" in finding.value
    assert "with the quantisation of both operands 1.20 times" in finding.value
    assert "emulates" not in finding.value
    assert finding.numbers["times_bf16_with_quantisation"] == pytest.approx(1.2)
    assert "stochastically" not in finding.value
    narrow = replace(rate, recipe="nvfp4", stochastic_flops_per_second=3.5e14)
    (other,) = judge_scaled_products({0: [narrow]}, "cuda")
    assert other.name == "products, nvfp4"
    assert "0.50 times if gradients are rounded stochastically" in other.value
    assert other.numbers["times_bf16_with_stochastic_rounding"] == pytest.approx(0.5)
    slow = replace(rate, kernel_flops_per_second=5e14)
    findings = judge_scaled_products({0: [rate], 1: [rate], 2: [slow], 3: [rate]}, "cuda")
    assert [each.name for each in findings if each.verdict != "pass"] == [
        "products, fp8 rowwise: slow rank 2"
    ]


def test_a_device_without_units_is_no_fault() -> None:
    rate = ScaledRate("mxfp8", 4096, 3e14, obstacle="NVIDIA A100 has no 8-bit units")
    (finding,) = judge_scaled_products({0: [rate]}, "cuda")
    assert (finding.verdict, finding.value) == (
        "pass",
        "not measured: NVIDIA A100 has no 8-bit units",
    )
