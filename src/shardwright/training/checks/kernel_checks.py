"""Check that a CUDA device has kernels for a plan's quantised products."""

from __future__ import annotations

from typing import get_args

from shardwright.config.low_precision import FP8Recipe, LowPrecisionSection
from shardwright.errors import RecipeError
from shardwright.model.products.kernel_support import (
    KernelDevice,
    explain_missing_kernel,
    format_capability,
)
from shardwright.model.products.scaled_matmul import DIM_MULTIPLE, SUMMED_MULTIPLE_OF_4BIT
from shardwright.placement import (
    describe_bits,
    has_micro_batch_scales,
    select_scaled_weights,
)
from shardwright.plans import Plan


def check_low_precision_kernels(plan: Plan, device: KernelDevice) -> None:
    """Check, before any rank starts, that the device multiplies what the recipe quantises.

    Raises:
        RecipeError: no kernel takes the recipe, the device or the sizes.
    """
    section = plan.precision.low_precision
    if section is None or section.emulate:
        return
    emulate = f"Set precision.{section.kind}.emulate: true (slow), or use precision.kind: bf16"
    obstacle = explain_missing_kernel(section.recipe, device)
    if obstacle is not None:
        possible = [
            recipe
            for recipe in get_args(FP8Recipe)
            if explain_missing_kernel(recipe, device) is None
        ]
        raise RecipeError(
            obstacle,
            field="precision.kind" if section.kind == "nvfp4" else "precision.fp8.recipe",
            got=f"{section.recipe} on compute capability {format_capability(device.capability)}",
            allowed=_list_allowed(section, possible),
            remedy=emulate,
        )
    if section.compute != "bf16":
        raise RecipeError(
            f"{describe_bits(section)} kernels write bf16",
            field=f"precision.{section.kind}.compute",
            got=section.compute,
            allowed="bf16",
            remedy=emulate,
        )
    weights = select_scaled_weights(plan.shape, section)
    obstacle = explain_missing_kernel(section.recipe, device, is_grouped=True)
    if "experts" in weights.values() and obstacle is not None:
        raise RecipeError(
            obstacle,
            field=f"precision.{section.kind}.targets",
            got=list(section.targets),
            allowed="attention, mlp",
            remedy='Set targets: ["attention", "mlp"], '
            f"or precision.{section.kind}.emulate: true (slow)",
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


def _list_allowed(section: LowPrecisionSection, fp8_recipes: list[FP8Recipe]) -> str:
    if not fp8_recipes:
        return "emulation only"
    names = ", ".join(fp8_recipes)
    return f"fp8 with recipe {names}" if section.kind == "nvfp4" else names


def _check_sizes(plan: Plan, section: LowPrecisionSection, names: list[str]) -> None:
    """Check that both sides of every weight's shard are multiples that kernels take."""
    # Both sides are summed over: the inputs by the output, the outputs by the input gradient.
    multiple = SUMMED_MULTIPLE_OF_4BIT if section.kind == "nvfp4" else DIM_MULTIPLE
    tp = plan.layout.tp
    specs = {spec.name: spec for spec in plan.shape.list_parameters()}
    for name in names:
        matrix = specs[name].packed_matrix or specs[name]
        sizes = list(matrix.shape)
        for shard in plan.placement.parameters[name].shards:
            if shard.axis == "tp":
                sizes[shard.dim] //= tp
        if any(size % multiple for size in sizes[-2:]):
            raise RecipeError(
                f"{name} is {' x '.join(map(str, sizes[-2:]))} on a tensor-parallel rank",
                field=f"precision.{section.kind}.exclude",
                got=list(section.exclude),
                allowed=f"weights whose sides are multiples of {multiple}",
                remedy=f"Add {name} to precision.{section.kind}.exclude, or lower layout.tp ({tp})",
            )
