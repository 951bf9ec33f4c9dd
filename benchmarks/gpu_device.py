"""Describe the device and check one product on it: `python -m benchmarks.gpu_device cuda RESULT`.

Needs torch alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.ceiling import DTYPES, measure_best_matmul_rate, measure_copy_rate

_MAX_PRODUCT_ERROR = 1e-5


def main() -> None:
    """Write name, memory, versions and rates; fail if a product is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_device", description=__doc__)
    parser.add_argument("device", choices=("cpu", "cuda"))
    parser.add_argument("result", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    described: dict[str, Any] = {
        "name": "CPU",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "product_error": measure_product_error(device),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        described |= {
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "capability": f"{properties.major}.{properties.minor}",
            "num_devices": torch.cuda.device_count(),
            "cudnn": torch.backends.cudnn.version(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version()))
            if dist.is_nccl_available()
            else None,
            "supports_bf16": torch.cuda.is_bf16_supported(),
        }
    is_cuda = device.type == "cuda"
    precisions = ("bf16", "fp32") if is_cuda else ("fp32",)
    described["matmul_flops_per_second"] = {
        name: measure_best_matmul_rate(device, DTYPES[name], is_large=is_cuda)
        for name in precisions
    }
    described["copy_bytes_per_second"] = measure_copy_rate(
        4 * 2**30 if is_cuda else 64 * 2**20, device
    )
    arguments.result.write_text(json.dumps(described, indent=1) + "\n")
    if described["product_error"] > _MAX_PRODUCT_ERROR:
        sys.exit(f"a float32 product has a relative error of {described['product_error']:.1e}")


def measure_product_error(device: torch.device) -> float:
    """Return the relative error of a float32 product against float64 on the CPU."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 256, generator=generator) for _ in range(2))
    exact = a.double() @ b.double()
    found = (a.to(device) @ b.to(device)).cpu().double()
    return float((found - exact).norm() / exact.norm())


if __name__ == "__main__":
    main()
