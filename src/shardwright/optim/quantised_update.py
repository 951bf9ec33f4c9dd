"""Update of weights and 8-bit moments by AdamW, as separate operations and in one pass.

Both compute the same bits. The separate operations are torchao's and define the numbers; they
write and read fp32 moments some forty times. The one pass is for the compiler, which keeps them in
registers; it spells out the roundings in which PyTorch's kernels differ from their formulas.

Legend: R rows, C columns, K blocks of a row, N blocks, S elements of a block.

Source: Dettmers et al. 2021, 8-bit Optimizers via Block-wise Quantization (arXiv 2110.02861).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwright.optim.code_places import CodePlaces, build_code_places, find_codes
from shardwright.optim.exact_operations import (
    CompileFunction,
    divide_blocks,
    interpolate,
    take_root,
)
from shardwright.optim.stochastic_rounding import (
    PieceRounding,
    PlaceNumbers,
    compute_places,
    draw_bits,
    make_sample_places,
    round_to_bf16,
)

_MAX_CHUNK_ELEMENTS = 1 << 22
"""Elements that separate operations update at a time."""
_CPU_CHUNK_ELEMENTS = 1 << 17
"""Elements that a CPU updates at a time, whose fp32 moments fit its cache."""
_MAGNITUDE = 0x7FFFFFFF
"""Bits of an fp32 number without its sign."""
_SAMPLE_BLOCKS = 1021
"""Enough for the compiler's choice for large tensors: on CUDA one warp updates four blocks."""


class QuantisedRows(NamedTuple):
    """Rows of one parameter, their gradient and 8-bit moments; all but the gradient change."""

    weights: Tensor
    gradient: Tensor
    mean_codes: Tensor
    mean_scales: Tensor
    square_codes: Tensor
    square_scales: Tensor
    copy: Tensor | None = None
    """Receives the new weights, in its dtype."""


class Tables(NamedTuple):
    """Values of the 256 codes, in ascending order."""

    signed: Tensor
    unsigned: Tensor


class Places(NamedTuple):
    """Places in the numbers where the codes of both tables begin."""

    signed: CodePlaces
    unsigned: CodePlaces


class BlockRounding(NamedTuple):
    """Random numbers of blocks `[N, S]` whose weights are in bf16."""

    places: PlaceNumbers
    key: Tensor


class Factors(NamedTuple):
    """Numbers of one update. Those that change between steps are fp32 CPU tensors without dims.

    Kernels on a GPU take such tensors as arguments, without a copy to the device.
    """

    gradient_factor: Tensor
    """fp64: gradients of each dtype round it as they do a number."""
    lr: Tensor
    decay: Tensor
    """lr x weight decay."""
    mean_correction: Tensor
    """1 - beta1^t."""
    square_correction: Tensor
    """sqrt(1 - beta2^t)."""
    mean_reciprocal: Tensor
    square_reciprocal: Tensor
    """Of the corrections: CUDA's kernels multiply by the reciprocal of a divisor on the host."""
    mean_weight: float
    """1 - beta1."""
    square_weight: float
    """1 - beta2."""
    eps: float


def compute_factors(
    num_steps: Tensor, group: Mapping[str, Any], gradient_factor: float = 1.0
) -> Factors:
    """Compute the numbers of an update from its count (1 for the first) and its group's rates."""
    beta1, beta2 = group["betas"]
    lr = torch.tensor(group["lr"], dtype=torch.float32)
    mean_correction = 1 - beta1**num_steps
    square_correction = (1 - beta2**num_steps).sqrt()
    return Factors(
        torch.tensor(gradient_factor, dtype=torch.float64),
        lr,
        lr * group["weight_decay"],
        mean_correction,
        square_correction,
        1 / mean_correction,
        1 / square_correction,
        1 - beta1,
        1 - beta2,
        group["eps"],
    )


def build_tables(device: torch.device) -> Tables:
    """Build torchao's tables on a device."""
    create = import_module("torchao.optim.quant_utils").create_dynamic_map
    return Tables(
        *(
            torch.tensor(create(signed), dtype=torch.float32, device=device)
            for signed in (True, False)
        )
    )


def build_places(device: torch.device) -> Places:
    """Build the places of torchao's codes on a device."""
    quantise = import_module("torchao.optim.quant_utils").quantize_8bit_with_qmap
    places = (
        build_code_places(table, partial(quantise, qmap=table))
        for table in build_tables(torch.device("cpu"))
    )
    return Places(*(each._replace(entries=each.entries.to(device)) for each in places))


