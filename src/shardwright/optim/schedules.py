"""Learning rate as a pure function of the step. No torch, no state: resuming needs the step alone."""

from __future__ import annotations

import math

from shardwright.config.training import TrainingSection


def learning_rate_at(step: int, training: TrainingSection, total_steps: int, global_batch_size: int) -> float:
    """Learning rate of optimizer step `step`, counted from 0, in a run of `total_steps`.

    Warmup of w steps: step i runs at peak x (i + 1) / (w + 1). After it, with progress p = (step - w) / (total_steps - w) in
    [0, 1]: `constant` stays; `linear` and `cosine` fall from the peak at p = 0 to the minimum at p = 1 (the step after the last);
    `warmup_stable_decay` stays until `decay_steps` before the end and falls linearly from there. Past the end: the minimum.
    `batch_scaling` multiplies peak and minimum by global_batch_size / base_batch_size, or its square root.

    Source: nanoGPT's get_lr (warmup and cosine, number for number); Hu et al. 2024, MiniCPM (warmup-stable-decay); Goyal et
    al. 2017 (linear) and Malladi et al. 2022 (square root) for the batch.
    """
    scale = batch_scale(training, global_batch_size)
    peak, minimum = training.learning_rate * scale, training.min_learning_rate * scale
    warmup = training.warmup_steps
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    if training.schedule == "constant":
        return peak
    if training.schedule == "warmup_stable_decay":
        decay = training.decay_steps or max(1, total_steps // 10)
        start = max(warmup, total_steps - decay)
    else:
        start = warmup
    if step >= total_steps:
        return minimum
    progress = max(0.0, (step - start) / max(1, total_steps - start))
    share = 0.5 * (1.0 + math.cos(math.pi * progress)) if training.schedule == "cosine" else 1.0 - progress
    return minimum + share * (peak - minimum)


def batch_scale(training: TrainingSection, global_batch_size: int) -> float:
    """Factor that `batch_scaling` puts on the learning rate.

    >>> batch_scale(TrainingSection(sequence_length=1, max_steps=1, learning_rate=1, batch_scaling="sqrt",
    ...                             base_batch_size=8), 32)
    2.0
    """
    if training.batch_scaling == "none":
        return 1.0
    assert training.base_batch_size is not None  # the schema demands it
    ratio = global_batch_size / training.base_batch_size
    return math.sqrt(ratio) if training.batch_scaling == "sqrt" else ratio
