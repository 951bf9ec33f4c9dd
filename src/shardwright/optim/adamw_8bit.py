"""AdamW with 8-bit moments: one code per element and one scale per block of elements of a row.

Codes and their table are torchao's (the same as bitsandbytes'). A block is `block_size`
consecutive elements of a row of the whole parameter; the last block of a row may be shorter. In
torchao blocks continue from row to row, so both agree bit for bit where the row length is a
multiple of the block size. Blocks within rows do not depend on the layout: ZeRO never splits a
row, and a layout that splits rows inside a block is rejected before the ranks start
(`check_block_boundaries`). Vectors and matrices below 4096 elements have fp32 moments.

Source: Dettmers et al. 2021, 8-bit Optimizers via Block-wise Quantization (arXiv 2110.02861).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial, reduce
from importlib import util
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import LayoutError, RecipeError
from shardwright.layout import Layout, ParameterBox, ParameterLayout, RankGrid, compute_local_boxes
from shardwright.numerics import get_local_tensor
from shardwright.optim.exact_operations import CompileFunction
from shardwright.optim.quantised_calls import QuantisedUpdate, Update
from shardwright.optim.quantised_update import (
    Factors,
    GradientFactor,
    QuantisedRows,
    apply_adamw,
    build_gradient_factor,
    compute_factors,
    write_unless_skipped,
)
from shardwright.optim.sharded_optimizer import (
    Moment,
    ParameterPiece,
    ShardedModel,
    ShardedOptimizer,
    StateSpec,
    count_elements,
)
from shardwright.optim.stochastic_rounding import PieceRounding, StochasticRounding

MIN_QUANTISED_ELEMENTS = 4096
"""Smaller matrices have fp32 moments, whose memory is negligible (Dettmers et al.)."""
_BLOCK_SIZES = (256, 128, 64, 32)
_MOMENTS = ("exp_avg", "exp_avg_sq")
_PARTS = ("codes", "scales")


def require_torchao() -> None:
    """Check, before any rank starts, that torchao is installed.

    Raises:
        RecipeError: torchao is missing; the message names the extra to install.
    """
    if util.find_spec("torchao") is None:
        raise RecipeError(
            "needs torchao, which is not installed",
            field="optimizer.name",
            got="adamw_8bit",
            remedy="Install it (pip install 'shardwright[lowbit]') or choose another optimizer",
        )


def is_quantised(shape: tuple[int, ...]) -> bool:
    """Return True if a parameter has 8-bit moments; `shape` is that of the whole parameter."""
    return len(shape) >= 2 and count_elements(shape) >= MIN_QUANTISED_ELEMENTS


def check_block_boundaries(
    layouts: Mapping[str, ParameterLayout], layout: Layout, block_size: int
) -> None:
    """Check that no block of moments is split between ranks, which would share its scale.

    Raises:
        LayoutError: a block is split; the message names the parameter, its shape and the
            largest block size that fits.
    """
    for name, described in layouts.items():
        if not is_quantised(described.shape):
            continue
        edges = [
            edge
            for box in _collect_boxes(described, layout)
            for edge in _find_row_edges(box, described.shape[-1])
        ]
        if any(edge % block_size for edge in edges):
            fitting = [size for size in _BLOCK_SIZES if all(edge % size == 0 for edge in edges)]
            allowed = (
                f"optimizer.block_size {fitting[0]}"
                if fitting
                else "no block size of 32 or more fits"
            )
            raise LayoutError(
                f"the layout splits the rows of {name} {list(described.shape)} "
                f"inside blocks of {block_size} 8-bit moments",
                field="optimizer.block_size",
                got=block_size,
                allowed=allowed,
                remedy=(
                    "Set the allowed block size, choose another "
                    "tensor-parallel degree, or use adamw"
                ),
            )


def _collect_boxes(parameter_layout: ParameterLayout, layout: Layout) -> set[ParameterBox]:
    """Return the boxes of all ranks; the empty set if no axis splits rows."""
    if not any(shard.dim == len(parameter_layout.shape) - 1 for shard in parameter_layout.shards):
        return set()
    grid = RankGrid(layout)
    return {
        box
        for rank in range(layout.world_size)
        for box in compute_local_boxes(parameter_layout, layout, grid.coordinates(rank))
    }


def _find_row_edges(box: ParameterBox, row_length: int) -> list[int]:
    """Return the columns where a box starts (local and global) and, inside a row, ends."""
    local_start, length = box.local_bounds[-1]
    start, _ = box.global_bounds[-1]
    return [local_start, start] + ([] if start + length == row_length else [start + length])


_KnownFactors = dict[tuple[int, int], Factors]
"""Factors of updates by id of the group and number of the update."""


class AdamW8bit(ShardedOptimizer):
    """AdamW (decoupled decay) with updates computed in fp32 and moments stored in 8 bits."""

    rule = "adamw_8bit"
    has_collectives = False
    applies_factor = True

    def __init__(
        self,
        groups: list[dict[str, Any]],
        model: ShardedModel,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        block_size: int,
        compile_function: CompileFunction | None = None,
        rounding_seed: int | None = None,
    ) -> None:
        """`rounding_seed` is the seed of the stochastic rounding of weights that are in bf16."""
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps}, model)
        self._rounding = None
        if rounding_seed is not None:
            parameters = {name: parameter for parameter, name in self.parameter_names.items()}
            self._rounding = StochasticRounding(rounding_seed, model, parameters)
        self.block_size = block_size
        require_torchao()
        self._update = QuantisedUpdate(block_size, compile_function)
        self._prepared_updates: dict[int, Update] = {}
        """Updates by the id of a prepared piece; they hold its gradient."""

    def list_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, StateSpec]:
        """List the tensors of a parameter's state by name, without its step count."""
        shape = tuple(get_local_tensor(parameter.detach()).shape)
        if not self._is_quantised(parameter):
            return {moment: StateSpec(shape, torch.float32) for moment in _MOMENTS}
        scales_shape = (*shape[:-1], -(-shape[-1] // self.block_size))
        return {
            f"{moment}_{part}": spec
            for moment in _MOMENTS
            for part, spec in (
                ("codes", StateSpec(shape, torch.uint8)),
                ("scales", StateSpec(scales_shape, torch.float32)),
            )
        }

    def get_row_length(self, parameter: Tensor, group: dict[str, Any]) -> int:
        """Return the elements of a row, which contains whole blocks; 1 with fp32 moments."""
        return parameter.shape[-1] if self._is_quantised(parameter) else 1

    def _is_quantised(self, parameter: Tensor) -> bool:
        return is_quantised(self.model.layouts[self.parameter_names[parameter]].shape)

    def describe_moments(self, parameter: Tensor, state: Mapping[str, Tensor]) -> dict[str, Moment]:
        """Return the given state tensors with their sharding, for checkpoints."""
        name = self.parameter_names[parameter]
        moments = {}
        for key, tensor in state.items():
            if key.endswith("_scales"):
                shape = self.model.layouts[name].shape
                boxes = tuple(
                    _scale_box_to_blocks(box, self.block_size)
                    for box in self.model.local_boxes(name)
                )
                moments[key] = Moment(
                    tensor, name, (*shape[:-1], -(-shape[-1] // self.block_size)), boxes
                )
            else:
                moments[key] = Moment(tensor, name)
        return moments

    def prepare_pieces(self, pieces: Sequence[ParameterPiece]) -> None:
        """Begin a step, and collect what the update of its pieces needs besides the factor.

        A gradient that must be copied is copied in the update only.
        """
        super().prepare_pieces(pieces)
        known: _KnownFactors = {}
        for piece in pieces:
            if piece.gradient.is_contiguous():
                self._prepared_updates[id(piece)] = self._prepare(piece, known)

    def can_skip_on_device(self) -> bool:
        """Return True if the device's factor, in fp32, has the bits of the host's."""
        return _find_wide_dtype(self._prepared or ()) == torch.float32

    def discard_preparation(self) -> None:
        """Forget what has been prepared for the next step."""
        super().discard_preparation()
        self._prepared_updates.clear()

    def update_pieces(self, pieces: Sequence[ParameterPiece]) -> None:
        """Update parameters and state of these pieces and advance their step counts."""
        if not pieces:
            return
        factor = build_gradient_factor(
            self.device_factor or self.gradient_factor,
            pieces[0].gradient.device,
            _find_wide_dtype(pieces),
        )
        known: _KnownFactors = {}
        for piece in pieces:
            update = self._prepared_updates.pop(id(piece), None) or self._prepare(piece, known)
            update(factor)
        self.advance_counts(pieces)

    def _prepare(self, piece: ParameterPiece, known: _KnownFactors) -> Update:
        """Collect what the next update of a piece needs besides the factor."""
        num_updates = int(piece.state["step"]) + 1
        key = (id(piece.group), num_updates)
        if key not in known:
            known[key] = compute_factors(num_updates, piece.group)
        factors = known[key]
        rounding = None
        if self._rounding is not None:
            rounding = self._rounding.prepare(piece, num_updates)
        if "exp_avg" in piece.state:
            return partial(_update_wide_moments, piece, factors, rounding)
        if not piece.local.numel():
            return lambda _factor: None
        update = self._update.prepare(_collect_rows(piece), factors, rounding)
        copy = piece.copy
        if copy is None:
            return update

        def update_with_copy(factor: GradientFactor) -> None:
            update(factor)
            copy.mark_current()

        return update_with_copy


def _find_wide_dtype(pieces: Sequence[ParameterPiece]) -> torch.dtype:
    """Find the dtype in which gradients are multiplied by their factor: fp32, or wider."""
    return reduce(torch.promote_types, {piece.gradient.dtype for piece in pieces}, torch.float32)


def _update_wide_moments(
    piece: ParameterPiece,
    factors: Factors,
    rounding: PieceRounding | None,
    factor: GradientFactor,
) -> None:
    """Update a piece with fp32 moments."""
    moments = (piece.state["exp_avg"], piece.state["exp_avg_sq"])
    mean, square = moments if factor.is_skipped is None else map(torch.clone, moments)
    bits = None if rounding is None else _draw_bits(piece, rounding)
    apply_adamw(piece.local, piece.gradient, mean, square, factors, factor, bits)
    if factor.is_skipped is not None:
        for moment, values in zip(moments, (mean, square), strict=True):
            write_unless_skipped(moment, values, factor.is_skipped)


def _draw_bits(piece: ParameterPiece, rounding: PieceRounding) -> Tensor:
    """Draw the random numbers of a piece's weights, in its shape."""
    bits = rounding.draw_bits(0, piece.local.numel(), piece.local.device)
    return bits.first.view(piece.local.shape)


def _collect_rows(piece: ParameterPiece) -> QuantisedRows:
    """Return a piece's tensors as matrices; the gradient is copied if it must be."""
    weights, *states = (
        tensor.view(-1, tensor.shape[-1])
        for tensor in (
            piece.local,
            *(piece.state[f"{moment}_{part}"] for moment in _MOMENTS for part in _PARTS),
        )
    )
    gradient = piece.gradient.reshape(-1, piece.gradient.shape[-1])
    rows = QuantisedRows(weights, gradient, *states)
    if piece.copy is None:
        return rows
    return rows._replace(copy=get_local_tensor(piece.copy.tensor).view(weights.shape))


def _scale_box_to_blocks(box: ParameterBox, block_size: int) -> ParameterBox:
    """Return the box of scales for a box of elements that starts at a block boundary."""
    block_bounds = [
        (*bounds[:-1], (bounds[-1][0] // block_size, -(-bounds[-1][1] // block_size)))
        for bounds in (box.local_bounds, box.global_bounds)
    ]
    return ParameterBox(block_bounds[0], block_bounds[1], box.num_copies, box.is_first_copy)
