"""Steps of layers of Llama 3 8B in bf16 and with quantised products: models, sizes, seconds, and
kernels by kind."""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.case import Case
from benchmarks.gpu_kernels import summarise_kernels, wait
from benchmarks.gpu_step import BuiltStep, build_step, choose_precision
from benchmarks.shapes import SHAPES, TINY
from shardwright.config.low_precision import LowPrecisionRecipe
from shardwright.telemetry.trace_summary import classify_kernel

_NUM_KERNELS = 30
_NUM_UPDATE_KERNELS = 10


@dataclass(frozen=True)
class Sizes:
    """Sizes of the three comparisons."""

    tokens: int
    """Tokens of a product."""
    sides: tuple[int, int]
    """Outputs and inputs of a product."""
    layers: int
    all_layers: int
    """Layers of the whole model."""
    step_shape: tuple[int, int]
    """Rows and tokens of a step's micro-batch."""
    timed_steps: int
    curve_steps: int
    curve_seeds: int
    curve_config: dict[str, Any]
    curve_shape: tuple[int, int]
    """Rows and tokens of a step."""


_SMALL = {
    "model_type": "llama",
    "vocab_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
SIZES = {
    "real": Sizes(8192, (14336, 4096), 4, 32, (2, 4096), 4, 200, 3, _SMALL, (16, 512)),
    "tiny": Sizes(
        128,
        (256, 128),
        1,
        2,
        (1, 128),
        1,
        3,
        2,
        _SMALL
        | {
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 1,
        },
        (1, 128),
    ),
}


def time_steps(
    recipe: LowPrecisionRecipe | None,
    sizes: Sizes,
    name: str,
    device: torch.device,
    is_compiled: bool,
    has_all_layers: bool = False,
    num_micro_batches: int = 1,
) -> dict[str, Any]:
    """Time optimizer steps of some or all layers on random tokens, set up as a run is.

    Steps follow each other as in a run: the host waits for each gradient norm, not for the update.

    Returns:
        Seconds of a step, those of its forward and backward pass, those of kernels of these passes
        by kind, the kernels with the most time, and peak bytes; seconds of norm and update, after a
        wait for the passes, and of their kernels.
    """
    # As in a process of its own: graphs of other recipes count against the limit of recompilations.
    torch.compiler.reset()
    gc.collect()  # the model before this one
    if device.type == "cuda":
        torch.cuda.empty_cache()
    step = _build_step(recipe, sizes, name, device, is_compiled, has_all_layers, num_micro_batches)
    for _ in range(2):
        step.run()
    wait(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    num_steps = max(2, sizes.timed_steps // num_micro_batches)
    start_seconds = time.perf_counter()
    for _ in range(num_steps):
        step.run()
    wait(device)
    seconds = (time.perf_counter() - start_seconds) / num_steps
    pass_seconds: list[float] = []
    update_seconds: list[float] = []
    for _ in range(num_steps):
        start_seconds = time.perf_counter()
        step.run_passes()
        wait(device)
        between_seconds = time.perf_counter()
        step.run_update()
        wait(device)
        pass_seconds.append(between_seconds - start_seconds)
        update_seconds.append(time.perf_counter() - between_seconds)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity], acc_events=True) as recorded:
        step.run_passes()
        wait(device)
    kernels = summarise_kernels(recorded, device)
    with profile(activities=[activity], acc_events=True) as recorded:
        step.run_update()
        wait(device)
    update_kernels = summarise_kernels(recorded, device)
    return {
        "seconds": seconds,
        "pass_seconds": statistics.median(pass_seconds),
        "peak_bytes": peak,
        "kernel_seconds": sum_by_kind(kernels),
        "kernels": kernels[:_NUM_KERNELS],
        "update_seconds": statistics.median(update_seconds),
        "update_kernel_seconds": sum(kernel["seconds"] for kernel in update_kernels),
        "update_kernels": update_kernels[:_NUM_UPDATE_KERNELS],
    }


def _build_step(
    recipe: LowPrecisionRecipe | None,
    sizes: Sizes,
    name: str,
    device: torch.device,
    is_compiled: bool,
    has_all_layers: bool,
    num_micro_batches: int,
) -> BuiltStep:
    """Build a step of a run's model and optimizer.

    All layers have 8-bit AdamW, to fit on one device.
    """
    config = (SHAPES | TINY)[name].config
    if name == "tiny":  # whole blocks of 128
        config = config | sizes.curve_config
    num_layers = sizes.all_layers if has_all_layers else sizes.layers
    rows, tokens = sizes.step_shape
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(
            json.dumps(config | {"num_hidden_layers": num_layers})
        )
        case = Case(
            contender="shardwright",
            zero_stage=0,
            precision="bf16",
            weights_dir=folder,
            world_size=1,
            sequence_length=tokens,
            micro_batch_size=rows,
            compile=is_compiled,
            optimizer="adamw_8bit" if has_all_layers else "adamw",
            device=device.type,  # type: ignore[arg-type]
            random_weights=True,
        )
        return build_step(
            case,
            device,
            precision=choose_precision(recipe),
            num_micro_batches=num_micro_batches,
        )


def sum_by_kind(kernels: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Sum the seconds of kernels by kind.

    A generated kernel that quantises may contain the operations before it: norms, gates, rotations.
    """
    seconds = dict.fromkeys(("products", "quantisation", "attention", "rest"), 0.0)
    for kernel in kernels:
        kind = classify_kernel(kernel["name"])
        seconds[kind if kind in seconds else "rest"] += kernel["seconds"]
    return seconds
