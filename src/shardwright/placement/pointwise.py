"""Choice of `model.fused_pointwise`: which functions norms, gates and rotations call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwright.architecture import HFShape, ModelShape
from shardwright.config.model import PointwiseSetting
from shardwright.errors import RecipeError

PointwiseKind = Literal["compiled", "none"]


@dataclass(frozen=True)
class PointwiseChoice:
    """Functions that a run takes; the reason is one clause for a person to read."""

    kind: PointwiseKind
    reason: str

    def __str__(self) -> str:
        functions = "each compiled by itself" if self.kind == "compiled" else "separate operations"
        return f"norms, gates, rotations, residual sums: {functions} ({self.reason})"


def choose_pointwise(
    setting: PointwiseSetting,
    shape: ModelShape,
    *,
    has_compiled_blocks: bool,
    compiler_obstacle: str | None,
) -> PointwiseChoice:
    """Choose the functions for a model.

    Args:
        has_compiled_blocks: `model.compile` is on; it fuses the functions of blocks.
        compiler_obstacle: reason why `auto` compiles nothing on these devices; None if it does.

    Raises:
        RecipeError: the recipe names functions that this model does not call.
    """
    if isinstance(shape, HFShape) and setting == "compiled":
        raise RecipeError(
            f"transformers' {shape.class_name} computes its own norms, gates and rotations",
            field="model.fused_pointwise",
            got=setting,
            allowed="auto, none",
            remedy="Remove the key",
        )
    if setting == "compiled":
        return PointwiseChoice("compiled", "the recipe names them")
    if setting == "none":
        return PointwiseChoice("none", "the recipe says none")
    if isinstance(shape, HFShape):
        return PointwiseChoice("none", f"auto: transformers' {shape.class_name} computes them")
    if has_compiled_blocks:
        return PointwiseChoice("none", "auto: model.compile fuses those of blocks")
    if compiler_obstacle is not None:
        return PointwiseChoice("none", f"auto: {compiler_obstacle}")
    return PointwiseChoice("compiled", "auto: Triton compiles for the device")
