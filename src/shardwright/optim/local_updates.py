"""torch's AdamW and SGD on the local parts of sharded parameters.

Both rules update each element independently, so the update needs neither communication nor
sharding information. On DTensors torch propagates the sharding of all parameters through each
fused operator, which takes tenths of a second in the first step of a rank and a lookup over the
whole list in each later step. The states remain DTensors, as checkpoints expect. The results
are bitwise identical.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from shardwright.optim.sharded_optimizer import get_local_tensor


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` that updates local tensors in place of DTensors."""

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        has_complex = bool(
            super()._init_group(group, *lists)  # type: ignore[no-untyped-call, unused-ignore]
        )
        for tensors in lists:
            tensors[:] = [get_local_tensor(tensor) for tensor in tensors]
        return has_complex


class SGD(torch.optim.SGD):
    """`torch.optim.SGD` that updates local tensors.

    Momentum starts at zero, so after the first step it equals the first gradient, as in torch.
    """

    @torch.no_grad()
    def step(  # type: ignore[override, unused-ignore]
        self, closure: Callable[[], float] | None = None
    ) -> None:
        """Update every parameter that has a gradient."""
        assert closure is None, "gradients are accumulated before the step"
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            buffers: list[Tensor | None] = []
            for parameter in parameters:
                state = self.state[parameter] if group["momentum"] else {}
                if group["momentum"] and state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = torch.zeros_like(
                        parameter, memory_format=torch.preserve_format
                    )
                buffers.append(
                    get_local_tensor(state["momentum_buffer"]) if group["momentum"] else None
                )
            sgd(
                [get_local_tensor(parameter) for parameter in parameters],
                [get_local_tensor(parameter.grad) for parameter in parameters],
                buffers,
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
