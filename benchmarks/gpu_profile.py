"""Profile one optimizer step of shardwright on one device: phases, gaps, kernels by kind and name.

    python -m benchmarks.gpu_profile cuda bf16 CONFIG.json SEQUENCE_LENGTH MICRO_BATCH RESULT.json
        [--compile] [--recipe tensorwise] [--offload '{"optimizer": "host"}']

The step is set up as in a run. A trace for https://ui.perfetto.dev is written next to RESULT.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import get_args

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.case import Case
from benchmarks.gpu_kernels import summarise_kernels, wait
from benchmarks.gpu_step import BuiltStep, build_step, choose_precision
from shardwright.config.low_precision import LowPrecisionRecipe
from shardwright.config.offload import OffloadSection
from shardwright.offload import OffloadedOptimizer
from shardwright.telemetry.trace_summary import read_trace, render_summary, summarise_trace

_WARMUP_STEPS = 3
_TIMED_STEPS = 3
_NUM_ROWS = 20
_UPDATE_BYTES = 4
"""Bytes of an element of gradients, moments and masters."""


def main() -> None:
    """Profile a step and write the result."""
    arguments = parse_arguments()
    device = torch.device(arguments.device)
    step = build(arguments, device)
    for _ in range(_WARMUP_STEPS):
        step.run()
    wait(device)
    start_seconds = time.perf_counter()
    for _ in range(_TIMED_STEPS):
        step.run()
    wait(device)
    step_seconds = (time.perf_counter() - start_seconds) / _TIMED_STEPS
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, acc_events=True) as recorded:
        step.run()
        wait(device)
    trace = arguments.result.with_suffix(".trace.json.gz")
    recorded.export_chrome_trace(str(trace))
    summary = summarise_trace(read_trace(trace), count_known_bytes(step))
    print(render_summary(summary))
    kernels = summarise_kernels(recorded, device)
    result = {
        "step_seconds": step_seconds,
        "idle_share": 1.0 - summary.busy_seconds / summary.seconds,
        "summary": dataclasses.asdict(summary) | {"text": render_summary(summary)},
        "kernels": kernels[:_NUM_ROWS],
    }
    arguments.result.write_text(json.dumps(result, indent=1) + "\n")
    step.state.wait_for_update()
    step.state.close_offloads()


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("device", choices=("cuda", "cpu"))
    parser.add_argument("precision", choices=("bf16", "fp32"))
    parser.add_argument("config", type=Path)
    parser.add_argument("length", type=int)
    parser.add_argument("rows", type=int)
    parser.add_argument("result", type=Path)
    parser.add_argument("--compile", action="store_true", help="compile the blocks")
    parser.add_argument(
        "--recipe", choices=get_args(LowPrecisionRecipe), help="8-bit or 4-bit products"
    )
    parser.add_argument(
        "--offload", type=json.loads, help="keys of `offload` in a recipe, as a JSON object"
    )
    return parser.parse_args()


def build(arguments: argparse.Namespace, device: torch.device) -> BuiltStep:
    """Build the step of the command line."""
    case = Case(
        "shardwright",
        0,
        arguments.precision,
        str(arguments.config.parent),
        1,
        arguments.length,
        arguments.rows,
        compile=arguments.compile,
        device=arguments.device,
        random_weights=True,
    )
    return build_step(
        case,
        device,
        precision=None if arguments.recipe is None else choose_precision(arguments.recipe),
        offload=None
        if arguments.offload is None
        else OffloadSection.model_validate(arguments.offload),
    )


def count_known_bytes(step: BuiltStep) -> dict[str, float]:
    """Count the bytes that AdamW's update reads and writes where it is on the device: gradient,
    weight and two moments, the last three twice, and working weights of 2 bytes.

    The gradient norm reads each gradient.
    """
    if isinstance(step.state.optimizer, OffloadedOptimizer):
        return {}
    model = step.state.model
    trained = [each for _, each in model.named_parameters() if each.requires_grad]
    num_elements = sum(parameter.numel() for parameter in trained)
    has_copies = model.decoder.working_weights is not None
    per_element = 7 * _UPDATE_BYTES + (2 if has_copies else 0)
    return {
        "update": float(num_elements * per_element),
        "gradient norm": float(num_elements * _UPDATE_BYTES),
    }


if __name__ == "__main__":
    main()
