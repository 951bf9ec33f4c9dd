"""Costs of 8-bit products as this trainer computes them.

Every product quantises both of its operands, weights too, in each micro-batch. Gradients of
experts' weights, and with `rowwise_with_gw_hp` all gradients of weights, are products in bf16.

Legend: M tokens, N output features, K input features of a product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from shardwright.architecture import ModelShape
from shardwright.config.low_precision import FP8Recipe, FP8Section, FP8Target
from shardwright.errors import RecipeError
from shardwright.hardware import Accelerator
from shardwright.placement.low_precision import TARGET_OF_ROLE, select_scaled_weights

EAGER_BYTES = 47.0
"""Bytes moved per element to quantise in separate operations: 24 for the maxima (to fp32: 2 + 4,
magnitudes 4 + 4, reduction 4, and a cast of 2 + 4 to scale), 8 to scale, 8 to clamp, 5 to cast,
and 2 to copy the codes into the order of the kernel."""
COMPILED_BYTES = 7.0
"""Read twice in bf16, written once, and copied into the order of the kernel."""
_TEMPORARY_BYTES = 9.0
"""Bytes per element at the peak of a quantisation in separate operations: fp32 before and after
the clamp, and the codes."""


_SINCE_HOPPER = ("Hopper", "Blackwell", "Blackwell Ultra", "RTX Blackwell")
_KERNEL_GENERATIONS: dict[FP8Recipe, tuple[str, ...]] = {
    "tensorwise": ("Ada", *_SINCE_HOPPER),
    "rowwise": _SINCE_HOPPER,
    "rowwise_with_gw_hp": _SINCE_HOPPER,
    "blockwise": ("Hopper",),
    "mxfp8": _SINCE_HOPPER[1:],
}
"""Generations with a kernel for a recipe, as `model.products.kernel_support` by capability."""
_GROUPED_GENERATIONS: dict[FP8Recipe, tuple[str, ...]] = {
    "rowwise": ("Hopper", "Blackwell"),
    "rowwise_with_gw_hp": ("Hopper", "Blackwell"),
}


class OperandElements(NamedTuple):
    """Elements of the operands of a product's forward pass, input and weight gradient."""

    forward: float
    input_gradient: float
    weight_gradient: float


@dataclass(frozen=True)
class ScaledShares:
    """Share of the weights of each kind of layer that multiply 8-bit operands."""

    attention: float
    mlp: float
    experts: float
    has_wide_weight_gradients: bool
    """Gradients of all weights are multiplied in bf16."""

    def get_share(self, role: str) -> float:
        """Return the share of products of a role with 8-bit operands."""
        target = TARGET_OF_ROLE.get(role)  # type: ignore[call-overload]
        return 0.0 if target is None else float(getattr(self, target))

    def get_weight_gradient_share(self, role: str) -> float:
        """Return the share of weight gradients of a role with 8-bit operands."""
        is_expert = TARGET_OF_ROLE.get(role) == "experts"  # type: ignore[call-overload]
        return 0.0 if self.has_wide_weight_gradients or is_expert else self.get_share(role)

    def count_operands(self, role: str, m: float, n: float, k: float) -> OperandElements:
        """Count the elements that the three products of a weight quantise."""
        share = self.get_share(role)
        return OperandElements(
            share * (m * k + n * k),
            share * (m * n + n * k),
            self.get_weight_gradient_share(role) * (m * n + m * k),
        )


def count_temporary_bytes(role: str, m: float, n: float, k: float, shares: ScaledShares) -> float:
    """Count the bytes of the temporary tensors of a product's largest quantisation, in separate
    operations."""
    if not shares.get_share(role):
        return 0.0
    return _TEMPORARY_BYTES * max(m * k, n * k, m * n)


def explain_missing_kernels(
    section: FP8Section, accelerator: Accelerator, shares: ScaledShares
) -> str | None:
    """Explain why `train` would not run a recipe's products at a predicted rate; None if it
    would."""
    if section.emulate:
        return "precision.fp8.emulate is true: the prediction is that of kernels, emulation is slow"
    remedy = "`train` refuses it, unless precision.fp8.emulate is true, which is slow"
    if accelerator.generation not in _KERNEL_GENERATIONS[section.recipe]:
        possible = [
            recipe
            for recipe, generations in _KERNEL_GENERATIONS.items()
            if accelerator.generation in generations
        ]
        kernels = f"kernels for {', '.join(possible)}" if possible else "no 8-bit kernels"
        return (
            f"torch has no kernel for {section.recipe} on {accelerator.name}, which has {kernels}: "
            f"{remedy}"
        )
    if shares.experts and accelerator.generation not in _GROUPED_GENERATIONS.get(
        section.recipe, ()
    ):
        return (
            f"torch has no grouped kernel for experts in {section.recipe} on {accelerator.name}: "
            f"{remedy}; leave experts out of precision.fp8.targets"
        )
    return None


def build_scaled_shares(shape: ModelShape, section: FP8Section) -> ScaledShares | None:
    """Compute the shares of a recipe; None if the model or its patterns are refused anyway."""
    try:
        selected = select_scaled_weights(shape, section)
    except RecipeError:
        return None
    totals: dict[FP8Target, list[int]] = {
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
        section.recipe == "rowwise_with_gw_hp",
    )
