"""The rate of matrix products that this device reaches, which MFU is a share of."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import cache

import torch

Product = tuple[int, int, int]
"""(tokens, outputs, inputs) of a linear layer: 2 x their product FLOPs forward and for each gradient."""

Work = Callable[[], torch.Tensor]

BUDGET_SECONDS = 0.4
_SLOWEST_SHARE = 0.25
"""Kinds of product (forward, the input's gradient, the weight's) that reach less of the best so far are
not tried again."""
_FEWEST_TOKENS = 16
_MOST_ELEMENTS = 2**28
"""Of a product's largest matrix."""


@cache
def measure_matmul_flops_per_second(
    device: torch.device,
    dtype: torch.dtype,
    products: tuple[Product, ...] = (),
) -> float:
    """Measure the best FLOP/s over square products and those of a model, forward and backward.

    This is the practical ceiling: what the vendor prints is not reached by any program. Where a dtype is
    emulated the three products of one layer differ by a factor of 30, so each is measured.

    Takes about `BUDGET_SECONDS`, however slow the device is: the smallest product comes first, and larger
    ones have fewer tokens where they would take too long. Kept for the life of the process.

    Args:
        products: of the model's layers, with the tokens of a micro-batch.
    """
    deadline = time.perf_counter() + BUDGET_SECONDS
    squares = (2048, 4096, 8192) if device.type == "cuda" else (128, 256, 512, 1024)
    smallest, *others = sorted({*((size,) * 3 for size in squares), *products}, key=math.prod)
    runs = _layer_products(smallest, device, dtype)
    latest = [_measure_rate(run, smallest, 0.0, device) for run in runs]
    fastest = list(latest)
    for index, product in enumerate(others):
        seconds = (deadline - time.perf_counter()) / (len(others) - index) / len(latest)
        kinds = [kind for kind, rate in enumerate(fastest) if rate >= _SLOWEST_SHARE * max(fastest)]
        fitting = _fit(product, seconds * min(latest[kind] for kind in kinds))
        if fitting is None:
            continue
        runs = _layer_products(fitting, device, dtype)
        for kind in kinds:
            latest[kind] = _measure_rate(runs[kind], fitting, seconds, device)
            fastest[kind] = max(fastest[kind], latest[kind])
    return max(fastest)


def _fit(product: Product, num_flops: float) -> Product | None:
    """Lower the tokens until two runs take `num_flops` and fit into memory; None if hardly any are left."""
    tokens, outputs, inputs = product
    affordable = int(num_flops / 2 / (2 * outputs * inputs))
    tokens = min(tokens, affordable, _MOST_ELEMENTS // max(outputs, inputs))
    if tokens < _FEWEST_TOKENS or outputs * inputs > _MOST_ELEMENTS:
        return None
    return tokens, outputs, inputs


def _layer_products(product: Product, device: torch.device, dtype: torch.dtype) -> tuple[Work, ...]:
    """Prepare forward, the input's gradient and the weight's, with operands laid out as in training."""
    tokens, outputs, inputs = product
    x = torch.randn(tokens, inputs, device=device).to(dtype)
    gradient = torch.randn(tokens, outputs, device=device).to(dtype)
    weight = torch.randn(outputs, inputs, device=device).to(dtype)
    return (lambda: x @ weight.t(), lambda: gradient @ weight, lambda: gradient.t() @ x)


def _measure_rate(run: Work, product: Product, budget_seconds: float, device: torch.device) -> float:
    """Measure the FLOP/s of the fastest run within the budget: of two at least, unless one exceeds it."""
    started, best = time.perf_counter(), math.inf
    num_runs = 0
    while num_runs < 2 or time.perf_counter() - started < budget_seconds:
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
        num_runs += 1
        if 0.0 < budget_seconds < best:
            break
    return 2.0 * math.prod(product) / best
