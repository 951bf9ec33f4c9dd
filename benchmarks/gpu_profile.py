"""Profile one optimizer step of shardwright on one device: kernels by time, and gaps between them.

    python -m benchmarks.gpu_profile cuda bf16 CONFIG.json SEQUENCE_LENGTH MICRO_BATCH RESULT.json

Writes the kernels with the most time, their share of the step, the share of the step in which the
device ran none, and a trace for chrome://tracing next to RESULT.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_model import build_model, make_batch
from shardwright.config.training import OptimizerSection, PrecisionSection
from shardwright.optim import build_optimizer
from shardwright.training.step import accumulate_gradients, update_parameters

_WARMUP_STEPS = 3
_NUM_ROWS = 20


def main() -> None:
    """Profile a step and write the result."""
    device = torch.device(sys.argv[1])
    config = json.loads(Path(sys.argv[3]).read_text())
    run_step = build_step(device, sys.argv[2], config, int(sys.argv[4]), int(sys.argv[5]))
    for _ in range(_WARMUP_STEPS):
        run_step()
    wait(device)
    start_seconds = time.perf_counter()
    run_step()
    wait(device)
    step_seconds = time.perf_counter() - start_seconds
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, acc_events=True) as recorded:
        run_step()
        wait(device)
    kernels = summarise_kernels(recorded, device)
    busy_seconds = sum(kernel["seconds"] for kernel in kernels)
    target = Path(sys.argv[6])
    recorded.export_chrome_trace(str(target.with_suffix(".trace.json.gz")))
    result = {
        "step_seconds": step_seconds,
        "kernel_seconds": busy_seconds,
        "num_kernels": sum(kernel["calls"] for kernel in kernels),
        "idle_share": max(0.0, 1.0 - busy_seconds / step_seconds),
        "kernels": kernels[:_NUM_ROWS],
    }
    target.write_text(json.dumps(result, indent=1) + "\n")


def build_step(
    device: torch.device, precision: str, config: dict[str, Any], sequence_length: int, rows: int
) -> Any:
    """Build shardwright's model and optimizer; return a function that runs one optimizer step."""
    section = PrecisionSection(kind=precision)  # type: ignore[arg-type]
    model = build_model(config, section, device, (rows, sequence_length), 0)
    optimizer = build_optimizer(
        model.named_parameters(), OptimizerSection(), learning_rate=1e-4, weight_decay=0.1
    )
    generator = torch.Generator().manual_seed(0)
    shape = (rows, sequence_length)
    batch = make_batch(torch.randint(0, config["vocab_size"], shape, generator=generator))

    def run_step() -> None:
        accumulate_gradients(model, [batch], seed=0, step=0)
        update_parameters(model, optimizer, learning_rate=1e-4, max_grad_norm=1.0)

    return run_step


def summarise_kernels(recorded: Any, device: torch.device) -> list[dict[str, Any]]:
    """List kernels (operators on a CPU) by time, with calls and seconds."""
    name = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    rows = [
        {"name": event.key, "calls": event.count, "seconds": getattr(event, name) / 1e6}
        for event in recorded.key_averages()
        # An annotation spans the kernels in it, and is no kernel.
        if device.type == "cpu"
        or (str(event.device_type).endswith("CUDA") and not event.is_user_annotation)
    ]
    return sorted((row for row in rows if row["seconds"]), key=lambda row: -row["seconds"])


def wait(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
