"""Measure the device's own rates and print one JSON line: `python -m benchmarks.ceiling cuda bf16`.

Needs torch alone.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch

REPEATS = 10
LONGEST_PRODUCT_SECONDS = 0.2
"""Larger sizes are skipped if a product would take longer: a CPU that emulates bf16 takes seconds
for the largest.
"""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def main() -> None:
    """Print the device's name, memory, matrix-product and copy rates."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ceiling", description=__doc__)
    parser.add_argument("device", choices=("cpu", "cuda"))
    parser.add_argument("precision", choices=tuple(DTYPES))
    parser.add_argument(
        "shapes",
        nargs="?",
        choices=("real", "tiny"),
        default="real",
        help="tiny: those of a CPU also on CUDA, for a simulated device",
    )
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    cuda = device.type == "cuda"
    is_large = cuda and arguments.shapes == "real"
    described = {
        "name": torch.cuda.get_device_name(device) if cuda else "CPU",
        "memory_bytes": torch.cuda.get_device_properties(device).total_memory if cuda else None,
        "cuda": torch.version.cuda if cuda else None,
        "matmul_flops_per_second": measure_best_matmul_rate(
            device, DTYPES[arguments.precision], is_large=is_large
        ),
        "copy_bytes_per_second": measure_copy_rate(4 * 2**30 if is_large else 64 * 2**20, device),
    }
    print(json.dumps(described))


def measure_best_matmul_rate(device: torch.device, dtype: torch.dtype, *, is_large: bool) -> float:
    """Return the best FLOP/s over square products of growing size."""
    best = 0.0
    for size in (4096, 8192, 16384) if is_large else (256, 512, 1024):
        if best and 2.0 * size**3 / best > LONGEST_PRODUCT_SECONDS:
            break
        best = max(best, measure_matmul_rate(size, device, dtype))
    return best


def measure_matmul_rate(size: int, device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of a square product of random numbers (zeros run faster on real chips)."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2.0 * size**3 / _time_call(lambda: torch.mm(a, b, out=out), device)


def measure_copy_rate(num_bytes: int, device: torch.device) -> float:
    """Return bytes per second of a large copy on the device, reads and writes counted."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2.0 * num_bytes / _time_call(lambda: target.copy_(source), device)


def _time_call(run: Callable[[], object], device: torch.device) -> float:
    """Return the mean seconds of one call after warm-up."""
    for _ in range(3):
        run()
    _wait(device)
    start_seconds = time.perf_counter()
    for _ in range(REPEATS):
        run()
    _wait(device)
    return (time.perf_counter() - start_seconds) / REPEATS


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
