"""Recipe sections of products with operands of 8 and of 4 bits."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import model_validator

from shardwright.config.recipe_section import RecipeSection

FP8Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8"]
LowPrecisionRecipe = Literal[
    "tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8", "nvfp4"
]
"""Recipes of `fp8`, and the one of `nvfp4`."""
LowPrecisionTarget = Literal["attention", "mlp", "experts"]
FP8Product = Literal["output", "input_gradient", "weight_gradient"]

_BLOCK_RECIPES: tuple[LowPrecisionRecipe, ...] = ("blockwise", "mxfp8", "nvfp4")


def select_fast_products(recipe: LowPrecisionRecipe) -> tuple[FP8Product, ...]:
    """Select the products of a recipe that accumulate fast by default.

    Scales of blocks are applied to partial sums in fp32, so kernels for them have no such mode.
    """
    return () if recipe in _BLOCK_RECIPES else ("output",)


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
    fast_accumulation: tuple[FP8Product, ...] | None = None
    """Products whose partial sums stay in Hopper's tensor cores, in about 14 bits, instead of being
    added in fp32: faster and less accurate. Emulation and GPUs without this mode ignore it.
    Default: `[output]`, and `[]` for `blockwise` and `mxfp8`, which add blocks in fp32."""

    @property
    def fast_products(self) -> tuple[FP8Product, ...]:
        """Products that accumulate fast."""
        if self.fast_accumulation is None:
            return select_fast_products(self.recipe)
        return self.fast_accumulation

    @model_validator(mode="after")
    def _check_fast_accumulation(self) -> FP8Section:
        if self.fast_accumulation and self.recipe in _BLOCK_RECIPES:
            raise ValueError(
                f"`fast_accumulation` got {list(self.fast_accumulation)}, but the kernels of "
                f"`recipe: {self.recipe}` add blocks in fp32; allowed: []; remove it"
            )
        if "weight_gradient" in self.fast_products and self.recipe == "rowwise_with_gw_hp":
            raise ValueError(
                "`fast_accumulation` got weight_gradient, which is no product of 8-bit operands "
                "with `recipe: rowwise_with_gw_hp`; allowed: output, input_gradient; remove it, "
                "or use `recipe: rowwise`"
            )
        return self


class NVFP4Section(_LowPrecisionSection):
    """Products of 4-bit operands, for `kind: nvfp4`, an experiment: 16 elements, or 16 x 16 of a
    weight, share a scale in E4M3, and a row or a weight one in fp32. Gradients of weights stay in
    high precision; docs/low-precision.md says what NVIDIA's recipe has beyond that."""

    kind: ClassVar[Literal["nvfp4"]] = "nvfp4"
    recipe: ClassVar[Literal["nvfp4"]] = "nvfp4"
    fast_products: ClassVar[tuple[FP8Product, ...]] = ()

    experimental: bool = False
    """Must be true: long runs are not measured, and formats may change between versions."""
    gradient_rounding: Literal["stochastic", "nearest"] = "stochastic"
    """Rounding of gradients of outputs. `stochastic`: up or down at random, so that the mean is
    exact; the random numbers depend on seed, step and values, not on the layout."""
    emulate: bool = False
    """Emulate on CUDA devices, slowly. CPUs always emulate."""


LowPrecisionSection = FP8Section | NVFP4Section