def update_rows(
    rows: QuantisedRows,
    tables: Tables,
    factors: Factors,
    block_size: int,
    random_bits: Tensor | None = None,
) -> None:
    """Update rows `[R, C]` by separate operations, in place; their scales are `[R, K]`."""
    weights, gradient, mean_codes, mean_scales, square_codes, square_scales, copy = rows
    mean = _decode(mean_codes, mean_scales, tables.signed, block_size)
    square = _decode(square_codes, square_scales, tables.unsigned, block_size)
    apply_adamw(weights, gradient, mean, square, factors, random_bits)
    if copy is not None:
        copy.copy_(weights)
    _encode(mean, mean_codes, mean_scales, tables.signed, block_size)
    _encode(square, square_codes, square_scales, tables.unsigned, block_size)


def apply_adamw(
    local: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    factors: Factors,
    random_bits: Tensor | None = None,
) -> None:
    """Update `local` and the fp32 moments `mean` and `square` in place.

    Operations, order and precision are torchao's. `random_bits` round new weights to bf16
    (`stochastic_rounding`); None if `local` is not in bf16.
    """
    if (gradient_factor := float(factors.gradient_factor)) != 1.0:
        gradient = gradient * gradient_factor
    gradient = gradient.float()
    weights = local.float()
    weights = weights - factors.decay * weights
    mean.lerp_(gradient, factors.mean_weight)
    square.lerp_(gradient.square(), factors.square_weight)
    denominator = square.sqrt() / factors.square_correction + factors.eps
    weights = weights - factors.lr * (mean / factors.mean_correction) / denominator
    local.copy_(weights if random_bits is None else round_to_bf16(weights, random_bits))


def _decode(codes_RC: Tensor, scales_RK: Tensor, table: Tensor, block_size: int) -> Tensor:
    """Return the dequantised values in fp32, shape [R, C]."""
    return table[codes_RC.int()].mul_(_expand_scales(scales_RK, codes_RC.shape[-1], block_size))


def _encode(
    values_RC: Tensor, codes_RC: Tensor, scales_RK: Tensor, table: Tensor, block_size: int
) -> None:
    """Write scales (largest magnitudes of blocks) and codes (nearest table entries)."""
    width = values_RC.shape[-1]
    num_blocks = scales_RK.shape[-1]
    padded = torch.nn.functional.pad(values_RC, (0, num_blocks * block_size - width))
    scales_RK.copy_(padded.unflatten(-1, (num_blocks, block_size)).abs().amax(-1).clip(1e-12))
    scaled_RC = values_RC / _expand_scales(scales_RK, width, block_size)
    quantise = import_module("torchao.optim.quant_utils").quantize_8bit_with_qmap
    codes_RC.copy_(quantise(scaled_RC, table))


def _expand_scales(scales_RK: Tensor, width: int, block_size: int) -> Tensor:
    return scales_RK.repeat_interleave(block_size, -1)[..., :width]


def update_blocks(
    rows: QuantisedRows,
    tables: Tables,
    places: Places,
    factors: Factors,
    rounding: BlockRounding | None,
) -> None:
    """Update whole blocks `[N, S]` with scales `[N]`; the compiler makes one pass of it."""
    mean_NS = tables.signed[rows.mean_codes.int()] * rows.mean_scales[:, None]
    square_NS = tables.unsigned[rows.square_codes.int()] * rows.square_scales[:, None]
    wide = torch.promote_types(rows.gradient.dtype, torch.float32)
    gradient_NS = rows.gradient.to(wide) * factors.gradient_factor.to(wide)
    gradient_NS = gradient_NS.to(rows.gradient.dtype).float()
    mean_NS = interpolate(mean_NS, gradient_NS, factors.mean_weight)
    square_NS = interpolate(square_NS, gradient_NS.square(), factors.square_weight)
    root_NS = take_root(square_NS)
    if rows.weights.is_cuda:
        mean_unbiased_NS = mean_NS * factors.mean_reciprocal
        denominator_NS = root_NS * factors.square_reciprocal + factors.eps
    else:
        mean_unbiased_NS = mean_NS / factors.mean_correction
        denominator_NS = root_NS / factors.square_correction + factors.eps
    weights_NS = rows.weights.float()
    weights_NS = weights_NS - factors.decay * weights_NS
    weights_NS = weights_NS - factors.lr * mean_unbiased_NS / denominator_NS
    if rounding is None:
        rows.weights.copy_(weights_NS)
    else:
        rows.weights.copy_(round_to_bf16(weights_NS, _draw_block_bits(weights_NS, rounding)))
    if rows.copy is not None:
        rows.copy.copy_(weights_NS.to(rows.weights.dtype))
    _write_blocks(mean_NS, rows.mean_codes, rows.mean_scales, places.signed)
    _write_blocks(square_NS, rows.square_codes, rows.square_scales, places.unsigned)


