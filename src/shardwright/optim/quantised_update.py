"""Update of weights and 8-bit moments by AdamW, as separate operations and in one pass.

Both compute the same bits. The separate operations are torchao's and define the numbers; they
write and read fp32 moments some forty times. The one pass is for the compiler, which keeps them in
registers; it spells out the roundings in which PyTorch's kernels differ from their formulas.

Legend: R rows, C columns, K blocks of a row, N blocks, S elements of a block.

Source: Dettmers et al. 2021, 8-bit Optimizers via Block-wise Quantization (arXiv 2110.02861).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwright.optim.code_places import CodePlaces, build_code_places, find_codes
from shardwright.optim.exact_operations import divide_blocks, interpolate, take_root
from shardwright.optim.sharded_optimizer import DeviceFactor
from shardwright.optim.stochastic_rounding import (
    PlaceNumbers,
    compute_places,
    draw_bits,
    round_to_bf16,
)

_MAGNITUDE = 0x7FFFFFFF
"""Bits of an fp32 number without its sign."""


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
    """Numbers of all updates with one count in a group.

    Those that change between steps are fp32 CPU tensors without dims. Kernels on a GPU take such
    tensors as arguments, without a copy to the device.
    """

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


class GradientFactor(NamedTuple):
    """Factor of the gradients of an update."""

    value: Tensor
    """For compiled functions: without dims, on the gradients' device, in fp32 or their wider
    dtype. NaN: nothing changes."""
    number: float | None
    """For separate operations; None if only the device knows it."""
    is_skipped: Tensor | None
    """bool: whether `value` is NaN; None if the host knows that it is not."""


def build_gradient_factor(
    factor: float | DeviceFactor, device: torch.device, dtype: torch.dtype
) -> GradientFactor:
    """Build the factor from the host's number or the device's."""
    if isinstance(factor, DeviceFactor):
        return GradientFactor(factor.value, None, factor.value.isnan())
    return GradientFactor(torch.full((), factor, dtype=dtype, device=device), factor, None)


def compute_factors(num_updates: int, group: Mapping[str, Any]) -> Factors:
    """Compute the numbers of an update (1 for the first) from the rates of its group."""
    num_steps = torch.tensor(float(num_updates))
    beta1, beta2 = group["betas"]
    lr = torch.tensor(group["lr"], dtype=torch.float32)
    mean_correction = 1 - beta1**num_steps
    square_correction = (1 - beta2**num_steps).sqrt()
    return Factors(
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
    gradient_factor: GradientFactor,
    block_size: int,
    random_bits: Tensor | None = None,
) -> None:
    """Update rows `[R, C]` by separate operations, in place; their scales are `[R, K]`."""
    weights, gradient, mean_codes, mean_scales, square_codes, square_scales, copy = rows
    mean = _decode(mean_codes, mean_scales, tables.signed, block_size)
    square = _decode(square_codes, square_scales, tables.unsigned, block_size)
    apply_adamw(weights, gradient, mean, square, factors, gradient_factor, random_bits)
    if copy is not None:
        copy.copy_(weights)
    is_skipped = gradient_factor.is_skipped
    _encode(mean, mean_codes, mean_scales, tables.signed, block_size, is_skipped)
    _encode(square, square_codes, square_scales, tables.unsigned, block_size, is_skipped)


def apply_adamw(
    local: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    factors: Factors,
    gradient_factor: GradientFactor,
    random_bits: Tensor | None = None,
) -> None:
    """Update `local` in place unless the step is skipped, and the fp32 moments `mean` and `square`
    always.

    Operations, order and precision are torchao's. `random_bits` round new weights to bf16
    (`stochastic_rounding`); None if `local` is not in bf16.
    """
    if gradient_factor.number is None:
        gradient = _scale(gradient, gradient_factor.value)
    elif gradient_factor.number != 1.0:
        gradient = gradient * gradient_factor.number
    gradient = gradient.float()
    weights = local.float()
    weights = weights - factors.decay * weights
    mean.lerp_(gradient, factors.mean_weight)
    square.lerp_(gradient.square(), factors.square_weight)
    denominator = square.sqrt() / factors.square_correction + factors.eps
    weights = weights - factors.lr * (mean / factors.mean_correction) / denominator
    weights = weights if random_bits is None else round_to_bf16(weights, random_bits)
    write_unless_skipped(local, weights, gradient_factor.is_skipped)


def _scale(gradient: Tensor, factor: Tensor) -> Tensor:
    """Multiply by a factor without dims as by a number, with one rounding."""
    wide = torch.promote_types(gradient.dtype, torch.float32)
    return (gradient.to(wide) * factor.to(wide)).to(gradient.dtype)


def write_unless_skipped(target: Tensor, values: Tensor, is_skipped: Tensor | None) -> None:
    """Write new values unless the step is skipped."""
    if is_skipped is None:
        target.copy_(values)
    else:
        torch.where(is_skipped, target, values.to(target.dtype), out=target)


def _decode(codes_RC: Tensor, scales_RK: Tensor, table: Tensor, block_size: int) -> Tensor:
    """Return the dequantised values in fp32, shape [R, C]."""
    return table[codes_RC.int()].mul_(_expand_scales(scales_RK, codes_RC.shape[-1], block_size))


def _encode(
    values_RC: Tensor,
    codes_RC: Tensor,
    scales_RK: Tensor,
    table: Tensor,
    block_size: int,
    is_skipped: Tensor | None,
) -> None:
    """Write scales (largest magnitudes of blocks) and codes (nearest table entries)."""
    width = values_RC.shape[-1]
    num_blocks = scales_RK.shape[-1]
    padded = torch.nn.functional.pad(values_RC, (0, num_blocks * block_size - width))
    new_scales_RK = padded.unflatten(-1, (num_blocks, block_size)).abs().amax(-1).clip(1e-12)
    scaled_RC = values_RC / _expand_scales(new_scales_RK, width, block_size)
    quantise = import_module("torchao.optim.quant_utils").quantize_8bit_with_qmap
    write_unless_skipped(scales_RK, new_scales_RK, is_skipped)
    write_unless_skipped(codes_RC, quantise(scaled_RC, table), is_skipped)


def _expand_scales(scales_RK: Tensor, width: int, block_size: int) -> Tensor:
    return scales_RK.repeat_interleave(block_size, -1)[..., :width]


def update_blocks(
    rows: QuantisedRows,
    tables: Tables,
    places: Places,
    factors: Factors,
    gradient_factor: Tensor,
    rounding: BlockRounding | None,
) -> None:
    """Update whole blocks `[N, S]` with scales `[N]`; the compiler makes one pass of it.

    A `gradient_factor` of NaN writes the old numbers: a choice costs no memory traffic.
    """
    mean_NS = tables.signed[rows.mean_codes.int()] * rows.mean_scales[:, None]
    square_NS = tables.unsigned[rows.square_codes.int()] * rows.square_scales[:, None]
    gradient_NS = _scale(rows.gradient, gradient_factor).float()
    mean_NS = interpolate(mean_NS, gradient_NS, factors.mean_weight)
    square_NS = interpolate(square_NS, gradient_NS.square(), factors.square_weight)
    root_NS = take_root(square_NS)
    if rows.weights.is_cuda:
        mean_unbiased_NS = mean_NS * factors.mean_reciprocal
        denominator_NS = root_NS * factors.square_reciprocal + factors.eps
    else:
        mean_unbiased_NS = mean_NS / factors.mean_correction
        denominator_NS = root_NS / factors.square_correction + factors.eps
    is_skipped = gradient_factor.isnan()
    weights_NS = rows.weights.float()
    # Choices of operands: old weights would take registers until the end. x - 0 is x.
    weights_NS = torch.where(is_skipped, weights_NS, weights_NS - factors.decay * weights_NS)
    step_NS = factors.lr * mean_unbiased_NS / denominator_NS
    weights_NS = weights_NS - torch.where(is_skipped, 0.0, step_NS)
    if rounding is None:
        rows.weights.copy_(weights_NS)
    else:
        rows.weights.copy_(round_to_bf16(weights_NS, _draw_block_bits(weights_NS, rounding)))
    if rows.copy is not None:
        rows.copy.copy_(weights_NS.to(rows.weights.dtype))
    _write_blocks(mean_NS, rows.mean_codes, rows.mean_scales, places.signed, is_skipped)
    _write_blocks(square_NS, rows.square_codes, rows.square_scales, places.unsigned, is_skipped)


def _draw_block_bits(blocks_NS: Tensor, rounding: BlockRounding) -> Tensor:
    places_NS = compute_places(rounding.places, blocks_NS.shape, blocks_NS.device)
    return draw_bits(places_NS, rounding.key).first


def _write_blocks(
    values_NS: Tensor,
    codes_NS: Tensor,
    scales_N: Tensor,
    places: CodePlaces,
    is_skipped: Tensor,
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
    codes_NS.copy_(torch.where(is_skipped, codes_NS, find_codes(scaled_NS, places)))
    scales_N.copy_(torch.where(is_skipped, scales_N, new_scales_N))


def update_blocks_separately(
    rows: QuantisedRows,
    tables: Tables,
    _places: Places,
    factors: Factors,
    gradient_factor: Tensor,
    rounding: BlockRounding | None,
) -> None:
    """Update whole blocks by separate operations, as `update_blocks` of a step that is not
    skipped."""
    columns = rows._replace(
        mean_scales=rows.mean_scales[:, None], square_scales=rows.square_scales[:, None]
    )
    bits = None if rounding is None else _draw_block_bits(rows.weights, rounding)
    factor = GradientFactor(gradient_factor, float(gradient_factor), None)
    update_rows(columns, tables, factors, factor, rows.weights.shape[-1], bits)
