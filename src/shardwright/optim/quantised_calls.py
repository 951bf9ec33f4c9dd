"""Calls of the update of 8-bit AdamW: one for each parameter and step, or for parts of it.

What a call needs besides the factor of the gradients is collected before that factor is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwright.optim.exact_operations import CompileFunction
from shardwright.optim.quantised_update import (
    BlockRounding,
    Factors,
    GradientFactor,
    Places,
    QuantisedRows,
    Tables,
    build_places,
    build_tables,
    compute_factors,
    update_blocks,
    update_blocks_separately,
    update_rows,
)
from shardwright.optim.stochastic_rounding import PieceRounding, make_sample_places

_MAX_CHUNK_ELEMENTS = 1 << 22
"""Elements that separate operations update at a time."""
_CPU_CHUNK_ELEMENTS = 1 << 17
"""Elements that a CPU updates at a time, whose fp32 moments fit its cache."""
_SAMPLE_BLOCKS = 1021
"""Enough for the compiler's choice for large tensors: on CUDA one warp updates four blocks."""

Dtypes = tuple[torch.dtype, torch.dtype, torch.dtype | None]
"""The dtypes of weights, gradient and copy."""
Constants = tuple[float, float, float]
"""1 - beta1, 1 - beta2 and eps."""
Update = Callable[[GradientFactor], None]
"""Update whose other arguments have been collected."""


class QuantisedUpdate:
    """Update of rows, in one compiled pass where the compiler can make it, else separately.

    Rows that end inside a block are updated by separate operations; so is a single block, for
    which torch would compile another graph.
    """

    def __init__(self, block_size: int, compile_function: CompileFunction | None) -> None:
        self._block_size = block_size
        self._compile_function = compile_function
        self._tables: dict[torch.device, Tables] = {}
        self._places: dict[torch.device, Places] = {}
        self._functions: dict[tuple[Any, ...], Callable[..., None] | None] = {}
        """By dtypes, constants and kind of rounding; None if there is none."""

    def prepare(
        self, rows: QuantisedRows, factors: Factors, rounding: PieceRounding | None = None
    ) -> Update:
        """Collect what the update of rows `[R, C]` needs, and return it; it is in place.

        Weights in bf16 need a `rounding`.
        """
        device = rows.weights.device
        if device not in self._tables:  # copied there once
            self._tables[device] = build_tables(device)
        update = self._find_function(rows, factors, rounding)
        if update is None:
            return partial(self._update_separately, rows, factors, rounding)
        if device not in self._places:
            self._places[device] = build_places(device)
        arguments = (self._tables[device], self._places[device], factors)
        blocks = self._form_blocks(rows)
        if rows.weights.is_cpu and rows.weights.numel() > _CPU_CHUNK_ELEMENTS:
            return partial(self._update_chunks, update, blocks, arguments, rounding)
        block_rounding = self._describe_rounding(rounding, 0, rows.weights.numel())
        return lambda factor: update(blocks, *arguments, factor.value, block_rounding)

    def _update_chunks(
        self,
        update: Callable[..., None],
        blocks: QuantisedRows,
        arguments: tuple[Tables, Places, Factors],
        rounding: PieceRounding | None,
        factor: GradientFactor,
    ) -> None:
        for first, part in _split(blocks, _CPU_CHUNK_ELEMENTS):
            stop = first + part.weights.numel()
            block_rounding = self._describe_rounding(rounding, first, stop)
            update(part, *arguments, factor.value, block_rounding)

    def _update_separately(
        self,
        rows: QuantisedRows,
        factors: Factors,
        rounding: PieceRounding | None,
        factor: GradientFactor,
    ) -> None:
        """Update a few rows at a time, because decoded moments are wider than stored ones."""
        device = rows.weights.device
        for first, part in _split(rows, _MAX_CHUNK_ELEMENTS):
            stop = first + part.weights.numel()
            bits = None if rounding is None else rounding.draw_bits(first, stop, device).first
            bits = None if bits is None else bits.view(part.weights.shape)
            update_rows(part, self._tables[device], factors, factor, self._block_size, bits)

    def _find_function(
        self, rows: QuantisedRows, factors: Factors, rounding: PieceRounding | None
    ) -> Callable[..., None] | None:
        """Return the compiled update of the rows; None if separate operations update them."""
        num_elements = rows.weights.numel()
        is_whole = rows.weights.shape[-1] % self._block_size == 0
        if not is_whole or not self._compile_function or num_elements <= self._block_size:
            return None
        has_one_run = None
        if rounding is not None:
            rounded = self._describe_rounding(rounding, 0, num_elements)
            is_divided = rows.weights.is_cpu and num_elements > _CPU_CHUNK_ELEMENTS
            if rounded is None or (is_divided and rounded.places.distance is not None):
                return None
            has_one_run = rounded.places.distance is None
        copy_dtype = None if rows.copy is None else rows.copy.dtype
        dtypes = (rows.weights.dtype, rows.gradient.dtype, copy_dtype)
        constants = (factors.mean_weight, factors.square_weight, factors.eps)
        key = (dtypes, constants, has_one_run)
        if key not in self._functions:
            update = self._compile_function(*self._describe(*key))
            self._functions[key] = None if update is update_blocks_separately else update
        return self._functions[key]

    def _describe_rounding(
        self, rounding: PieceRounding | None, first: int, stop: int
    ) -> BlockRounding | None:
        """Return the random numbers of elements of a piece by blocks, if they are regular."""
        if rounding is None:
            return None
        places = rounding.narrow(first, stop).describe_rows(self._block_size)
        return None if places is None else BlockRounding(places, rounding.key)

    def _form_blocks(self, rows: QuantisedRows) -> QuantisedRows:
        def form(tensor: Tensor) -> Tensor:
            if tensor is rows.mean_scales or tensor is rows.square_scales:
                return tensor.view(-1)
            is_read = tensor is rows.gradient  # a copy of the others would be updated
            return (tensor.reshape if is_read else tensor.view)(-1, self._block_size)

        return _map(form, rows)

    def _describe(
        self, dtypes: Dtypes, constants: Constants, has_one_run: bool | None
    ) -> tuple[Any, ...]:
        """Return the arguments of `compile_function`.

        `has_one_run` is None if weights are not rounded stochastically.
        """
        name = (
            f"8-bit AdamW ({dtypes[0]}, gradients {dtypes[1]}, blocks of {self._block_size}, "
            f"1 - betas {constants[0]:.4g} and {constants[1]:.4g}, eps {constants[2]:g}"
            f"{'' if dtypes[2] is None else f', copy {dtypes[2]}'}"
        )
        if has_one_run is not None:
            name += f", rounded stochastically{'' if has_one_run else ', parts of rows'}"
        name += ")"
        make_sample = partial(_make_sample, dtypes, self._block_size, constants, has_one_run)
        return name.replace("torch.", ""), update_blocks, update_blocks_separately, make_sample


