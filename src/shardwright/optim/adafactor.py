"""Adafactor: the second moment of a matrix is stored as one number per row and one per column.

Sums over rows, columns and whole parameters are all-reduced over the ranks that shard the
parameter, with one collective per set of axes for all parameters. Every rank holds the complete
row and column vectors. The update equals that of torch.optim.Adafactor up to the order of
additions. Vectors have a second moment per element, sharded like the parameter.

Source: Shazeer and Stern 2018, Adafactor (arXiv 1804.04235), algorithm 4, with torch's two
deviations: a learning rate that bounds the relative step, and decoupled weight decay.

Legend: E matrices of a stack (absent for a single matrix), R rows, C columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.layout import ParameterBox
from shardwright.numerics import get_local_tensor
from shardwright.optim.adafactor_passes import divide_by_root, scale_and_add
from shardwright.optim.exact_operations import CompileFunction
from shardwright.optim.sharded_optimizer import (
    Moment,
    ParameterPiece,
    ShardedModel,
    ShardedOptimizer,
    StateSpec,
    advance_step,
    count_elements,
    narrow_to_box,
)

_DECAY_EXPONENT = -0.8
"""The decay of the second moment after t steps is 1 - t^-0.8."""
_MIN_PARAMETER_SCALE = 1e-3
"""Lower bound of the parameter's root mean square in its step, so that zeros can move."""
_MAX_UPDATE_RMS = 1.0
"""Largest root mean square of an update before it is multiplied by the step size."""


@dataclass
class _ParameterUpdate:
    """Inputs and intermediate results of one parameter's update."""

    name: str
    local: Tensor
    gradient: Tensor
    state: dict[str, Any]
    group: dict[str, Any]
    shape: tuple[int, ...]
    sums: dict[str, Tensor]
    """Global sums of squares: `parameter`, and of a matrix's gradient `rows` and `columns`."""
    update: Tensor | None = None


