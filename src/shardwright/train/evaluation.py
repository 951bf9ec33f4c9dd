"""Mean loss over the validation set, under any layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice

import torch

from shardwright.data.loader import iterate_evaluation_micro_batches
from shardwright.parallel import ParallelModel
from shardwright.train.run_checks import ValidatedRun
from shardwright.train.step import TOKEN_OBJECTIVE, Objective


@dataclass(frozen=True)
class EvaluationResult:
    """Mean `loss` in nats and number of supervised `tokens` on all ranks.

    The mean is per supervised token, weighted by the loss weights, or per preference pair.
    """

    loss: float
    tokens: int


def evaluate_loss(
    validated_run: ValidatedRun,
    model: ParallelModel,
    data_rank: int,
    should_abort: Callable[[], bool],
    objective: Objective = TOKEN_OBJECTIVE,
) -> EvaluationResult | None:
    """Compute the mean validation loss of the current weights. Collective; same on all ranks.

    Args:
        should_abort: Called before every batch; returns the same on all ranks. True ends the
            evaluation without a result.
        objective: Objective to evaluate; the loss is divided by its count.
    """
    assert validated_run.data.validation is not None
    section = validated_run.recipe.evaluation
    batch_plan = validated_run.plan.batch
    if section.micro_batch_size is not None:
        batch_plan = replace(batch_plan, micro_batch_size=section.micro_batch_size)
    loss_sum = torch.zeros((), dtype=torch.float64, device=model.device)
    num_supervised = 0
    num_counted = 0.0
    model.decoder.eval()
    try:
        with model.evaluate_mode():
            batches = iterate_evaluation_micro_batches(
                validated_run.data.validation,
                batch_plan,
                data_rank,
                max_batches=section.max_batches,
            )
            # Several micro-batches fill a pipeline: with 2 x pp, at most a third is bubble.
            at_once = 2 * model.layout.pp if model.layout.pp > 1 else 1
            while chunk := list(islice(batches, at_once)):
                if should_abort():
                    return None
                loss_sum += model.compute_losses(objective.prepare(chunk), objective.arguments)
                num_supervised += sum(batch.num_supervised for batch in chunk)
                num_counted += sum(objective.count(batch) for batch in chunk)
    finally:
        model.decoder.train()
    numbers = torch.tensor([num_supervised, num_counted], dtype=torch.float64, device=model.device)
    tokens, count = model.sum_over_batch(numbers).tolist()
    return EvaluationResult(float(model.sum_over_data(loss_sum)) / (count or 1.0), int(tokens))
