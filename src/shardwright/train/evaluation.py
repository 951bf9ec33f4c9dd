"""Mean loss over the validation set, under any layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice

import torch

from shardwright.data.loader import evaluation_micro_batches
from shardwright.parallel import ParallelModel
from shardwright.train.preflight import Checked
from shardwright.train.step import TOKENS, Objective


@dataclass(frozen=True)
class Evaluated:
    """Mean `loss` in nats and number of supervised `tokens` on all ranks.

    The mean is per supervised token, weighted by the loss weights, or per preference pair.
    """

    loss: float
    tokens: int


def evaluate(
    checked: Checked,
    model: ParallelModel,
    data_rank: int,
    abandon: Callable[[], bool],
    objective: Objective = TOKENS,
) -> Evaluated | None:
    """Compute the mean validation loss of the current weights. Collective; same on all ranks.

    Args:
        abandon: Called before every batch; returns the same on all ranks. True ends the
            evaluation without a result.
        objective: Objective to evaluate; the loss is divided by its count.
    """
    assert checked.data.validation is not None
    section = checked.recipe.evaluation
    batch_plan = checked.plan.batch
    if section.micro_batch_size is not None:
        batch_plan = replace(batch_plan, micro_batch_size=section.micro_batch_size)
    loss_sum = torch.zeros((), dtype=torch.float64, device=model.device)
    num_supervised = 0
    num_counted = 0.0
    model.decoder.eval()
    try:
        with model.evaluating():
            batches = evaluation_micro_batches(
                checked.data.validation, batch_plan, data_rank, max_batches=section.max_batches
            )
            # Several micro-batches fill a pipeline: with 2 x pp, at most a third is bubble.
            at_once = 2 * model.layout.pp if model.layout.pp > 1 else 1
            while chunk := list(islice(batches, at_once)):
                if abandon():
                    return None
                loss_sum += model.losses(objective.prepare(chunk), objective.arguments)
                num_supervised += sum(batch.num_supervised for batch in chunk)
                num_counted += sum(objective.count(batch) for batch in chunk)
    finally:
        model.decoder.train()
    numbers = torch.tensor([num_supervised, num_counted], dtype=torch.float64, device=model.device)
    tokens, count = model.sum_over_batch(numbers).tolist()
    return Evaluated(float(model.sum_over_data(loss_sum)) / (count or 1.0), int(tokens))
