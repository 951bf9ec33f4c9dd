"""AdamW in one pass over memory: factor of the gradient, update, and copy of the new weights.

The separate operations define the bits: a multiplication of the gradient, torch's fused kernel, and
a cast. They read and write 8, 28 and 6 bytes per fp32 parameter and 16-bit copy; the one pass, 30.

A step count is on the device, and the host must not wait for it. So what depends on counts is
computed there for all parameters together, a few numbers each.

A call of a compiled function takes the host as long as several launches. So a call updates several
tensors, each by a kernel of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwright.numerics import get_local_tensor
from shardwright.optim.exact_operations import CompileFunction, interpolate, multiply_add
from shardwright.optim.sharded_optimizer import DeviceFactor, ParameterPiece

_MIN_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 22}
"""Elements from which a tensor is worth a call of its own, which takes the host about 0.1 ms;
torch's kernel updates a list in one."""
_ROW_ELEMENTS = 64
"""Elements that divide a tensor, for whole vectors: torch's kernel of a CPU rounds a remainder
otherwise, and a kernel on a GPU would read single numbers."""
_ALIGNMENT_BYTES = 16
"""Alignment that compiled code expects."""
_SAMPLE_ROWS = 67
_MAX_TENSORS = 4
"""Tensors of a call. The time of compiling grows with them."""
_MAX_LENGTHS = 2
"""Numbers of tensors, besides one, for which there is a graph."""


class AdamWTensors(NamedTuple):
    """One parameter, its gradient and moments, `[N, 64]` in fp32; all but the gradient change."""

    weights: Tensor
    gradient: Tensor
    mean: Tensor
    square: Tensor
    copy: Tensor | None = None
    """Receives the new weights, in its dtype."""


class AdamWNumbers(NamedTuple):
    """Numbers of one update that change between steps; CPU tensors without dims are arguments
    of kernels."""

    rates: Tensor
    """Step size and sqrt(1 - beta2^t), in fp32 on the parameter's device; 16 bytes."""
    decay: Tensor
    """fp32. On a CPU 1 - lr x weight decay, elsewhere -lr x weight decay."""
    gradient_factor: Tensor
    """fp32 on the parameter's device. NaN: nothing changes."""
    step: Tensor
    """Count of the update, for torch's kernel."""
    lr: Tensor
    """fp64, for torch's kernel; so is the next."""
    weight_decay: Tensor


class AdamWConstants(NamedTuple):
    """Numbers of one update that a graph contains."""

    beta1: float
    beta2: float
    eps: float


def update_in_one_pass(
    tensors: AdamWTensors, numbers: AdamWNumbers, constants: AdamWConstants
) -> None:
    """Update with the roundings of torch's kernels; the compiler makes one pass of it.

    torch's kernel of a CPU takes constants in fp64 and rounds them. That of CUDA computes in fp32,
    where its compiler contracts the decay to one rounding.
    """
    weights = tensors.weights
    gradient = tensors.gradient * numbers.gradient_factor
    beta1, beta2, eps = constants
    if weights.is_cuda:
        weights = multiply_add(torch.zeros_like(weights) + numbers.decay, weights, weights)
        mean = _mix(tensors.mean, gradient, beta1)
        square = _mix(tensors.square, gradient * gradient, beta2)
    else:
        weights = weights * numbers.decay
        mean = interpolate(tensors.mean, gradient, 1 - beta1)
        square = multiply_add((1 - beta2) * gradient, gradient, tensors.square * beta2)
    step_size, root_correction = numbers.rates[:2].unbind()
    denominator = square.sqrt() / root_correction + eps
    weights = weights - step_size * mean / denominator
    is_skipped = numbers.gradient_factor.isnan()  # a choice costs no memory traffic
    weights = torch.where(is_skipped, tensors.weights, weights)
    tensors.weights.copy_(weights)
    tensors.mean.copy_(torch.where(is_skipped, tensors.mean, mean))
    tensors.square.copy_(torch.where(is_skipped, tensors.square, square))
    if tensors.copy is not None:
        tensors.copy.copy_(weights)


def _mix(old: Tensor, new: Tensor, beta: float) -> Tensor:
    """Compute beta x old + (1 - beta) x new as torch's CUDA kernel, by two fused operations."""
    factor = torch.full_like(old, beta)
    return multiply_add(factor, old, multiply_add(-factor, new, new))


