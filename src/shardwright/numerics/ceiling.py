"""The rate of matrix products that this device reaches, which MFU is a share of."""

from __future__ import annotations

import time
from functools import cache

import torch


@cache
def measure_matmul_flops_per_second(device: torch.device, dtype: torch.dtype) -> float:
    """Best FLOP/s over a few square products (2 n^3 FLOPs each), measured once per process, device and dtype.

    Takes under half a second on a CPU. This is the practical ceiling: what the vendor prints is not reached by any program.
    """
    sizes = (2048, 4096, 8192) if device.type == "cuda" else (512, 1024)
    budget_seconds = 0.4 / len(sizes)
    return max(_rate(size, device, dtype, budget_seconds) for size in sizes)


def _rate(size: int, device: torch.device, dtype: torch.dtype, budget_seconds: float) -> float:
    a = torch.randn(size, size, device=device, dtype=torch.float32).to(dtype)
    b = torch.randn(size, size, device=device, dtype=torch.float32).to(dtype)
    out = torch.empty_like(a)
    best = float("inf")
    started = time.perf_counter()
    torch.mm(a, b, out=out)  # warm-up: library handles, threads, clocks
    _wait(device)
    while True:
        begin = time.perf_counter()
        torch.mm(a, b, out=out)
        _wait(device)
        now = time.perf_counter()
        best = min(best, now - begin)
        if now - started > budget_seconds:
            return 2.0 * size**3 / best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
