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

from shardwright.numerics import get_local_tensor
from shardwright.optim.exact_operations import CompileFunction
from shardwright.optim.one_pass_adamw import OnePassAdamW
from shardwright.optim.sharded_optimizer import (
    DeviceFactor,
    ElementwiseUpdate,
    ParameterPiece,
    StateSpec,
    scale_gradients,
)


class AdamW(ElementwiseUpdate, torch.optim.AdamW):
    """`torch.optim.AdamW` that updates local tensors in place of DTensors."""

    applies_factor = True

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        compile_function: CompileFunction | None = None,
        **options: Any,
    ) -> None:
        super().__init__(groups, **options)
        self._rule = AdamWRule(
            compile_function,
            fused=bool(self.defaults["fused"]),
            foreach=bool(self.defaults["foreach"]),
        )

    def list_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, StateSpec]:
        """List the tensors of a parameter's state by name, without its step count."""
        return _list_moments(parameter, "exp_avg", "exp_avg_sq")

    def create_step_count(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Create a step count of zero; fused kernels expect it on the parameter's device."""
        device = parameter.device if group["fused"] else None
        return torch.zeros((), dtype=torch.float32, device=device)

    def prepare_pieces(self, pieces: Sequence[ParameterPiece]) -> None:
        """Prepare the next update of these pieces."""
        self._rule.prepare(pieces)

    def discard_preparation(self) -> None:
        """Forget what has been prepared for the next step."""
        super().discard_preparation()
        self._rule.discard_preparation()

    def can_skip_on_device(self) -> bool:
        """Return True if torch's fused kernel and the one pass can update the prepared pieces."""
        return bool(self.defaults["fused"]) and all(
            piece.gradient.dtype == torch.float32 for piece in self._prepared or ()
        )

    def update_pieces(self, pieces: Sequence[ParameterPiece]) -> None:
        """Update parameters and state of these pieces and advance their step counts."""
        self._rule.update(pieces, self.device_factor or self.gradient_factor)


class AdamWRule:
    """AdamW of pieces with the states `exp_avg`, `exp_avg_sq` and `step`.

    Pieces are updated in one compiled pass each where it has the bits of torch's fused kernel, and
    by torch's kernels otherwise.
    """

    def __init__(
        self, compile_function: CompileFunction | None, *, fused: bool, foreach: bool
    ) -> None:
        self._fused = fused
        self._foreach = foreach
        self._one_pass = OnePassAdamW(compile_function) if compile_function and fused else None

    def prepare(self, pieces: Sequence[ParameterPiece]) -> None:
        """Do what the next update of these pieces needs besides the gradients' factor."""
        if self._one_pass is not None:
            for group, members in _collect_by_group(pieces):
                self._one_pass.prepare(members, group)

    def discard_preparation(self) -> None:
        """Forget what has been prepared."""
        if self._one_pass is not None:
            self._one_pass.discard_preparation()

    def update(
        self, pieces: Sequence[ParameterPiece], gradient_factor: float | DeviceFactor
    ) -> None:
        """Update pieces with their gradients times a factor."""
        for group, members in _collect_by_group(pieces):
            remaining = members
            if self._one_pass is not None and _saves_traffic(members, gradient_factor):
                remaining = self._one_pass.update(members, group, gradient_factor)
            scale_gradients(remaining, gradient_factor)
            if remaining:
                self._run_kernels(remaining, group, gradient_factor)

    def _run_kernels(
        self,
        pieces: Sequence[ParameterPiece],
        group: dict[str, Any],
        gradient_factor: float | DeviceFactor,
    ) -> None:
        is_skipped = (
            gradient_factor.is_skipped if isinstance(gradient_factor, DeviceFactor) else None
        )
        adamw(
            [piece.local for piece in pieces],
            [piece.gradient for piece in pieces],
            [get_local_tensor(piece.state["exp_avg"]) for piece in pieces],
            [get_local_tensor(piece.state["exp_avg_sq"]) for piece in pieces],
            [],
            [piece.state["step"] for piece in pieces],
            foreach=self._foreach,
            fused=self._fused,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
            found_inf=is_skipped,
        )


def _saves_traffic(pieces: Sequence[ParameterPiece], gradient_factor: float | DeviceFactor) -> bool:
    """Return True if one pass moves fewer bytes than torch's kernel, or runs on a CPU.

    torch's kernel updates all tensors in one launch, one pass four at most, and only one of those
    whose moments share memory. The host of a GPU launches the updates of such offloaded moments
    while it launches a forward pass, so it multiplies all their gradients in one launch before.
    """
    if pieces[0].local.is_cpu or any(piece.copy is not None for piece in pieces):
        return True
    if gradient_factor == 1.0:
        return False
    moments = [get_local_tensor(piece.state["exp_avg"]) for piece in pieces if piece.local.numel()]
    storages = {moment.untyped_storage().data_ptr() for moment in moments}
    return len(storages) == len(moments)


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
