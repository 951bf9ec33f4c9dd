"""Compare recipes of 8-bit and 4-bit products with bf16: kernels, speed of a step, loss curves.

    python -m benchmarks.gpu_low_precision cuda real RESULT.json
    python -m benchmarks.gpu_low_precision cpu tiny RESULT.json

1. Kernels: every product of every recipe, those of experts too, against its emulation on the
   device, with its seconds and those of bf16. The step fails if one differs by more than the limit.
2. Steps: layers of Llama 3 8B with optimizer, in bf16 and every recipe, plain and compiled, and
   compiled all layers with 8-bit AdamW, which need about 100 GiB; seconds of kernels by kind.
3. Curves: 200 steps of a small model on the text of Python's standard library, in bf16 with three
   seeds and in every recipe with the first: losses, and elements saturated or flushed to zero.

A recipe without a kernel on the device has the reason. A CPU emulates; its figures have no meaning.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from benchmarks.gpu_kernels import wait
from benchmarks.gpu_model import build_model, make_batch
from benchmarks.gpu_quantised_steps import SIZES, Sizes, time_steps
from benchmarks.gpu_step import choose_precision
from benchmarks.gpu_step_figures import DeviceRates, measure_rates
from shardwright.config.low_precision import (
    LowPrecisionRecipe,
    select_fast_products,
)
from shardwright.config.training import OptimizerSection
from shardwright.model.products.grouped_matmul import multiply_grouped
from shardwright.model.products.kernel_support import describe_device, explain_missing_kernel
from shardwright.model.products.operand import PRODUCT_SCALINGS
from shardwright.model.products.scaled_product import ScaledProducts
from shardwright.model.products.wide_product import multiply_to
from shardwright.optim import build_optimizer
from shardwright.training.step import accumulate_gradients, update_parameters

RECIPE_NAMES: tuple[LowPrecisionRecipe, ...] = get_args(LowPrecisionRecipe)
LIMIT = 5e-3
"""Largest distance of a kernel's result from the emulation's: results are rounded to bf16 (8 bits)
and a tensor core may sum with fewer bits than fp32."""
FAST_LIMIT = 2e-2
"""The same with fast accumulation: DeepSeek-V3 (arXiv 2412.19437, section 3.3.2) states a relative
error of nearly 2% at most, for sums of 4,096 random products."""
FAST = " fast accumulation"
ALL_LAYERS = ", all layers"
_NUM_MICRO_BATCHES = 4
ACCUMULATED = f"{ALL_LAYERS}, {_NUM_MICRO_BATCHES} micro-batches"
_LORA_RANK = 16
LORA = f"{ALL_LAYERS}, LoRA of rank {_LORA_RANK}"
PRODUCTS = ("compute_output", "compute_input_gradient", "compute_weight_gradient")
EXPERT_PRODUCTS = ("compute_expert_output", "compute_expert_input_gradient")
_EXPERT_SHARES = (0.5, 0.0, 0.3, 0.2)
"""Share of the rows of each expert; the groups begin anywhere."""
_CALLS = {"cpu": 2, "cuda": 20}
_SAVED_LOSSES = 20
"""Last losses whose mean is compared."""


def find_obstacle(
    recipe: LowPrecisionRecipe, device: torch.device, *, is_grouped: bool = False
) -> str | None:
    """Return why a recipe has no kernel on a CUDA device; None on a CPU, which emulates."""
    if device.type == "cpu":
        return None
    return explain_missing_kernel(recipe, describe_device(device), is_grouped=is_grouped)


def compare_kernels(
    recipe: LowPrecisionRecipe, sizes: Sizes, device: torch.device
) -> dict[str, Any]:
    """Compare each product with the emulation, and time it and bf16's."""
    generator = torch.Generator().manual_seed(0)
    num_out, num_in = sizes.sides
    shapes = {"x": (sizes.tokens, num_in), "w": sizes.sides, "g": (sizes.tokens, num_out)}
    operands = {
        name: torch.randn(shape, generator=generator).to(device, torch.bfloat16)
        for name, shape in shapes.items()
    }
    x, w, g = (operands[name] for name in "xwg")
    factors: dict[str, tuple[Any, ...]] = {
        PRODUCTS[0]: (x, w),
        PRODUCTS[1]: (g, w),
        PRODUCTS[2]: (g, x, torch.float32),
    }
    plain: dict[str, Callable[[], Tensor]] = {
        PRODUCTS[0]: lambda: x @ w.t(),
        PRODUCTS[1]: lambda: g @ w,
        PRODUCTS[2]: lambda: multiply_to(g.t(), x, torch.float32),
    }
    if recipe != "tensorwise" and find_obstacle(recipe, device, is_grouped=True) is None:
        experts = torch.stack([w * 2.0**expert for expert in range(len(_EXPERT_SHARES))])
        counts = [int(share * sizes.tokens) for share in _EXPERT_SHARES]
        counts[-1] += sizes.tokens - sum(counts)
        counts_E = torch.tensor(counts, device=device)
        factors |= {
            EXPERT_PRODUCTS[0]: (x, experts, counts_E),
            EXPERT_PRODUCTS[1]: (g, experts, counts_E),
        }
        plain |= {
            EXPERT_PRODUCTS[0]: lambda: multiply_grouped(x, experts, counts_E, transposed=True),
            EXPERT_PRODUCTS[1]: lambda: multiply_grouped(g, experts, counts_E, transposed=False),
        }
    emulated = ScaledProducts(PRODUCT_SCALINGS[recipe])
    is_emulated = device.type == "cpu"
    computed = {"": ScaledProducts(PRODUCT_SCALINGS[recipe], is_emulated=is_emulated)}
    fast_products = select_fast_products(recipe)
    if not is_emulated:
        computed[FAST] = replace(computed[""], fast_products=fast_products)
    result = {}
    for product, operands_of_product in factors.items():
        expected = getattr(emulated, product)(*operands_of_product).double()
        bf16_seconds = time_calls(plain[product], device)
        for suffix, products in computed.items():
            if suffix and not product.endswith(fast_products):
                continue
            compute = partial(getattr(products, product), *operands_of_product)
            result[product + suffix] = {
                "distance": float((compute().double() - expected).norm() / expected.norm()),
                "seconds": time_calls(compute, device),
                "bf16_seconds": bf16_seconds,
            }
    return result


