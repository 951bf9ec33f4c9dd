"""Recipe section of products with 8-bit operands."""

from __future__ import annotations

from typing import Literal

from shardwright.config.recipe_section import RecipeSection

FP8Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8"]
FP8Target = Literal["attention", "mlp", "experts"]


class FP8Section(RecipeSection):
    """Products of 8-bit operands, for `kind: fp8`. Scales follow from the current values of the
    whole tensor, never from a shard; docs/low-precision.md has the recipes and their limits."""

    recipe: FP8Recipe = "rowwise_with_gw_hp"
    """Elements that share a scale: all of a tensor (`tensorwise`); a row or column (`rowwise`);
    the same with gradients of weights in high precision (`rowwise_with_gw_hp`), which every
    parallelism supports; 128 elements or 128 x 128 weights (`blockwise`); 32 elements with scales
    that are powers of two (`mxfp8`)."""
    targets: tuple[FP8Target, ...] = ("attention", "mlp", "experts")
    """Layers whose weights multiply 8-bit operands: projections of attention, feed-forwards
    (shared experts too), experts. Embeddings, head, norms, routers, adapters and attention itself
    never do. Gradients of experts' weights stay in high precision."""
    exclude: tuple[str, ...] = ()
    """Patterns of weights that stay in high precision, for example `model.layers.0.*`."""
    compute: Literal["bf16", "fp32", "fp64"] = "bf16"
    """Precision of everything else, and of the results of 8-bit products."""
    emulate: bool = False
    """Emulate on CUDA devices too: slow, but for every recipe and every device. CPUs always
    emulate."""
