"""Preference tuning: loss of pairs of responses against a reference model, and its metrics.

A row holds a pair as two documents: the chosen response, then the rejected one. They are kept
apart like any other documents.

Legend: B pairs (rows), T tokens of a row, N tokens of a micro-batch on this context rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwright.config import Recipe
from shardwright.config.data import IGNORED_LABEL
from shardwright.config.preference import PreferenceSection
from shardwright.data.loader import MicroBatch
from shardwright.model.head import LossFunction
from shardwright.numerics.loss import compute_token_losses
from shardwright.numerics.preference_loss import (
    PairLosses,
    PreferenceLossSettings,
    compute_preference_loss,
    compute_response_log_probs,
)
from shardwright.parallel import ParallelModel


def has_frozen_reference(recipe: Recipe) -> bool:
    """Return True if a second model is the reference, not the model without its adapters."""
    assert recipe.preference is not None
    if recipe.preference.reference is None:
        return recipe.adapters is None
    return recipe.preference.reference == "frozen"


@dataclass(frozen=True)
class PreferenceMetrics:
    """Means over the pairs of a step on all ranks.

    A reward is beta x (log-probability of a response - log-probability under the reference).
    """

    reward_chosen: float
    reward_rejected: float
    reward_margin: float
    reward_accuracy: float
    """Share of pairs whose chosen response has the higher reward."""

    @classmethod
    def from_totals(cls, totals: Sequence[float]) -> PreferenceMetrics:
        """Return the means from the sums of `PreferenceObjective.pop_totals`."""
        chosen, rejected, num_correct, num_pairs = totals
        count = max(1.0, num_pairs)
        return cls(
            chosen / count, rejected / count, (chosen - rejected) / count, num_correct / count
        )


class PreferenceObjective:
    """Objective of preference tuning: loss of the pairs, divided by their number.

    Args:
        model: Model that is trained.
        reference: Frozen model with the initial weights, in the same layout; None uses `model`
            with its adapters disabled.
        chunk_tokens: Tokens whose logits are in memory at a time.
    """

    def __init__(
        self,
        section: PreferenceSection,
        model: ParallelModel,
        reference: ParallelModel | None,
        chunk_tokens: int,
    ) -> None:
        self.loss_settings = PreferenceLossSettings(section.beta, section.label_smoothing)
        self.model = model
        self.reference = reference
        self.chunk_tokens = chunk_tokens
        self._recorded: list[Tensor] = []

    def prepare(self, micro_batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Add the log-probabilities of the responses under the reference to the batches.

        Computed before the model's first forward pass, because nothing else can run between the
        actions of a pipeline's schedule. Pipeline ranks without the head get and need none.
        """
        log_probs = self.compute_reference_log_probs(micro_batches)
        return [
            replace(batch, reference_B2=pair)
            for batch, pair in zip(micro_batches, log_probs, strict=True)
        ]

    def arguments(self, batch: MicroBatch) -> dict[str, Any]:
        """Return the decoder's arguments for a batch, with the loss of its pairs."""

        def loss(*head: Any, **options: Any) -> Tensor:
            assert batch.reference_B2 is not None, (
                "the rank with the head has the log-probabilities"
            )
            return compute_preference_loss(
                *head,
                reference_B2=batch.reference_B2,
                settings=self.loss_settings,
                sum_over_row=self._sum_over_row,
                loss_share=1.0 / self.model.layout.cp,
                record=self._record_pairs,
                chunk_tokens=self.chunk_tokens,
                **options,
            )

        return batch.build_model_arguments() | {"row_loss": _PairLoss(batch, loss)}

    def count(self, batch: MicroBatch) -> int:
        """Count the pairs, without the padding rows at the end of an evaluation."""
        return int((batch.labels_BT != IGNORED_LABEL).any(dim=1).sum())

    def compute_reference_log_probs(
        self, micro_batches: Sequence[MicroBatch]
    ) -> list[Tensor | None]:
        """Compute the log-probabilities of the responses under the reference.

        Returns `[B, 2]` in fp64 for each micro-batch, None on ranks without the head.
        """
        log_probs: dict[int, Tensor] = {}

        def read(*head: Any, sides_N: Tensor, samples_B: Tensor, **options: Any) -> Tensor:
            losses_N = compute_token_losses(*head, chunk_tokens=self.chunk_tokens, **options)
            log_probs[int(samples_B[0])] = compute_response_log_probs(
                losses_N, sides_N, len(samples_B), self._sum_over_row
            )
            return losses_N.sum()

        def arguments(batch: MicroBatch) -> dict[str, Any]:
            return batch.build_model_arguments() | {
                "row_loss": _PairLoss(batch, partial(read, samples_B=batch.sample_indices_B))
            }

        with self._use_reference() as model:
            model.compute_losses(micro_batches, arguments)
        return [log_probs.get(int(batch.sample_indices_B[0])) for batch in micro_batches]

    @contextmanager
    def _use_reference(self) -> Iterator[ParallelModel]:
        if self.reference is not None:
            with self.reference.evaluate_mode():
                yield self.reference
            return
        with self.model.evaluate_mode(), self.model.decoder.without_adapters():
            yield self.model

    def _sum_over_row(self, tensor: Tensor) -> Tensor:
        return self.model.sum_over(tensor, ("cp",))

    def _record_pairs(self, pairs: PairLosses) -> None:
        chosen_B, rejected_B = pairs.rewards_B2.detach().unbind(1)
        columns = [
            chosen_B,
            rejected_B,
            (chosen_B > rejected_B).double(),
            torch.ones_like(chosen_B),
        ]
        self._recorded.append((torch.stack(columns) * pairs.valid_B).sum(dim=1))

    def pop_metrics(self) -> PreferenceMetrics:
        """Return the means of the pairs since the last call, over all ranks. Collective."""
        return PreferenceMetrics.from_totals(self.pop_totals().tolist())

    def pop_totals(self) -> Tensor:
        """Return the sums of the pairs since the last call, over all ranks. Collective.

        `[4]` in fp64 on the device, for `PreferenceMetrics.from_totals`.
        """
        total = (
            torch.stack(self._recorded).sum(dim=0)
            if self._recorded
            else torch.zeros(4, dtype=torch.float64, device=self.model.device)
        )
        self._recorded.clear()
        # Of a pipeline's ranks, only the one with the head has recorded pairs.
        return self.model.sum_over_batch(self.model.sum_over(total, ("pp",)))


class _PairLoss:
    """Loss of pairs with the side (pair and response) of each token."""

    def __init__(self, batch: MicroBatch, loss: Callable[..., Tensor]) -> None:
        assert batch.document_ids_BT is not None, "the responses of a pair are documents of a row"
        rows_B1 = torch.arange(len(batch.labels_BT), device=batch.labels_BT.device).unsqueeze(1)
        # Padding after the responses is unsupervised, so it may count to either side.
        self.sides_BT = 2 * rows_B1 + batch.document_ids_BT.clamp(max=1)
        self.loss = loss

    def __call__(self, select_tokens: Callable[[Tensor], Tensor]) -> LossFunction:
        return partial(self.loss, sides_N=select_tokens(self.sides_BT))
