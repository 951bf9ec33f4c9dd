"""Costs of 8-bit and 4-bit products as this trainer computes them.

Every product quantises both of its operands, weights too, in each micro-batch. A weight whose codes
ZeRO gathers is quantised once per gather instead, each rank its shard. Working operands are
quantised once per step.
Gradients of experts' weights, and with `rowwise_with_gw_hp` and `nvfp4` all gradients of weights,
are products in bf16.

Legend: M tokens, N output features, K input features of a product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from shardwright.architecture import ModelShape
from shardwright.config.low_precision import (
    FP8Section,
    LowPrecisionRecipe,
    LowPrecisionSection,
    LowPrecisionTarget,
    NVFP4Section,
)
from shardwright.config.recipe import Recipe
from shardwright.errors import RecipeError
from shardwright.hardware import Accelerator, Cluster
from shardwright.placement.low_precision import (
    BLOCK_OF_RECIPE,
    TARGET_OF_ROLE,
    select_scaled_weights,
)

EAGER_BYTES = 39.0
"""Bytes moved per element to quantise in separate operations: 24 for the maxima (to fp32: 2 + 4,
magnitudes 4 + 4, reduction 4, and a cast of 2 + 4 to scale), 8 to scale, 5 to cast, and 2 to copy
the codes into the order of the kernel. Where ranks agree on maxima, 8 more clamp; they are not
counted."""
COMPILED_BYTES = 7.0
"""Read twice in bf16, written once, and copied into the order of the kernel."""
EAGER_4BIT_BYTES = 109.0
"""The same for `nvfp4`: 24 for the maxima and a cast, 8 to scale, 8 to clamp, 64 to round to E2M1
(magnitudes 8, distances between neighbours 24, quotient 12, rounding 8, product 12), and 5 to cast
to a byte; packing two to a byte is not counted."""
STOCHASTIC_BYTES = 200.0
"""Bytes moved in addition per element that is rounded stochastically in separate operations: 44 for
the sum of a block's halves, 104 for the hash, 32 to turn it into a number, 20 to add and round."""
_TEMPORARY_BYTES = 8.0
"""Bytes per element at the peak of a quantisation in separate operations: fp32 before and after
the multiplication."""
_TEMPORARY_4BIT_BYTES = 17.0
"""The same for `nvfp4`: fp32 values, magnitudes, distances before and after the smallest numbers
have theirs, and a byte for which of them these are."""


Extent = Literal["rows", "tensors"]
"""A scale of a whole row or column along the summed dim, or of a tensor."""


class SpanningScales(NamedTuple):
    """Extents of scales that tensor-parallel ranks may share."""

    operands: Extent
    """Scales of activations and of gradients of outputs."""
    output: Extent
    """Scales of a weight in the output."""
    input_gradient: Extent
    """Scales of a weight in the input gradient."""


_SPANNING_SCALES: dict[LowPrecisionRecipe, SpanningScales] = {
    "tensorwise": SpanningScales("tensors", "tensors", "tensors"),
    "rowwise": SpanningScales("rows", "rows", "rows"),
    "rowwise_with_gw_hp": SpanningScales("rows", "rows", "tensors"),
    "nvfp4": SpanningScales("rows", "tensors", "tensors"),
}
_SINCE_BLACKWELL = ("Blackwell", "Blackwell Ultra", "RTX Blackwell")
_SINCE_HOPPER = ("Hopper", *_SINCE_BLACKWELL)
_KERNEL_GENERATIONS: dict[LowPrecisionRecipe, tuple[str, ...]] = {
    "tensorwise": ("Ada", *_SINCE_HOPPER),
    "rowwise": _SINCE_HOPPER,
    "rowwise_with_gw_hp": _SINCE_HOPPER,
    "blockwise": ("Hopper",),
    "mxfp8": _SINCE_BLACKWELL,
    "nvfp4": _SINCE_BLACKWELL,
}
"""Generations with a kernel for a recipe, as `model.products.kernel_support` by capability."""
_GROUPED_GENERATIONS: dict[LowPrecisionRecipe, tuple[str, ...]] = {
    "rowwise": ("Hopper", "Blackwell"),
    "rowwise_with_gw_hp": ("Hopper", "Blackwell"),
    "blockwise": ("Hopper",),
    "mxfp8": ("Blackwell",),
}


class OperandElements(NamedTuple):
    """Elements of the operands of a product's forward pass, input and weight gradient, without
    its weight."""

    forward: float
    input_gradient: float
    weight_gradient: float


