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
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.numerics import get_local_tensor
from shardwright.optim.exact_operations import CompileFunction
from shardwright.optim.local_updates import AdamWRule
from shardwright.optim.sharded_optimizer import (
    ParameterPiece,
    ShardedModel,
    ShardedOptimizer,
    StateSpec,
    scale_gradients,
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
    applies_factor = True

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
        compile_function: CompileFunction | None = None,
    ) -> None:
        super().__init__(
            groups, {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps}, model
        )
        self._exchange = model.build_matrix_exchange(model.block_matrices())
        self._fused = fused
        self._adamw = AdamWRule(compile_function, fused=fused, foreach=False)
        self._parameters = {name: parameter for parameter, name in self.parameter_names.items()}
        self._updates: dict[str, Tensor] = {}
        """Momenta of matrices of this step that are to be orthogonalised."""

    def initialise_state(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        for moment in self._list_moment_names(group):
            if moment not in state:
                state[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        if "step" not in state:
            state["step"] = self.create_step_count(parameter, group)

    def create_step_count(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Create a parameter's step count of zero, on the device where updates expect it."""
        on_device = self._fused and group["rule"] == "adamw"
        return torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu")

    def list_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, StateSpec]:
        """List the tensors of a parameter's state by name, without its step count."""
        local = get_local_tensor(parameter.detach())
        spec = StateSpec(tuple(local.shape), local.dtype)
        return dict.fromkeys(self._list_moment_names(group), spec)

    def is_updated_without_gradient(self, group: dict[str, Any]) -> bool:
        """Return True for matrices, which all ranks exchange."""
        return bool(group["rule"] == "muon")

    def update_pieces(self, pieces: Sequence[ParameterPiece]) -> None:
        """Update the moments, and all parameters but the matrices, which `finish_update` does."""
        matrices = [piece for piece in pieces if piece.group["rule"] == "muon"]
        scale_gradients(matrices, self.gradient_factor)
        for piece in matrices:
            self._update_momentum(piece)
        others = [piece for piece in pieces if piece.group["rule"] != "muon"]
        self._adamw.update(others, self.gradient_factor)

    def _update_momentum(self, piece: ParameterPiece) -> None:
        buffer = get_local_tensor(piece.state["momentum"])
        momentum = piece.group["momentum"]
        buffer.lerp_(piece.gradient, 1 - momentum)
        update = piece.gradient.lerp(buffer, momentum).to(
            choose_working_dtype(piece.local.dtype)
        )  # Nesterov momentum
        piece.state["step"] += 1
        first = piece.first_element
        if first is None:
            self._updates[piece.name] = update
            return
        if piece.name not in self._updates:
            self._updates[piece.name] = update.new_empty(self._get_local_shape(piece.name))
        whole = self._updates[piece.name].view(-1)
        whole[first : first + update.numel()].copy_(update.view(-1))

    def _get_local_shape(self, name: str) -> torch.Size:
        return get_local_tensor(self._parameters[name].detach()).shape

    def finish_update(self) -> None:
        """Orthogonalise the momenta since the last call and update their matrices.

        Collective: every rank has updated the momenta of the same matrices.
        """
        orthogonal = self._exchange.apply(orthogonalise, self._updates)
        self._updates = {}
        for group in self.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                if name in orthogonal:
                    local = get_local_tensor(parameter.detach())
                    local.mul_(1 - group["lr"] * group["weight_decay"])
                    local.add_(
                        orthogonal[name],
                        alpha=-group["lr"]
                        * compute_update_scale(tuple(self.model.layouts[name].shape)),
                    )

    @staticmethod
    def _list_moment_names(group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum",) if group["rule"] == "muon" else ("exp_avg", "exp_avg_sq")
