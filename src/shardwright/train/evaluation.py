"""Mean loss over the validation set, under whatever layout trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from shardwright.data.loader import evaluation_micro_batches
from shardwright.parallel import ParallelModel
from shardwright.train.preflight import Checked


@dataclass(frozen=True)
class Evaluated:
    """`loss` in nats per supervised token, over `tokens` of them on all ranks."""

    loss: float
    tokens: int


def evaluate(checked: Checked, model: ParallelModel, data_rank: int, abandon: Callable[[], bool]) -> Evaluated | None:
    """The mean loss of the current weights; every rank calls this and gets the same.

    Args:
        abandon: asked before every batch, answered alike on every rank; True ends the evaluation without a result.
    """
    assert checked.data.validation is not None
    section, batch_plan = checked.recipe.evaluation, checked.plan.batch
    if section.micro_batch_size is not None:
        batch_plan = replace(batch_plan, micro_batch_size=section.micro_batch_size)
    loss_sum = torch.zeros((), dtype=torch.float64, device=model.device)
    num_supervised = 0
    model.decoder.eval()
    try:
        with model.evaluating() as module:
            for batch in evaluation_micro_batches(checked.data.validation, batch_plan, data_rank, max_batches=section.max_batches):
                if abandon():
                    return None
                here = batch.to(model.device)
                loss_sum += module(
                    here.input_ids_BT,
                    positions_BT=here.positions_BT,
                    document_ids_BT=here.document_ids_BT,
                    labels_BT=here.labels_BT,
                ).double()
                num_supervised += here.num_supervised
    finally:
        model.decoder.train()
    tokens = int(model.sum_over_batch(torch.tensor(num_supervised, dtype=torch.int64, device=model.device)))
    return Evaluated(float(model.sum_over_data(loss_sum)) / max(1, tokens), tokens)
