"""Softmax over a vocabulary whose rows are sharded: one rank's rows and the sums over ranks.

Shapes: C tokens, V vocabulary rows of this rank, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class VocabularyShard:
    """One rank's rows of the head.

    Attributes:
        first: vocabulary index of its first row.
        size_of_whole: number of rows over all ranks; each rank's rows are consecutive.
        gather_over: tensor -> every rank's tensor, stacked `[R, ...]`; without gradient.
        whole: logits of this rank's rows `[..., V]` -> logits of all rows, equal on every rank,
            with gradient.
    """

    first_row: int
    vocab_size: int
    gather_ranks: Callable[[Tensor], Tensor]
    gather_logits: Callable[[Tensor], Tensor]

    def map_labels_to_rows(self, labels_C1: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        """Map labels to this rank's rows; also return a mask of the labels whose row it has.

        Labels of other ranks map to an arbitrary row. A label outside the whole vocabulary maps
        to a row that no rank has, so that indexing with it raises the same error as on one
        rank, without making the host wait for the device.
        """
        local_C1 = labels_C1 - self.first_row
        own_C1 = (local_C1 >= 0) & (local_C1 < num_rows)
        valid_C1 = (labels_C1 >= 0) & (labels_C1 < self.vocab_size)
        return torch.where(valid_C1, local_C1.clamp(0, num_rows - 1), num_rows), own_C1

    def normalise(
        self, logits_CV: Tensor, log_probs_CV: Tensor, target_C1: Tensor, *, has_smoothing: bool
    ) -> tuple[Tensor, Tensor]:
        """Turn log-probabilities among this rank's rows into those among all rows, in place.

        It takes one collective.

        Args:
            logits_CV: `log_probs_CV` is their log-softmax over this rank's rows.
            target_C1: the target's logit, or 0 if another rank has it.
            has_smoothing: compute the mean of all log-probabilities too.

        Returns:
            Log-probability of the targets, and mean of the log-probabilities of the whole
            vocabulary (zero unless `has_smoothing`), each `[C]` and equal on every rank.
        """
        # At the largest logit, the local normaliser can be read without cancellation.
        top_C1, index_C1 = logits_CV.max(dim=1, keepdim=True)
        local_normaliser_C1 = top_C1.to(log_probs_CV.dtype) - log_probs_CV.gather(1, index_C1)
        parts = [local_normaliser_C1, target_C1]
        if has_smoothing:
            parts.append(logits_CV.sum(dim=1, keepdim=True, dtype=log_probs_CV.dtype))
        shares_RCP = self.gather_ranks(torch.cat(parts, dim=1))
        normaliser_C1 = shares_RCP[..., :1].logsumexp(dim=0)
        log_probs_CV += local_normaliser_C1 - normaliser_C1
        sums_CP = shares_RCP[..., 1:].sum(dim=0)
        target_C = sums_CP[:, 0] - normaliser_C1[:, 0]
        mean_C = (
            sums_CP[:, 1] / self.vocab_size - normaliser_C1[:, 0]
            if has_smoothing
            else torch.zeros_like(target_C)
        )
        return target_C, mean_C
