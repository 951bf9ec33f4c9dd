"""Learning rate as a pure function of the step, without state: resuming needs only the step."""

from __future__ import annotations

import math

from shardwright.config.training import TrainingSection


def compute_learning_rate(
    step: int, training: TrainingSection, total_steps: int, global_batch_size: int
) -> float:
    """Compute the learning rate of optimizer step `step`, counted from 0.

    During a warmup of w steps, step i has peak x (i + 1) / (w + 1). After it, with progress p =
    (step - w) / (total_steps - w) in [0, 1]: `constant` keeps the peak; `linear` and `cosine`
    decay from the peak at p = 0 to the minimum at p = 1 (the step after the last);
    `warmup_stable_decay` keeps the peak until `decay_steps` before the end and then decays
    linearly. After the end:
    the minimum. `batch_scaling` multiplies peak and minimum by global_batch_size /
    base_batch_size or by its square root.

    Source: nanoGPT's get_lr (warmup and cosine, the same numbers); Hu et al. 2024, MiniCPM
    (warmup-stable-decay); Goyal et al. 2017 (linear) and Malladi et al. 2022 (square root) for
    the batch scaling.
    """
    scale = compute_batch_scale(training, global_batch_size)
    peak = training.learning_rate * scale
    minimum = training.min_learning_rate * scale
    warmup = training.warmup_steps
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    if training.schedule == "constant":
        return peak
    if training.schedule == "warmup_stable_decay":
        num_decay_steps = training.decay_steps or max(1, total_steps // 10)
        decay_start = max(warmup, total_steps - num_decay_steps)
    else:
        decay_start = warmup
    if step >= total_steps:
        return minimum
    progress = max(0.0, (step - decay_start) / max(1, total_steps - decay_start))
    factor = (
        0.5 * (1.0 + math.cos(math.pi * progress))
        if training.schedule == "cosine"
        else 1.0 - progress
    )
    return minimum + factor * (peak - minimum)


def compute_batch_scale(training: TrainingSection, global_batch_size: int) -> float:
    """Return the factor that `batch_scaling` applies to the learning rate.

    >>> section = TrainingSection(sequence_length=1, max_steps=1, learning_rate=1,
    ...                           batch_scaling="sqrt", base_batch_size=8)
    >>> compute_batch_scale(section, 32)
    2.0
    """
    if training.batch_scaling == "none":
        return 1.0
    assert training.base_batch_size is not None  # required by the schema
    ratio = global_batch_size / training.base_batch_size
    return math.sqrt(ratio) if training.batch_scaling == "sqrt" else ratio
