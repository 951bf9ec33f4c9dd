"""Check that a CUDA device has kernels for a plan's 8-bit products."""

from __future__ import annotations

from typing import get_args

from shardwright.config.low_precision import FP8Recipe, FP8Section
from shardwright.errors import RecipeError
from shardwright.model.products.kernel_support import (
    KernelDevice,
    explain_missing_kernel,
    format_capability,
)
from shardwright.model.products.scaled_matmul import DIM_MULTIPLE
from shardwright.placement import has_micro_batch_scales, select_scaled_weights
from shardwright.plans import Plan

_EMULATE = "Set precision.fp8.emulate: true (slow), or use precision.kind: bf16"


def check_low_precision_kernels(plan: Plan, device: KernelDevice) -> None:
    """Check, before any rank starts, that the device multiplies what the recipe quantises.

    Raises:
        RecipeError: no kernel takes the recipe, the device or the sizes.
    """
    section = plan.precision.low_precision
    if section is None or section.emulate:
        return
    obstacle = explain_missing_kernel(section.recipe, device)
    if obstacle is not None:
        possible = [
            recipe
            for recipe in get_args(FP8Recipe)
            if explain_missing_kernel(recipe, device) is None
        ]
        raise RecipeError(
            obstacle,
            field="precision.fp8.recipe",
            got=f"{section.recipe} on compute capability {format_capability(device.capability)}",
            allowed=", ".join(possible) or "emulation only",
            remedy=_EMULATE,
        )
    if section.compute != "bf16":
        raise RecipeError(
            "8-bit kernels write bf16",
            field="precision.fp8.compute",
            got=section.compute,
            allowed="bf16",
            remedy=_EMULATE,
        )
    weights = select_scaled_weights(plan.shape, section)
    obstacle = explain_missing_kernel(section.recipe, device, is_grouped=True)
    if "experts" in weights.values() and obstacle is not None:
        raise RecipeError(
            obstacle,
            field="precision.fp8.targets",
            got=list(section.targets),
            allowed="attention, mlp",
            remedy='Set targets: ["attention", "mlp"], or precision.fp8.emulate: true (slow)',
        )
    _check_sizes(plan, section, list(weights))
    tokens = plan.batch.sequence_length * plan.batch.micro_batch_size
    if has_micro_batch_scales(section) and tokens % DIM_MULTIPLE:
        raise RecipeError(
            f"8-bit weight gradients sum over {tokens} tokens of a micro-batch",
            field="training.sequence_length",
            got=plan.batch.sequence_length,
            allowed=f"multiples of {DIM_MULTIPLE} tokens in a micro-batch",
        )


def _check_sizes(plan: Plan, section: FP8Section, names: list[str]) -> None:
    """Check that both sides of every weight's shard are multiples that kernels take."""
    tp = plan.layout.tp
    specs = {spec.name: spec for spec in plan.shape.list_parameters()}
    for name in names:
        matrix = specs[name].packed_matrix or specs[name]
        sizes = list(matrix.shape)
        for shard in plan.placement.parameters[name].shards:
            if shard.axis == "tp":
                sizes[shard.dim] //= tp
        if any(size % DIM_MULTIPLE for size in sizes[-2:]):
            raise RecipeError(
                f"{name} is {' x '.join(map(str, sizes[-2:]))} on a tensor-parallel rank",
                field="precision.fp8.exclude",
                got=list(section.exclude),
                allowed=f"weights whose sides are multiples of {DIM_MULTIPLE}",
                remedy=f"Add {name} to precision.fp8.exclude, or lower layout.tp ({tp})",
            )
