"""Matrix products whose weights are cast to the input's precision at use, with a low-rank adapter beside them where there is one.

Legend: D in, F out, R rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.architecture import AdapterShape
from shardwright.architecture.quantised import columns_of, packed_width
from shardwright.model import nf4
from shardwright.model.adapters import row_norms
from shardwright.model.cuts import WHOLE, Cuts
from shardwright.model.deferral import WeightGradients
from shardwright.model.dropout import Dropout


class Linear(nn.Module):
    """x @ weight (+ bias), the weight lying `[out, in]`, or `[in, out]` with `transposed` (GPT-2's files).

    The cast is what mixed precision is here: parameters may stay fp32 while activations are bf16, and where FSDP2 has
    gathered them in bf16 already it costs nothing.

    `sum_shares` makes the whole product of a weight whose inputs lie over several ranks; the bias is added once, to the sum.

    After `adapt` the function is that of W + scale x B A; A and B are products of their own, so that whatever holds for a weight
    here (casts, deferred gradients) holds for them.
    """

    deferral: WeightGradients | None = None
    """Under a schedule that splits the backward: where the weight's gradient may wait."""
    cuts: Cuts = WHOLE
    adapters: AdapterShape | None = None
    adapter_on: bool = True

    def __init__(self, num_in: int, num_out: int, *, bias: bool, transposed: bool = False) -> None:
        super().__init__()
        self.transposed = transposed
        self.num_in, self.num_out = num_in, num_out
        self.weight = nn.Parameter(torch.empty((num_in, num_out) if transposed else (num_out, num_in)))
        self.bias = nn.Parameter(torch.empty(num_out)) if bias else None

    def adapt(self, adapters: AdapterShape, number: int) -> None:
        """Put an adapter beside the weight; `number` tells its dropout from that of the layer's others."""
        self.adapters, self.adapter_number = adapters, number
        if adapters.kind == "dora":
            self.lora_magnitude_vector = nn.Parameter(torch.empty(self.num_out))
        self.lora_A = Linear(self.num_in, adapters.rank, bias=False)
        self.lora_B = Linear(adapters.rank, self.num_out, bias=False)

    def quantise(self) -> None:
        """Hold the weight, which is frozen then, as bytes (`nf4`)."""
        assert not self.transposed, "blocks go along a product's inputs"
        shape = (self.num_out, packed_width(self.num_in))
        self.weight = nn.Parameter(torch.empty(shape, dtype=torch.uint8, device=self.weight.device), requires_grad=False)

    def forward(self, x: Tensor, sum_shares: Callable[[Tensor], Tensor] | None = None, dropout: Dropout | None = None) -> Tensor:
        """The product; `dropout` has the layer's masks, which an adapter's inputs take where it asks for them."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        if sum_shares is not None:
            product = sum_shares(self._share(x, None, dropout))
            return product if bias is None else product + bias
        return self._share(x, bias, dropout)

    def _share(self, x: Tensor, bias: Tensor | None, dropout: Dropout | None) -> Tensor:
        """The product of the weights that this rank holds, with its adapter where that is on."""
        if self.adapters is None or not self.adapter_on:
            return self._multiply(x, bias)
        return self._adapted(x, bias, self.adapters, dropout)

    def _multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.weight.dtype == torch.uint8:
            product = nf4.linear(x, self.weight, self.num_in)
            return product if bias is None else product + bias
        if self.deferral is not None and torch.is_grad_enabled():
            return self.deferral.linear(x, self.weight, bias, transposed=self.transposed)
        weight = self.weight.to(x.dtype)
        return F.linear(x, weight.t() if self.transposed else weight, bias)

    def _adapted(self, x: Tensor, bias: Tensor | None, adapters: AdapterShape, dropout: Dropout | None) -> Tensor:
        """x @ (W + scale x B A) (+ bias)."""
        kept = x if dropout is None or adapters.dropout == 0.0 else self._drop(x, adapters.dropout, dropout)
        update = self.lora_B(self.lora_A(kept)) * adapters.scale
        if adapters.kind != "dora":
            return self._multiply(x, bias) + update
        product = self._multiply(x, None)
        length_F = (self.lora_magnitude_vector / self._norms(adapters.scale)).to(x.dtype)
        if kept is x:
            product = (product + update) * length_F
        else:  # what the adapter changes is a function of the inputs that were kept, as in peft
            product = product + (length_F - 1.0) * self._multiply(kept, None) + length_F * update
        return product if bias is None else product + bias

    @torch.no_grad()
    def _norms(self, scale: float) -> Tensor:
        """Lengths of the rows of W + scale x B A, `[out]`, which take no gradient (DoRA, section 4.3)."""
        weight = self.weight.t() if self.transposed else self.weight
        if weight.dtype == torch.uint8:
            wide = torch.promote_types(self.lora_A.weight.dtype, torch.float32)
            weight = nf4.unpack(weight, columns_of(weight.shape[1], self.num_in), wide)
        squares_F = row_norms(weight, self.lora_A.weight, self.lora_B.weight, scale).square()
        if self.cuts.tensor is not None and weight.shape[1] < self.num_in:
            squares_F = self.cuts.tensor.sum(squares_F)
        return squares_F.sqrt()

    def _drop(self, x: Tensor, rate: float, dropout: Dropout) -> Tensor:
        """Masks by the feature's number in the whole model: ranks whose inputs are cut drop what one process would."""
        first = 0
        if self.cuts.tensor is not None and x.shape[-1] < self.num_in:
            first = self.cuts.tensor.rank * x.shape[-1]
        return dropout.drop_adapter(x, rate, self.adapter_number, first_feature=first)
