"""The three products of a layer with quantised operands, of a whole weight or of a rank's shard.

A block of elements that share a scale may span the dim that tensor parallelism shards. Its ranks
then agree on the block's maximum first, so that each quantises its part as one process
quantises the whole. Which products agree:

    sharded    output          input gradient    weight gradient
    outputs    w if whole      g, w              g if whole
    inputs     x, w            w if whole        x if whole

"If whole": where one scale covers the tensor. Maxima of weights may be known before the step
(`parallel.weight_maxima`). Blocks of a fixed size lie within a shard
(`placement.check_low_precision`). With two levels of scales (`nvfp4`), these are the outer ones.

Legend: M tokens, N output features, K input features, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from shardwright.config.low_precision import FP8Product
from shardwright.model.products import fp8
from shardwright.model.products.counting_operator import count_in_operator, register_counter
from shardwright.model.products.fp8 import ProductScaling, QuantisedMatrix, Scaling
from shardwright.model.products.gathered_weight import GatheredWeight
from shardwright.model.products.grouped_matmul import multiply_grouped
from shardwright.model.products.operand import (
    Operand,
    count_rounding,
    dequantise,
    get_widest_blocks,
    limit_rows,
    quantise,
    transpose,
)
from shardwright.model.products.scaled_matmul import multiply_experts_on_device, multiply_on_device
from shardwright.model.products.wide_product import multiply_to
from shardwright.model.products.working_operands import WorkingOperands, fill_operands

LayerDim = Literal["tokens", "inputs", "outputs"]
OperandWriter = Callable[[Tensor, WorkingOperands, Sequence[Tensor | None]], None]
"""`fill_operands`, or compiled code of it."""

_X: tuple[LayerDim, LayerDim] = ("tokens", "inputs")
_W: tuple[LayerDim, LayerDim] = ("outputs", "inputs")
_G: tuple[LayerDim, LayerDim] = ("tokens", "outputs")


class RoundingTotals:
    """Elements of each weight's products that quantisation saturated or flushed to zero."""

    NUM_COLUMNS = 4
    """Saturated, flushed, not finite, all elements."""

    def __init__(self, names: Sequence[str]) -> None:
        """
        Args:
            names: Weights of the whole model that multiply quantised operands.
        """
        self.names = tuple(names)
        self.is_counting = False
        """Counting reads every operand again; the trainer counts in logged steps only."""
        self._row_of_name = {name: row for row, name in enumerate(self.names)}
        # Weights are quantised on the streams of their updates and gathers, before the passes wait.
        self._table_of_stream: dict[torch.cuda.Stream | None, Tensor] = {}

    def add(self, name: str, values_RC: Tensor, operand: Operand) -> None:
        """Count one operand, without waiting for the device."""
        counts = count_rounding(values_RC, operand)
        device = values_RC.device
        stream = torch.cuda.current_stream(device) if values_RC.is_cuda else None
        if stream not in self._table_of_stream:
            self._table_of_stream[stream] = self._make_table(device)
        row = self._table_of_stream[stream][self._row_of_name[name]]
        row[:3] += torch.stack(tuple(counts))
        row[3] += values_RC.numel()

    def pop_table(self, device: torch.device) -> Tensor:
        """Return this rank's counts since the last call, int64 `[weights, NUM_COLUMNS]`."""
        tables = self._table_of_stream
        self._table_of_stream = {}
        total = self._make_table(device)
        for stream, table in tables.items():
            if stream is not None:
                current = torch.cuda.current_stream(device)
                current.wait_stream(stream)
                table.record_stream(current)
            total += table
        return total

    def _make_table(self, device: torch.device) -> Tensor:
        shape = (len(self.names), self.NUM_COLUMNS)
        return torch.zeros(shape, dtype=torch.int64, device=device)