def _map(function: Callable[[Tensor], Tensor], rows: QuantisedRows) -> QuantisedRows:
    """Apply a function to all tensors."""
    *required, copy = rows
    mapped = QuantisedRows(*map(function, required))
    return mapped._replace(copy=None if copy is None else function(copy))


def _split(rows: QuantisedRows, max_elements: int) -> Iterator[tuple[int, QuantisedRows]]:
    """Split into parts of whole rows, whose numbers differ by one at most.

    Yields each part with its first element.
    """
    num_rows = max(1, max_elements // rows.weights.shape[-1])
    num_parts = max(1, -(-rows.weights.shape[0] // num_rows))
    parts = [[None] * num_parts if each is None else each.tensor_split(num_parts) for each in rows]
    first = 0
    for part in zip(*parts, strict=True):
        yield first, (named := QuantisedRows(*part))
        first += named.weights.numel()


def _make_sample(
    dtypes: Dtypes,
    block_size: int,
    constants: Constants,
    has_one_run: bool | None,
    device: torch.device,
) -> tuple[QuantisedRows, Tables, Places, Factors, Tensor, BlockRounding | None]:
    """Make blocks with moments of two updates, with gradients of all sizes and some zeros.

    The number of blocks varies between calls: all numbers share a graph.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (_SAMPLE_BLOCKS, block_size)
    rows = QuantisedRows(
        torch.randn(shape, generator=generator).to(dtypes[0]),
        torch.empty(shape, dtype=dtypes[1]),
        *(
            torch.zeros(size, dtype=dtype)
            for _ in range(2)
            for size, dtype in ((shape, torch.uint8), (shape[:1], torch.float32))
        ),
    )
    if dtypes[2] is not None:
        rows = rows._replace(copy=torch.zeros(shape, dtype=dtypes[2]))
    mean_weight, square_weight, eps = constants
    betas = (1 - mean_weight, 1 - square_weight)
    group = {"lr": 3e-3, "betas": betas, "eps": eps, "weight_decay": 0.1}
    tables = build_tables(torch.device("cpu"))
    places = build_places(device)
    factor_dtype = torch.promote_types(dtypes[1], torch.float32)
    factor = torch.tensor(0.37, dtype=factor_dtype)
    # The same for all steps: added to a much larger number, rounding of the smaller one is lost.
    magnitudes_N1 = 10.0 ** torch.randint(-12, 3, shape[:1], generator=generator)[:, None]
    rounding = None
    if has_one_run is not None:
        rounding = BlockRounding(*make_sample_places(rows.weights.shape, has_one_run=has_one_run))
    for step in (1, 2, 3):
        gradient = torch.randn(shape, generator=generator) * magnitudes_N1
        gradient[step::7] = 0.0
        rows.gradient.copy_(gradient)
        factors = compute_factors(step, group)._replace(
            mean_weight=mean_weight, square_weight=square_weight
        )
        if step < 3:
            update_blocks_separately(rows, tables, places, factors, factor, rounding)
    on_device = _map(lambda tensor: tensor.to(device), rows)
    for tensor in on_device:
        if tensor is not None:
            torch._dynamo.mark_dynamic(tensor, 0)
    return on_device, build_tables(device), places, factors, factor.to(device), rounding
