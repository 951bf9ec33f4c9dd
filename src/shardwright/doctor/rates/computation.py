"""Computation between two collectives, for times as in a step."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from shardwright.doctor.rates.device_rates import measure_median_seconds

WORK_SECONDS = 1e-2
"""Computation between two collectives: about one layer of a small model."""


def build_computation(device: torch.device) -> Callable[[], None]:
    """Return products that take `WORK_SECONDS` on an idle rank; all ranks compute as many.

    Every rank of the default group calls this.
    """
    m, k, n = (2048, 256, 768) if device.type == "cpu" else (4096, 4096, 4096)
    a = torch.randn(m, k, device=device)
    b = torch.randn(k, n, device=device)
    count = torch.tensor(
        WORK_SECONDS / measure_median_seconds(lambda: a @ b, device, seconds=0.05), device=device
    )
    dist.all_reduce(count)  # all ranks do the same amount of work
    num_products = max(1, round(float(count) / dist.get_world_size()))

    def compute() -> None:
        for _ in range(num_products):
            torch.mm(a, b)

    return compute
