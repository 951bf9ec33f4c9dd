"""AdamW and SGD of weights that are stored in bf16 only, with moments in bf16.

An update is computed in fp32; new weights and moments are rounded stochastically. Separate
operations and one compiled pass give the same bits: every operation rounds by itself. AdamW's pass
reads and writes 14 bytes per parameter.

Legend: N rows, C columns.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwright.numerics import get_local_tensor
from shardwright.optim.exact_operations import CompileFunction, take_root
from shardwright.optim.one_pass_adamw import AdamWConstants, make_factor
from shardwright.optim.sharded_optimizer import (
    ParameterPiece,
    ShardedModel,
    ShardedOptimizer,
    StateSpec,
)
from shardwright.optim.stochastic_rounding import (
    PieceRounding,
    PlaceNumbers,
    StochasticRounding,
    compute_places,
    draw_bits,
    make_sample_places,
    round_to_bf16,
)

logger = logging.getLogger(__name__)

_ROW_ELEMENTS = 64
_ALIGNMENT_BYTES = 16
_MIN_ELEMENTS = {"cpu": 1 << 19, "cuda": 1}
"""Elements from which a tensor is worth a compiled call; separate operations are thirty
launches on a GPU."""
_CHUNK_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 24}
"""Elements that separate operations update at a time: their fp32 results are temporary."""
_SAMPLE_ROWS = {"cpu": 67, "cuda": (1 << 16) + 3}
"""On a GPU the compiler times tile sizes on the sample. A small one takes the time of a launch with
any of them, and one has 1.7 times the instructions per element of the other."""


class UpdateTensors(NamedTuple):
    """Weights, gradient and moments, `[N, C]`; all but the gradient change."""

    weights: Tensor
    gradient: Tensor
    moments: tuple[Tensor, ...]
    """AdamW: mean and mean square. SGD: momentum, or nothing."""


class UpdateNumbers(NamedTuple):
    """Numbers that change between updates: CPU tensors without dims, arguments of kernels."""

    key: Tensor
    """int32, of the random numbers."""
    gradient_factor: Tensor
    """fp32 on the parameter's device. NaN: nothing changes."""
    decay: Tensor
    """fp32; so are the others. AdamW: 1 - lr x weight decay. SGD: weight decay."""
    step_size: Tensor
    """AdamW: lr / (1 - beta1^t). SGD: lr."""
    root_factor: Tensor
    """AdamW: 1 / sqrt(1 - beta2^t)."""


class SGDConstants(NamedTuple):
    """Numbers that a graph contains."""

    momentum: float


def update_adamw(
    tensors: UpdateTensors, places: PlaceNumbers, numbers: UpdateNumbers, constants: AdamWConstants
) -> None:
    """Update `[N, C]` in place; the compiler makes one pass of it."""
    places_NC = compute_places(places, tensors.weights.shape, tensors.weights.device)
    apply_adamw(tensors, places_NC, numbers, constants)


def update_sgd(
    tensors: UpdateTensors, places: PlaceNumbers, numbers: UpdateNumbers, constants: SGDConstants
) -> None:
    """Update `[N, C]` in place; the compiler makes one pass of it."""
    places_NC = compute_places(places, tensors.weights.shape, tensors.weights.device)
    apply_sgd(tensors, places_NC, numbers, constants)


def apply_adamw(
    tensors: UpdateTensors, places: Tensor, numbers: UpdateNumbers, constants: AdamWConstants
) -> None:
    """Update elements by Loshchilov and Hutter 2019, algorithm 2; the step reads the moments
    before they are rounded."""
    mean, square = (moment.float() for moment in tensors.moments)
    beta1, beta2, eps = constants
    gradient = _scale(tensors.gradient, numbers.gradient_factor)
    mean = mean * beta1 + gradient * (1 - beta1)
    square = square * beta2 + gradient * gradient * (1 - beta2)
    denominator = take_root(square) * numbers.root_factor + eps
    weights = tensors.weights.float() * numbers.decay
    weights = weights - numbers.step_size * mean / denominator
    bits = draw_bits(places, numbers.key)
    _write(tensors.weights, round_to_bf16(weights, bits.first), numbers)
    _write(tensors.moments[0], round_to_bf16(mean, bits.second), numbers)
    _write(tensors.moments[1], round_to_bf16(square, bits.third), numbers)


def apply_sgd(
    tensors: UpdateTensors, places: Tensor, numbers: UpdateNumbers, constants: SGDConstants
) -> None:
    """Update elements as torch's SGD, whose decay is added to the gradient."""
    weights = tensors.weights.float()
    gradient = _scale(tensors.gradient, numbers.gradient_factor) + weights * numbers.decay
    bits = draw_bits(places, numbers.key)
    if tensors.moments:
        gradient = tensors.moments[0].float() * constants.momentum + gradient
        _write(tensors.moments[0], round_to_bf16(gradient, bits.second), numbers)
    weights = weights - numbers.step_size * gradient
    _write(tensors.weights, round_to_bf16(weights, bits.first), numbers)


