"""Measured rate of matrix products on this device, the denominator of MFU."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import cache

import torch

Product = tuple[int, int, int]
"""(tokens, outputs, inputs) of a linear layer.

Forward and each gradient take 2 x their product FLOPs.
"""

Work = Callable[[], torch.Tensor]

BUDGET_SECONDS = 0.4
_MIN_RATE_SHARE = 0.25
"""Kinds of product (forward, the input's gradient, the weight's) below this share of the best
rate so far are not measured again."""
_MIN_TOKENS = 16
_MAX_ELEMENTS = 2**28
"""Largest number of elements of a product's matrices."""


@cache
def measure_matmul_flops_per_second(
    device: torch.device,
    dtype: torch.dtype,
    products: tuple[Product, ...] = (),
) -> float:
    """Measure the best FLOP/s over square products and those of a model, forward and backward.

    This is the practical ceiling: no program reaches the rate that the vendor publishes. Where
    a dtype is emulated the three products of one layer differ by a factor of 30, so each is
    measured.

    Takes about `BUDGET_SECONDS`, however slow the device is: the smallest product comes first,
    and larger ones use fewer tokens where they would take too long. Cached for the life of the
    process.

    Args:
        products: those of the model's layers, with the tokens of a micro-batch.
    """
    deadline = time.perf_counter() + BUDGET_SECONDS
    squares = (2048, 4096, 8192) if device.type == "cuda" else (128, 256, 512, 1024)
    smallest, *others = sorted({*((size,) * 3 for size in squares), *products}, key=math.prod)
    runs = _build_layer_products(smallest, device, dtype)
    latest = [_measure_rate(run, smallest, 0.0, device) for run in runs]
    fastest = list(latest)
    for index, product in enumerate(others):
        seconds = (deadline - time.perf_counter()) / (len(others) - index) / len(latest)
        kinds = [
            kind for kind, rate in enumerate(fastest) if rate >= _MIN_RATE_SHARE * max(fastest)
        ]
        reduced = _fit_num_tokens(product, seconds * min(latest[kind] for kind in kinds))
        if reduced is None:
            continue
        runs = _build_layer_products(reduced, device, dtype)
        for kind in kinds:
            latest[kind] = _measure_rate(runs[kind], reduced, seconds, device)
            fastest[kind] = max(fastest[kind], latest[kind])
    return max(fastest)


def _fit_num_tokens(product: Product, num_flops: float) -> Product | None:
    """Lower the tokens until two runs take `num_flops` and fit into memory; None if too few."""
    tokens, outputs, inputs = product
    affordable = int(num_flops / 2 / (2 * outputs * inputs))
    tokens = min(tokens, affordable, _MAX_ELEMENTS // max(outputs, inputs))
    if tokens < _MIN_TOKENS or outputs * inputs > _MAX_ELEMENTS:
        return None
    return tokens, outputs, inputs


def _build_layer_products(
    product: Product, device: torch.device, dtype: torch.dtype
) -> tuple[Work, ...]:
    """Build the three products of a linear layer, with operands laid out as in training."""
    tokens, outputs, inputs = product
    x = torch.randn(tokens, inputs, device=device).to(dtype)
    gradient = torch.randn(tokens, outputs, device=device).to(dtype)
    weight = torch.randn(outputs, inputs, device=device).to(dtype)
    return (lambda: x @ weight.t(), lambda: gradient @ weight, lambda: gradient.t() @ x)


def _measure_rate(
    run: Work, product: Product, budget_seconds: float, device: torch.device
) -> float:
    """Measure the FLOP/s of the fastest run within the budget.

    At least two runs, unless one exceeds the budget.
    """
    started = time.perf_counter()
    best = math.inf
    num_runs = 0
    while num_runs < 2 or time.perf_counter() - started < budget_seconds:
        run_start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - run_start)
        num_runs += 1
        if 0.0 < budget_seconds < best:
            break
    return 2.0 * math.prod(product) / best
