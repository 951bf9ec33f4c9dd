"""Weights of a Hugging Face folder in 8 bits, in the file layouts that inference servers read.

| format | elements that share a scale | config.json | scales |
|---|---|---|---|
| fp8-block | 128 x 128 | `quant_method: fp8`, as DeepSeek-V3's release | `weight_scale_inv`, fp32 |
| fp8-row | a row | `compressed-tensors`, `float-quantized` | `weight_scale`, fp32, `[rows, 1]` |

Codes are e4m3; a value is code x scale. Codes and scales are those of the training's output
product (recipes `blockwise` and `rowwise`, `products/fp8.py`), so a run in such a recipe is
exported as it multiplied. The scales of rows are powers of two, and therefore exact in any format.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import Tensor

from shardwright.architecture import HFShape, ModelShape, WeightFileSlice
from shardwright.errors import InputError
from shardwright.model.products import fp8
from shardwright.placement.low_precision import TARGET_OF_ROLE

WeightFormat = Literal["fp8-block", "fp8-row"]
WEIGHT_FORMATS: tuple[WeightFormat, ...] = get_args(WeightFormat)

_SCALINGS = {
    "fp8-block": fp8.RECIPES["blockwise"].output[1],
    "fp8-row": fp8.RECIPES["rowwise"].output[1],
}
_SCALE_SUFFIXES = {"fp8-block": "_scale_inv", "fp8-row": "_scale"}
_BLOCK = 128


@dataclass(frozen=True)
class FP8Weights:
    """Tensors of a folder that are stored in 8 bits, and their format."""

    format: WeightFormat
    names: frozenset[str]
    """Names in the file of the matrices that are quantised."""
    plain_modules: tuple[str, ...]
    """Modules with a matrix in high precision: the head, routers, excluded layers."""

    def name_scales(self, name: str) -> str:
        """Return the name of a matrix's scales."""
        return name + _SCALE_SUFFIXES[self.format]

    def compute_scales_shape(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return the shape of the scales of a matrix."""
        rows, columns = shape
        return (rows // _BLOCK, columns // _BLOCK) if self.format == "fp8-block" else (rows, 1)

    def quantise(self, matrix_NK: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes, e4m3 `[N, K]`, and scales, fp32, of a matrix."""
        quantised = fp8.quantise(matrix_NK, _SCALINGS[self.format])
        return quantised.codes, 1.0 / quantised.multipliers

    def round(self, matrix_NK: Tensor) -> Tensor:
        """Return the values that a reader of the folder computes, fp32: code x scale."""
        codes_NK, scales = self.quantise(matrix_NK)
        rows, columns = (
            size // num for size, num in zip(codes_NK.shape, scales.shape, strict=True)
        )
        blocks = codes_NK.float().unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        return (blocks * scales[:, None, :, None]).flatten(2, 3).flatten(0, 1)

    def build_config(self) -> dict[str, Any]:
        """Build `quantization_config` of config.json. Activations get dynamic scales."""
        if self.format == "fp8-block":
            return {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [_BLOCK, _BLOCK],
                "modules_to_not_convert": list(self.plain_modules),
            }
        numbers = {"num_bits": 8, "type": "float", "symmetric": True}
        return {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": numbers | {"strategy": "channel", "dynamic": False},
                    "input_activations": numbers | {"strategy": "token", "dynamic": True},
                }
            },
            "ignore": list(self.plain_modules),
        }


def select_fp8_weights(
    shape: ModelShape, name_of_format: str, exclude: Sequence[str] = ()
) -> FP8Weights:
    """Select the matrices of the blocks and experts that a folder stores in 8 bits.

    Args:
        exclude: patterns of names that stay in high precision.

    Raises:
        InputError: a format, a model or a width that the file layouts do not have, a pattern
            that matches nothing, or nothing left.
    """
    weight_format = next((each for each in WEIGHT_FORMATS if each == name_of_format), None)
    if weight_format is None:
        raise InputError(
            "no such format of 8-bit weights",
            field="quantise",
            got=name_of_format,
            allowed=", ".join(WEIGHT_FORMATS),
        )
    _check_model(shape, weight_format)
    matrices = {
        piece.name: spec.role in TARGET_OF_ROLE
        for spec in shape.list_parameters()
        for piece in spec.file_slices
        if len(piece.shape) > 1 and spec.role not in ("embedding", "positions")
    }
    selected = {name for name, is_targeted in matrices.items() if is_targeted}
    for pattern in exclude:
        excluded = fnmatch.filter(selected, pattern)
        if not excluded:
            raise InputError(
                "matches no weight that would be stored in 8 bits",
                field="quantise-exclude",
                got=pattern,
                allowed=f"a pattern such as {min(selected, default='model.layers.0.*')}",
            )
        selected.difference_update(excluded)
    if not selected:
        raise InputError(
            "every weight is excluded from 8 bits",
            field="quantise-exclude",
            got=", ".join(exclude),
            remedy="Exclude less, or do not quantise",
        )
    for spec in shape.list_parameters():
        for piece in spec.file_slices:
            if piece.name in selected and weight_format == "fp8-block":
                _check_blocks(piece)
    plain = {name.removesuffix(".weight") for name in matrices if name not in selected}
    # A tied head has no tensor, and readers look for its module.
    plain |= {name.removesuffix(".weight") for name in shape.tied_names}
    return FP8Weights(weight_format, frozenset(selected), tuple(sorted(plain)))


def _check_model(shape: ModelShape, weight_format: WeightFormat) -> None:
    """Check that the folder stores each matrix by itself, with outputs as rows."""
    targeted = [spec for spec in shape.list_parameters() if spec.role in TARGET_OF_ROLE]
    is_stacked = any(
        len(piece.shape) > 2 for spec in targeted if not spec.is_bias for piece in spec.file_slices
    )
    if isinstance(shape, HFShape) or shape.matrix_layout == "in_out" or is_stacked:
        if isinstance(shape, HFShape):
            reason = "runs in transformers' own class, whose matrices are not known here"
        elif is_stacked:
            reason = "stores all experts of a layer in one tensor"
        else:
            reason = "stores matrices with inputs as rows"
        raise InputError(
            f"{shape.family} {reason}; the layouts of 8-bit weights have one matrix per tensor, "
            "with outputs as rows",
            field="quantise",
            got=weight_format,
            allowed="models of other families",
            remedy="Export without --quantise",
        )


def _check_blocks(piece: WeightFileSlice) -> None:
    if any(size % _BLOCK for size in piece.shape):
        raise InputError(
            f"{piece.name} is {' x '.join(map(str, piece.shape))}, not a multiple of "
            f"the block size {_BLOCK} x {_BLOCK}",
            field="quantise",
            got="fp8-block",
            allowed=f"widths that are multiples of {_BLOCK}, or fp8-row for any width",
            remedy=f"Use --quantise fp8-row, or exclude it by --quantise-exclude {piece.name}",
        )
