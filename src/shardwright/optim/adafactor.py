"""Adafactor: the second moment of a matrix kept as one number per row and one per column.

Sums over rows, columns and whole parameters run over the ranks that hold the parameter, all parameters' in one exchange per set of
axes; the two vectors that come of it are held whole by every rank. The update is that of torch.optim.Adafactor up to the order of
additions. Vectors keep a second moment per element, cut like themselves.

Source: Shazeer and Stern 2018, Adafactor (arXiv 1804.04235), algorithm 4, with torch's two deviations: a learning rate that bounds
the relative step, and a decoupled decay.

Legend: E matrices of a stack (absent for one), R rows, C columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.layout import Held
from shardwright.optim.cut import CutOptimizer, ModelCut, Moment, count_step, local_part, narrow, num_elements

_DECAY_EXPONENT = -0.8
"""The second moment's decay after t steps is 1 - t^-0.8."""
_SMALLEST_SCALE = 1e-3
"""Least root mean square of a parameter that its step is relative to, so that zeros move."""
_CLIP = 1.0
"""Largest root mean square of an update before the step size."""


@dataclass
class _Work:
    """One parameter on its way through a step."""

    name: str
    local: Tensor
    gradient: Tensor
    state: dict[str, Any]
    group: dict[str, Any]
    shape: tuple[int, ...]
    sums: dict[str, Tensor]
    """Sums of squares of the whole: `parameter` (a scalar) and, of a matrix's gradient, `rows` and `columns`."""
    update: Tensor | None = None


class Adafactor(CutOptimizer):
    """One step size relative to each parameter's own size; `lr` is its upper bound (0.01 in the paper)."""

    rule = "adafactor"

    def __init__(self, groups: list[dict[str, Any]], cut: ModelCut, *, lr: float) -> None:
        super().__init__(groups, {"lr": lr}, cut)

    def start(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if state:
            return
        shape = self.cut.layouts[self.name_of[parameter]].shape
        state["step"] = torch.zeros((), dtype=torch.float32)
        if len(shape) < 2:
            state["variance"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            return
        local = local_part(parameter.detach())
        state["row_var"], state["col_var"] = local.new_zeros(shape[:-1]), local.new_zeros((*shape[:-2], shape[-1]))

    def moments(self, parameter: Tensor) -> dict[str, Moment]:
        state, name = self.state[parameter], self.name_of[parameter]
        if "variance" in state:
            return {"variance": Moment(state["variance"], name)}
        return {key: _whole(state[key], name) for key in ("row_var", "col_var")}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step of every parameter. Every rank calls this: it sums over ranks."""
        assert closure is None
        work = [
            _Work(name, local, gradient, state, group, tuple(self.cut.layouts[name].shape), {})
            for name, _, local, gradient, state, group in self.walk()
        ]
        for item in work:
            self._sum_locally(item)
        self._sum_over_ranks(work, ("parameter", "rows", "columns"))
        for item in work:
            item.update = self._updated_variance(item)
            squares = [narrow(item.update, box.local).double().square().sum() for box in self._counted(item.name)]
            item.sums = item.sums | {"update": sum(squares, torch.zeros((), dtype=torch.float64, device=item.local.device))}
        self._sum_over_ranks(work, ("update",))
        for item in work:
            self._move(item)

    def _counted(self, name: str) -> list[Held]:
        """Boxes that this rank counts in a sum over the ranks that cut the parameter."""
        return [box for box in self.cut.held(name) if box.first and all(length for _, length in box.whole)]

    def _sum_locally(self, item: _Work) -> None:
        empty = torch.zeros((), dtype=torch.float64, device=item.local.device)
        item.sums = {"parameter": empty.clone()}
        if len(item.shape) >= 2:
            item.sums["rows"] = empty.new_zeros(item.shape[:-1])
            item.sums["columns"] = empty.new_zeros((*item.shape[:-2], item.shape[-1]))
        for box in self._counted(item.name):
            item.sums["parameter"] += narrow(item.local, box.local).double().square().sum()
            if len(item.shape) >= 2:
                squares_ERC = narrow(item.gradient, box.local).double().square()
                narrow(item.sums["rows"], box.whole[:-1]).add_(squares_ERC.sum(-1))
                narrow(item.sums["columns"], (*box.whole[:-2], box.whole[-1])).add_(squares_ERC.sum(-2))

    def _sum_over_ranks(self, work: list[_Work], kinds: tuple[str, ...]) -> None:
        """Make the sums those of whole parameters: one exchange per set of axes, in fp64, so that hardly a bit changes."""
        by_axes: dict[tuple[str, ...], list[Tensor]] = {}
        for item in work:
            axes = self.cut.layouts[item.name].shard_axes
            by_axes.setdefault(axes, []).extend(item.sums[kind] for kind in kinds if kind in item.sums)
        for axes, sums in by_axes.items():
            if axes:
                flat = self.cut.sum_over(torch.cat([tensor.reshape(-1) for tensor in sums]), axes)
                for tensor, summed in zip(sums, flat.split([tensor.numel() for tensor in sums]), strict=True):
                    tensor.copy_(summed.view(tensor.shape))

    def _updated_variance(self, item: _Work) -> Tensor:
        """The second moment after this step, and of it the update before clipping: gradient / sqrt(moment), this rank's part."""
        share = count_step(item.state) ** _DECAY_EXPONENT
        smallest = torch.finfo(item.local.dtype).eps
        if "variance" in item.state:
            variance = local_part(item.state["variance"])
            variance.lerp_(item.gradient.square(), share)
            return variance.clamp(min=smallest**2).rsqrt_().mul_(item.gradient)
        row_ER, column_EC = item.state["row_var"], item.state["col_var"]
        row_ER.lerp_((item.sums["rows"] / item.shape[-1]).to(row_ER.dtype), share)
        column_EC.lerp_((item.sums["columns"] / item.shape[-2]).to(column_EC.dtype), share)
        relative_ER = row_ER / row_ER.mean(-1, keepdim=True).clamp(min=smallest)
        update = torch.empty_like(item.gradient)
        for box in self.cut.held(item.name):
            rows = narrow(relative_ER, box.whole[:-1])
            columns = narrow(column_EC, (*box.whole[:-2], box.whole[-1]))
            estimate = (rows[..., None] * columns[..., None, :]).clamp_(min=smallest**2).rsqrt_()
            narrow(update, box.local).copy_(estimate.mul_(narrow(item.gradient, box.local)))
        return update

    def _move(self, item: _Work) -> None:
        assert item.update is not None
        lr, count = item.group["lr"], num_elements(item.shape)
        size = float((item.sums["parameter"] / count).sqrt())
        clip = max(1.0, float((item.sums["update"] / count).sqrt()) / _CLIP)
        relative = min(lr, float(item.state["step"]) ** -0.5)
        item.local.mul_(1 - lr * item.group["weight_decay"])
        item.local.add_(item.update, alpha=-max(_SMALLEST_SCALE, size) * relative / clip)


def _whole(tensor: Tensor, name: str) -> Moment:
    """A tensor that every rank holds whole."""
    bounds = tuple((0, size) for size in tensor.shape)
    return Moment(tensor, name, tuple(tensor.shape), (Held(bounds, bounds),))
