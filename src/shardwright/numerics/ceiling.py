"""The rate of matrix products that this device reaches, which MFU is a share of."""

from __future__ import annotations

import time
from functools import cache

import torch

_SECONDS_PER_SIZE = 0.12
_LONGEST_SECONDS = 0.2
"""A size whose single product would take longer, going by the size before, is left out."""


@cache
def measure_matmul_flops_per_second(device: torch.device, dtype: torch.dtype) -> float:
    """Best FLOP/s over square products of growing size (2 n^3 FLOPs each), measured once per process, device and dtype.

    Takes under half a second, a little more where products are slow (fp16 on most CPUs). This is the practical ceiling: what the
    vendor prints is not reached by any program.
    """
    sizes = (2048, 4096, 8192) if device.type == "cuda" else (256, 512, 1024)
    best = 0.0
    for size in sizes:
        if best and 2.0 * size**3 / best > _LONGEST_SECONDS:
            break
        best = max(best, 2.0 * size**3 / _seconds_of_product(size, device, dtype, _SECONDS_PER_SIZE))
    return best


def _seconds_of_product(size: int, device: torch.device, dtype: torch.dtype, budget_seconds: float) -> float:
    """The fastest of as many products as the budget allows, at least three after one for warming up."""
    a = torch.randn(size, size, device=device, dtype=torch.float32).to(dtype)
    b = torch.randn(size, size, device=device, dtype=torch.float32).to(dtype)
    out = torch.empty_like(a)
    started = time.perf_counter()
    torch.mm(a, b, out=out)  # warm-up: library handles, threads, clocks
    _wait(device)
    seconds: list[float] = []
    while len(seconds) < 3 or time.perf_counter() - started < budget_seconds:
        begin = time.perf_counter()
        torch.mm(a, b, out=out)
        _wait(device)
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
