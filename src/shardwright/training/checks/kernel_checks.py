"""Check that a CUDA device has kernels for a plan's 8-bit products."""

from __future__ import annotations

from shardwright.config.low_precision import FP8Section
from shardwright.errors import RecipeError
from shardwright.model.products.scaled_matmul import DIM_MULTIPLE
from shardwright.placement import has_micro_batch_scales, select_scaled_weights
from shardwright.plans import Plan

_FIRST_CAPABILITY = {
    "tensorwise": (8, 9),
    "rowwise": (9, 0),
    "rowwise_with_gw_hp": (9, 0),
}
"""First CUDA compute capability whose 8-bit kernels take a recipe's scales; others are emulated."""

_EMULATE = "Set precision.fp8.emulate: true (slow), or use precision.kind: bf16"


def check_low_precision_kernels(plan: Plan, capability: tuple[int, int]) -> None:
    """Check, before any rank starts, that the device multiplies what the recipe quantises.

    Args:
        capability: compute capability of the CUDA device.

    Raises:
        RecipeError: no kernel takes the recipe, the device or the sizes.
    """
    section = plan.precision.low_precision
    if section is None or section.emulate:
        return
    if section.recipe not in _FIRST_CAPABILITY:
        raise RecipeError(
            "only emulated so far; no kernel of a device is called",
            field="precision.fp8.recipe",
            got=section.recipe,
            allowed=", ".join(_FIRST_CAPABILITY),
            remedy=_EMULATE,
        )
    if capability < _FIRST_CAPABILITY[section.recipe]:
        raise RecipeError(
            "this CUDA device has no 8-bit units for the recipe",
            field="precision.fp8.recipe",
            got=f"{section.recipe} on compute capability {capability[0]}.{capability[1]}",
            allowed=", ".join(
                f"{name} from {first[0]}.{first[1]}" for name, first in _FIRST_CAPABILITY.items()
            ),
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
    if "experts" in weights.values():
        raise RecipeError(
            "8-bit products of experts are only emulated so far",
            field="precision.fp8.targets",
            got=list(section.targets),
            allowed="attention, mlp",
            remedy='Set targets: ["attention", "mlp"]',
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
        if any(size % DIM_MULTIPLE for size in sizes):
            raise RecipeError(
                f"{name} is {' x '.join(map(str, sizes))} on a tensor-parallel rank",
                field="precision.fp8.exclude",
                got=list(section.exclude),
                allowed=f"weights whose sides are multiples of {DIM_MULTIPLE}",
                remedy=f"Add {name} to precision.fp8.exclude, or lower layout.tp ({tp})",
            )
