"""Recipe sections of products with operands of 8 and of 4 bits."""

from __future__ import annotations

from typing import ClassVar, Literal

from shardwright.config.recipe_section import RecipeSection

FP8Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8"]
LowPrecisionRecipe = Literal[
    "tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8", "nvfp4"
]
"""Recipes of `fp8`, and the one of `nvfp4`."""
LowPrecisionTarget = Literal["attention", "mlp", "experts"]


class _LowPrecisionSection(RecipeSection):
    """Keys that sections of low-precision products have in common."""

    targets: tuple[LowPrecisionTarget, ...] = ("attention", "mlp", "experts")
    """Layers whose weights multiply quantised operands: projections of attention, feed-forwards
    (shared experts too), experts. Embeddings, head, norms, routers, adapters and attention itself
    never do. Gradients of experts' weights stay in high precision."""
    exclude: tuple[str, ...] = ()
    """Patterns of weights that stay in high precision, for example `model.layers.0.*`."""
    compute: Literal["bf16", "fp32", "fp64"] = "bf16"
    """Precision of everything else, and of the results of quantised products."""


class FP8Section(_LowPrecisionSection):
    """Products of 8-bit operands, for `kind: fp8`. Scales follow from the current values of the
    whole tensor, never from a shard; docs/low-precision.md has the recipes and their limits."""

    kind: ClassVar[Literal["fp8"]] = "fp8"

    recipe: FP8Recipe = "rowwise_with_gw_hp"
    """Elements that share a scale: all of a tensor (`tensorwise`); a row or column (`rowwise`);
    the same with gradients of weights in high precision (`rowwise_with_gw_hp`), which every
    parallelism supports; 128 elements or 128 x 128 weights (`blockwise`); 32 elements with scales
    that are powers of two (`mxfp8`)."""
    emulate: bool = False
    """Emulate on CUDA devices too: slow, but for every recipe and every device. CPUs always
    emulate."""


class NVFP4Section(_LowPrecisionSection):
    """Products of 4-bit operands, for `kind: nvfp4`, an experiment: 16 elements, or 16 x 16 of a
    weight, share a scale in E4M3, and a row or a weight one in fp32. Gradients of weights stay in
    high precision; docs/low-precision.md says what NVIDIA's recipe has beyond that."""

    kind: ClassVar[Literal["nvfp4"]] = "nvfp4"
    recipe: ClassVar[Literal["nvfp4"]] = "nvfp4"

    experimental: bool = False
    """Must be true: long runs are not measured, and formats may change between versions."""
    gradient_rounding: Literal["stochastic", "nearest"] = "stochastic"
    """Rounding of gradients of outputs. `stochastic`: up or down at random, so that the mean is
    exact; the random numbers depend on seed, step and values, not on the layout."""
    emulate: bool = False
    """Emulate on CUDA devices, slowly. CPUs always emulate."""


LowPrecisionSection = FP8Section | NVFP4Section
