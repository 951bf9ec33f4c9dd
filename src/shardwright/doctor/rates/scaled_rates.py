"""Rates of products of quantised operands, compared with bf16, or the reason why there is none.

Two rates count: that of the kernel alone, and that with the quantisation of both operands, which
the trainer repeats in every product. A recipe that rounds gradients stochastically has a third: of
the input gradient, whose quantisation draws random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from shardwright.config.low_precision import LowPrecisionRecipe, select_fast_products
from shardwright.doctor.finding import Finding
from shardwright.doctor.rates.device_rates import measure_median_seconds
from shardwright.doctor.rates.rate_findings import SECTION, judge_slow_ranks
from shardwright.hardware import MatmulRate
from shardwright.launch.rank_outcome import extract_first_line
from shardwright.model.products.kernel_support import (
    describe_device,
    explain_missing_cpu_kernel,
    explain_missing_kernel,
)
from shardwright.model.products.operand import PRODUCT_SCALINGS
from shardwright.model.products.scaled_matmul import multiply_on_device
from shardwright.model.products.scaled_product import ScaledProducts
from shardwright.units import format_flops_per_second

MEASURED_RECIPES: tuple[LowPrecisionRecipe, ...] = (
    "tensorwise",
    "rowwise",
    "blockwise",
    "mxfp8",
    "nvfp4",
)
"""`rowwise_with_gw_hp` has the output product of `rowwise`."""
_MAX_CPU_SIDE = 512
_SECONDS = {"cpu": 0.05, "cuda": 0.2}


@dataclass(frozen=True)
class ScaledRate:
    """Rates of a square product of a recipe in FLOP/s, or the reason why there is none."""

    recipe: str
    side: int
    bf16_flops_per_second: float
    kernel_flops_per_second: float | None = None
    whole_flops_per_second: float | None = None
    """Rate with the quantisation of both operands."""
    stochastic_flops_per_second: float | None = None
    """Rate of an input gradient with the quantisation of both operands, of which it rounds the
    gradient stochastically; None if the recipe rounds to nearest."""
    obstacle: str | None = None
    is_unexpected: bool = False
    """True if the device should have the kernel, and calling it failed."""


def time_scaled_products(
    device: torch.device, bf16_rates: Sequence[MatmulRate]
) -> Iterator[ScaledRate]:
    """Measure the recipes at the largest side of the square bf16 products."""
    squares = [
        rate
        for rate in bf16_rates
        if rate.precision == "bf16"
        and rate.m == rate.n == rate.k
        and (device.type == "cuda" or rate.m <= _MAX_CPU_SIDE)
    ]
    if not squares:
        return
    best = max(squares, key=lambda rate: rate.m)
    for recipe in MEASURED_RECIPES:
        yield _time_recipe(recipe, device, best)


def _time_recipe(recipe: LowPrecisionRecipe, device: torch.device, bf16: MatmulRate) -> ScaledRate:
    side = bf16.m
    if device.type == "cuda":
        obstacle = explain_missing_kernel(recipe, describe_device(device))
    else:
        obstacle = explain_missing_cpu_kernel(recipe)
    if obstacle is not None:
        return ScaledRate(recipe, side, bf16.flops_per_second, obstacle=obstacle)
    x_MK, w_NK = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    fast_products = select_fast_products(recipe)
    products = ScaledProducts(
        PRODUCT_SCALINGS[recipe], is_emulated=False, fast_products=fast_products
    )
    if recipe == "nvfp4":
        products.rounding_key = torch.zeros((), dtype=torch.int32, device="cpu")
    left, right = products.quantise_output_operands(x_MK, w_NK)
    seconds = _SECONDS[device.type]
    try:
        kernel = measure_median_seconds(
            lambda: multiply_on_device(
                left, right, torch.bfloat16, is_fast="output" in fast_products
            ),
            device,
            seconds=seconds,
        )
        whole = measure_median_seconds(
            lambda: products.compute_output(x_MK, w_NK), device, seconds=seconds
        )
        stochastic = None
        if products.rounding_key is not None:
            stochastic = measure_median_seconds(
                lambda: products.compute_input_gradient(x_MK, w_NK), device, seconds=seconds
            )
    except (RuntimeError, ValueError) as error:
        reason = extract_first_line(str(error))
        return ScaledRate(recipe, side, bf16.flops_per_second, obstacle=reason, is_unexpected=True)
    flops = 2.0 * side**3
    return ScaledRate(
        recipe,
        side,
        bf16.flops_per_second,
        flops / kernel,
        flops / whole,
        None if stochastic is None else flops / stochastic,
    )


def _name_precision(recipe: str) -> str:
    return recipe if recipe == "nvfp4" else f"fp8 {recipe}"


def judge_scaled_products(
    rates: Mapping[int, Sequence[ScaledRate]], device_kind: str
) -> list[Finding]:
    """Report each recipe's rate against bf16, the reason for a missing one, and slow ranks."""
    findings = []
    for recipe in dict.fromkeys(rate.recipe for each in rates.values() for rate in each):
        by_rank = {
            rank: next(rate for rate in each if rate.recipe == recipe)
            for rank, each in rates.items()
            if any(rate.recipe == recipe for rate in each)
        }
        name = f"products, {_name_precision(recipe)}"
        missing = {rank: rate for rank, rate in by_rank.items() if rate.obstacle is not None}
        if missing:
            first = next(iter(missing.values()))
            is_unexpected = any(rate.is_unexpected for rate in missing.values())
            findings.append(
                Finding(
                    SECTION,
                    name,
                    "warn" if is_unexpected else "pass",
                    f"not measured: {first.obstacle}",
                    "Use precision: bf16, or another recipe; to emulate is slow"
                    if is_unexpected
                    else "",
                    {"recipe": recipe, "obstacle": first.obstacle},
                )
            )
            continue
        kernels = {rank: rate.kernel_flops_per_second or 0.0 for rank, rate in by_rank.items()}
        kernel_factor, whole_factor, stochastic_factor = (
            median(
                (getattr(rate, field) or 0.0) / rate.bf16_flops_per_second
                for rate in by_rank.values()
            )
            for field in (
                "kernel_flops_per_second",
                "whole_flops_per_second",
                "stochastic_flops_per_second",
            )
        )
        value = (
            f"{format_flops_per_second(min(kernels.values()))}, {kernel_factor:.2f} times bf16; "
            f"with the quantisation of both operands {whole_factor:.2f} times"
        )
        if stochastic_factor:
            value += f", and {stochastic_factor:.2f} times if gradients are rounded stochastically"
        if device_kind == "cpu":
            value += "; training on a CPU emulates"
        numbers = {
            "recipe": recipe,
            "flops_per_second": kernels,
            "times_bf16": kernel_factor,
            "times_bf16_with_quantisation": whole_factor,
            "times_bf16_with_stochastic_rounding": stochastic_factor or None,
            "side": next(iter(by_rank.values())).side,
        }
        findings.append(Finding(SECTION, name, "pass", value, "", numbers))
        findings += judge_slow_ranks(kernels, device_kind, name, format_flops_per_second)
    return findings
