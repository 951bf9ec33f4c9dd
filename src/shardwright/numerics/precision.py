"""Dtypes of parameters, computation and reduction, and fp16's dynamic loss scale."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.config.training import PrecisionSection
from shardwright.errors import NonFiniteError


@dataclass(frozen=True)
class PrecisionDtypes:
    """Dtypes of one precision kind.

    `param` is that of master weights, gradients and moments, `compute` that of matrix products
    (with `fp8` and `nvfp4`, of those without quantised operands), `reduce` that of gradient sums
    over ranks.
    """

    param: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype


_COMPUTE_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}


def resolve_dtypes(precision: PrecisionSection) -> PrecisionDtypes:
    """Return the dtypes of a precision kind.

    Master weights are fp32, or fp64 with `kind: fp64`, unless the recipe sets bf16. Gradients are
    reduced in fp32 (fp64) unless the recipe sets bf16.

    >>> resolve_dtypes(PrecisionSection(kind="bf16"))
    PrecisionDtypes(param=torch.float32, compute=torch.bfloat16, reduce=torch.float32)
    """
    assert precision.kind != "auto", "the plan resolves `auto`"
    low = precision.low_precision
    compute = _COMPUTE_DTYPES[precision.kind if low is None else low.compute]
    wide = torch.promote_types(compute, torch.float32)
    param = torch.bfloat16 if precision.master_weights == "bf16" else wide
    reduce = torch.bfloat16 if precision.reduce_dtype == "bf16" else wide
    return PrecisionDtypes(param=param, compute=compute, reduce=reduce)


class LossScaler:
    """Dynamic factor on the loss that keeps small fp16 gradients from becoming zero.

    Every rank must take the same decision, or their weights diverge: the argument of `update`
    follows from the norm that all ranks share (`numerics.gradient_clip`). A non-finite
    step halves the scale and is skipped; after `loss_scale_growth_steps` finite steps in a row
    the scale doubles. Precisions other than fp16 need no scaler.

    Source: Micikevicius et al. 2018, Mixed Precision Training, section 3.2; defaults of
    torch.amp.GradScaler.
    """

    MIN_SCALE = 2.0**-24
    """Below this the scale would erase gradients that fp16 can represent: the run has diverged.
    """
    MAX_SCALE = 2.0**24
    """Keeps fp32 losses and gradients far from overflow; a larger scale has no benefit."""

    def __init__(self, precision: PrecisionSection) -> None:
        self.scale = float(precision.initial_loss_scale)
        self.growth_steps = precision.loss_scale_growth_steps
        self.finite_steps = 0

    def update(self, is_skipped: bool) -> None:
        """Adjust the scale after a step that all ranks took, or skipped as non-finite.

        Raises:
            NonFiniteError: the scale fell below `MIN_SCALE`.
        """
        if not is_skipped:
            self.finite_steps += 1
            if self.finite_steps >= self.growth_steps:
                self.scale = min(self.scale * 2.0, self.MAX_SCALE)
                self.finite_steps = 0
            return
        self.finite_steps = 0
        self.scale /= 2.0
        if self.scale < self.MIN_SCALE:
            raise NonFiniteError(
                f"the fp16 loss scale fell below {self.MIN_SCALE:g} and gradients are still not "
                "finite: the run has diverged; lower training.learning_rate, or use precision "
                "bf16 or fp32"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and the number of finite steps since its last change, for JSON."""
        return {"scale": self.scale, "finite_steps": self.finite_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        scale = float(state["scale"])
        assert math.isfinite(scale), scale
        assert scale > 0, scale
        self.scale = scale
        self.finite_steps = int(state["finite_steps"])