def _draw_block_bits(blocks_NS: Tensor, rounding: BlockRounding) -> Tensor:
    places_NS = compute_places(rounding.places, blocks_NS.shape, blocks_NS.device)
    return draw_bits(places_NS, rounding.key).first


def _write_blocks(
    values_NS: Tensor, codes_NS: Tensor, scales_N: Tensor, places: CodePlaces
) -> None:
    """Write scales and codes as `_encode`."""
    if values_NS.is_cuda:
        # As integers, magnitudes have the same order, and a comparison needs no case for NaN.
        magnitudes_NS = values_NS.view(torch.int32) & _MAGNITUDE
        new_scales_N = magnitudes_NS.amax(-1).view(torch.float32).clip(1e-12)
        scaled_NS = divide_blocks(values_NS, new_scales_N)  # a division is 12 instructions
    else:
        new_scales_N = values_NS.abs().amax(-1).clip(1e-12)
        scaled_NS = values_NS / new_scales_N[:, None]
    codes_NS.copy_(find_codes(scaled_NS, places))
    scales_N.copy_(new_scales_N)


def _update_blocks_separately(
    rows: QuantisedRows,
    tables: Tables,
    _places: Places,
    factors: Factors,
    rounding: BlockRounding | None,
) -> None:
    """Update whole blocks by separate operations, as `update_blocks`."""
    columns = rows._replace(
        mean_scales=rows.mean_scales[:, None], square_scales=rows.square_scales[:, None]
    )
    bits = None if rounding is None else _draw_block_bits(rows.weights, rounding)
    update_rows(columns, tables, factors, rows.weights.shape[-1], bits)


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

    def apply(
        self, rows: QuantisedRows, factors: Factors, rounding: PieceRounding | None = None
    ) -> None:
        """Update rows `[R, C]` in place; weights in bf16 need a `rounding`."""
        device = rows.weights.device
        if device not in self._tables:  # copied there once
            self._tables[device] = build_tables(device)
        tables = self._tables[device]
        update = self._find_function(rows, factors, rounding)
        if update is not None:
            blocks = _map(partial(self._to_blocks, rows), rows)
            if device not in self._places:
                self._places[device] = build_places(device)
            places = self._places[device]
            size = _CPU_CHUNK_ELEMENTS if device.type == "cpu" else rows.weights.numel()
            first = 0
            for part in _split(blocks, size):
                stop = first + part.weights.numel()
                block_rounding = self._describe_rounding(rounding, first, stop)
                update(_mark_varying(part), tables, places, factors, block_rounding)
                first = stop
            return
        # A few rows at a time, because decoded moments are wider than stored ones.
        first = 0
        for part in _split(rows, _MAX_CHUNK_ELEMENTS):
            stop = first + part.weights.numel()
            bits = None if rounding is None else rounding.draw_bits(first, stop, device).first
            bits = None if bits is None else bits.view(part.weights.shape)
            update_rows(part, tables, factors, self._block_size, bits)
            first = stop

    def _find_function(
        self, rows: QuantisedRows, factors: Factors, rounding: PieceRounding | None
    ) -> Callable[..., None] | None:
        """Return the compiled update of the rows; None if separate operations update them."""
        num_elements = rows.weights.numel()
        is_whole = rows.weights.shape[-1] % self._block_size == 0
        if not is_whole or not self._compile_function or num_elements <= self._block_size:
            return None
        rounded = self._describe_rounding(rounding, 0, num_elements)
        if rounding is not None:
            is_divided = rows.weights.is_cpu and num_elements > _CPU_CHUNK_ELEMENTS
            if rounded is None or (is_divided and rounded.places.distance is not None):
                return None
        update = self._compile_function(*self._describe(rows, factors, rounded))
        return None if update is _update_blocks_separately else update

    def _describe_rounding(
        self, rounding: PieceRounding | None, first: int, stop: int
    ) -> BlockRounding | None:
        """Return the random numbers of elements of a piece by blocks, if they are regular."""
        if rounding is None:
            return None
        places = rounding.narrow(first, stop).describe_rows(self._block_size)
        return None if places is None else BlockRounding(places, rounding.key)

    def _to_blocks(self, rows: QuantisedRows, tensor: Tensor) -> Tensor:
        is_scales = tensor is rows.mean_scales or tensor is rows.square_scales
        return tensor.view(-1) if is_scales else tensor.reshape(-1, self._block_size)

    def _describe(
        self, rows: QuantisedRows, factors: Factors, rounding: BlockRounding | None
    ) -> tuple[Any, ...]:
        """Return the arguments of `compile_function` for these dtypes and constants."""
        copy_dtype = None if rows.copy is None else rows.copy.dtype
        dtypes = (rows.weights.dtype, rows.gradient.dtype, copy_dtype)
        constants = (factors.mean_weight, factors.square_weight, factors.eps)
        name = (
            f"8-bit AdamW ({dtypes[0]}, gradients {dtypes[1]}, blocks of {self._block_size}, "
            f"1 - betas {constants[0]:.4g} and {constants[1]:.4g}, eps {constants[2]:g}"
            f"{'' if copy_dtype is None else f', copy {copy_dtype}'}"
        )
        if rounding is None:
            has_one_run = None
        else:
            has_one_run = rounding.places.distance is None
            name += f", rounded stochastically{'' if has_one_run else ', parts of rows'}"
        name += ")"
        make_sample = partial(_make_sample, dtypes, self._block_size, constants, has_one_run)
        return name.replace("torch.", ""), update_blocks, _update_blocks_separately, make_sample


