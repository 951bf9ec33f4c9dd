"""Matrix products whose weights are cast to the input's precision at use.

Legend: D in, F out.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.model.deferral import WeightGradients


class Linear(nn.Module):
    """x @ weight (+ bias), the weight lying `[out, in]`, or `[in, out]` with `transposed` (GPT-2's files).

    The cast is what mixed precision is here: parameters may stay fp32 while activations are bf16, and where FSDP2 has
    gathered them in bf16 already it costs nothing.

    `sum_shares` makes the whole product of a weight whose inputs lie over several ranks; the bias is added once, to the sum.
    """

    deferral: WeightGradients | None = None
    """Under a schedule that splits the backward: where the weight's gradient may wait."""

    def __init__(self, num_in: int, num_out: int, *, bias: bool, transposed: bool = False) -> None:
        super().__init__()
        self.transposed = transposed
        self.weight = nn.Parameter(torch.empty((num_in, num_out) if transposed else (num_out, num_in)))
        self.bias = nn.Parameter(torch.empty(num_out)) if bias else None

    def forward(self, x: Tensor, sum_shares: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        if sum_shares is not None:
            product = sum_shares(self._multiply(x, None))
            return product if bias is None else product + bias
        return self._multiply(x, bias)

    def _multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.deferral is not None and torch.is_grad_enabled():
            return self.deferral.linear(x, self.weight, bias, transposed=self.transposed)
        weight = self.weight.to(x.dtype)
        return F.linear(x, weight.t() if self.transposed else weight, bias)
