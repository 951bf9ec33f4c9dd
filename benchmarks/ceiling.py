"""What the device itself reaches, as one JSON line: `python -m benchmarks.ceiling cuda`. Needs torch alone."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch

REPEATS = 10


def main() -> None:
    """Print the device's name, memory, matrix-product and copy rates."""
    device = torch.device(sys.argv[1])
    cuda = device.type == "cuda"
    sizes = (4096, 8192, 16384) if cuda else (512, 1024)
    described = {
        "name": torch.cuda.get_device_name(device) if cuda else "CPU",
        "memory_bytes": torch.cuda.get_device_properties(device).total_memory if cuda else None,
        "cuda": torch.version.cuda if cuda else None,
        "matmul_flops_per_second": max(matmul_rate(size, device) for size in sizes),
        "copy_bytes_per_second": copy_rate(4 * 2**30 if cuda else 64 * 2**20, device),
    }
    print(json.dumps(described))


def matmul_rate(size: int, device: torch.device) -> float:
    """FLOP/s of a square bf16 product of random numbers (zeros run faster on real chips)."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return 2.0 * size**3 / _seconds(lambda: torch.mm(a, b, out=out), device)


def copy_rate(num_bytes: int, device: torch.device) -> float:
    """Bytes per second of a large copy on the device, bytes read and bytes written counted."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2.0 * num_bytes / _seconds(lambda: target.copy_(source), device)


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call: the mean of a row of calls, after warm-up."""
    for _ in range(3):
        run()
    _wait(device)
    started = time.perf_counter()
    for _ in range(REPEATS):
        run()
    _wait(device)
    return (time.perf_counter() - started) / REPEATS


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