def _write(target: Tensor, values: Tensor, numbers: UpdateNumbers) -> None:
    """Write new values unless the step is skipped; a choice costs no memory traffic."""
    target.copy_(torch.where(numbers.gradient_factor.isnan(), target, values))


def _scale(gradient: Tensor, factor: Tensor) -> Tensor:
    """Multiply as an update whose gradients are scaled in place before it; return fp32."""
    return (gradient.float() * factor).to(gradient.dtype).float()


class BF16Optimizer(ShardedOptimizer):
    """Optimizer of bf16 weights that updates every element on its own.

    A subclass defines its moments, the numbers of an update and the functions that apply it.
    """

    has_collectives = False
    applies_factor = True

    def __init__(
        self,
        groups: list[dict[str, Any]],
        defaults: dict[str, Any],
        model: ShardedModel,
        *,
        seed: int,
        compile_function: CompileFunction | None = None,
    ) -> None:
        """`seed` is that of the rounding."""
        super().__init__(groups, defaults, model)
        self._compile_function = compile_function
        self._irregular_names: set[str] = set()
        parameters = {name: parameter for parameter, name in self.parameter_names.items()}
        self._rounding = StochasticRounding(seed, model, parameters)

    def list_moments(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """List the names of a parameter's moments."""
        raise NotImplementedError

    def get_functions(self) -> tuple[Callable[..., None], Callable[..., None]]:
        """Return the update of rows with regular places, and of elements with places."""
        raise NotImplementedError

    def get_constants(self, group: Mapping[str, Any]) -> Any:
        """Return the numbers that a graph contains."""
        raise NotImplementedError

    def compute_numbers(
        self, group: Mapping[str, Any], num_updates: int, key: Tensor, factor: Tensor
    ) -> UpdateNumbers:
        """Compute the numbers of an update (1 for the first) with a gradient factor."""
        raise NotImplementedError

    def list_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, StateSpec]:
        """List the tensors of a parameter's state by name, without its step count."""
        shape = tuple(get_local_tensor(parameter.detach()).shape)
        return dict.fromkeys(self.list_moments(group), StateSpec(shape, torch.bfloat16))

    def can_skip_on_device(self) -> bool:
        """Return True: an update whose factor is NaN writes the old numbers."""
        return True

    def update_pieces(self, pieces: Sequence[ParameterPiece]) -> None:
        """Update parameters and state of these pieces and advance their step counts."""
        if not pieces:
            return
        self.advance_counts(pieces)
        factor = make_factor(self.device_factor or self.gradient_factor, pieces[0].local.device)
        known: dict[tuple[int, int], UpdateNumbers] = {}
        for piece in pieces:
            num_updates = int(piece.state["step"])
            rounding = self._rounding.prepare(piece, num_updates)
            identity = (id(piece.group), num_updates)
            if identity not in known:
                known[identity] = self.compute_numbers(
                    piece.group, num_updates, rounding.key, factor
                )
            numbers = known[identity]._replace(key=rounding.key)
            if piece.local.numel():
                self._update_piece(piece, rounding, numbers)

    def _update_piece(
        self, piece: ParameterPiece, rounding: PieceRounding, numbers: UpdateNumbers
    ) -> None:
        moments = [piece.state[name] for name in self.list_moments(piece.group)]
        tensors = [piece.local, piece.gradient, *map(get_local_tensor, moments)]
        constants = self.get_constants(piece.group)
        rows = rounding.describe_rows(_ROW_ELEMENTS)
        update = None if rows is None else self._find_function(tensors, rows, constants)
        if rows is not None and update is not None:
            views = [tensor.view(-1, _ROW_ELEMENTS) for tensor in tensors]
            update(_collect(views, is_varying=True), rows, numbers, constants)
            return
        if rows is None and self._compile_function is not None:
            self._log_irregular(piece.name)
        _, apply = self.get_functions()
        tensors[1] = piece.gradient.contiguous()
        flat = [tensor.view(-1) for tensor in tensors]
        device = piece.local.device
        size = _CHUNK_ELEMENTS.get(device.type, len(flat[0]))
        for start in range(0, len(flat[0]), size):
            part = [tensor[start : start + size] for tensor in flat]
            places = rounding.list_places(start, start + len(part[0]), device)
            apply(_collect(part), places, numbers, constants)

    def _log_irregular(self, name: str) -> None:
        if name not in self._irregular_names:
            self._irregular_names.add(name)
            logger.info(
                "%s: updated by separate operations, because its part here has irregular rows",
                name,
            )

    def _find_function(
        self, tensors: Sequence[Tensor], rows: PlaceNumbers, constants: Any
    ) -> Callable[..., None] | None:
        """Return the compiled update of these tensors; None if separate operations update them."""
        local = tensors[0]
        if (
            self._compile_function is None
            or local.numel() < _MIN_ELEMENTS.get(local.device.type, math.inf)
            or local.numel() % _ROW_ELEMENTS
            or not all(
                tensor.is_contiguous() and tensor.data_ptr() % _ALIGNMENT_BYTES == 0
                for tensor in tensors
            )
        ):
            return None
        formulation, _ = self.get_functions()
        details = ", ".join(f"{key} {value:g}" for key, value in constants._asdict().items())
        has_one_run = rows.distance is None
        name = f"{self.rule} of bf16 weights ({details}{'' if has_one_run else ', parts of rows'})"
        update = self._compile_function(
            name,
            formulation,
            formulation,
            partial(self._make_sample, constants, len(tensors) - 2, has_one_run),
        )
        return None if update is formulation else update

    def _make_sample(
        self, constants: Any, num_moments: int, has_one_run: bool, device: torch.device
    ) -> tuple[UpdateTensors, PlaceNumbers, UpdateNumbers, Any]:
        """Make weights with moments of two updates, gradients of all sizes and some zeros."""
        generator = torch.Generator().manual_seed(0)
        _, apply = self.get_functions()
        shape = (_SAMPLE_ROWS[device.type], _ROW_ELEMENTS)
        weights = torch.randn(shape, generator=generator).bfloat16().to(device)
        magnitudes = 10.0 ** torch.randint(-12, 3, shape, generator=generator)
        moments = [torch.zeros_like(weights) for _ in range(num_moments)]
        places, key = make_sample_places(shape, has_one_run=has_one_run)
        group = dict(self.param_groups[0]) | {"lr": 3e-3, "weight_decay": 0.1}
        for step in (1, 2, 3):
            gradient = torch.randn(shape, generator=generator) * magnitudes
            gradient[:, ::7] = 0.0
            tensors = [weights, gradient.bfloat16().to(device), *moments]
            numbers = self.compute_numbers(group, step, key, make_factor(0.37, device))
            if step < 3:
                listed = compute_places(places, weights.shape, device)
                apply(_collect(tensors), listed, numbers, constants)
        return _collect(tensors, is_varying=True), places, numbers, constants


