"""Evaluation during training: mean validation loss and sample texts, under any layout."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import islice

import torch

from shardwright.data.loader import iterate_evaluation_micro_batches
from shardwright.parallel import ParallelModel
from shardwright.training.checks.run_checks import ValidatedRun
from shardwright.training.preference_objective import PreferenceObjective
from shardwright.training.rank_context import RankContext
from shardwright.training.sample_texts import choose_prompts, generate_texts, save_texts
from shardwright.training.step import TOKEN_OBJECTIVE, Objective
from shardwright.training.training_state import TrainingState


@dataclass(frozen=True)
class EvaluationResult:
    """Mean `loss` in nats and number of supervised `tokens` on all ranks.

    The mean is per supervised token, weighted by the loss weights, or per preference pair.
    """

    loss: float
    tokens: int
    is_best: bool = False
    """True if the loss is the lowest of the run so far."""


def evaluate(
    context: RankContext, state: TrainingState, *, is_last: bool
) -> EvaluationResult | None:
    """Evaluate the current weights, log the result and write sample texts. Collective.

    Returns None if a stop is requested meanwhile, except at the last step (`is_last`).
    """
    start_seconds = time.perf_counter()

    def is_stop_requested() -> bool:
        context.watchdog.begin_phase("evaluate", state.step)
        return not is_last and context.rank_sync.any_rank(bool(context.stop_request))

    result = evaluate_loss(
        context.validated_run, state.model, context.data_rank, is_stop_requested, state.objective
    )
    pairs = (
        state.objective.pop_metrics() if isinstance(state.objective, PreferenceObjective) else None
    )
    if result is None:
        return None
    state.is_evaluation_due = False
    result = replace(result, is_best=result.loss < state.best_loss)
    state.best_loss = min(state.best_loss, result.loss)
    context.event_logger.log(
        "evaluation",
        step=state.step,
        loss=result.loss,
        perplexity=math.exp(min(result.loss, 700.0)),
        tokens=result.tokens,
        seconds=time.perf_counter() - start_seconds,
        best=result.is_best,
        **({} if pairs is None else asdict(pairs)),
    )
    _write_samples(context, state, is_stop_requested)
    return result


def _write_samples(
    context: RankContext, state: TrainingState, should_abort: Callable[[], bool]
) -> None:
    """Generate continuations of validation rows, if the recipe asks for them."""
    section = context.recipe.evaluation
    data = context.validated_run.data
    if not section.num_samples:
        return
    assert data.validation is not None
    texts = generate_texts(
        state.model,
        data.tokenizer,
        choose_prompts(data.validation, section.num_samples, section.sample_tokens),
        sequence_length=context.plan.batch.sequence_length,
        max_new_tokens=section.sample_tokens,
        should_abort=should_abort,
    )
    if texts is not None and context.is_main_rank:
        save_texts(context.folder.samples_path, state.step, texts)


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
                max_rows=section.max_rows,
            )
            # Several micro-batches fill a pipeline: with 2 x pp, at most a third is bubble.
            at_once = 2 * model.layout.pp if model.layout.pp > 1 else 1
            while chunk := list(islice(batches, at_once)):
                if should_abort():
                    return None
                if model.device.type == "cuda":
                    chunk = [batch.pin_memory() for batch in chunk]
                loss_sum += model.compute_losses(objective.prepare(chunk), objective.arguments)
                num_supervised += sum(batch.num_supervised for batch in chunk)
                num_counted += sum(objective.count(batch) for batch in chunk)
    finally:
        model.decoder.train()
    numbers = torch.tensor([num_supervised, num_counted], dtype=torch.float64, device=model.device)
    tokens, count = model.sum_over_batch(numbers).tolist()
    return EvaluationResult(float(model.sum_over_data(loss_sum)) / (count or 1.0), int(tokens))
