"""Settings of a run whose `auto` takes memory where it is free (`planner.memory_settings`)."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from shardwright.architecture import HFShape
from shardwright.planner.memory_settings import apply_memory_settings, resolve_memory_settings
from shardwright.planner.problem import build_plan_candidate, get_recipe_facts
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
        recipe = validated_run.recipe
        section = model.model_copy(update={"loss_chunk_tokens": tokens})
        return replace(validated_run, recipe=recipe.model_copy(update={"model": section}))
    local_bytes, _ = torch.cuda.mem_get_info(device)
    free_bytes = min(free for (free,) in rank_sync.gather([float(local_bytes)]))
    return take_free_memory(validated_run, free_bytes)


def take_free_memory(validated_run: ValidatedRun, free_bytes: float) -> ValidatedRun:
    """Return the run with the settings that the planner resolves by free bytes of the fullest
    device."""
    candidate = build_plan_candidate(validated_run.recipe, validated_run.plan)
    shape = validated_run.shape
    facts = None if isinstance(shape, HFShape) else get_recipe_facts(validated_run.recipe, shape)
    resolved, lines = resolve_memory_settings(facts, candidate, free_bytes)
    for line in lines:
        logger.info("%s", line)
    if resolved == candidate:
        return validated_run
    planned = validated_run.recipe
    recipe, plan = apply_memory_settings(planned, validated_run.plan, candidate, resolved)
    return replace(validated_run, recipe=recipe, plan=plan, planned_recipe=planned)
