"""Linear layer that casts its weight to the input's precision, with an optional adapter.

Legend: D in, F out, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shardwright.architecture import AdapterShape
from shardwright.architecture.nf4_layout import compute_row_bytes, count_columns
from shardwright.model.communication_results import name_partial_product
from shardwright.model.dropout import Dropout
from shardwright.model.lora import compute_row_norms
from shardwright.model.parallel_hooks import NO_PARALLEL_HOOKS, ParallelHooks
from shardwright.model.products import nf4
from shardwright.model.products.product import (
    LayerReference,
    Operands,
    ProductRule,
    WeightGradientStore,
    multiply,
)
from shardwright.model.products.scaled_product import ScaledProducts
from shardwright.model.products.working_weights import declare_working_weight, read_weight
from shardwright.model.result_names import NamedPart, name_results
from shardwright.model.tensor_parallel_hooks import PipelineHooks, TensorParallelHooks


class Linear(nn.Module):
    """x @ weight (+ bias); weight is `[out, in]`, or `[in, out]` if `is_transposed` (GPT-2).

    The cast implements mixed precision: parameters may stay fp32 while activations are bf16. If
    FSDP2 has gathered them in bf16, the cast does nothing; a working weight replaces it.

    With `tensor_parallel`, the partial products of a row-parallel weight are summed over ranks; the
    bias is added once, to the sum.

    After `add_adapter` it computes with W + scale x B A. A and B are `Linear` layers too, with the
    same casts and deferred gradients.
    """

    gradient_store: WeightGradientStore | None = None
    """Store of deferred weight gradients, under a schedule with split backward passes."""
    scaled: ScaledProducts | None = None
    """Products of quantised operands with its own weight; adapters multiply in x's precision."""
    parallel_hooks: ParallelHooks = NO_PARALLEL_HOOKS
    adapters: AdapterShape | None = None
    is_adapter_enabled: bool = True
    working_weight: Tensor | None
    """The weight in the compute precision (`working_weights`); None casts it at each use."""

    def __init__(self, num_in: int, num_out: int, *, bias: bool, transposed: bool = False) -> None:
        super().__init__()
        self.is_transposed = transposed
        self.num_in = num_in
        self.num_out = num_out
        self.weight = nn.Parameter(
            torch.empty((num_in, num_out) if transposed else (num_out, num_in))
        )
        self.bias = nn.Parameter(torch.empty(num_out)) if bias else None
        declare_working_weight(self, "weight")

    def add_adapter(self, adapters: AdapterShape, number: int) -> None:
        """Add an adapter; `number`, unique in the layer, selects its dropout masks."""
        self.adapters = adapters
        self.adapter_number = number
        if adapters.kind == "dora":
            self.lora_magnitude_vector = nn.Parameter(torch.empty(self.num_out))
        self.lora_A = Linear(self.num_in, adapters.rank, bias=False)
        self.lora_B = Linear(adapters.rank, self.num_out, bias=False)

    def quantise(self) -> None:
        """Freeze the weight and store it as bytes (`nf4`)."""
        assert not self.is_transposed, "quantisation blocks lie along a product's inputs"
        shape = (self.num_out, compute_row_bytes(self.num_in))
        self.weight = nn.Parameter(
            torch.empty(shape, dtype=torch.uint8, device=self.weight.device), requires_grad=False
        )

    def forward(
        self,
        x: Tensor,
        tensor_parallel: TensorParallelHooks | None = None,
        dropout: Dropout | None = None,
    ) -> Tensor:
        """Compute the product; `dropout` has the masks for the adapter's inputs."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        if tensor_parallel is None:
            return self._compute_product(x, bias, dropout)
        pipeline = self.get_pipeline(tensor_parallel)
        if pipeline is not None:
            product = pipeline.multiply_and_reduce(*self._list_terms(x))
        else:
            product = tensor_parallel.reduce_output(self._compute_partial_product(x, dropout))
        return product if bias is None else product + bias

    def get_pipeline(self, tensor_parallel: TensorParallelHooks) -> PipelineHooks | None:
        """Return the hooks that pipeline this layer's product with its communication, if any."""
        is_pipelined = self.scaled is None and self.weight.dtype != torch.uint8
        if self.enabled_adapters is not None:
            is_pipelined &= self.enabled_adapters.is_additive
        return tensor_parallel.pipeline if is_pipelined else None

    @property
    def enabled_adapters(self) -> AdapterShape | None:
        """Adapters, of which the layer has one; None if it has none, or a disabled one."""
        return self.adapters if self.is_adapter_enabled else None

    def add_update(self, product: Tensor, narrow_BLR: Tensor) -> Tensor:
        """Add the adapter's update to a product; `narrow_BLR` is x A."""
        assert self.adapters is not None
        with name_results(None):
            return product + self.lora_B(narrow_BLR * self.adapters.scale)

    def _list_terms(self, x: Tensor) -> tuple[list[Tensor], list[Operands]]:
        """List inputs and operands whose products add up to this layer's, without the bias."""
        operands = self.get_operands(x.dtype)
        adapters = self.enabled_adapters
        if adapters is None:
            return [x], [operands]
        with name_results(None):
            narrow_BLR = self.lora_A(x) * adapters.scale
        return [x, narrow_BLR], [operands, self.lora_B.get_operands(x.dtype)]

    def get_operands(self, dtype: torch.dtype) -> Operands:
        """Return the weight and bias in `dtype`."""
        rule = ProductRule(self.num_in, self.is_transposed, self.gradient_store)
        matrix = read_weight(self.weight, self.working_weight, dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        return Operands(matrix, bias, LayerReference(rule, self.weight))

    def _compute_partial_product(self, x: Tensor, dropout: Dropout | None) -> Tensor:
        """Compute this rank's part of a product that is summed over ranks."""
        adapters = self.enabled_adapters
        if adapters is not None and adapters.kind == "dora":
            return self._compute_product(x, None, dropout)  # its gradients read the result
        with name_partial_product():
            return self._compute_product(x, None, dropout)

    def _compute_product(self, x: Tensor, bias: Tensor | None, dropout: Dropout | None) -> Tensor:
        """Compute the product with this rank's weight, with the adapter if it is enabled."""
        adapters = self.enabled_adapters
        if adapters is None:
            return self._multiply(x, bias)
        return self._apply_adapter(x, bias, adapters, dropout)

    def _multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        # Compiled blocks defer gradients by dividing their backward graph (`SplitBackward`).
        store = None if torch.compiler.is_compiling() else self.gradient_store
        rule = ProductRule(self.num_in, self.is_transposed, store, self.scaled)
        return multiply(x, self.weight, bias, rule, self.working_weight)

    def _apply_adapter(
        self, x: Tensor, bias: Tensor | None, adapters: AdapterShape, dropout: Dropout | None
    ) -> Tensor:
        """Compute x @ (W + scale x B A) (+ bias)."""
        adapter_x = (
            x
            if dropout is None or adapters.dropout == 0.0
            else self._drop_adapter_input(x, adapters.dropout, dropout)
        )
        with name_results(None):
            # The narrow result is scaled: neither pass reads the wide one once more for it.
            update = self.lora_B(self.lora_A(adapter_x) * adapters.scale)
        if adapters.kind != "dora":
            return self._multiply(x, bias) + update
        product = self._multiply(x, None)
        scale_F = (self.lora_magnitude_vector / self._compute_adapted_norms(adapters.scale)).to(
            x.dtype
        )
        if adapter_x is x:
            product = (product + update) * scale_F
        else:  # all that the adapter changes depends on the inputs after dropout, as in peft
            product = product + (scale_F - 1.0) * self._multiply(adapter_x, None) + scale_F * update
        return product if bias is None else product + bias

    @torch.no_grad()
    def _compute_adapted_norms(self, scale: float) -> Tensor:
        """Compute the norms of the rows of W + scale x B A, `[out]`, without gradient.

        Source: DoRA, arXiv 2402.09353, section 4.3.
        """
        weight = self.weight.t() if self.is_transposed else self.weight
        if weight.dtype == torch.uint8:
            wide = torch.promote_types(self.lora_A.weight.dtype, torch.float32)
            weight = nf4.unpack(weight, count_columns(weight.shape[1], self.num_in), wide)
        squares_F = compute_row_norms(
            weight, self.lora_A.weight, self.lora_B.weight, scale
        ).square()
        if self.parallel_hooks.tensor is not None and weight.shape[1] < self.num_in:
            squares_F = self.parallel_hooks.tensor.sum_over_ranks(squares_F)
        return squares_F.sqrt()

    def _drop_adapter_input(self, x: Tensor, rate: float, dropout: Dropout) -> Tensor:
        """Drop inputs by their index in the whole model, so that masks match one process."""
        first_feature = 0
        if self.parallel_hooks.tensor is not None and x.shape[-1] < self.num_in:
            first_feature = self.parallel_hooks.tensor.rank * x.shape[-1]
        return dropout.drop_adapter(x, rate, self.adapter_number, first_feature=first_feature)


def multiply_gathered(
    layers: Sequence[Linear],
    x_BSD: Tensor,
    tensor_parallel: TensorParallelHooks | None,
    dropout: Dropout | None,
    name: NamedPart,
) -> list[Tensor]:
    """Apply layers to all tokens of the residual stream; `name` is that of their results."""
    if tensor_parallel is not None:
        pipelines = [layer.get_pipeline(tensor_parallel) for layer in layers]
        if pipelines[0] is not None and None not in pipelines:
            with name_results(name):
                return _multiply_pipelined(layers, x_BSD, pipelines[0])
        x_BSD = tensor_parallel.prepare_input(x_BSD)
    with name_results(name):
        return [layer(x_BSD, None, dropout) for layer in layers]


def _multiply_pipelined(
    layers: Sequence[Linear], x_BSD: Tensor, pipeline: PipelineHooks
) -> list[Tensor]:
    adapted = [layer for layer in layers if layer.enabled_adapters is not None]
    multiplied = [*layers, *(layer.lora_A for layer in adapted)]
    results = pipeline.multiply_gathered(
        x_BSD, [layer.get_operands(x_BSD.dtype) for layer in multiplied]
    )
    narrow = iter(results[len(layers) :])
    return [
        product if layer.enabled_adapters is None else layer.add_update(product, next(narrow))
        for layer, product in zip(layers, results, strict=False)
    ]
