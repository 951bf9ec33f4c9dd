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
_MAX_BUSY_FACTOR = 10.0
"""Longest time of the measurement, as a multiple of its budget, on a busy CPU."""
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
    and larger ones use fewer tokens where they would take too long. On a CPU the seconds are those
    of this thread's processor time, so other processes lower neither the rate nor the number of
    measured products; the measurement then takes up to `_MAX_BUSY_FACTOR` times as long. Cached for
    the life of the process.

    Args:
        products: those of the model's layers, with the tokens of a micro-batch.
    """
    clock = _Clock(device)
    deadline = clock.read() + BUDGET_SECONDS
    last_start = time.perf_counter() + _MAX_BUSY_FACTOR * BUDGET_SECONDS
    squares = (2048, 4096, 8192) if device.type == "cuda" else (128, 256, 512, 1024)
    smallest, *others = sorted({*((size,) * 3 for size in squares), *products}, key=math.prod)
    runs = _build_layer_products(smallest, device, dtype)
    latest = [_measure_rate(run, smallest, 0.0, clock) for run in runs]
    fastest = list(latest)
    for index, product in enumerate(others):
        if time.perf_counter() > last_start:
            break
        seconds = (deadline - clock.read()) / (len(others) - index) / len(latest)
        kinds = [
            kind for kind, rate in enumerate(fastest) if rate >= _MIN_RATE_SHARE * max(fastest)
        ]
        reduced = _fit_num_tokens(product, seconds * min(latest[kind] for kind in kinds))
        if reduced is None:
            continue
        runs = _build_layer_products(reduced, device, dtype)
        for kind in kinds:
            latest[kind] = _measure_rate(runs[kind], reduced, seconds, clock)
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


class _Clock:
    """Seconds of a device: processor time of this thread on a CPU, else elapsed time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def read(self) -> float:
        """Return the seconds once the device has ended its work."""
        if self._device.type == "cpu":
            return time.thread_time()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _measure_rate(run: Work, product: Product, budget_seconds: float, clock: _Clock) -> float:
    """Measure the FLOP/s of the fastest run within the budget.

    At least two runs, unless one exceeds the budget. Runs during which the clock does not advance
    are left out: the processor time of a thread in a virtual machine may not advance for a while.
    """
    first_start = time.perf_counter()
    started = clock.read()
    best = math.inf
    num_runs = 0
    while num_runs < 2 or clock.read() - started < budget_seconds:
        run_start = clock.read()
        run()
        seconds = clock.read() - run_start
        if seconds > 0.0:
            best = min(best, seconds)
        num_runs += 1
        if 0.0 < budget_seconds < best or (seconds <= 0.0 and num_runs >= 2):
            break
    if math.isinf(best):
        best = (time.perf_counter() - first_start) / num_runs
    return 2.0 * math.prod(product) / best
