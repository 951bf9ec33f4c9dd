"""torch's AdamW and SGD on the local parts of sharded parameters.

Both rules update each element independently, so the update needs neither communication nor
sharding information. On DTensors torch propagates the sharding of all parameters through each
fused operator, which takes tenths of a second in the first step of a rank and a lookup over the
whole list in each later step. The states remain DTensors, as checkpoints expect. The results
are bitwise identical.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from shardwright.optim.sharded_optimizer import (
    ElementwiseUpdate,
    ParameterPiece,
    StateSpec,
    get_local_tensor,
)


class AdamW(ElementwiseUpdate, torch.optim.AdamW):
    """`torch.optim.AdamW` that updates local tensors in place of DTensors."""

    def list_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, StateSpec]:
        """List the tensors of a parameter's state by name, without its step count."""
        return _list_moments(parameter, "exp_avg", "exp_avg_sq")

    def create_step_count(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Create a step count of zero; fused kernels expect it on the parameter's device."""
        device = parameter.device if group["fused"] else None
        return torch.zeros((), dtype=torch.float32, device=device)

    def update_pieces(self, pieces: Sequence[ParameterPiece]) -> None:
        """Update parameters and state of these pieces and advance their step counts."""
        options = self.defaults
        apply_adamw(pieces, fused=bool(options["fused"]), foreach=bool(options["foreach"]))


def apply_adamw(pieces: Sequence[ParameterPiece], *, fused: bool, foreach: bool) -> None:
    """Run torch's AdamW on pieces with the states `exp_avg`, `exp_avg_sq` and `step`."""
    for group, members in _collect_by_group(pieces):
        adamw(
            [piece.local for piece in members],
            [piece.gradient for piece in members],
            [get_local_tensor(piece.state["exp_avg"]) for piece in members],
            [get_local_tensor(piece.state["exp_avg_sq"]) for piece in members],
            [],
            [piece.state["step"] for piece in members],
            foreach=foreach,
            fused=fused,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def _collect_by_group(
    pieces: Sequence[ParameterPiece],
) -> list[tuple[dict[str, Any], list[ParameterPiece]]]:
    """Return the groups of the pieces with their members, in order of first appearance."""
    groups: dict[int, tuple[dict[str, Any], list[ParameterPiece]]] = {}
    for piece in pieces:
        groups.setdefault(id(piece.group), (piece.group, []))[1].append(piece)
    return list(groups.values())


def _list_moments(parameter: Tensor, *names: str) -> dict[str, StateSpec]:
    local = get_local_tensor(parameter.detach())
    return dict.fromkeys(names, StateSpec(tuple(local.shape), local.dtype))


class SGD(ElementwiseUpdate, torch.optim.SGD):
    """`torch.optim.SGD` that updates local tensors.

    Momentum starts at zero, so after the first step it equals the first gradient, as in torch.
    """

    has_step_count = False

    def list_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, StateSpec]:
        """List the tensors of a parameter's state by name: none without momentum."""
        return _list_moments(parameter, *(("momentum_buffer",) if group["momentum"] else ()))

    def create_step_count(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Create a step count, which SGD never advances."""
        return torch.zeros((), dtype=torch.float32)

    def update_pieces(self, pieces: Sequence[ParameterPiece]) -> None:
        """Update parameters and momentum of these pieces."""
        for group, members in _collect_by_group(pieces):
            sgd(
                [piece.local for piece in members],
                [piece.gradient for piece in members],
                [
                    get_local_tensor(piece.state["momentum_buffer"]) if group["momentum"] else None
                    for piece in members
                ],
                weight_decay=group["weight_decay"],
                momentum=group["momentum"],
                lr=group["lr"],
                dampening=group["dampening"],
                nesterov=group["nesterov"],
                maximize=group["maximize"],
                has_sparse_grad=False,
                foreach=group["foreach"],
                fused=group["fused"],
            )
