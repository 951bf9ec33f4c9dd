"""Loss of direct preference optimisation (DPO) over pairs of chosen and rejected responses.

Legend: N tokens of a micro-batch (of this context rank, if rows are sharded), B pairs, 2 sides
of a pair: chosen, rejected.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.config.data import IGNORED_LABEL
from shardwright.numerics.loss import chunked_cross_entropy, compute_token_losses


@dataclass(frozen=True)
class PreferenceLossSettings:
    """Settings of the DPO loss.

    `beta` is the strength of the pull towards the reference model, `label_smoothing` the share
    of pairs assumed to be labelled the wrong way round.
    """

    beta: float
    label_smoothing: float = 0.0


@dataclass(frozen=True)
class PairLosses:
    """Losses and rewards of a micro-batch of pairs, without gradient.

    `valid_B` marks pairs with supervised tokens; the others are padding.
    """

    loss_B: Tensor
    rewards_B2: Tensor
    """beta x (log-probability of the response - the reference's)."""
    valid_B: Tensor


SumOverRow = Callable[[Tensor], Tensor]
"""Sums in place over the ranks that hold other tokens of the same rows."""


def compute_response_log_probs(
    losses_N: Tensor, sides_N: Tensor, num_pairs: int, sum_over_row: SumOverRow
) -> Tensor:
    """Sum token losses into log-probabilities of whole responses, `[B, 2]` in fp64.

    Args:
        sides_N: 2 x pair for a token of the chosen response (or its prompt), 2 x pair + 1 for
            one of the rejected response.
    """
    sums = torch.zeros(2 * num_pairs, dtype=torch.float64, device=losses_N.device)
    return sum_over_row(sums.index_add_(0, sides_N, -losses_N.double())).view(num_pairs, 2)


def compute_preference_loss(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    labels_N: Tensor,
    *,
    sides_N: Tensor,
    reference_B2: Tensor,
    settings: PreferenceLossSettings,
    sum_over_row: SumOverRow,
    loss_share: float,
    record: Callable[[PairLosses], None],
    chunk_tokens: int,
    **head: Any,
) -> Tensor:
    """Compute the summed DPO loss of the pairs.

    Per pair it is -(1 - e) log sigmoid(m) - e log sigmoid(-m), where e is the label smoothing
    and m the chosen response's reward less the rejected one's. Two passes over chunks of
    logits: the first computes log-probabilities of whole responses, summed over the ranks that
    share a row; with them the gradient of the loss is that of a weighted sum of token losses,
    which the second pass computes. So nothing larger than a chunk exists, the backward pass
    does not read the head, and every sharding of the token loss works for this one.

    Args:
        labels_N: -100 for tokens outside of responses.
        loss_share: share of the loss that this rank counts; the shares of the ranks of one row
            add up to 1.
        record: called with the losses and rewards of the pairs. head: `logit_scale`, `soft_cap`
            and `vocabulary`, as in `chunked_cross_entropy`.

    Source: Rafailov et al. 2023, Direct Preference Optimization, equation 7; Mitchell 2023 for
    label smoothing (conservative DPO).
    """
    num_pairs = len(reference_B2)
    losses_N = compute_token_losses(
        hidden_ND, weight_VD, bias_V, labels_N, chunk_tokens=chunk_tokens, **head
    )
    supervised = torch.zeros(num_pairs, dtype=torch.float64, device=labels_N.device)
    supervised.index_add_(0, sides_N // 2, (labels_N != IGNORED_LABEL).double())
    valid_B = sum_over_row(supervised) > 0
    rewards_B2 = settings.beta * (
        compute_response_log_probs(losses_N, sides_N, num_pairs, sum_over_row) - reference_B2
    )
    margin_B = rewards_B2[:, 0] - rewards_B2[:, 1]
    e = settings.label_smoothing
    loss_B = -(1.0 - e) * F.logsigmoid(margin_B) - e * F.logsigmoid(-margin_B)
    # d loss / d margin is -(1 - e) sigmoid(-m) + e sigmoid(m), and a token's loss lowers its
    # response's reward by beta.
    slope_B = ((1.0 - e) * torch.sigmoid(-margin_B) - e * torch.sigmoid(margin_B)) * valid_B
    weights_B2 = settings.beta * torch.stack([slope_B, -slope_B], dim=1)
    record(PairLosses(loss_B, rewards_B2, valid_B))
    weighted_loss = chunked_cross_entropy(
        hidden_ND,
        weight_VD,
        bias_V,
        labels_N,
        chunk_tokens=chunk_tokens,
        weights_N=weights_B2.flatten()[sides_N],
        **head,
    )
    value = (loss_share * (loss_B * valid_B).sum()).to(weighted_loss.dtype)
    return weighted_loss + (value - weighted_loss).detach()
