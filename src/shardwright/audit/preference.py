"""Loss of direct preference optimisation (DPO) over the pairs of a recorded micro-batch.

The rows of a micro-batch are the chosen responses, then the rejected ones in the same order, as
TRL passes them.

Shapes: B pairs, V vocabulary, T tokens of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.audit.batch_reading import BatchReading
from shardwright.config.data import IGNORED_LABEL
from shardwright.errors import InputError


@dataclass(frozen=True)
class PreferenceSettings:
    """Settings of the DPO loss that the trainer used.

    `reference_path` is the Hugging Face folder of the reference model. None uses recorded
    log-probabilities, or the model without its adapters.
    """

    beta: float
    label_smoothing: float = 0.0
    reference_path: Path | None = None

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not self.beta > 0.0:
            raise InputError("not a DPO loss", field="--beta", got=self.beta, allowed="above 0")
        if not 0.0 <= self.label_smoothing < 0.5:
            raise InputError(
                "not a fraction of pairs with swapped labels",
                field="--label-smoothing",
                got=self.label_smoothing,
                allowed="from 0 to below 0.5",
            )


def sum_row_log_probs(logits: Tensor, targets: Tensor, reading: BatchReading) -> Tensor:
    """Sum the log-probabilities of each row's targets, [2 B].

    Args:
        logits: [2 B, T, V].
        targets: [2 B, T]; -100 for tokens outside of responses.
        reading: `averages_log_probs` divides by the number of targets.
    """
    losses = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED_LABEL, reduction="none"
    )
    sums = -losses.view(targets.shape).sum(1)
    if reading.averages_log_probs:
        sums = sums / (targets != IGNORED_LABEL).sum(1).clamp(min=1)
    return sums


def sum_pair_losses(
    log_probs: Tensor, reference: Tensor, settings: PreferenceSettings, reading: BatchReading
) -> Tensor:
    """Sum the DPO losses of a micro-batch's pairs.

    Args:
        log_probs: Log-probabilities of the responses, [2 B].
        reference: The same under the reference model, [2 B].
        settings: Beta and label smoothing.
        reading: Mistakes of pairs to repeat.

    Source: Rafailov et al. 2023, Direct Preference Optimization, equation 7; Mitchell 2023 for
    label smoothing (conservative DPO).
    """
    if reading.omits_reference:
        reference = torch.zeros_like(reference)
    ratios = log_probs - reference
    if reading.is_own_reference:
        ratios = log_probs - log_probs.detach()
    chosen, rejected = ratios.chunk(2)
    if reading.swaps_pairs:
        chosen, rejected = rejected, chosen
    margin = settings.beta * (chosen - rejected)
    share = settings.label_smoothing
    return -((1.0 - share) * F.logsigmoid(margin) + share * F.logsigmoid(-margin)).sum()