def update_separately(
    tensors: AdamWTensors, numbers: AdamWNumbers, constants: AdamWConstants
) -> None:
    """Update by separate operations; the gradient stays as it is."""
    torch._fused_adamw_(
        [tensors.weights],
        torch._foreach_mul([tensors.gradient], float(numbers.gradient_factor)),
        [tensors.mean],
        [tensors.square],
        [],
        [numbers.step],
        lr=float(numbers.lr),
        beta1=constants.beta1,
        beta2=constants.beta2,
        weight_decay=float(numbers.weight_decay),
        eps=constants.eps,
        amsgrad=False,
        maximize=False,
    )
    if tensors.copy is not None:
        tensors.copy.copy_(tensors.weights)


def update_all_in_one_pass(
    all_tensors: Sequence[AdamWTensors],
    all_rates: Sequence[Tensor],
    numbers: AdamWNumbers,
    constants: AdamWConstants,
) -> None:
    """Update several parameters as `update_in_one_pass`, with these rates instead of those of
    `numbers`."""
    for tensors, rates in zip(all_tensors, all_rates, strict=True):
        update_in_one_pass(tensors, numbers._replace(rates=rates), constants)


def _update_all_separately(
    all_tensors: Sequence[AdamWTensors],
    _all_rates: Sequence[Tensor],
    numbers: AdamWNumbers,
    constants: AdamWConstants,
) -> None:
    """Update several parameters of one count as `update_separately`."""
    for tensors in all_tensors:
        update_separately(tensors, numbers, constants)


class _PreparedUpdate(NamedTuple):
    """Arguments of a piece's update; the factor in its numbers is to be replaced."""

    piece: ParameterPiece
    tensors: AdamWTensors
    numbers: AdamWNumbers

    @property
    def copy_dtype(self) -> torch.dtype | None:
        """The dtype of the copy."""
        return None if self.tensors.copy is None else self.tensors.copy.dtype


class OnePassAdamW:
    """Update of the pieces for which the compiler has a function with the right bits."""

    def __init__(self, compile_function: CompileFunction) -> None:
        self._compile_function = compile_function
        self._functions: dict[tuple[torch.dtype | None, AdamWConstants, int], Any] = {}
        """By dtype of the copies, constants and number of tensors; None if there is none. Without
        one for a single tensor none is used."""
        self._lengths: list[int] = []
        """Numbers of tensors for which there is a graph, besides one."""
        self._prepared: dict[int, tuple[ParameterPiece, _PreparedUpdate | None]] = {}
        """By the piece's id; None if the one pass does not apply."""

    def prepare(self, pieces: Sequence[ParameterPiece], group: Mapping[str, Any]) -> None:
        """Do for pieces of one group what their next update needs besides the gradients' factor.

        It changes no state and waits for nothing.
        """
        chosen: list[tuple[ParameterPiece, AdamWTensors]] = []
        constants = _get_constants(group)
        for piece in pieces:
            self._prepared[id(piece)] = (piece, None)
            copy_dtype = None if piece.copy is None else piece.copy.tensor.dtype
            if self._functions.get((copy_dtype, constants, 1), "not tried") is None:
                continue  # its numbers would take longer than those of torch's kernel
            tensors = _collect_tensors(piece)
            if tensors is not None:
                chosen.append((piece, tensors))
        if not chosen:
            return
        all_numbers = _advance([piece.state["step"] for piece, _ in chosen], group)
        for (piece, tensors), numbers in zip(chosen, all_numbers, strict=True):
            self._prepared[id(piece)] = (piece, _PreparedUpdate(piece, tensors, numbers))

    def discard_preparation(self) -> None:
        """Forget what has been prepared; it holds gradients."""
        self._prepared.clear()

    def update(
        self,
        pieces: Sequence[ParameterPiece],
        group: Mapping[str, Any],
        gradient_factor: float | DeviceFactor,
    ) -> list[ParameterPiece]:
        """Update pieces of one group, and return those that remain to be updated.

        Gradients stay as they are.
        """
        self.prepare([piece for piece in pieces if id(piece) not in self._prepared], group)
        constants = _get_constants(group)
        remaining = []
        by_copy: dict[torch.dtype | None, list[_PreparedUpdate]] = {}
        for piece in pieces:
            _, prepared = self._prepared.pop(id(piece))
            if prepared is None:
                remaining.append(piece)
            else:
                by_copy.setdefault(prepared.copy_dtype, []).append(prepared)
        calls = []
        for copy_dtype, members in by_copy.items():
            for batch in self._split(members):
                function = self._find_function(copy_dtype, constants, len(batch))
                if function is None:
                    remaining += [each.piece for each in batch]
                else:
                    calls.append((function, batch))
        updated = [each for _, batch in calls for each in batch]
        if not updated:
            return remaining
        _advance_counts([each.piece.state["step"] for each in updated], gradient_factor)
        factor = make_factor(gradient_factor, updated[0].tensors.weights.device)
        for function, batch in calls:
            function(
                [each.tensors for each in batch],
                [each.numbers.rates for each in batch],
                batch[0].numbers._replace(gradient_factor=factor),
                constants,
            )
        for each in updated:
            if each.piece.copy is not None:
                each.piece.copy.mark_current()
        return remaining

    def _split(self, members: Sequence[_PreparedUpdate]) -> Iterator[Sequence[_PreparedUpdate]]:
        """Split into batches of one call each: the fewer different lengths, the fewer graphs."""
        start = 0
        while start < len(members):
            batch = members[start : start + self._choose_length(len(members) - start)]
            if _share_memory(batch):
                batch = batch[:1]
            yield batch
            start += len(batch)

    def _choose_length(self, num_members: int) -> int:
        length = min(num_members, _MAX_TENSORS)
        if length > 1 and length not in self._lengths and len(self._lengths) < _MAX_LENGTHS:
            self._lengths.append(length)
        return max((known for known in self._lengths if known <= length), default=1)

    def _find_function(
        self, copy_dtype: torch.dtype | None, constants: AdamWConstants, num_tensors: int
    ) -> Any:
        """Return the compiled function for this number of tensors; None if there is none."""
        key = (copy_dtype, constants, num_tensors)
        if key not in self._functions:
            name = (
                f"AdamW in one pass (tensors {num_tensors}, copy {copy_dtype}, betas "
                f"{constants.beta1:g} and {constants.beta2:g}, eps {constants.eps:g})"
            )
            update = self._compile_function(
                name.replace("torch.", "").replace("copy None", "no copy"),
                update_all_in_one_pass,
                _update_all_separately,
                partial(_make_sample, *key),
            )
            self._functions[key] = None if update is _update_all_separately else update
        return self._functions[key]


