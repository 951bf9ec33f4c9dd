"""One optimizer step: gradients under one normaliser, one norm, one clip, one decision to skip.

Shapes: B sequences, T tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwright.data.loader import MicroBatch
from shardwright.layout import AXES, DATA_AXES
from shardwright.model import DropoutKey
from shardwright.numerics import LossScaler, agree_on_norm, clip_coefficient, global_norm, scale_
from shardwright.optim import set_learning_rate
from shardwright.parallel import ParallelModel
from shardwright.train.experts import move_balance_biases


class Objective(Protocol):
    """What is learned of a micro-batch: how the decoder is called for its summed loss, and what that sum is divided by."""

    def prepare(self, micro_batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """The micro-batches of a step, or of a part of an evaluation, with what has to be known before the model sees the first."""
        ...

    def arguments(self, batch: MicroBatch) -> dict[str, Any]:
        """What the decoder is called with, by name; the batch is on the device."""
        ...

    def count(self, batch: MicroBatch) -> float:
        """How many things were learned, or what they weigh together: its global sum over a step is the one normaliser."""
        ...


class TokenObjective:
    """The supervised tokens: their cross-entropy, divided by their number, or weighed and divided by the sum of their weights."""

    def prepare(self, micro_batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """As they are."""
        return micro_batches

    def arguments(self, batch: MicroBatch) -> dict[str, Any]:
        """Ids, positions, documents, labels and their weights."""
        return batch.arguments()

    def count(self, batch: MicroBatch) -> float:
        """Supervised tokens, or the sum of their weights."""
        return batch.num_supervised if batch.weights_BT is None else batch.weight_sum


TOKENS = TokenObjective()


@dataclass(frozen=True)
class StepLoss:
    """What the forward passes of one step gave, summed over all ranks and micro-batches."""

    loss_sum: Tensor
    """Sum of the losses (of the supervised tokens, in nats), a scalar on the device (reading it waits for the device)."""
    supervised_tokens: Tensor
    """Their number, a scalar on the device."""
    routers: Tensor | None = None
    """What the routers of a sparse model did, as `RouterTally.take` has it, on the device."""

    count: Tensor | None = None
    """What the sum is divided by where that is not the supervised tokens: pairs, or the sum of the tokens' weights."""

    def mean(self) -> float:
        """Loss per supervised token in nats, or per pair."""
        count = self.supervised_tokens if self.count is None else self.count
        return float(self.loss_sum / _at_least_something(count))


@dataclass(frozen=True)
class StepUpdate:
    """What became of the step's gradients; equal on every rank."""

    gradient_norm: float
    """L2 norm of the whole model's gradient, before clipping; inf or nan when the step was skipped for it."""
    skipped: bool


