"""Lengths of the rows of a run: whether they end early, and what the planner predicts them from."""

from __future__ import annotations

import logging

from shardwright.architecture import ModelShape
from shardwright.config import Recipe
from shardwright.data.model_data import prepare_for_model
from shardwright.data.prepared_data import PreparedData
from shardwright.data.run_order import build_run_order, list_row_documents
from shardwright.errors import InputError
from shardwright.layout import Layout
from shardwright.model.routing import ExpertRules, resolve_expert_rules
from shardwright.placement import has_micro_batch_scales
from shardwright.planner.training_rows import MAX_STEPS, TrainingRows
from shardwright.plans import build_work_balance

logger = logging.getLogger(__name__)

_MAX_ROWS = 16_384
"""Largest number of rows whose lengths are read, unless a step has more."""


def has_short_rows(recipe: Recipe, packing: str, expert_rules: ExpertRules | None) -> bool:
    """Return True if rows end with the longest of their micro-batch; log why if they cannot."""
    if packing == "windows" or recipe.data.padding == "max_length":
        return False
    if expert_rules not in (None, ExpertRules()):
        logger.info(
            "all rows are padded to training.sequence_length: "
            "balancing and capacity of experts count tokens per row"
        )
        return False
    if has_micro_batch_scales(recipe.precision.low_precision):
        logger.info(
            "all rows are padded to training.sequence_length: "
            "8-bit scales of a whole micro-batch span padding too"
        )
        return False
    return True


def prepare_training_rows(recipe: Recipe, num_ranks: int) -> TrainingRows:
    """Prepare the data and read the lengths of the rows of the first steps.

    Raises:
        InputError: the sources are streamed, or cannot be prepared.
    """
    if recipe.data.streaming is not None:
        raise InputError(
            "the rows of streamed sources are not read for a plan, because that fetches them",
            field="data.streaming",
            remedy="Plan with full rows (without --data), or without `data.streaming`",
        )
    shape, data = prepare_for_model(recipe)
    training = recipe.training
    per_rank = (training.micro_batch_size or 1) * (training.gradient_accumulation_steps or 1)
    return read_training_rows(
        recipe, shape, data, training.global_batch_size or per_rank * num_ranks
    )


def read_training_rows(
    recipe: Recipe, shape: ModelShape, data: PreparedData, rows_per_step: int
) -> TrainingRows:
    """Read the lengths of the rows of the first steps.

    Args:
        rows_per_step: sequences of the largest global batch that is planned.
    """
    num_rows = max(rows_per_step, min(MAX_STEPS * rows_per_step, _MAX_ROWS))
    dataset = data.train
    rules = resolve_expert_rules(recipe.moe, shape)
    is_short = has_short_rows(recipe, data.report.packing, rules)
    is_packed = dataset.get_sample(0).document_ids is not None
    length = recipe.training.sequence_length
    return TrainingRows(
        list_row_documents(dataset, build_run_order(dataset, recipe.seed, rows_per_step), num_rows),
        length,
        is_packed=is_packed,
        is_uneven=dataset.is_uneven,
        pad_multiple=recipe.data.pad_to_multiple_of if is_short else None,
        balance=build_work_balance(shape, Layout(), length, is_padded=is_short and not is_packed)
        if recipe.data.assignment == "work"
        else None,
    )