@dataclass(eq=False)
class ScaledProducts:
    """Products of one weight with quantised operands.

    Not frozen: the compiler would specialise compiled code to every field of a frozen dataclass,
    and the name would make a graph of every layer. Compiled code reads `key`, a tensor, instead.
    """

    scaling: ProductScaling
    name: str = ""
    """The weight's name, for `totals`."""
    sharded: Literal["inputs", "outputs"] | None = None
    """Dim of the weight of which this rank has a part."""
    reduce_maxima: Callable[[Tensor], Tensor] | None = None
    """Function from this rank's maxima to those of all ranks that share the weight."""
    is_emulated: bool = True
    """True multiplies dequantised operands; False calls the device's kernels."""
    fast_products: tuple[FP8Product, ...] = ()
    """Products whose kernels accumulate fast."""
    totals: RoundingTotals | None = None
    gathered: GatheredWeight | None = None
    """The weight, if its codes are gathered over data ranks. Those of a rank's shard are counted
    in `totals` where they are quantised."""
    working: WorkingOperands | None = None
    """The weight, if it is quantised once per update (`working_weights`); counted in `totals` where
    that is."""
    is_gathered_as_codes: bool = False
    """True if ZeRO gathers the codes of the weight instead of its values."""
    output_maxima: Tensor | None = None
    """Maxima of the weight's blocks over all of its ranks, for the output, in the precision of the
    operands; None if the product must agree on them."""
    input_gradient_maxima: Tensor | None = None
    """The same for the input gradient."""
    rounding_key: Tensor | None = None
    """Key of the step's random numbers, by which gradients of outputs are rounded stochastically;
    an int32 scalar in host memory. None rounds to nearest."""
    key: Tensor = field(init=False, repr=False)
    """Key of these products for `count_in_operator`, an int64 scalar in host memory."""

    def __post_init__(self) -> None:
        self.key = register_counter(self)

    def compute_output(self, x_MK: Tensor, w_NK: Tensor) -> Tensor:
        """Compute x w^T, `[M, N]`, in x's dtype."""
        left, right = self.quantise_output_operands(x_MK, w_NK)
        return self._multiply("output", left, right, x_MK.dtype)

    def quantise_output_operands(self, x_MK: Tensor, w_NK: Tensor) -> tuple[Operand, Operand]:
        """Quantise the operands of x w^T, `[M, K]` and `[K, N]`."""
        x_operand = self.quantise(x_MK, self.scaling.output[0], _X)
        w_operand = self._read_weight(w_NK, x_MK.dtype, is_backward=False)
        return x_operand, transpose(w_operand)

    def compute_input_gradient(self, g_MN: Tensor, w_NK: Tensor) -> Tensor:
        """Compute g w, `[M, K]`, in g's dtype."""
        w_operand = self._read_weight(w_NK, g_MN.dtype, is_backward=True)
        g_scaling = self.scaling.input_gradient[0]
        g_operand = self.quantise(g_MN, g_scaling, _G, rounding_key=self.rounding_key)
        return self._multiply("input_gradient", g_operand, w_operand, g_MN.dtype)

    def compute_weight_gradient(
        self, g_MN: Tensor, x_MK: Tensor, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Compute g^T x, `[N, K]`, in `dtype`, by default g's.

        A wider dtype than g's saves a rounding where scales are those of tensors: other kernels of
        quantised operands write 16 bits.
        """
        dtype = dtype or g_MN.dtype
        if self.scaling.weight_gradient is None:
            return multiply_to(g_MN.t(), x_MK, dtype)
        g_scaling, x_scaling = self.scaling.weight_gradient
        left = transpose(self.quantise(g_MN, g_scaling, _G))
        right = self.quantise(x_MK, x_scaling, _X)
        result_dtype = dtype if g_scaling.is_whole and x_scaling.is_whole else g_MN.dtype
        return self._multiply("weight_gradient", left, right, result_dtype).to(dtype)

    def compute_expert_output(self, x_MK: Tensor, w_ENK: Tensor, counts_E: Tensor) -> Tensor:
        """Multiply each row by its expert's matrix, `[M, N]`, in x's dtype."""
        return self._multiply_grouped(
            "output",
            self.quantise(x_MK, self.scaling.output[0], _X),
            self._read_weight(w_ENK, x_MK.dtype, is_backward=False),
            counts_E,
            x_MK.dtype,
            is_transposed=True,
        )

    def compute_expert_input_gradient(
        self, g_MN: Tensor, w_ENK: Tensor, counts_E: Tensor
    ) -> Tensor:
        """Multiply each gradient by its row's expert, `[M, K]`, in g's dtype."""
        g_scaling = self.scaling.input_gradient[0]
        return self._multiply_grouped(
            "input_gradient",
            self.quantise(g_MN, g_scaling, _G, rounding_key=self.rounding_key),
            self._read_weight(w_ENK, g_MN.dtype, is_backward=True),
            counts_E,
            g_MN.dtype,
            is_transposed=False,
        )

    def quantise(
        self,
        values_RC: Tensor,
        scaling: Scaling,
        dims: tuple[LayerDim, LayerDim],
        *,
        num_matrices: int = 1,
        maxima: Tensor | None = None,
        rounding_key: Tensor | None = None,
    ) -> Operand:
        """Quantise an operand whose rows and columns are the layer's `dims`.

        Args:
            num_matrices: Matrices stacked along the rows, each quantised by itself.
            maxima: Maxima of all ranks, if they are known; of no use in another precision.
            rounding_key: Key of random numbers; None rounds to nearest.
        """
        if self.gathered is not None and dims == _W:
            return self.gathered.read(scaling)
        spans_ranks = self.spans_ranks(scaling, dims)
        if num_matrices > 1:
            scaling = limit_rows(scaling, values_RC.shape[0] // num_matrices)
        if maxima is not None and maxima.dtype == values_RC.dtype:
            maxima = maxima.float()
        else:
            maxima = self._agree_on_maxima(values_RC, scaling) if spans_ranks else None
        operand = quantise(values_RC, scaling, maxima, rounding_key)
        if self.totals is None:
            return operand
        if torch.compiler.is_compiling():
            return count_in_operator(self.key, values_RC, operand, is_emulated=self.is_emulated)
        if self.is_counting:
            self.count(values_RC, operand)
        return operand

    @property
    def is_counting(self) -> bool:
        """True if the step counts operands."""
        return self.totals is not None and self.totals.is_counting

    def count(self, values_RC: Tensor, operand: Operand) -> None:
        """Add an operand to `totals`."""
        assert self.totals is not None
        self.totals.add(self.name, values_RC, operand)

    def _agree_on_maxima(self, values_RC: Tensor, scaling: Scaling) -> Tensor | None:
        """Return the maxima of all ranks that share an operand; None if there are no others."""
        if self.reduce_maxima is None:
            return None
        return self.reduce_maxima(fp8.compute_block_maxima(values_RC, get_widest_blocks(scaling)))

    def fill_working(self, weight: Tensor, fill: OperandWriter = fill_operands) -> None:
        """Quantise the weight, `[N, K]` or `[E, N, K]`, for all products until it changes."""
        working = self.working
        assert working is not None
        scalings = (self.scaling.output[1], self.scaling.input_gradient[1])
        maxima: list[Tensor | None] = [self.output_maxima, self.input_gradient_maxima]
        for index, operand in enumerate(working.list_sets()):
            known = maxima[index]
            if known is not None:
                maxima[index] = known.float()
            elif self.reduce_maxima is not None and self.spans_ranks(scalings[index], _W):
                values_RC = weight.to(working.dtype).flatten(0, -2)
                maxima[index] = self._agree_on_maxima(values_RC, operand.scaling)
        fill(weight, working, maxima)
        if self.is_counting:
            values_RC = weight.to(working.dtype).flatten(0, -2)
            for operand in working.list_sets():
                self.count(values_RC, operand)

    def quantise_weight(self, weight: Tensor, *, is_backward: bool) -> Operand:
        """Quantise the weight, `[N, K]`, for the output, or for the input gradient; experts'
        matrices, `[E, N, K]`, below each other, each by itself."""
        scaling = (self.scaling.input_gradient if is_backward else self.scaling.output)[1]
        maxima = self.get_agreed_maxima(is_backward=is_backward)
        num_matrices = weight.shape[0] if weight.ndim == 3 else 1
        rows = weight.flatten(0, -2)
        return self.quantise(rows, scaling, _W, num_matrices=num_matrices, maxima=maxima)

    def has_operands(self, dtype: torch.dtype) -> bool:
        """Return True if the weight is quantised already, for products in this precision."""
        return self.working is not None and self.working.dtype == dtype

    def _read_weight(self, weight: Tensor, dtype: torch.dtype, *, is_backward: bool) -> Operand:
        """Return the operand of the weight in a product of this precision."""
        if self.working is not None and self.working.dtype == dtype:
            return self.working.input_gradient if is_backward else self.working.output
        return self.quantise_weight(weight, is_backward=is_backward)

    def get_agreed_maxima(self, *, is_backward: bool) -> Tensor | None:
        """Return the known maxima of the weight in the output, or in the input gradient."""
        return self.input_gradient_maxima if is_backward else self.output_maxima

    def spans_ranks(self, scaling: Scaling, dims: tuple[LayerDim, LayerDim]) -> bool:
        """Return True if a scale of an operand spans the ranks that share the weight."""
        widest = get_widest_blocks(scaling)
        blocks = dict(zip(dims, (widest.rows, widest.columns), strict=True))
        return self.sharded in blocks and blocks[self.sharded] is None

    def _multiply(
        self, product: FP8Product, left: Operand, right: Operand, dtype: torch.dtype
    ) -> Tensor:
        if not self.is_emulated:
            is_fast = product in self.fast_products
            return multiply_on_device(left, right, dtype, is_fast=is_fast)
        wide = torch.promote_types(dtype, torch.float32)
        return (dequantise(left).to(wide) @ dequantise(right).to(wide)).to(dtype)

    def _multiply_grouped(
        self,
        product: FP8Product,
        left: Operand,
        right: Operand,
        counts_E: Tensor,
        dtype: torch.dtype,
        *,
        is_transposed: bool,
    ) -> Tensor:
        """Multiply rows by the experts' matrices."""
        assert get_widest_blocks(left.scaling).rows == 1, "rows of different experts share no scale"
        if not self.is_emulated:
            assert isinstance(left, QuantisedMatrix), "4-bit experts have no kernel"
            assert isinstance(right, QuantisedMatrix)
            return multiply_experts_on_device(
                left,
                right,
                counts_E,
                dtype,
                is_transposed=is_transposed,
                is_fast=product in self.fast_products,
            )
        wide = torch.promote_types(dtype, torch.float32)
        product_M = multiply_grouped(
            dequantise(left).to(wide),
            dequantise(right).to(wide).unflatten(0, (counts_E.shape[0], -1)),
            counts_E,
            transposed=is_transposed,
        )
        return product_M.to(dtype)
