"""Mean loss over the validation set, under whatever layout trains."""

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
    """`loss` in nats per supervised token (weighed by their loss weights; of preferences per pair), over `tokens` on all ranks."""

    loss: float
    tokens: int


def evaluate(
    checked: Checked, model: ParallelModel, data_rank: int, abandon: Callable[[], bool], objective: Objective = TOKENS
) -> Evaluated | None:
    """The mean loss of the current weights; every rank calls this and gets the same.

    Args:
        objective: what is learned; the loss is per thing that it counts.
        abandon: asked before every batch, answered alike on every rank; True ends the evaluation without a result.
    """
    assert checked.data.validation is not None
    section, batch_plan = checked.recipe.evaluation, checked.plan.batch
    if section.micro_batch_size is not None:
        batch_plan = replace(batch_plan, micro_batch_size=section.micro_batch_size)
    loss_sum = torch.zeros((), dtype=torch.float64, device=model.device)
    num_supervised, num_counted = 0, 0.0
    model.decoder.eval()
    try:
        with model.evaluating():
            batches = evaluation_micro_batches(checked.data.validation, batch_plan, data_rank, max_batches=section.max_batches)
            # A pipeline is filled by several micro-batches: twice as many as ranks leave it a third of its time, or less, to wait.
            at_once = 2 * model.layout.pp if model.layout.pp > 1 else 1
            while here := list(islice(batches, at_once)):
                if abandon():
                    return None
                loss_sum += model.losses(objective.prepare(here), objective.arguments)
                num_supervised += sum(batch.num_supervised for batch in here)
                num_counted += sum(objective.count(batch) for batch in here)
    finally:
        model.decoder.train()
    numbers = torch.tensor([num_supervised, num_counted], dtype=torch.float64, device=model.device)
    tokens, count = model.sum_over_batch(numbers).tolist()
    return Evaluated(float(model.sum_over_data(loss_sum)) / (count or 1.0), int(tokens))