@dataclass(frozen=True)
class CodeGathers:
    """Weights that ZeRO gathers as codes, if their shards are whole blocks
    (`parallel.code_gathers`)."""

    recipe: LowPrecisionRecipe
    share: float
    """Share of the weights of all kinds of layer."""

    @property
    def has_one_set(self) -> bool:
        """True if the output and the input gradient multiply the same codes of a weight."""
        return self.recipe in ("blockwise", "nvfp4")

    @property
    def has_agreed_maxima(self) -> bool:
        """True if a scale of a matrix spans the shards, so that the ranks agree on it."""
        return self.recipe in ("rowwise_with_gw_hp", "nvfp4")

    @property
    def block_rows(self) -> int:
        """Rows of a block of weights."""
        return BLOCK_OF_RECIPE.get(self.recipe, 1)

    @property
    def element_bytes(self) -> float:
        """Bytes of an element in a gather: its code, and its part of the scales. A scale of a row
        is not counted."""
        return 1.0 + {"blockwise": 4 / 128**2, "mxfp8": 1 / 32, "nvfp4": 1 / 16**2}.get(
            self.recipe, 0.0
        )


@dataclass(frozen=True)
class ScaledShares:
    """Share of the weights of each kind of layer that multiply quantised operands."""

    attention: float
    mlp: float
    experts: float
    has_wide_weight_gradients: bool
    """Gradients of all weights are multiplied in bf16."""
    has_4bit_operands: bool = False
    """Operands have 4 bits (`nvfp4`), not 8."""
    spanning: SpanningScales | None = None
    """None if all scales are of blocks of a fixed size."""
    has_stochastic_gradients: bool = False
    """Gradients of outputs are rounded stochastically."""
    code_gathers: CodeGathers | None = None
    """Weights that ZeRO may gather as codes; None if all are stored as `[in, out]`."""
    compute: Literal["bf16", "fp32", "fp64"] = "bf16"
    """Precision of everything else, and of the results of these products."""
    recipe: LowPrecisionRecipe | None = None
    """Recipe of the products. None for those of other trainers."""
    has_kernels: bool = True
    """False if no kernel multiplies the operands: on the CPU, or with `emulate`."""

    @property
    def is_emulated(self) -> bool:
        """True if products multiply dequantised operands: kernels write bf16."""
        return self.compute != "bf16" or not self.has_kernels

    @property
    def has_fp32_gradients(self) -> bool:
        """True if the kernels of weight gradients can write fp32: those of bf16, and of scales of
        tensors."""
        return self.has_wide_weight_gradients or (
            self.spanning is not None and self.spanning.operands == "tensors"
        )

    @property
    def eager_bytes(self) -> float:
        """Bytes moved per element to quantise in separate operations."""
        return EAGER_4BIT_BYTES if self.has_4bit_operands else EAGER_BYTES

    @property
    def temporary_bytes(self) -> float:
        """Peak temporary bytes per element of a quantisation in separate operations."""
        return _TEMPORARY_4BIT_BYTES if self.has_4bit_operands else _TEMPORARY_BYTES

    def get_working_bytes(self, cast_bytes: float, *, is_expert: bool) -> float:
        """Return the bytes per element of weights in the precision of products, kept from one
        update to the next: codes and scales, or casts of `cast_bytes`."""
        gathers = self.code_gathers
        if gathers is None:
            return cast_bytes
        share = self.experts if is_expert else gathers.share
        return self.get_code_bytes(is_expert=is_expert) + (1.0 - share) * cast_bytes

    def get_code_bytes(self, *, is_expert: bool) -> float:
        """Return the part of codes and scales in `get_working_bytes`."""
        gathers = self.code_gathers
        if gathers is None:
            return 0.0
        share = self.experts if is_expert else gathers.share
        num_sets = 1.0 if is_expert and gathers.has_one_set else 2.0
        return share * num_sets * (1.0 + (4.0 / 32.0 if gathers.recipe == "mxfp8" else 0.0))

    def get_share(self, role: str) -> float:
        """Return the share of products of a role with quantised operands."""
        target = TARGET_OF_ROLE.get(role)  # type: ignore[call-overload]
        return 0.0 if target is None else float(getattr(self, target))

    def get_weight_gradient_share(self, role: str) -> float:
        """Return the share of weight gradients of a role with quantised operands."""
        is_expert = TARGET_OF_ROLE.get(role) == "experts"  # type: ignore[call-overload]
        return 0.0 if self.has_wide_weight_gradients or is_expert else self.get_share(role)

    def count_operands(self, role: str, m: float, n: float, k: float) -> OperandElements:
        """Count the elements of activations and gradients that a weight's three products
        quantise."""
        share = self.get_share(role)
        return OperandElements(
            share * m * k, share * m * n, self.get_weight_gradient_share(role) * (m * n + m * k)
        )


