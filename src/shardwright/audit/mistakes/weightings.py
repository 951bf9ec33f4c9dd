"""Weights of micro-batches in a step's gradient: the objective's, and known mistakes.

A step's gradient is the sum of the micro-batches' summed losses' gradients with one weight each.

Shapes: R data ranks, M micro-batches of a rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from shardwright.errors import InputError

OBJECTIVES = ("mean_tokens", "mean_micro_batches", "mean_ranks", "sum_tokens", "dpo")
"""Definitions of a step's loss.

`mean_tokens`: sum over the supervised tokens of the global batch over their number, what users
expect. `mean_micro_batches`: mean of the micro-batches' means. `mean_ranks`: mean of the ranks'
means. `sum_tokens`: the sum, not divided. `dpo`: mean over the pairs of the global batch of the
loss of direct preference optimisation.
"""


class BatchCounts(NamedTuple):
    """Numbers of tokens of every micro-batch; each [R, M] float64, 0 where there is none."""

    supervised: Tensor
    """Terms of the loss: supervised tokens, or pairs."""
    labels: Tensor
    """Labels that are not ignored, before the shift."""
    tokens: Tensor
    exists: Tensor


class Weighting(NamedTuple):
    """Weights [R, M], and the mistakes that lead to them (none for the objective)."""

    mistakes: tuple[str, ...]
    weights: Tensor
    subject: str = ""
    router_factors: Tensor | float = 1.0
    """Factors of the routers' losses under the same mistake, relative to their mean."""


def compute_objective_weights(objective: str, counts: BatchCounts) -> Tensor:
    """Return the weights [R, M] of an objective.

    Raises:
        InputError: an unknown objective.
    """
    if objective not in OBJECTIVES:
        raise InputError(
            "unknown objective", field="--objective", got=objective, allowed=", ".join(OBJECTIVES)
        )
    num_ranks = len(counts.supervised)
    num_batches = counts.exists.sum(1, keepdim=True)
    weights = {
        "mean_tokens": counts.exists / counts.supervised.sum(),
        "mean_micro_batches": counts.exists / counts.supervised / num_batches / num_ranks,
        "mean_ranks": counts.exists / counts.supervised.sum(1, keepdim=True) / num_ranks,
        "sum_tokens": counts.exists,
        "dpo": counts.exists / counts.supervised.sum(),
    }[objective]
    return torch.nan_to_num(weights, nan=0.0, posinf=0.0)


def compute_router_weights(counts: BatchCounts) -> Tensor:
    """Return the weights [R, M] of the mean over micro-batches, for the routers' losses."""
    num_batches = counts.exists.sum(1, keepdim=True)
    return counts.exists / num_batches.clamp(min=1.0) / len(counts.exists)


def iterate_router_factors(counts: BatchCounts) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Yield wrong factors of the routers' losses, [R, M], and the mistakes that lead to them."""
    ranks = len(counts.exists) * counts.exists
    batches = counts.exists.sum(1, keepdim=True) * counts.exists
    if len(counts.exists) > 1:
        yield ("router_loss_multiplied_by_ranks",), ranks
        yield ("router_loss_divided_by_ranks",), counts.exists / len(counts.exists)
    if float(batches.max()) > 1.0:
        yield ("router_loss_multiplied_by_accumulation",), batches
        yield ("router_loss_divided_by_accumulation",), counts.exists / batches.clamp(min=1.0)
        if len(counts.exists) > 1:
            yield (
                ("router_loss_multiplied_by_ranks", "router_loss_multiplied_by_accumulation"),
                ranks * batches,
            )
    yield ("router_loss_missing",), torch.zeros_like(counts.exists)


def iterate_normalisers(counts: BatchCounts, objective: str) -> Iterator[Weighting]:
    """Yield the objective's weights, then those of every wrong division."""
    right = compute_objective_weights(objective, counts)
    yield Weighting((), right)
    num_ranks = float(len(counts.supervised))
    num_batches = counts.exists.sum(1, keepdim=True)
    exists = counts.exists
    means = torch.nan_to_num(exists / counts.supervised, nan=0.0, posinf=0.0)
    by_rank = torch.nan_to_num(exists / counts.supervised.sum(1, keepdim=True), nan=0.0, posinf=0.0)
    wrong = {
        "mean_of_rank_means": by_rank / num_ranks,
        "mean_of_micro_batch_means": means / num_batches / num_ranks,
        "accumulation_not_divided": means / num_ranks,
        "ranks_not_divided": by_rank,
        "nothing_divided": means,
        "divided_by_accumulation_twice": right / num_batches,
        "divided_by_ranks_twice": right / num_ranks,
        "multiplied_by_ranks": right * num_ranks,
        "multiplied_by_accumulation": right * num_batches,
        "final_scaling_missing": exists,
        "sum_averaged_over_ranks": exists / num_ranks,
        "unsupervised_tokens_counted": exists / counts.tokens.sum(),
        "labels_counted_before_shift": exists / counts.labels.sum(),
    }
    # A mistake that multiplies the whole gradient multiplies the routers' part too.
    whole: dict[str, Tensor | float] = {
        "divided_by_accumulation_twice": 1.0 / num_batches,
        "divided_by_ranks_twice": 1.0 / num_ranks,
        "multiplied_by_ranks": num_ranks,
        "multiplied_by_accumulation": num_batches,
    }
    for name, weights in wrong.items():
        yield Weighting((name,), weights, router_factors=whole.get(name, 1.0))
    for divided in ("divided_by_accumulation_twice", "divided_by_ranks_twice"):
        divisor = num_batches if "accumulation" in divided else num_ranks
        for first in ("mean_of_rank_means", "mean_of_micro_batch_means"):
            yield Weighting((first, divided), wrong[first] / divisor, router_factors=whole[divided])


def iterate_omissions(counts: BatchCounts) -> Iterator[Weighting]:
    """Yield factors [R, M] of 0 and 1: all ones, then zeros where gradients are lost."""
    exists = counts.exists
    num_ranks, num_batches = exists.shape
    yield Weighting((), torch.ones_like(exists))
    if num_batches > 1:
        last = (exists.cumsum(1) == exists.sum(1, keepdim=True)) & (exists > 0)
        yield Weighting(("last_micro_batch_only",), last.double())
        first = torch.zeros_like(exists)
        first[:, 0] = 1.0
        yield Weighting(("first_micro_batch_only",), first)
        for batch in range(num_batches):
            yield _build_omission(
                exists, slice(None), batch, "micro_batch_lost", f"micro-batch {batch}"
            )
    if num_ranks > 1:
        for rank in range(num_ranks):
            yield _build_omission(exists, rank, slice(None), "rank_lost", f"data rank {rank}")
            for batch in range(num_batches if num_batches > 1 else 0):
                subject = f"micro-batch {batch} of data rank {rank}"
                yield _build_omission(exists, rank, batch, "micro_batch_lost", subject)


def _build_omission(
    exists: Tensor, rank: int | slice, batch: int | slice, mistake: str, subject: str
) -> Weighting:
    mask = torch.ones_like(exists)
    mask[rank, batch] = 0.0
    return Weighting((mistake,), mask, subject)