def _collect(tensors: Sequence[Tensor], *, is_varying: bool = False) -> UpdateTensors:
    """Name the tensors; mark the number of rows if it varies between calls of one graph."""
    if is_varying:
        for tensor in tensors:
            torch._dynamo.mark_dynamic(tensor, 0)
    return UpdateTensors(tensors[0], tensors[1], tuple(tensors[2:]))


class BF16AdamW(BF16Optimizer):
    """AdamW (decoupled decay)."""

    rule = "adamw"

    def list_moments(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """List the names of a parameter's moments."""
        return ("exp_avg", "exp_avg_sq")

    def get_functions(self) -> tuple[Callable[..., None], Callable[..., None]]:
        """Return the update of rows with regular places, and of elements with places."""
        return update_adamw, apply_adamw

    def get_constants(self, group: Mapping[str, Any]) -> AdamWConstants:
        """Return the numbers that a graph contains."""
        beta1, beta2 = group["betas"]
        return AdamWConstants(beta1, beta2, group["eps"])

    def compute_numbers(
        self, group: Mapping[str, Any], num_updates: int, key: Tensor, factor: Tensor
    ) -> UpdateNumbers:
        """Compute the numbers of an update in fp64, and round them to fp32."""
        beta1, beta2 = group["betas"]
        lr = group["lr"]
        decay, step_size, root_factor = torch.tensor(
            [
                1 - lr * group["weight_decay"],
                lr / (1 - beta1**num_updates),
                1 / math.sqrt(1 - beta2**num_updates),
            ],
            dtype=torch.float32,
        )
        return UpdateNumbers(key, factor, decay, step_size, root_factor)


class BF16SGD(BF16Optimizer):
    """SGD, with or without momentum."""

    rule = "sgd"

    def list_moments(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """List the names of a parameter's moments."""
        return ("momentum_buffer",) if group["momentum"] else ()

    def get_functions(self) -> tuple[Callable[..., None], Callable[..., None]]:
        """Return the update of rows with regular places, and of elements with places."""
        return update_sgd, apply_sgd

    def get_constants(self, group: Mapping[str, Any]) -> SGDConstants:
        """Return the numbers that a graph contains."""
        return SGDConstants(group["momentum"])

    def compute_numbers(
        self, group: Mapping[str, Any], num_updates: int, key: Tensor, factor: Tensor
    ) -> UpdateNumbers:
        """Return the group's numbers; SGD corrects nothing."""
        decay, lr = torch.tensor([group["weight_decay"], group["lr"]], dtype=torch.float32)
        return UpdateNumbers(key, factor, decay, lr, torch.ones_like(lr))