def find_measured_ratio(cluster: Cluster, recipe: LowPrecisionRecipe | None) -> float | None:
    """Return the measured rate of a recipe's products as a multiple of that of bf16; None if it was
    not measured."""
    if recipe is None or cluster.profile is None:
        return None
    # The output of `rowwise_with_gw_hp` is that of `rowwise`, which `doctor` measures.
    measured = "rowwise" if recipe == "rowwise_with_gw_hp" else recipe
    return cluster.profile.find_scaled_product_ratio(measured)


def describe_product_rates(section: LowPrecisionSection | None, cluster: Cluster) -> str | None:
    """Say whether the rates of a recipe's products are measured or assumed; None without them."""
    if section is None:
        return None
    name = section.kind if section.kind == "nvfp4" else f"{section.kind} {section.recipe}"
    ratio = find_measured_ratio(cluster, section.recipe)
    if ratio is not None:
        return f"{name}: products at {ratio:.2f} times the rate of bf16, measured; casts assumed"
    return (
        f"{name}: rates of products assumed, from published runs of other trainers; "
        "`doctor --calibrate` measures them. Casts assumed"
    )


def explain_missing_kernels(
    section: LowPrecisionSection, accelerator: Accelerator, shares: ScaledShares
) -> str | None:
    """Explain why `train` would not run a recipe's products at a predicted rate; None if it
    would."""
    if section.emulate:
        return (
            f"precision.{section.kind}.emulate is true: the prediction is that of kernels, "
            "emulation is slow"
        )
    remedy = f"`train` refuses it, unless precision.{section.kind}.emulate is true, which is slow"
    if accelerator.generation not in _KERNEL_GENERATIONS[section.recipe]:
        possible = [
            recipe
            for recipe, generations in _KERNEL_GENERATIONS.items()
            if recipe != "nvfp4" and accelerator.generation in generations
        ]
        kernels = f"kernels for {', '.join(possible)}" if possible else "no 8-bit kernels"
        return (
            f"torch has no kernel for {section.recipe} on {accelerator.name}, which has {kernels}: "
            f"{remedy}"
        )
    if section.compute != "bf16":
        field = f"precision.{section.kind}.compute"
        return f"{field} is {section.compute}, and kernels write bf16: {remedy}"
    if shares.experts and accelerator.generation not in _GROUPED_GENERATIONS.get(
        section.recipe, ()
    ):
        return (
            f"torch has no grouped kernel for experts in {section.recipe} on {accelerator.name}: "
            f"{remedy}; leave experts out of precision.{section.kind}.targets"
        )
    return None


def read_low_precision_section(recipe: Recipe, precision: str) -> LowPrecisionSection | None:
    """Return the recipe's options of a precision with quantised products, or its defaults if the
    recipe has another; None for other precisions."""
    section = recipe.precision.low_precision
    if section is not None and section.kind == precision:
        return section
    if precision == "fp8":
        return FP8Section()
    # Planning needs no flag; `train` asks for it.
    return NVFP4Section(experimental=True) if precision == "nvfp4" else None


def build_scaled_shares(shape: ModelShape, section: LowPrecisionSection) -> ScaledShares | None:
    """Compute the shares of a recipe; None if the model or its patterns are refused anyway."""
    try:
        selected = select_scaled_weights(shape, section)
    except RecipeError:
        return None
    totals: dict[LowPrecisionTarget, list[int]] = {
        "attention": [0, 0],
        "mlp": [0, 0],
        "experts": [0, 0],
    }
    for spec in shape.list_parameters():
        target = TARGET_OF_ROLE.get(spec.role)
        if target is None or spec.is_bias or spec.adapter_part is not None:
            continue
        matrix = spec.packed_matrix or spec
        totals[target][0] += matrix.num_elements
        totals[target][1] += matrix.num_elements if spec.name in selected else 0
    shares = {
        target: selected_elements / elements if elements else 0.0
        for target, (elements, selected_elements) in totals.items()
    }
    return ScaledShares(
        shares["attention"],
        shares["mlp"],
        shares["experts"],
        section.recipe in ("rowwise_with_gw_hp", "nvfp4"),
        section.kind == "nvfp4",
        _SPANNING_SCALES.get(section.recipe),
        isinstance(section, NVFP4Section) and section.gradient_rounding == "stochastic",
        _build_code_gathers(shape, section, totals),
        section.compute,
        section.recipe,
        has_kernels=not section.emulate,
    )


def _build_code_gathers(
    shape: ModelShape,
    section: LowPrecisionSection,
    totals: dict[LowPrecisionTarget, list[int]],
) -> CodeGathers | None:
    layouts = {shape.matrix_layout, shape.experts.matrix_layout if shape.experts else "out_in"}
    if "in_out" in layouts:
        return None
    elements, selected = map(sum, zip(*totals.values(), strict=True))
    return CodeGathers(section.recipe, selected / elements)
