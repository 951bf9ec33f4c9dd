"""Muon: orthogonalised momentum for matrices of blocks, AdamW for all other parameters.

The momentum is computed element by element and sharded like the parameter. Only for the
orthogonalisation is a matrix gathered, on one of the ranks that shard it; that rank scatters
the result.

Source: Jordan et al. 2024, Muon (https://kellerjordan.github.io/posts/muon); Liu et al. 2025,
Muon is Scalable for LLM Training (arXiv 2502.16982), section 2.2, for the scale. In one process
the result equals torch.optim.Muon's bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from shardwright.optim.sharded_optimizer import (
    Moment,
    ShardedModel,
    ShardedOptimizer,
    get_local_tensor,
)

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration that raises small singular values fastest.

Singular values end between 0.5 and 1.5, not at 1 (Jordan et al.).
"""
_NUM_ITERATIONS = 5
_MIN_NORM = 1e-7


def orthogonalise(matrix_MN: Tensor) -> Tensor:
    """Orthogonalise U S V^T to about U V^T by Newton-Schulz iterations in the matrix's dtype.

    >>> matrix = orthogonalise(torch.randn(6, 4, dtype=torch.float64))
    >>> bool((torch.linalg.svdvals(matrix) - 1).abs().max() < 0.5)
    True
    """
    a, b, c = _COEFFICIENTS
    tall = matrix_MN.shape[0] > matrix_MN.shape[1]
    x = matrix_MN.T if tall else matrix_MN
    x = x / x.norm().clamp(min=_MIN_NORM)
    for _ in range(_NUM_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def choose_working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the orthogonalisation.

    It is bf16, as Muon's authors use, but fp64 for fp64 parameters.
    """
    return torch.float64 if dtype == torch.float64 else torch.bfloat16


def compute_update_scale(shape: tuple[int, ...]) -> float:
    """Return the factor on the learning rate of a matrix: 0.2 x sqrt(larger side).

    An orthogonal update has root mean square 1 / sqrt(larger side), AdamW's 0.2 to 0.4. With
    the factor, a learning rate and a weight decay that suit AdamW suit both.

    Source: Liu et al. 2025, section 2.2, equation 4.
    """
    return 0.2 * math.sqrt(max(shape[-2:]))


class Muon(ShardedOptimizer):
    """Muon for groups with `rule` muon, AdamW for groups with `rule` adamw.

    Weight decay is decoupled in both.
    """

    rule = "muon"

    def __init__(
        self,
        groups: list[dict[str, Any]],
        model: ShardedModel,
        *,
        lr: float,
        momentum: float,
        betas: tuple[float, float],
        eps: float,
        fused: bool,
    ) -> None:
        super().__init__(
            groups, {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps}, model
        )
        self._exchange = model.build_matrix_exchange(model.block_matrices())
        self._fused = fused

    def initialise_state(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        for moment in self._list_moment_names(group):
            if moment not in state:
                state[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        if "step" not in state:
            on_device = self._fused and group["rule"] == "adamw"
            state["step"] = torch.zeros(
                (), dtype=torch.float32, device=parameter.device if on_device else "cpu"
            )

    def moments(self, parameter: Tensor) -> dict[str, Moment]:
        state = self.state[parameter]
        name = self.parameter_names[parameter]
        return {key: Moment(tensor, name) for key, tensor in state.items() if key != "step"}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter. Collective: every rank calls it."""
        assert closure is None
        self._step_matrices()
        for group in self.param_groups:
            if group["rule"] == "adamw":
                self._step_adamw(group)

    def _step_matrices(self) -> None:
        matrices = []
        updates = {}
        for name, _, local, gradient, state, group in self.iterate_parameters("muon"):
            buffer = get_local_tensor(state["momentum"])
            momentum = group["momentum"]
            buffer.lerp_(gradient, 1 - momentum)
            updates[name] = gradient.lerp(buffer, momentum).to(
                choose_working_dtype(local.dtype)
            )  # Nesterov momentum
            state["step"] += 1
            matrices.append((name, local, group, tuple(self.model.layouts[name].shape)))
        orthogonal = self._exchange.apply(orthogonalise, updates)
        for name, local, group, shape in matrices:
            local.mul_(1 - group["lr"] * group["weight_decay"])
            local.add_(orthogonal[name], alpha=-group["lr"] * compute_update_scale(shape))

    def _step_adamw(self, group: dict[str, Any]) -> None:
        with_gradient = [parameter for parameter in group["params"] if parameter.grad is not None]
        for parameter in with_gradient:
            self.initialise_state(parameter, group)
        states = [self.state[parameter] for parameter in with_gradient]
        if not with_gradient:
            return
        adamw(
            [get_local_tensor(parameter.detach()) for parameter in with_gradient],
            [get_local_tensor(parameter.grad) for parameter in with_gradient],
            [get_local_tensor(state["exp_avg"]) for state in states],
            [get_local_tensor(state["exp_avg_sq"]) for state in states],
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
    def _list_moment_names(group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum",) if group["rule"] == "muon" else ("exp_avg", "exp_avg_sq")