@dataclass
class StepTimes:
    """Marks between the parts of a step; `seconds` adds up what lies between them.

    On CUDA a mark is an event in the stream, which costs the host nothing; the sums wait for the device. `reduction` is what is
    left of the gradients' sums when the backward pass has reached the embeddings: the part that nothing hides.
    """

    device: torch.device
    _marks: list[tuple[str, float | torch.cuda.Event]] = field(default_factory=list)
    _began: float = 0.0

    def mark(self, part: str) -> None:
        """What began at the last mark ends here, and belongs to `part`."""
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((part, event))
        else:
            self._marks.append((part, time.perf_counter()))

    def start(self) -> None:
        """Forget the last step; time runs from here."""
        self._marks.clear()
        self._began = time.perf_counter()
        self.mark("")

    def spans(self) -> list[tuple[str, float, float]]:
        """Each part as it came: its name, and from when to when, on this process's performance counter.

        On CUDA the device must have come to the end; its clock is set by the host's at the start of the step, when it was idle.
        """
        found = []
        for (_, before), (part, after) in zip(self._marks, self._marks[1:], strict=False):
            found.append((part, self._instant(before), self._instant(after)))
        return found

    def _instant(self, mark: float | torch.cuda.Event) -> float:
        if isinstance(mark, float):
            return mark
        first = self._marks[0][1]
        assert isinstance(first, torch.cuda.Event)
        return self._began + first.elapsed_time(mark) / 1000.0

    def seconds(self) -> dict[str, float]:
        """Seconds per part: forward, backward, reduction, optimizer; with a pipeline, waiting for other ranks."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        total = dict.fromkeys(("forward", "backward", "reduction", "optimizer"), 0.0)
        for (_, before), (part, after) in zip(self._marks, self._marks[1:], strict=False):
            total.setdefault(part, 0.0)
            if isinstance(before, float):
                assert isinstance(after, float)
                total[part] += after - before
            else:
                assert isinstance(after, torch.cuda.Event)
                total[part] += before.elapsed_time(after) / 1000.0
        return total


def count_supervised(model: ParallelModel, micro_batches: Sequence[MicroBatch]) -> Tensor:
    """Supervised tokens of a step over all its micro-batches and all ranks: an int64 scalar on the device."""
    number = sum(batch.num_supervised for batch in micro_batches)
    return model.sum_over_batch(torch.tensor(number, dtype=torch.int64, device=model.device))


def count_work(
    model: ParallelModel, micro_batches: Sequence[MicroBatch], flops_per_token: Callable[[int], float]
) -> tuple[int, float]:
    """Tokens that a step computes over all micro-batches and ranks, those that fill rows up included, and a token's model FLOPs.

    The FLOPs are the mean: attention's share of them grows with the row that a token stands in. Waits for all ranks.

    Args:
        flops_per_token: of a row of so many tokens.
    """
    sizes = [batch.input_ids_BT.shape for batch in micro_batches]
    tokens = sum(rows * length for rows, length in sizes)
    flops = sum(rows * length * flops_per_token(length) for rows, length in sizes)
    work = model.sum_over_batch(torch.tensor([tokens, flops], dtype=torch.float64, device=model.device))
    all_tokens, all_flops = work.tolist()
    return int(all_tokens), all_flops / all_tokens


def _count(model: ParallelModel, micro_batches: Sequence[MicroBatch], objective: Objective) -> Tensor:
    number = sum(objective.count(batch) for batch in micro_batches)
    return model.sum_over_batch(torch.tensor(number, dtype=torch.float64, device=model.device))


def _at_least_something(count: Tensor) -> Tensor:
    """What a sum is divided by. Where nothing is supervised the sum is zero, and dividing by one keeps it zero and not nan."""
    return torch.where(count > 0, count, torch.ones_like(count))


def accumulate_gradients(
    model: ParallelModel,
    micro_batches: Sequence[MicroBatch],
    *,
    seed: int,
    step: int,
    loss_scale: float = 1.0,
    times: StepTimes | None = None,
    objective: Objective = TOKENS,
) -> StepLoss:
    """Forward and backward of a step's micro-batches: gradients are those of loss_sum / supervised_tokens, times `loss_scale`.

    One normaliser: the supervised tokens (or their weights, or pairs) of all micro-batches of all ranks are added up first, every
    summed loss is divided by that one number, and gradients are summed. Neither accumulation nor ranks with few supervised tokens
    change the result. A sparse model's router losses are added as means over the step's rows, times `loss_scale`; where nothing is
    supervised nothing is.

    Args:
        micro_batches: this rank's, the same number on every rank.
        seed: of the run, for dropout.
        step: the optimizer step, for dropout.
        loss_scale: for fp16; divided out in `update`.
        times: gets the marks of forward, backward and the reduction that nothing hides.
        objective: what is learned.
    """
    times = times or StepTimes(torch.device("cpu"))
    times.start()
    tokens = count_supervised(model, micro_batches)
    plain = objective is TOKENS and all(batch.weights_BT is None for batch in micro_batches)
    count = tokens if plain else _count(model, micro_batches, objective)
    scale = loss_scale / _at_least_something(count).to(torch.float64)
    micro_batches = objective.prepare(micro_batches)
    routing: dict[str, Tensor] = {}
    if model.decoder.shape.experts is not None:
        num_rows = sum(batch.input_ids_BT.shape[0] for batch in micro_batches) * model.layout.data_ranks
        routing["row_weight"] = (tokens > 0) * torch.tensor(loss_scale / num_rows, dtype=torch.float64, device=model.device)

    def arguments(batch: MicroBatch) -> dict[str, Any]:
        dropout = DropoutKey(seed, step, batch.sample_indices_B) if model.decoder.training else None
        return objective.arguments(batch) | routing | {"dropout": dropout}

    loss_sum = model.differentiate(micro_batches, arguments, scale, times.mark)
    model.finish_gradients()
    loss_sum = model.sum_over_data(loss_sum.to(torch.float64))
    routers = _sum_routers(model)
    times.mark("reduction")
    return StepLoss(loss_sum, tokens, routers, count)


def _sum_routers(model: ParallelModel) -> Tensor | None:
    """What the routers of all ranks did; a pipeline rank knows of its own layers, and tensor-parallel ranks all know the same."""
    shape = model.decoder.shape
    if shape.experts is None:
        return None
    table = model.decoder.router_tally.take(shape.num_layers, shape.experts.num_experts, model.device)
    return model.sum_over(table, ("pp", *DATA_AXES))


def update(
    model: ParallelModel,
    optimizer: torch.optim.Optimizer,
    *,
    learning_rate: float,
    max_grad_norm: float | None,
    scaler: LossScaler | None = None,
    routers: Tensor | None = None,
    times: StepTimes | None = None,
) -> StepUpdate:
    """Norm, clip, optimizer step, gradients dropped. A gradient that is not finite anywhere makes every rank skip.

    The norm is the same number on every rank (shards are summed over all that hold one), and not finite on all as soon as it is on
    one, so the decision is the same, too.

    Args:
        learning_rate: for this step, every group.
        max_grad_norm: clip to this global norm; None clips nothing.
        scaler: fp16's loss scale, by which the gradients are still multiplied.
        routers: `StepLoss.routers`, by which balance biases move.
        times: gets the mark of the optimizer.
    """
    loss_scale = 1.0 if scaler is None else scaler.scale
    gradients = model.gradients()
    norm = global_norm(model.counted_gradients(), model.sum_over, stage_axes=model.stage_axes, device=model.device) / loss_scale
    norm = agree_on_norm(norm, lambda scalar: model.sum_over(scalar, AXES))
    gradient_norm = float(norm)
    skipped = not isfinite(gradient_norm)
    if scaler is not None:
        scaler.update(skipped)
    if not skipped:
        factor = 1.0 / loss_scale
        if max_grad_norm is not None:
            factor *= float(clip_coefficient(norm, max_grad_norm))
        if factor != 1.0:
            scale_([gradient for gradient, _ in gradients if gradient is not None], factor)
        set_learning_rate(optimizer, learning_rate)
        optimizer.step()
        if routers is not None:
            move_balance_biases(model.decoder, routers)
    optimizer.zero_grad(set_to_none=True)
    if times is not None:
        times.mark("optimizer")
    return StepUpdate(gradient_norm, skipped)