def _share_memory(batch: Sequence[_PreparedUpdate]) -> bool:
    """Return True if written tensors share memory: a graph is for one pattern of such views."""
    written = [
        tensor.untyped_storage().data_ptr()
        for each in batch
        for tensor in each.tensors
        if tensor is not None and tensor is not each.tensors.gradient
    ]
    return len(set(written)) < len(written)


def make_factor(gradient_factor: float | DeviceFactor, device: torch.device) -> Tensor:
    """Return the factor as a tensor on a device: always, because a graph is for one device."""
    if isinstance(gradient_factor, DeviceFactor):
        return gradient_factor.value
    return torch.full((), gradient_factor, dtype=torch.float32, device=device)


def _advance_counts(steps: list[Tensor], gradient_factor: float | DeviceFactor) -> None:
    if isinstance(gradient_factor, DeviceFactor):
        torch._foreach_add_(steps, 1 - gradient_factor.is_skipped)
    else:
        torch._foreach_add_(steps, 1)


def _advance(steps: Sequence[Tensor], group: Mapping[str, Any]) -> list[AdamWNumbers]:
    """Compute the numbers of the update that follows these counts, with a factor of 1."""
    following = torch._foreach_add(list(steps), 1)
    return compute_numbers(following, group, _get_constants(group), gradient_factor=1.0)


def _get_constants(group: Mapping[str, Any]) -> AdamWConstants:
    beta1, beta2 = group["betas"]
    return AdamWConstants(beta1, beta2, group["eps"])


def _collect_tensors(piece: ParameterPiece) -> AdamWTensors | None:
    """Return a piece's tensors in rows; None if the one pass does not apply."""
    num_elements = piece.local.numel()
    kind = piece.local.device.type
    if kind not in _MIN_ELEMENTS or num_elements < _MIN_ELEMENTS[kind]:
        return None
    if num_elements % _ROW_ELEMENTS:
        return None
    moments = (get_local_tensor(piece.state[key]) for key in ("exp_avg", "exp_avg_sq"))
    tensors = [piece.local, piece.gradient, *moments]
    if any(tensor.dtype != torch.float32 for tensor in tensors):
        return None
    if piece.copy is not None:
        tensors.append(get_local_tensor(piece.copy.tensor))
    for tensor in tensors:
        if not tensor.is_contiguous() or tensor.data_ptr() % _ALIGNMENT_BYTES:
            return None
    return AdamWTensors(*(tensor.view(-1, _ROW_ELEMENTS) for tensor in tensors))


