"""Choices of compiled code: whole blocks, or the functions of norms, gates and rotations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwright.architecture import HFShape, ModelShape
from shardwright.config.model import PointwiseSetting
from shardwright.errors import RecipeError

PointwiseKind = Literal["compiled", "loss", "none"]


@dataclass(frozen=True)
class CompileChoice:
    """Result of `model.compile: auto` for a run; the reason is one clause for a person to read."""

    is_compiled: bool
    reason: str

    def __str__(self) -> str:
        return f"{'compiled' if self.is_compiled else 'not compiled'} (auto: {self.reason})"


def choose_blocks(auto: CompileChoice, shape: ModelShape) -> CompileChoice:
    """Choose for the blocks of a model; `auto` is the choice for those of our decoder."""
    if not isinstance(shape, HFShape):
        return auto
    return CompileChoice(False, f"the model runs through transformers' {shape.class_name}")


def check_blocks(setting: bool | Literal["auto"], shape: ModelShape) -> None:
    """Refuse `model.compile: true` for blocks of a transformers class, which may not be compilable.

    Raises:
        RecipeError: the recipe compiles them.
    """
    if setting is True and isinstance(shape, HFShape):
        raise RecipeError(
            f"blocks of transformers' {shape.class_name} are not compiled",
            field="model.compile",
            got="true",
            allowed="auto, false",
            remedy="Remove the key",
        )


@dataclass(frozen=True)
class PointwiseChoice:
    """Functions that a run takes; the reason is one clause for a person to read."""

    kind: PointwiseKind
    reason: str

    def __str__(self) -> str:
        functions = {
            "compiled": "each compiled by itself",
            "loss": "separate operations, the loss compiled by itself",
            "none": "separate operations",
        }[self.kind]
        return f"norms, gates, rotations, residual sums: {functions} ({self.reason})"


SEPARATE_FUNCTIONS = PointwiseChoice("none", "nothing runs")
"""Choice of plans that no device runs."""


def choose_pointwise(
    setting: PointwiseSetting,
    shape: ModelShape,
    *,
    has_compiled_blocks: bool,
    auto_compilation: CompileChoice | None,
) -> PointwiseChoice:
    """Choose the functions for a model.

    Args:
        has_compiled_blocks: `model.compile` is on; it fuses the functions of blocks.
        auto_compilation: whether `auto` compiles on these devices; None if they are not known.

    Raises:
        RecipeError: the recipe names functions that this model does not call.
    """
    if isinstance(shape, HFShape) and setting == "compiled":
        raise RecipeError(
            f"transformers' {shape.class_name} computes its own norms, gates and rotations",
            field="model.fused_pointwise",
            got=setting,
            allowed="auto, loss, none",
            remedy="Remove the key",
        )
    if setting == "compiled":
        return PointwiseChoice("compiled", "the recipe names them")
    if setting != "auto":
        return PointwiseChoice(setting, f"the recipe says {setting}")
    if isinstance(shape, HFShape):
        can_compile = auto_compilation is not None and auto_compilation.is_compiled
        reason = f"auto: transformers' {shape.class_name} computes them"
        return PointwiseChoice("loss" if can_compile else "none", reason)
    if has_compiled_blocks:
        return PointwiseChoice("none", "auto: model.compile fuses those of blocks")
    if auto_compilation is None:
        return PointwiseChoice("none", "auto: no device is known")
    if not auto_compilation.is_compiled:
        return PointwiseChoice("none", f"auto: {auto_compilation.reason}")
    return PointwiseChoice("compiled", "auto: Triton compiles for the device")