def time_calls(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a call, the mean of several."""
    work()
    wait(device)
    start_seconds = time.perf_counter()
    for _ in range(_CALLS[device.type]):
        work()
    wait(device)
    return (time.perf_counter() - start_seconds) / _CALLS[device.type]


def read_text_ids(num_bytes: int) -> Tensor:
    """Read bytes of Python's standard library, in the order of the files' names."""
    folder = Path(os.__file__).parent
    text = bytearray()
    for file in sorted(folder.glob("*.py")):
        text += file.read_bytes()
        if len(text) >= num_bytes:
            break
    return torch.frombuffer(text[:num_bytes], dtype=torch.uint8).long()


def train_curve(
    recipe: LowPrecisionRecipe | None, sizes: Sizes, device: torch.device, seed: int
) -> dict[str, Any]:
    """Train on text; return every loss and the counts of the last steps."""
    rows, tokens = sizes.curve_shape
    ids = read_text_ids(sizes.curve_steps * rows * tokens)
    ids_SBT = ids[: len(ids) // (rows * tokens) * rows * tokens].view(-1, rows, tokens)
    model = build_model(
        sizes.curve_config, choose_precision(recipe), device, sizes.curve_shape, seed
    )
    optimizer = build_optimizer(
        model.named_parameters(), OptimizerSection(), learning_rate=1e-3, weight_decay=0.1
    )
    totals = model.decoder.rounding_totals
    losses = []
    for step in range(sizes.curve_steps):
        if totals is not None:
            totals.is_counting = step >= sizes.curve_steps - _SAVED_LOSSES
        batch = make_batch(ids_SBT[step % len(ids_SBT)])
        step_loss = accumulate_gradients(model, [batch], seed=seed, step=step)
        losses.append(float(step_loss.loss_sum) / batch.num_supervised)
        rate = 1e-3 * min(1.0, (step + 1) / 20)
        update_parameters(model, optimizer, learning_rate=rate, max_grad_norm=1.0)
    result: dict[str, Any] = {
        "losses": losses,
        "final_loss": statistics.mean(losses[-_SAVED_LOSSES:]),
    }
    if totals is not None:
        saturated, flushed, nonfinite, count = totals.pop_table(device).sum(0).tolist()
        result |= {
            "saturated": saturated,
            "flushed_share": flushed / max(1, count),
            "nonfinite": nonfinite,
            "num_counted": count,
        }
    return result


def attempt(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run a comparison; an error is its result, and does not end the others."""
    try:
        return work()
    except Exception as error:
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:300]}


def _list_comparisons(
    usable: Sequence[LowPrecisionRecipe],
    sizes: Sizes,
    shape_name: str,
    device: torch.device,
    rates: DeviceRates,
) -> list[tuple[str, str, Callable[[], dict[str, Any]]]]:
    """List the sections, names and functions of everything but compiled steps."""
    recipes = (None, *usable)
    time = partial(
        time_steps, sizes=sizes, name=shape_name, device=device, is_compiled=False, rates=rates
    )
    train = partial(train_curve, sizes=sizes, device=device)
    seeds = range(sizes.curve_seeds)
    return [
        *(("kernels", each, partial(compare_kernels, each, sizes, device)) for each in usable),
        *(("steps", each or "bf16", partial(time, each)) for each in recipes),
        *(("curves", f"bf16, seed {seed}", partial(train, None, seed=seed)) for seed in seeds),
        *(("curves", each, partial(train, each, seed=0)) for each in usable),
    ]


