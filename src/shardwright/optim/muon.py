"""Muon: a matrix moves along its momentum made orthogonal; what is no matrix of a block moves by AdamW.

The momentum is cut like the parameter (it is made element by element); only to be made orthogonal do the pieces of a matrix come
together, on one of the ranks that hold it, which sends each its piece of the result.

Source: Jordan et al. 2024, Muon (https://kellerjordan.github.io/posts/muon); Liu et al. 2025, Muon is Scalable for LLM Training
(arXiv 2502.16982), section 2.2, for the scale. torch.optim.Muon is the same in one process, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from shardwright.optim.cut import CutOptimizer, ModelCut, Moment, local_part

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration that lifts small singular values fastest; they end between 0.5 and 1.5, not at 1 (Jordan et al.)."""
_ITERATIONS = 5
_SMALLEST_NORM = 1e-7


def orthogonalise(matrix_MN: Tensor) -> Tensor:
    """Newton-Schulz: U S V^T -> about U V^T, in the dtype given.

    >>> bool((torch.linalg.svdvals(orthogonalise(torch.randn(6, 4, dtype=torch.float64))) - 1).abs().max() < 0.5)
    True
    """
    a, b, c = _COEFFICIENTS
    tall = matrix_MN.shape[0] > matrix_MN.shape[1]
    x = matrix_MN.T if tall else matrix_MN
    x = x / x.norm().clamp(min=_SMALLEST_NORM)
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """What matrices are made orthogonal in: bf16, as Muon's authors do, but fp64 for fp64 parameters."""
    return torch.float64 if dtype == torch.float64 else torch.bfloat16


def update_scale(shape: tuple[int, ...]) -> float:
    """Factor on the learning rate of a matrix: 0.2 x sqrt(its larger side).

    An orthogonal update has root mean square 1 / sqrt(larger side); AdamW's is 0.2 to 0.4. So one learning rate and one decay,
    those one would give AdamW, serve both.

    Source: Liu et al. 2025, section 2.2, equation 4.
    """
    return 0.2 * math.sqrt(max(shape[-2:]))


class Muon(CutOptimizer):
    """Muon for the groups with `rule` muon, AdamW for those with `rule` adamw; both decays are decoupled."""

    rule = "muon"

    def __init__(
        self,
        groups: list[dict[str, Any]],
        cut: ModelCut,
        *,
        lr: float,
        momentum: float,
        betas: tuple[float, float],
        eps: float,
        fused: bool,
    ) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps}, cut)
        self._exchange = cut.exchange(cut.block_matrices())
        self._fused = fused

    def start(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, wanted = self.state[parameter], self._moment_names(group)
        for moment in wanted:
            if moment not in state:
                state[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        if "step" not in state:
            on_device = self._fused and group["rule"] == "adamw"
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu")

    def moments(self, parameter: Tensor) -> dict[str, Moment]:
        state, name = self.state[parameter], self.name_of[parameter]
        return {key: Moment(tensor, name) for key, tensor in state.items() if key != "step"}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step of every parameter. Every rank calls this: it exchanges."""
        assert closure is None
        self._step_matrices()
        for group in self.param_groups:
            if group["rule"] == "adamw":
                self._step_others(group)

    def _step_matrices(self) -> None:
        moved, updates = [], {}
        for name, _, local, gradient, state, group in self.walk("muon"):
            buffer, share = local_part(state["momentum"]), group["momentum"]
            buffer.lerp_(gradient, 1 - share)
            updates[name] = gradient.lerp(buffer, share).to(working_dtype(local.dtype))  # Nesterov's
            state["step"] += 1
            moved.append((name, local, group, tuple(self.cut.layouts[name].shape)))
        made = self._exchange.apply(orthogonalise, updates)
        for name, local, group, shape in moved:
            local.mul_(1 - group["lr"] * group["weight_decay"])
            local.add_(made[name], alpha=-group["lr"] * update_scale(shape))

    def _step_others(self, group: dict[str, Any]) -> None:
        with_gradient = [parameter for parameter in group["params"] if parameter.grad is not None]
        for parameter in with_gradient:
            self.start(parameter, group)
        states = [self.state[parameter] for parameter in with_gradient]
        if not with_gradient:
            return
        adamw(
            [local_part(parameter.detach()) for parameter in with_gradient],
            [local_part(parameter.grad) for parameter in with_gradient],
            [local_part(state["exp_avg"]) for state in states],
            [local_part(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            foreach=False,
            fused=self._fused,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    @staticmethod
    def _moment_names(group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum",) if group["rule"] == "muon" else ("exp_avg", "exp_avg_sq")
