"""Which dtype is held, computed and reduced in, and the dynamic loss scale of fp16."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.config.training import PrecisionSection
from shardwright.errors import NonFiniteError


@dataclass(frozen=True)
class Dtypes:
    """`param`: master weights, gradients and moments; `compute`: matrix products; `reduce`: gradient sums over ranks."""

    param: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype


_COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def dtypes(precision: PrecisionSection) -> Dtypes:
    """Dtypes of a precision kind.

    Master weights are fp32, fp64 with `kind: fp64`. Gradients are reduced in fp32 (fp64) unless the recipe asks for bf16.

    >>> dtypes(PrecisionSection(kind="bf16"))
    Dtypes(param=torch.float32, compute=torch.bfloat16, reduce=torch.float32)
    """
    assert precision.kind != "auto", "the plan has settled it"
    compute = _COMPUTE[precision.kind]
    param = torch.promote_types(compute, torch.float32)
    reduce = torch.bfloat16 if precision.reduce_dtype == "bf16" else param
    return Dtypes(param=param, compute=compute, reduce=reduce)


class LossScaler:
    """The factor by which the loss is multiplied before backward, so that small fp16 gradients do not vanish.

    Every rank must take the same decision, or their weights part: what `update` is told is what the ranks have agreed on
    (`numerics.clip.agree_on_norm`). A bad step halves the scale and is to be skipped; after `loss_scale_growth_steps` finite
    steps in a row it doubles. For other precisions than fp16 build none.

    Source: Micikevicius et al. 2018, Mixed Precision Training, section 3.2; defaults of torch.amp.GradScaler.
    """

    SMALLEST = 2.0**-24
    """Below this the scale would erase gradients that fp16 can hold: the run has diverged."""
    LARGEST = 2.0**24
    """fp32 losses and gradients stay far from overflow; a larger scale gains nothing."""

    def __init__(self, precision: PrecisionSection) -> None:
        self.scale = float(precision.initial_loss_scale)
        self.growth_steps = precision.loss_scale_growth_steps
        self.finite_steps = 0

    def update(self, skipped: bool) -> None:
        """Move the scale after a step that every rank did, or skipped because its gradient was not finite.

        Raises:
            NonFiniteError: the scale fell below `SMALLEST`.
        """
        if not skipped:
            self.finite_steps += 1
            if self.finite_steps >= self.growth_steps:
                self.scale = min(self.scale * 2.0, self.LARGEST)
                self.finite_steps = 0
            return
        self.finite_steps = 0
        self.scale /= 2.0
        if self.scale < self.SMALLEST:
            raise NonFiniteError(
                f"the fp16 loss scale fell below {self.SMALLEST:g} and gradients are still not finite: the run has diverged; "
                "lower training.learning_rate, or use precision bf16 or fp32"
            )

    def state_dict(self) -> dict[str, Any]:
        """JSON: the scale and how long it has held."""
        return {"scale": self.scale, "finite_steps": self.finite_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        scale = float(state["scale"])
        assert math.isfinite(scale), scale
        assert scale > 0, scale
        self.scale, self.finite_steps = scale, int(state["finite_steps"])
