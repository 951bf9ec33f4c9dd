"""Choice of `model.loss_chunk_tokens: auto`: larger chunks where memory is free.

The sum of the head's weight gradient, in fp32, is read and written once per chunk.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from shardwright.architecture import HFShape
from shardwright.training.checks.run_checks import ValidatedRun
from shardwright.training.metrics.run_prediction import predict_training_memory
from shardwright.training.rank_sync import RankSync
from shardwright.units import format_bytes

logger = logging.getLogger(__name__)

_LARGER_CHUNKS = (8192, 4096, 2048)
_USED_SHARE = 0.85
"""Share of the free memory that a prediction with a larger chunk may need."""


def agree_on_loss_chunk(
    validated_run: ValidatedRun, rank_sync: RankSync, device: torch.device
) -> ValidatedRun:
    """Return the run with a number of tokens in place of `auto`; log it with its reason.

    All ranks choose by the device with the least free memory, since ranks that share the vocabulary
    compute a chunk together. On a CPU the number is fixed. Collective.
    """
    model = validated_run.recipe.model
    if model.loss_kernel != "chunked":
        logger.info("loss: %s's kernel, in chunks of its own", model.loss_kernel)
        return validated_run
    if model.loss_chunk_tokens != "auto":
        return validated_run
    chunk_tokens = model.smallest_loss_chunk
    reason = "fixed on a CPU"
    if device.type == "cuda":
        local_bytes, _ = torch.cuda.mem_get_info(device)
        free_bytes = min(free for (free,) in rank_sync.gather([float(local_bytes)]))
        chunk_tokens, reason = choose_loss_chunk(validated_run, free_bytes)
    logger.info("loss: chunks of %s tokens (auto: %s)", f"{chunk_tokens:,}", reason)
    return set_loss_chunk(validated_run, chunk_tokens)


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
    for chunk_tokens in _LARGER_CHUNKS:
        if chunk_tokens >= 2 * num_tokens:
            continue
        needed = predict_training_memory(set_loss_chunk(validated_run, chunk_tokens)).total
        if needed <= _USED_SHARE * free_bytes:
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
