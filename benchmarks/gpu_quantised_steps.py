"""Steps of layers of Llama 3 8B in bf16 and with quantised products: models, sizes, seconds, and
kernels by kind."""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.case import Case
from benchmarks.contenders.with_shardwright import (
    build_recipe,
    build_validated_run,
    draw_weights_on,
)
from benchmarks.gpu_model import make_batch
from benchmarks.gpu_profile import summarise_kernels, wait
from benchmarks.shapes import SHAPES, TINY
from shardwright.config.low_precision import FP8Section, LowPrecisionRecipe, NVFP4Section
from shardwright.config.training import PrecisionSection
from shardwright.launch.rank_environment import RankEnvironment
from shardwright.training.memory_settings import agree_on_memory_settings
from shardwright.training.rank_sync import RankSync
from shardwright.training.setup import build_state
from shardwright.training.step import accumulate_gradients, update_parameters

_NUM_KERNELS = 30
_QUANTISATION = ("amax", "scaled_mm", "clamp")
"""Operators in the names of generated kernels that search maxima or write codes."""
_ATTENTION = ("flash", "fmha", "attention")
_PRODUCTS = ("gemm", "nvjet", "cutlass", "xmma", "::mm", "::addmm", "::bmm")


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


def choose_precision(recipe: LowPrecisionRecipe | None) -> PrecisionSection:
    """Return bf16, with quantised products of a recipe if one is given."""
    if recipe is None:
        return PrecisionSection(kind="bf16")
    return PrecisionSection.of_low_precision(
        NVFP4Section(experimental=True) if recipe == "nvfp4" else FP8Section(recipe=recipe)
    )


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
        by kind, the kernels with the most time, and peak bytes.
    """
    gc.collect()  # the model before this one
    if device.type == "cuda":
        torch.cuda.empty_cache()
    run_passes, run_update = _build_step(
        recipe, sizes, name, device, is_compiled, has_all_layers, num_micro_batches
    )
    for _ in range(2):
        run_passes()
        run_update()
    wait(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    num_steps = max(2, sizes.timed_steps // num_micro_batches)
    start_seconds = time.perf_counter()
    for _ in range(num_steps):
        run_passes()
        run_update()
    wait(device)
    seconds = (time.perf_counter() - start_seconds) / num_steps
    pass_seconds: list[float] = []
    for _ in range(num_steps):
        start_seconds = time.perf_counter()
        run_passes()
        wait(device)
        pass_seconds.append(time.perf_counter() - start_seconds)
        run_update()
        wait(device)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity], acc_events=True) as recorded:
        run_passes()
        wait(device)
    kernels = summarise_kernels(recorded, device)
    return {
        "seconds": seconds,
        "pass_seconds": statistics.median(pass_seconds),
        "peak_bytes": peak,
        "kernel_seconds": sum_by_kind(kernels),
        "kernels": kernels[:_NUM_KERNELS],
    }


def _build_step(
    recipe: LowPrecisionRecipe | None,
    sizes: Sizes,
    name: str,
    device: torch.device,
    is_compiled: bool,
    has_all_layers: bool,
    num_micro_batches: int,
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Build a run's model and optimizer; return functions that run a step's passes, and its update.

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
        plain = build_recipe(case)
        training = {"gradient_accumulation_steps": num_micro_batches}
        validated_run = agree_on_memory_settings(
            build_validated_run(
                plain.model_copy(
                    update={
                        "precision": choose_precision(recipe),
                        "training": plain.training.model_copy(update=training),
                    }
                ),
                1,
            ),
            RankSync(RankEnvironment(), device),
            device,
        )
        with draw_weights_on(device):
            state = build_state(validated_run, device)
    generator = torch.Generator().manual_seed(0)
    batches = [
        make_batch(torch.randint(0, config["vocab_size"], (rows, tokens), generator=generator))
        for _ in range(num_micro_batches)
    ]
    update = partial(
        update_parameters, state.model, state.optimizer, learning_rate=1e-5, max_grad_norm=1.0
    )
    return partial(accumulate_gradients, state.model, batches, seed=0, step=0), update


def sum_by_kind(kernels: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Sum the seconds of kernels by kind.

    A generated kernel that quantises may contain the operations before it: norms, gates, rotations.
    """
    seconds = dict.fromkeys(("products", "quantisation", "attention", "rest"), 0.0)
    for kernel in kernels:
        seconds[_find_kind(kernel["name"].lower())] += kernel["seconds"]
    return seconds


def _find_kind(name: str) -> str:
    if name.startswith("triton"):
        return "quantisation" if any(part in name for part in _QUANTISATION) else "rest"
    if any(part in name for part in _ATTENTION):
        return "attention"
    return "products" if any(part in name for part in _PRODUCTS) else "rest"