def compute_numbers(
    steps: Sequence[Tensor],
    group: Mapping[str, Any],
    constants: AdamWConstants,
    gradient_factor: float,
) -> list[AdamWNumbers]:
    """Compute the numbers of an update of each parameter with these counts; waits for nothing."""
    lr = group["lr"]
    weight_decay = group["weight_decay"]
    if steps[0].is_cpu:
        rates = _compute_rates_on_host([float(step) for step in steps], lr, constants)
        decay = torch.tensor(1 - lr * weight_decay, dtype=torch.float32)
    else:
        fp32_lr, fp32_decay = torch.tensor([lr, weight_decay], dtype=torch.float32)
        rates = _compute_rates_on_device(torch.stack(list(steps)), fp32_lr, constants)
        # Zero, not minus zero, without decay: it keeps the sign of weights that are zero.
        decay = 0.0 - fp32_lr * fp32_decay
    factor = make_factor(gradient_factor, steps[0].device)
    exact_lr, exact_decay = torch.tensor([lr, weight_decay], dtype=torch.float64)
    return [
        AdamWNumbers(rate, decay, factor, step, exact_lr, exact_decay)
        for rate, step in zip(rates, steps, strict=True)
    ]


_RATES_PER_PARAMETER = _ALIGNMENT_BYTES // 4
"""Two rates in fp32, and padding."""


def _compute_rates_on_host(
    counts: Sequence[float], lr: float, constants: AdamWConstants
) -> Sequence[Tensor]:
    """Compute the rates as torch's kernel of a CPU, in fp64."""
    padding = [0.0] * (_RATES_PER_PARAMETER - 2)
    rates = [
        [lr / (1 - constants.beta1**count), math.sqrt(1 - constants.beta2**count), *padding]
        for count in counts
    ]
    return torch.tensor(rates, dtype=torch.float32).unbind()


def _compute_rates_on_device(
    counts: Tensor, lr: Tensor, constants: AdamWConstants
) -> Sequence[Tensor]:
    """Compute the rates as torch's CUDA kernel, in fp32."""
    rates = counts.new_zeros(len(counts), _RATES_PER_PARAMETER)
    rates[:, 0] = torch.div(lr, 1 - constants.beta1**counts)
    rates[:, 1] = (1 - constants.beta2**counts).sqrt()
    return rates.unbind()


def _make_sample(
    copy_dtype: torch.dtype | None,
    constants: AdamWConstants,
    num_tensors: int,
    device: torch.device,
) -> tuple[list[AdamWTensors], list[Tensor], AdamWNumbers, AdamWConstants]:
    """Make parameters with the moments of two updates, gradients of all sizes and some zeros.

    The number of rows varies between calls and differs between tensors: the compiler takes equal
    sizes for one.
    """
    generator = torch.Generator().manual_seed(0)
    all_tensors = []
    for index in range(num_tensors):
        shape = (_SAMPLE_ROWS + index, _ROW_ELEMENTS)
        weights = torch.randn(shape, generator=generator).to(device)
        copy = None if copy_dtype is None else torch.zeros_like(weights, dtype=copy_dtype)
        moments = (torch.zeros_like(weights), torch.zeros_like(weights))
        magnitudes = 10.0 ** torch.randint(-12, 3, shape, generator=generator).to(device)
        all_tensors.append(AdamWTensors(weights, magnitudes, *moments, copy))
    step = torch.zeros((), device=device)
    group = {"lr": 3e-3, "weight_decay": 0.1}
    all_magnitudes = [tensors.gradient.clone() for tensors in all_tensors]
    for _ in range(3):
        for tensors, magnitudes in zip(all_tensors, all_magnitudes, strict=True):
            drawn = torch.randn(magnitudes.shape, generator=generator).to(device)
            tensors.gradient.copy_(drawn * magnitudes)
            tensors.gradient[:, ::7] = 0.0
        step = step + 1
        numbers, *_ = all_numbers = compute_numbers([step] * num_tensors, group, constants, 0.37)
        if int(step) < 3:
            _update_all_separately(all_tensors, [], numbers, constants)
    for tensors in all_tensors:
        for tensor in tensors:
            if tensor is not None:
                torch._dynamo.mark_dynamic(tensor, 0)
    return all_tensors, [each.rates for each in all_numbers], numbers, constants
