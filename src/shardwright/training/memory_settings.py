"""Settings of a run whose `auto` takes memory where it is free (`planner.memory_settings`)."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch

from shardwright.planner.memory_settings import resolve_memory_settings
from shardwright.planner.problem import build_plan_candidate
from shardwright.training.checks.run_checks import ValidatedRun
from shardwright.training.rank_sync import RankSync

logger = logging.getLogger(__name__)


def agree_on_memory_settings(
    validated_run: ValidatedRun, rank_sync: RankSync, device: torch.device
) -> ValidatedRun:
    """Return the run with these settings resolved; log them with their reasons.

    All ranks choose by the device with the least free memory, since ranks that share the vocabulary
    compute a chunk together. On a CPU the number of tokens is fixed, and copies are not made where
    they take memory. Collective.
    """
    model = validated_run.recipe.model
    if model.loss_kernel != "chunked":
        logger.info("loss: %s's kernel, in chunks of its own", model.loss_kernel)
    if device.type != "cuda":
        if not model.has_auto_loss_chunk:
            return validated_run
        tokens = model.smallest_loss_chunk
        logger.info("loss: chunks of %s tokens (auto: fixed on a CPU)", f"{tokens:,}")
        return _update(validated_run, "model", loss_chunk_tokens=tokens)
    local_bytes, _ = torch.cuda.mem_get_info(device)
    free_bytes = min(free for (free,) in rank_sync.gather([float(local_bytes)]))
    return take_free_memory(validated_run, free_bytes)


def take_free_memory(validated_run: ValidatedRun, free_bytes: float) -> ValidatedRun:
    """Return the run with the settings that the planner resolves by free bytes of the fullest
    device."""
    candidate = build_plan_candidate(validated_run.recipe, validated_run.plan)
    resolved, lines = resolve_memory_settings(validated_run.shape, candidate, free_bytes)
    for line in lines:
        logger.info("%s", line)
    run = validated_run
    if resolved.is_loss_chunk_auto != candidate.is_loss_chunk_auto:
        run = _update(run, "model", loss_chunk_tokens=resolved.loss_chunk_tokens)
    if resolved.working_weights != candidate.working_weights:
        precision = run.plan.precision.model_copy(update={"working_weights": True})
        run = replace(run, plan=replace(run.plan, precision=precision))
        run = replace(run, recipe=run.recipe.model_copy(update={"precision": precision}))
    if resolved.is_read_ahead_auto != candidate.is_read_ahead_auto:
        run = _update(run, "offload", read_ahead_bytes=resolved.ahead_bytes)
    return run if run is validated_run else replace(run, planned_recipe=validated_run.recipe)


def _update(validated_run: ValidatedRun, section: str, **values: Any) -> ValidatedRun:
    """Return the run with values of a section of its recipe replaced."""
    recipe = validated_run.recipe
    changed = getattr(recipe, section).model_copy(update=values)
    return replace(validated_run, recipe=recipe.model_copy(update={section: changed}))
