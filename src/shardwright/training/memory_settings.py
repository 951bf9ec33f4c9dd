"""Settings whose `auto` takes memory where it is free: `model.loss_chunk_tokens`, then
`precision.working_weights`, then `offload.read_ahead_bytes`.

The sum of the head's weight gradient, in fp32, is read and written once per chunk. Working weights
take 2 bytes per parameter, and save reading the master weights and writing casts. Moments that are
read ahead shorten the update by their transfer.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from shardwright.architecture import HFShape
from shardwright.planner.problem import build_plan_candidate
from shardwright.planner.time.update_time import saves_casts
from shardwright.planner.update_place import choose_update_place
from shardwright.training.checks.run_checks import ValidatedRun
from shardwright.training.metrics.run_prediction import predict_training_memory
from shardwright.training.rank_sync import RankSync
from shardwright.units import format_bytes

logger = logging.getLogger(__name__)

LARGER_CHUNKS = (8192, 4096, 2048)
"""Tokens of a chunk of the loss, the best first."""
USED_SHARE = 0.85
"""Share of the free memory that a prediction with a larger chunk, or with copies, may need."""
_ALL_BYTES = 2**40
"""More than the moments of any rank."""


def agree_on_memory_settings(
    validated_run: ValidatedRun, rank_sync: RankSync, device: torch.device
) -> ValidatedRun:
    """Return the run with these settings resolved; log them with their reasons.

    All ranks choose by the device with the least free memory, since ranks that share the vocabulary
    compute a chunk together. On a CPU the number of tokens is fixed, and copies are not made where
    they take memory. Collective.
    """
    model = validated_run.recipe.model
    has_auto_chunk = model.loss_kernel == "chunked" and model.loss_chunk_tokens == "auto"
    if model.loss_kernel != "chunked":
        logger.info("loss: %s's kernel, in chunks of its own", model.loss_kernel)
    if device.type != "cuda":
        if has_auto_chunk:
            validated_run = _take_chunk(validated_run, model.smallest_loss_chunk, "fixed on a CPU")
        return validated_run
    local_bytes, _ = torch.cuda.mem_get_info(device)
    free_bytes = min(free for (free,) in rank_sync.gather([float(local_bytes)]))
    if has_auto_chunk:
        validated_run = _take_chunk(validated_run, *choose_loss_chunk(validated_run, free_bytes))
    return choose_read_ahead(choose_working_weights(validated_run, free_bytes), free_bytes)


def choose_loss_chunk(validated_run: ValidatedRun, free_bytes: float) -> tuple[int, str]:
    """Choose the tokens of a chunk by free bytes of the fullest device; also return the reason.

    More tokens than a micro-batch has on a rank make no difference.
    """
    batch = validated_run.plan.batch
    num_tokens = batch.micro_batch_size * batch.sequence_length // validated_run.plan.layout.cp
    smallest = validated_run.recipe.model.smallest_loss_chunk
    if isinstance(validated_run.shape, HFShape):
        return smallest, "memory of transformers' own classes is not predicted"
    needed = 0.0
    for chunk_tokens in LARGER_CHUNKS:
        if chunk_tokens >= 2 * num_tokens:
            continue
        needed = predict_training_memory(set_loss_chunk(validated_run, chunk_tokens)).total
        if needed <= USED_SHARE * free_bytes:
            return chunk_tokens, (
                f"{format_bytes(needed)} are predicted, {format_bytes(free_bytes)} free"
            )
    if needed == 0.0:
        return smallest, f"a micro-batch has {num_tokens:,} tokens"
    return smallest, (
        f"with more, {format_bytes(needed)} are predicted, {format_bytes(free_bytes)} free"
    )


def set_loss_chunk(validated_run: ValidatedRun, chunk_tokens: int) -> ValidatedRun:
    """Return the run with chunks of this many tokens."""
    recipe = validated_run.recipe
    model = recipe.model.model_copy(update={"loss_chunk_tokens": chunk_tokens})
    return replace(validated_run, recipe=recipe.model_copy(update={"model": model}))


def _take_chunk(validated_run: ValidatedRun, chunk_tokens: int, reason: str) -> ValidatedRun:
    logger.info("loss: chunks of %s tokens (auto: %s)", f"{chunk_tokens:,}", reason)
    return set_loss_chunk(validated_run, chunk_tokens)


def choose_working_weights(validated_run: ValidatedRun, free_bytes: float) -> ValidatedRun:
    """Return the run with working weights if `auto` makes none yet, they save casts and fit."""
    plan = validated_run.plan
    recipe = validated_run.recipe
    if recipe.working_weights != "auto" or plan.has_working_weights:
        return validated_run
    precision = plan.precision.model_copy(update={"working_weights": True})
    copied = replace(
        validated_run,
        plan=replace(plan, precision=precision),
        recipe=recipe.model_copy(update={"precision": precision}),
    )
    candidate = build_plan_candidate(recipe, plan)
    if not copied.plan.has_working_weights or not saves_casts(candidate, "gpu"):
        return validated_run
    needed = predict_training_memory(copied).total
    has_memory = needed <= USED_SHARE * free_bytes
    logger.info(
        "working weights: %s (auto: with them %s are predicted, %s free)",
        "yes" if has_memory else "no",
        format_bytes(needed),
        format_bytes(free_bytes),
    )
    return copied if has_memory else validated_run


def choose_read_ahead(validated_run: ValidatedRun, free_bytes: float) -> ValidatedRun:
    """Return the run with the bytes of moments that `auto` reads ahead, in whole buffers.

    At most half of the moments: with more of them on the device nothing further is hidden, unless
    the passes are much shorter than the transfers.
    """
    section = validated_run.recipe.moved_offload
    is_read = (
        section.optimizer == "host" and choose_update_place(validated_run.recipe).place == "device"
    )
    if section.read_ahead_bytes != "auto" or not is_read:
        return validated_run
    if isinstance(validated_run.shape, HFShape):
        return _take_read_ahead(validated_run, 0)
    without = predict_training_memory(validated_run)
    whole = predict_training_memory(_take_read_ahead(validated_run, _ALL_BYTES))
    spare_bytes = max(0.0, USED_SHARE * free_bytes - without.total)
    share = min(0.5, spare_bytes / max(1.0, whole.total - without.total))
    num_buffers = int(share * (whole.optimizer - without.optimizer) // section.buffer_bytes)
    ahead_bytes = num_buffers * section.buffer_bytes
    logger.info(
        "offload: %s of moments are read during the passes before their update (auto: %s are "
        "predicted without, %s free)",
        format_bytes(ahead_bytes),
        format_bytes(without.total),
        format_bytes(free_bytes),
    )
    return _take_read_ahead(validated_run, ahead_bytes)


def _take_read_ahead(validated_run: ValidatedRun, ahead_bytes: int) -> ValidatedRun:
    recipe = validated_run.recipe
    section = recipe.offload.model_copy(update={"read_ahead_bytes": ahead_bytes})
    return replace(validated_run, recipe=recipe.model_copy(update={"offload": section}))