def _list_compiled_steps(
    usable: Sequence[LowPrecisionRecipe],
    sizes: Sizes,
    shape_name: str,
    device: torch.device,
    arguments: argparse.Namespace,
    rates: DeviceRates,
) -> list[tuple[str, str, Callable[[], dict[str, Any]]]]:
    """List compiled steps of some or, with `all_layers`, all layers; the latter are not compiled on
    a CPU, where that takes long. All steps of all layers have the same graphs.
    """
    is_compiled = device.type == "cuda"
    if not is_compiled and not (arguments.all_layers or arguments.lora):
        return []
    kind = ", compiled" if is_compiled else ""
    suffixes = (ALL_LAYERS, ACCUMULATED) if arguments.all_layers else ("",)
    if arguments.lora:
        suffixes = (LORA,)
    return [
        (
            "steps",
            f"{recipe or 'bf16'}{kind}{suffix}",
            partial(
                time_steps,
                recipe,
                sizes,
                shape_name,
                device,
                is_compiled,
                bool(suffix),
                _NUM_MICRO_BATCHES if suffix == ACCUMULATED else 1,
                _LORA_RANK if suffix == LORA else None,
                rates=rates,
            ),
        )
        for suffix in suffixes[: 1 if arguments.compile_only else None]
        for recipe in (None, *usable)
    ]


def main() -> None:
    """Compare everything, and write the result after each comparison."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("device", choices=("cuda", "cpu"))
    parser.add_argument("sizes", choices=SIZES)
    parser.add_argument("result", type=Path)
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PATTERN",
        help="comparisons to make, as 'steps/rowwise*' or 'curves/*'; repeatable",
    )
    parser.add_argument(
        "--all-layers",
        action="store_true",
        help="steps of all layers, and nothing else; without it everything else",
    )
    parser.add_argument(
        "--lora",
        action="store_true",
        help="steps of all layers with adapters over the frozen base, and nothing else",
    )
    parser.add_argument(
        "--compile-only",
        action="store_true",
        help="one layer and one step of the compiled steps: fill the compiler's caches",
    )
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    name: str = arguments.sizes
    sizes = SIZES[name]
    if arguments.compile_only:
        sizes = replace(sizes, layers=1, all_layers=1, timed_steps=1)
    target: Path = arguments.result
    patterns = arguments.only or ["*"]
    obstacles = {recipe: find_obstacle(recipe, device) for recipe in RECIPE_NAMES}
    usable = [recipe for recipe, obstacle in obstacles.items() if obstacle is None]
    shape_name = "llama-3-8b-12-layers" if name == "real" else "tiny"
    result: dict[str, Any] = {
        "low_precision": {
            "limit": LIMIT,
            "fast_limit": FAST_LIMIT,
            "num_layers": sizes.layers,
            "shape": shape_name,
        },
        "obstacles": {recipe: why for recipe, why in obstacles.items() if why is not None},
        "kernels": {},
        "steps": {},
        "curves": {},
    }

    def record(section: str, key: str, work: Callable[[], dict[str, Any]]) -> None:
        if not any(fnmatchcase(f"{section}/{key}", pattern) for pattern in patterns):
            return
        result[section][key] = attempt(work)
        target.write_text(json.dumps(result, indent=1) + "\n")

    comparisons: list[tuple[str, str, Callable[[], dict[str, Any]]]] = []
    rates = measure_rates(device, "bf16")
    if not (arguments.all_layers or arguments.lora or arguments.compile_only):
        comparisons = _list_comparisons(usable, sizes, shape_name, device, rates)
    comparisons += _list_compiled_steps(usable, sizes, shape_name, device, arguments, rates)
    for comparison in comparisons:
        record(*comparison)
    distant = [
        f"{recipe} {product}: {row['distance']:.1e}"
        for recipe, products in result["kernels"].items()
        if "failed" not in products
        for product, row in products.items()
        if not row["distance"] <= (FAST_LIMIT if product.endswith(FAST) else LIMIT)
    ]
    failed = [
        f"{key}: {row['failed']}"
        for section in ("kernels", "steps", "curves")
        for key, row in result[section].items()
        if "failed" in row
    ]
    if distant or failed:
        sys.exit("; ".join([*(f"differs from its emulation: {each}" for each in distant), *failed]))


if __name__ == "__main__":
    main()
