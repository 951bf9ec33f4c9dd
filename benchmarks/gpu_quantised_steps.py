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
from benchmarks.gpu_step_figures import DeviceRates, count_steps, describe_step, read_peaks
from benchmarks.pace import forget_graph_breaks
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
    lora_rank: int | None = None,
    *,
    rates: DeviceRates,
) -> dict[str, Any]:
    """Time optimizer steps of some or all layers on random tokens, set up as a run is.

    Steps follow each other as in a run: the host waits for each gradient norm, not for the update.

    Args:
        lora_rank: Rank of adapters of all projections, whose base is frozen; None: all is trained.

    Returns:
        The figures of every step (`StepFigures`); seconds of a step, those of its forward and
        backward pass, those of kernels of these passes by kind, the kernels with the most time, and
        peak bytes; seconds of norm and update, after a wait for the passes, and of their
        kernels.
    """
    forget_graph_breaks()
    # As in a process of its own: graphs of other recipes count against the limit of recompilations.
    torch.compiler.reset()
    gc.collect()  # the model before this one
    if device.type == "cuda":
        torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as folder:
        step = _build_step(
            Path(folder),
            *(recipe, sizes, name, device, is_compiled, has_all_layers),
            *(num_micro_batches, lora_rank),
        )
        num_steps = max(2, sizes.timed_steps // num_micro_batches)
        return _time_step(step, num_steps, device, rates)


def _time_step(
    step: BuiltStep, num_steps: int, device: torch.device, rates: DeviceRates
) -> dict[str, Any]:
    """Time a built step; its model's config.json must still be there, for the prediction."""
    for _ in range(2):
        step.run()
    wait(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    start_seconds = time.perf_counter()
    for _ in range(num_steps):
        step.run()
    wait(device)
    seconds = (time.perf_counter() - start_seconds) / num_steps
    peaks = read_peaks(device)
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
    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity], acc_events=True) as recorded:
        step.run_passes()
        wait(device)
    kernels = summarise_kernels(recorded, device)
    with profile(activities=[activity], acc_events=True) as recorded:
        step.run_update()
        wait(device)
    update_kernels = summarise_kernels(recorded, device)
    counts = count_steps(step.run, device)
    return {
        **describe_step(step.validated_run, rates, seconds, peaks, counts),
        "seconds": seconds,
        "pass_seconds": statistics.median(pass_seconds),
        "peak_bytes": peaks["peak_allocated_bytes"],
        "kernel_seconds": sum_by_kind(kernels),
        "kernels": kernels[:_NUM_KERNELS],
        "update_seconds": statistics.median(update_seconds),
        "update_kernel_seconds": sum(kernel["seconds"] for kernel in update_kernels),
        "update_kernels": update_kernels[:_NUM_UPDATE_KERNELS],
    }


def _build_step(
    folder: Path,
    recipe: LowPrecisionRecipe | None,
    sizes: Sizes,
    name: str,
    device: torch.device,
    is_compiled: bool,
    has_all_layers: bool,
    num_micro_batches: int,
    lora_rank: int | None,
) -> BuiltStep:
    """Build a step of a run's model and optimizer.

    All layers have 8-bit AdamW, to fit on one device, unless only adapters are trained.
    """
    config = (SHAPES | TINY)[name].config
    if name == "tiny":  # whole blocks of 128
        config = config | sizes.curve_config
    num_layers = sizes.all_layers if has_all_layers else sizes.layers
    rows, tokens = sizes.step_shape
    text = json.dumps(config | {"num_hidden_layers": num_layers})
    (folder / "config.json").write_text(text)
    case = Case(
        contender="shardwright",
        zero_stage=0,
        precision="bf16",
        weights_dir=str(folder),
        world_size=1,
        sequence_length=tokens,
        micro_batch_size=rows,
        compile=is_compiled,
        optimizer="adamw_8bit" if has_all_layers and lora_rank is None else "adamw",
        lora_rank=lora_rank,
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