def _mark_varying(rows: QuantisedRows) -> QuantisedRows:
    """Mark the number of rows as one that varies between calls: all numbers share a graph."""
    for tensor in rows:
        if tensor is not None:
            torch._dynamo.mark_dynamic(tensor, 0)
    return rows


def _map(function: Callable[[Tensor], Tensor], rows: QuantisedRows) -> QuantisedRows:
    """Apply a function to all tensors."""
    *required, copy = rows
    mapped = QuantisedRows(*map(function, required))
    return mapped._replace(copy=None if copy is None else function(copy))


def _split(rows: QuantisedRows, max_elements: int) -> Iterator[QuantisedRows]:
    """Split into parts of whole rows, whose numbers differ by one at most."""
    num_rows = max(1, max_elements // rows.weights.shape[-1])
    num_parts = max(1, -(-rows.weights.shape[0] // num_rows))
    parts = [[None] * num_parts if each is None else each.tensor_split(num_parts) for each in rows]
    for part in zip(*parts, strict=True):
        yield QuantisedRows(*part)


def _make_sample(
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None],
    block_size: int,
    constants: tuple[float, float, float],
    has_one_run: bool | None,
    device: torch.device,
) -> tuple[QuantisedRows, Tables, Places, Factors, BlockRounding | None]:
    """Make blocks with moments of two updates, with gradients of all sizes and some zeros.

    `has_one_run` is None if weights are not rounded stochastically.
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
    # The same for all steps: added to a much larger number, rounding of the smaller one is lost.
    magnitudes_N1 = 10.0 ** torch.randint(-12, 3, shape[:1], generator=generator)[:, None]
    rounding = None
    if has_one_run is not None:
        rounding = BlockRounding(*make_sample_places(rows.weights.shape, has_one_run=has_one_run))
    for step in (1, 2, 3):
        gradient = torch.randn(shape, generator=generator) * magnitudes_N1
        gradient[step::7] = 0.0
        rows.gradient.copy_(gradient)
        factors = compute_factors(torch.tensor(float(step)), group, 0.37)._replace(
            mean_weight=mean_weight, square_weight=square_weight
        )
        if step < 3:
            _update_blocks_separately(rows, tables, places, factors, rounding)
    on_device = _map(lambda tensor: tensor.to(device), rows)
    return _mark_varying(on_device), build_tables(device), places, factors, rounding
