"""Kernels of a profile by time, and the wait for a device."""

from __future__ import annotations

from typing import Any

import torch


def summarise_kernels(recorded: Any, device: torch.device) -> list[dict[str, Any]]:
    """List kernels (operators on a CPU) by time, with calls and seconds."""
    name = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    rows = [
        {"name": event.key, "calls": event.count, "seconds": getattr(event, name) / 1e6}
        for event in recorded.key_averages()
        # An annotation spans the kernels in it, and is no kernel.
        if not event.is_user_annotation
        and (device.type == "cpu" or str(event.device_type).endswith("CUDA"))
    ]
    return sorted((row for row in rows if row["seconds"]), key=lambda row: -row["seconds"])


def wait(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