class Adafactor(ShardedOptimizer):
    """Adafactor with steps relative to each parameter's root mean square.

    `lr` bounds the relative step (0.01 in the paper).
    """

    rule = "adafactor"
    is_divisible = False

    def __init__(
        self,
        groups: list[dict[str, Any]],
        model: ShardedModel,
        *,
        lr: float,
        compile_function: CompileFunction | None = None,
    ) -> None:
        super().__init__(groups, {"lr": lr}, model)
        self._compile_function = compile_function

    def list_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, StateSpec]:
        """List the tensors of a parameter's state by name, without its step count."""
        shape = self.model.layouts[self.parameter_names[parameter]].shape
        local = get_local_tensor(parameter.detach())
        if len(shape) < 2:
            return {"variance": StateSpec(tuple(local.shape), local.dtype)}
        return {
            "row_var": StateSpec(shape[:-1], local.dtype),
            "col_var": StateSpec((*shape[:-2], shape[-1]), local.dtype),
        }

    def get_row_length(self, parameter: Tensor, group: dict[str, Any]) -> int:
        """Return the elements of the whole: its update depends on all of them."""
        return get_local_tensor(parameter.detach()).numel()

    def describe_moments(self, parameter: Tensor, state: Mapping[str, Tensor]) -> dict[str, Moment]:
        """Return the given state tensors with their sharding, for checkpoints."""
        name = self.parameter_names[parameter]
        return {
            key: Moment(tensor, name)
            if key == "variance"
            else _make_replicated_moment(tensor, name)
            for key, tensor in state.items()
        }

    def update_pieces(self, pieces: Sequence[ParameterPiece]) -> None:
        """Update these parameters. Collective: every rank passes the same ones of its stage."""
        updates = [
            _ParameterUpdate(
                piece.name,
                piece.local,
                piece.gradient,
                piece.state,
                piece.group,
                tuple(self.model.layouts[piece.name].shape),
                {},
            )
            for piece in pieces
        ]
        for item in updates:
            self._sum_locally(item)
        self._sum_over_ranks(updates, ("parameter", "rows", "columns"))
        for item in updates:
            item.update = self._update_variance(item)
            squares = [
                narrow_to_box(item.update, box.local_bounds).double().square().sum()
                for box in self._list_first_copies(item.name)
            ]
            item.sums = item.sums | {
                "update": sum(
                    squares, torch.zeros((), dtype=torch.float64, device=item.local.device)
                )
            }
        self._sum_over_ranks(updates, ("update",))
        if not updates:
            return
        # One read for all parameters: each read makes the host wait for the device.
        means = [
            item.sums[kind] / count_elements(item.shape)
            for item in updates
            for kind in ("parameter", "update")
        ]
        roots = torch.stack(means).sqrt().tolist()
        for item, parameter_rms, update_rms in zip(updates, roots[::2], roots[1::2], strict=True):
            self._apply_update(item, parameter_rms, update_rms)

    def _list_first_copies(self, name: str) -> list[ParameterBox]:
        """Return the boxes that this rank adds to sums over ranks, so that each counts once."""
        return [
            box
            for box in self.model.local_boxes(name)
            if box.is_first_copy and all(length for _, length in box.global_bounds)
        ]

    def _sum_locally(self, item: _ParameterUpdate) -> None:
        zero = torch.zeros((), dtype=torch.float64, device=item.local.device)
        item.sums = {"parameter": zero.clone()}
        if len(item.shape) >= 2:
            item.sums["rows"] = zero.new_zeros(item.shape[:-1])
            item.sums["columns"] = zero.new_zeros((*item.shape[:-2], item.shape[-1]))
        for box in self._list_first_copies(item.name):
            item.sums["parameter"] += (
                narrow_to_box(item.local, box.local_bounds).double().square().sum()
            )
            if len(item.shape) >= 2:
                squares_ERC = narrow_to_box(item.gradient, box.local_bounds).double().square()
                narrow_to_box(item.sums["rows"], box.global_bounds[:-1]).add_(squares_ERC.sum(-1))
                narrow_to_box(
                    item.sums["columns"], (*box.global_bounds[:-2], box.global_bounds[-1])
                ).add_(squares_ERC.sum(-2))

    def _sum_over_ranks(self, updates: list[_ParameterUpdate], kinds: tuple[str, ...]) -> None:
        """All-reduce the sums in place, with one collective per set of axes.

        They are fp64, so that rounding differences between layouts are negligible.
        """
        by_axes: dict[tuple[str, ...], list[Tensor]] = {}
        for item in updates:
            axes = self.model.layouts[item.name].shard_axes
            by_axes.setdefault(axes, []).extend(
                item.sums[kind] for kind in kinds if kind in item.sums
            )
        for axes, sums in by_axes.items():
            if axes:
                flat = self.model.sum_over(torch.cat([tensor.reshape(-1) for tensor in sums]), axes)
                for tensor, summed in zip(
                    sums, flat.split([tensor.numel() for tensor in sums]), strict=True
                ):
                    tensor.copy_(summed.view(tensor.shape))

    def _update_variance(self, item: _ParameterUpdate) -> Tensor:
        """Update the second moment; return the local gradient / sqrt(second moment)."""
        weight = advance_step(item.state) ** _DECAY_EXPONENT
        epsilon = torch.finfo(item.local.dtype).eps
        if "variance" in item.state:
            variance = get_local_tensor(item.state["variance"])
            variance.lerp_(item.gradient.square(), weight)
            return variance.clamp(min=epsilon**2).rsqrt_().mul_(item.gradient)
        row_ER = item.state["row_var"]
        column_EC = item.state["col_var"]
        row_ER.lerp_((item.sums["rows"] / item.shape[-1]).to(row_ER.dtype), weight)
        column_EC.lerp_((item.sums["columns"] / item.shape[-2]).to(column_EC.dtype), weight)
        relative_ER = row_ER / row_ER.mean(-1, keepdim=True).clamp(min=epsilon)
        update = torch.empty_like(item.gradient)
        for box in self.model.local_boxes(item.name):
            rows = narrow_to_box(relative_ER, box.global_bounds[:-1])
            columns = narrow_to_box(column_EC, (*box.global_bounds[:-2], box.global_bounds[-1]))
            divide_by_root(
                narrow_to_box(item.gradient, box.local_bounds),
                rows,
                columns,
                narrow_to_box(update, box.local_bounds),
                self._compile_function,
            )
        return update

    def _apply_update(
        self, item: _ParameterUpdate, parameter_rms: float, update_rms: float
    ) -> None:
        assert item.update is not None
        lr = item.group["lr"]
        clip_divisor = max(1.0, update_rms / _MAX_UPDATE_RMS)
        relative_step = min(lr, float(item.state["step"]) ** -0.5)
        scale_and_add(
            item.local,
            item.update,
            1 - lr * item.group["weight_decay"],
            -max(_MIN_PARAMETER_SCALE, parameter_rms) * relative_step / clip_divisor,
            self._compile_function,
        )


def _make_replicated_moment(tensor: Tensor, name: str) -> Moment:
    """Describe a tensor that every rank holds completely."""
    bounds = tuple((0, size) for size in tensor.shape)
    return Moment(tensor, name, tuple(tensor.shape), (ParameterBox(bounds, bounds),))
