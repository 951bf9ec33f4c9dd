"""One optimizer step: gradients with one normaliser, gradient norm, clipping and update.

Shapes: B sequences, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from shardwright.data.loader import MicroBatch
from shardwright.layout import AXES, DATA_AXES
from shardwright.model import DropoutKey
from shardwright.numerics import (
    LossScaler,
    compute_clip_coefficient,
    compute_clip_coefficient_on_device,
    compute_global_norm,
    expect_loss_gradient,
    scale_,
    synchronise_norm,
)
from shardwright.offload import OffloadedOptimizer
from shardwright.optim import set_learning_rate
from shardwright.optim.sharded_optimizer import DeviceFactor, UpdateByPiece
from shardwright.parallel import ParallelModel
from shardwright.parallel.experts.padded_exchange import find_padded_exchange
from shardwright.parallel.low_precision import set_rounding_step
from shardwright.parallel.mesh import check_nccl_groups
from shardwright.parallel.weight_maxima import agree_on_maxima
from shardwright.training.metrics.expert_load import update_balance_biases
from shardwright.training.metrics.host_reads import PendingRead, read_together
from shardwright.training.metrics.profiling import mark_phase
from shardwright.training.metrics.step_times import StepTimes


class Objective(Protocol):
    """Training objective: the decoder's arguments for a summed loss, and the normaliser."""

    def prepare(self, micro_batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Add to the micro-batches the inputs that are computed before the first forward pass."""
        ...

    def arguments(self, batch: MicroBatch) -> dict[str, Any]:
        """Return the decoder's keyword arguments for a micro-batch on the device."""
        ...

    def count(self, batch: MicroBatch) -> float:
        """Count the loss terms or sum their weights; the global sum is the normaliser."""
        ...


class TokenObjective:
    """Cross-entropy of the supervised tokens, divided by their number or total weight."""

    def prepare(self, micro_batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Return the micro-batches unchanged."""
        return micro_batches

    def arguments(self, batch: MicroBatch) -> dict[str, Any]:
        """Return ids, positions, documents, labels and loss weights."""
        return batch.build_model_arguments()

    def count(self, batch: MicroBatch) -> float:
        """Count the supervised tokens, or sum their loss weights."""
        return batch.num_supervised if batch.weights_BT is None else batch.weight_sum


TOKEN_OBJECTIVE = TokenObjective()


@dataclass(frozen=True)
class StepLoss:
    """Result of the forward passes of one step, summed over all ranks and micro-batches."""

    loss_sum: Tensor
    """Summed loss (in nats for supervised tokens), a scalar on the device."""
    supervised_tokens: Tensor
    """Number of supervised tokens, a scalar on the device."""
    router_table: Tensor | None = None
    """Router statistics of `RouterTotals.take`, on the device. None for dense models."""

    normaliser: Tensor | None = None
    """Normaliser if it is not the supervised tokens: pairs, or the sum of the loss weights."""
    rows_beyond_limit: Tensor | None = None
    """Rows that padded exchanges have omitted, a scalar on the device: unless it is 0, loss and
    gradients are wrong. None if exchanges are exact."""

    @property
    def count(self) -> Tensor:
        """Normaliser of the loss, a scalar on the device."""
        return self.supervised_tokens if self.normaliser is None else self.normaliser

    def mean(self) -> float:
        """Return the loss per supervised token (nats) or per pair; synchronises the device.

        A training run reads the sum and the count with the gradient norm instead
        (`update_parameters`), so that the host waits once per step.
        """
        (loss_sum,), (count,) = read_together([self.loss_sum, self.count])
        return compute_mean_loss(loss_sum, count)


def compute_mean_loss(loss_sum: float, count: float) -> float:
    """Divide a summed loss by its count; 0 without supervised tokens, not nan."""
    return loss_sum / (count if count > 0 else 1.0)


@dataclass(frozen=True)
class StepUpdate:
    """Result of the optimizer update. Identical on all ranks."""

    gradient_norm: float
    """L2 norm of the whole model's gradient before clipping; inf or nan if it was skipped."""
    is_skipped: bool
    read_values: tuple[list[float], ...] = ()
    """Elements of the tensors that were read with the norm, in their order."""
    rows_beyond_limit: int = 0
    """Unless it is 0, the step is not applied: it is to be repeated with exact exchanges."""


def count_supervised(model: ParallelModel, micro_batches: Sequence[MicroBatch]) -> Tensor:
    """Sum the supervised tokens of a step over micro-batches and ranks, an int64 scalar."""
    number = sum(batch.num_supervised for batch in micro_batches)
    return model.sum_over_batch(torch.full((), number, dtype=torch.int64, device=model.device))


def count_tokens_and_flops(
    model: ParallelModel,
    micro_batches: Sequence[MicroBatch],
    flops_per_token: Callable[[int], float],
) -> Tensor:
    """Count the tokens of a step over all ranks, including padding, and their model FLOPs.

    Collective. FLOPs per token depend on the row length because of attention.

    Args:
        flops_per_token: Function from row length in tokens to FLOPs per token.

    Returns:
        Tokens and FLOPs, `[2]` in fp64 on the device.
    """
    sizes = [batch.input_ids_BT.shape for batch in micro_batches]
    tokens = sum(rows * length for rows, length in sizes)
    flops = sum(rows * length * flops_per_token(length) for rows, length in sizes)
    # `torch.tensor` on a CUDA device would wait for its copy.
    work = [
        torch.full((), number, dtype=torch.float64, device=model.device)
        for number in (tokens, flops)
    ]
    return model.sum_over_batch(torch.stack(work))


def _count_objective(
    model: ParallelModel, micro_batches: Sequence[MicroBatch], objective: Objective
) -> Tensor:
    number = sum(objective.count(batch) for batch in micro_batches)
    return model.sum_over_batch(torch.full((), number, dtype=torch.float64, device=model.device))


def _replace_zero_by_one(count: Tensor) -> Tensor:
    """Replace a count of zero with one: without supervised tokens the mean is 0, not nan."""
    return torch.where(count > 0, count, torch.ones_like(count))


def begin_update(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Let a step's update begin in its backward pass, if the optimizer can; call it before the
    step's passes, and `update_parameters` after them.

    Args:
        learning_rate: Learning rate of this step, for every parameter group.
    """
    if isinstance(optimizer, OffloadedOptimizer) and optimizer.has_backward_update:
        optimizer.begin_step()
        set_learning_rate(optimizer, learning_rate)


def accumulate_gradients(
    model: ParallelModel,
    micro_batches: Sequence[MicroBatch],
    *,
    seed: int,
    step: int,
    loss_scale: float = 1.0,
    times: StepTimes | None = None,
    objective: Objective = TOKEN_OBJECTIVE,
) -> StepLoss:
    """Compute the gradients of loss_sum / normaliser, times `loss_scale`, for a step.

    The normaliser (supervised tokens, their weights, or pairs) is summed over all micro-batches
    and ranks first. Every summed loss is divided by it and gradients are summed, so neither
    accumulation nor ranks with few supervised tokens change the result. Router losses of a
    sparse model are added as means over the step's rows times `loss_scale`, unless no token is
    supervised.

    Args:
        micro_batches: Micro-batches of this rank; the same number on every rank.
        seed: Seed of the run, for dropout and stochastic rounding.
        step: Optimizer step, for the same.
        loss_scale: Loss scale of fp16; `update_parameters` divides by it.
        times: Receives the marks of forward, backward and exposed reduction.
        objective: Loss to train.
    """
    times = times or StepTimes(torch.device("cpu"))
    times.reset()
    tokens = count_supervised(model, micro_batches)
    plain = objective is TOKEN_OBJECTIVE and all(
        batch.weights_BT is None for batch in micro_batches
    )
    count = tokens if plain else _count_objective(model, micro_batches, objective)
    scale = loss_scale / _replace_zero_by_one(count).to(torch.float64)
    micro_batches = objective.prepare(micro_batches)
    routing: dict[str, Tensor] = {}
    if model.decoder.shape.experts is not None:
        num_rows = (
            sum(batch.input_ids_BT.shape[0] for batch in micro_batches) * model.layout.data_ranks
        )
        routing["row_weight"] = (tokens > 0) * torch.full(
            (), loss_scale / num_rows, dtype=torch.float64, device=model.device
        )

    def arguments(batch: MicroBatch) -> dict[str, Any]:
        dropout = DropoutKey(seed, step, batch.sample_indices_B) if model.decoder.training else None
        return objective.arguments(batch) | routing | {"dropout": dropout}

    set_rounding_step(model.decoder, seed, step)
    decoder = model.decoder
    expected = expect_loss_gradient(decoder.loss_function, scale, decoder.compute_dtype)
    with (
        mark_phase("forward and backward"),
        agree_on_maxima(model.weight_maxima),
        expected as gradient,
    ):
        loss_sum = model.forward_backward(micro_batches, arguments, gradient, times.mark)
    with mark_phase("reduction"):
        model.finish_gradients()
        loss_sum = model.sum_over_data(loss_sum.to(torch.float64))
        routers, beyond_limit = _sum_router_tables(model)
    times.mark("reduction")
    return StepLoss(loss_sum, tokens, routers, count, beyond_limit)


def _sum_router_tables(model: ParallelModel) -> tuple[Tensor | None, Tensor | None]:
    """Sum router statistics over data and pipeline ranks; tensor-parallel ranks have copies.

    Returns:
        `RouterTotals.pop_table`, and `StepLoss.rows_beyond_limit`.
    """
    shape = model.decoder.shape
    if shape.experts is None:
        return None, None
    totals = model.decoder.router_totals
    is_padded = find_padded_exchange(model.decoder) is not None
    beyond_limit = totals.count_beyond_limit(model.device) if is_padded else None
    table = totals.pop_table(shape.num_layers, shape.experts.num_experts, model.device)
    if beyond_limit is None:
        return model.sum_over(table, ("pp", *DATA_AXES)), None
    both = model.sum_over(torch.cat([table.flatten(), beyond_limit[None]]), ("pp", *DATA_AXES))
    return both[:-1].view_as(table), both[-1]


def update_parameters(
    model: ParallelModel,
    optimizer: torch.optim.Optimizer,
    *,
    learning_rate: float,
    max_grad_norm: float | None,
    scaler: LossScaler | None = None,
    router_table: Tensor | None = None,
    rows_beyond_limit: Tensor | None = None,
    read_along: Sequence[Tensor] = (),
    times: StepTimes | None = None,
    overlaps_forward: bool = False,
) -> StepUpdate:
    """Clip the gradients, update the parameters and drop the gradients.

    The norm is summed over all shards, identical on all ranks, and non-finite on all if it is
    so on one. All ranks then skip the update. The host reads the norm to decide, which is the
    only time in a step that it waits for the device; the update itself it only launches. Where
    the update can find on the device that it is skipped, it is launched before that wait. One
    that has begun in the backward pass (`begin_update`) ends here, and cannot be skipped.

    Args:
        learning_rate: Learning rate of this step, for every parameter group.
        max_grad_norm: Largest global gradient norm; None for no clipping.
        scaler: Loss scaler of fp16, whose scale the gradients still contain.
        router_table: `StepLoss.router_table`, for the update of the balance biases.
        rows_beyond_limit: `StepLoss.rows_beyond_limit`. Unless it is 0, gradients are dropped and
            nothing else changes. Required while exchanges are padded.
        read_along: Tensors to read in the same copy as the norm.
        times: Receives the mark of the optimizer.
        overlaps_forward: True if only forward passes read weights before
            `OffloadedOptimizer.wait_for_update` is called. They may begin during the update then.

    Raises:
        ValueError: Exchanges are padded, and `rows_beyond_limit` is None.
        NonFiniteError: The norm is not finite, and the update has begun.
    """
    exchange = find_padded_exchange(model.decoder)
    if exchange is not None and exchange.rows_per_rank and rows_beyond_limit is None:
        raise ValueError("rows_beyond_limit: None; pass StepLoss.rows_beyond_limit")
    loss_scale = 1.0 if scaler is None else scaler.scale
    with mark_phase("gradient norm"):
        norm = _compute_norm(model, loss_scale)
        if isinstance(optimizer, UpdateByPiece):
            _pass_on(model, optimizer)
            # The last update of an offloaded optimizer may still be running.
            if not isinstance(optimizer, OffloadedOptimizer):
                set_learning_rate(optimizer, learning_rate)
                optimizer.prepare_step()  # while the device computes the gradients
    tensors = [norm, *([] if rows_beyond_limit is None else [rows_beyond_limit]), *read_along]
    clipping = _Clipping(loss_scale, max_grad_norm)
    with mark_phase("update"):
        pending = _launch_before_wait(model, optimizer, clipping, tensors, rows_beyond_limit)
    if pending is not None:
        values = pending.wait()
    elif len(tensors) > 1:
        values = read_together(tensors)
    else:  # fake tensors of a rehearsal have a value for a scalar only
        values = [[float(norm)]]
    check_nccl_groups()  # the device has computed the gradients
    (gradient_norm,), *read_values = values
    beyond_limit = 0 if rows_beyond_limit is None else int(read_values.pop(0)[0])
    skipped = beyond_limit > 0 or not isfinite(gradient_norm)
    if skipped and pending is not None:
        assert isinstance(optimizer, UpdateByPiece)
        optimizer.undo_counts()
    if beyond_limit:
        _drop_gradients(optimizer)
        return StepUpdate(gradient_norm, True, tuple(read_values), rows_beyond_limit=beyond_limit)
    if scaler is not None:
        scaler.update(skipped)
    with mark_phase("update"):
        if isinstance(optimizer, OffloadedOptimizer) and optimizer.is_updating:
            assert max_grad_norm is None, "gradients are clipped before their update"
            optimizer.end_step(gradient_norm)
        elif not skipped and pending is None:
            if (factor := clipping.compute_factor(gradient_norm)) != 1.0:
                _scale_gradients(model, optimizer, factor)
            set_learning_rate(optimizer, learning_rate)
            model.invalidate_weights()
            optimizer.step()
            if isinstance(optimizer, OffloadedOptimizer) and not overlaps_forward:
                optimizer.wait_for_update()
        if not skipped and router_table is not None:
            update_balance_biases(model.decoder, router_table)
        _drop_gradients(optimizer)
    if times is not None:
        times.mark("optimizer")
    return StepUpdate(gradient_norm, skipped, tuple(read_values))


def _compute_norm(model: ParallelModel, loss_scale: float) -> Tensor:
    """Compute the gradient norm without the loss scale, a scalar, identical on all ranks."""
    norm = compute_global_norm(
        model.list_norm_gradients(),
        model.sum_over,
        stage_axes=model.stage_axes,
        device=model.device,
    )
    return synchronise_norm(norm / loss_scale, lambda scalar: model.sum_over(scalar, AXES))


@dataclass(frozen=True)
class _Clipping:
    """Factor of the gradients, from their norm: on the host, or on the device with equal bits."""

    loss_scale: float
    max_grad_norm: float | None

    def compute_factor(self, norm: float) -> float:
        """Compute the factor for a finite norm."""
        factor = 1.0 / self.loss_scale
        if self.max_grad_norm is not None:
            factor *= compute_clip_coefficient(norm, self.max_grad_norm)
        return factor

    def find_on_device(self, norm: Tensor, rows_beyond_limit: Tensor | None) -> DeviceFactor:
        """Compute the factor, and whether the step is skipped, without a wait for the device."""
        factor = torch.full_like(norm, 1.0 / self.loss_scale)
        if self.max_grad_norm is not None:
            factor *= compute_clip_coefficient_on_device(norm, self.max_grad_norm)
        is_applied = norm.isfinite()
        if rows_beyond_limit is not None:
            is_applied &= rows_beyond_limit == 0
        return DeviceFactor.from_value(torch.where(is_applied, factor, torch.nan).float())


def _launch_before_wait(
    model: ParallelModel,
    optimizer: torch.optim.Optimizer,
    clipping: _Clipping,
    tensors: Sequence[Tensor],
    rows_beyond_limit: Tensor | None,
) -> PendingRead | None:
    """Begin to read tensors, the norm first, and launch the update behind that copy.

    Returns None, and does nothing, where the host must know whether the step is skipped.
    """
    norm, *_ = tensors
    if not (
        isinstance(optimizer, UpdateByPiece)
        and optimizer.can_skip_on_device()
        and norm.is_cuda
        and not isinstance(norm, FakeTensor)
        and model.trained_offload is None
    ):
        return None
    pending = PendingRead(tensors)
    optimizer.device_factor = clipping.find_on_device(norm, rows_beyond_limit)
    model.invalidate_weights()
    optimizer.step()
    return pending


def _pass_on(model: ParallelModel, optimizer: UpdateByPiece) -> None:
    """Pass on what an update may do with new weights: begin gathers and write copies."""
    if model.early_gathers is not None:
        optimizer.update_parts = model.early_gathers.parts
    if model.decoder.working_weights is not None:
        optimizer.find_copy = model.decoder.working_weights.find


def _drop_gradients(optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=True)
    if isinstance(optimizer, UpdateByPiece):
        optimizer.discard_preparation()


def _scale_gradients(model: ParallelModel, optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Multiply the gradients of the update by a factor, where the update reads them or in it."""
    if isinstance(optimizer, OffloadedOptimizer) and optimizer.host_update is not None:
        optimizer.host_update.scale_gradients(factor)  # of offloaded weights too
        return
    if isinstance(optimizer, UpdateByPiece) and optimizer.applies_factor:
        optimizer.gradient_factor = factor
    else:
        scale_([gradient for gradient, _ in model.list_gradients() if gradient is not None], factor)
    if model.trained_offload is not None:
        model.trained_offload.scale_gradients(factor)
