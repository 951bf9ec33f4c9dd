"""From the last norm's output to logits, and to the loss where all of them are held.

Legend: B sequences, T tokens, N = B x T, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.model.tensor_cut import Vocabulary

LossFunction = Callable[..., Tensor]
"""(hidden_ND, head_weight_VD, head_bias | None, labels_N, *, logit_scale, soft_cap) -> summed loss. Where the head's rows lie over
ranks, `vocabulary` tells which of them these are; `weights_N` is given where labels' losses have weights."""


RowLoss = Callable[[Callable[[Tensor], Tensor]], LossFunction]
"""A loss that asks more of a token than its label. It is given the way from a tensor of whole rows `[B, T]` to that of the tokens
whose hidden states it will see `[N]`, which a context rank has some of."""


def full_logits_loss(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    labels_N: Tensor,
    *,
    logit_scale: float = 1.0,
    soft_cap: float | None = None,
    label_smoothing: float = 0.0,
    vocabulary: Vocabulary | None = None,
    weights_N: Tensor | None = None,
) -> Tensor:
    """Summed cross-entropy with all logits held at once: the plain definition, for when no chunked loss is given."""
    logits_NV = head_logits(hidden_ND, weight_VD, bias_V, logit_scale=logit_scale, soft_cap=soft_cap)
    if vocabulary is not None:
        logits_NV = vocabulary.whole(logits_NV)
    accumulate = torch.float64 if logits_NV.dtype == torch.float64 else torch.float32
    logits_NV = logits_NV.to(accumulate)
    if weights_N is None:
        return F.cross_entropy(logits_NV, labels_N, ignore_index=-100, reduction="sum", label_smoothing=label_smoothing)
    losses_N = F.cross_entropy(logits_NV, labels_N, ignore_index=-100, reduction="none", label_smoothing=label_smoothing)
    return losses_N @ weights_N.to(accumulate)


def head_logits(hidden: Tensor, weight_VD: Tensor, bias_V: Tensor | None, *, logit_scale: float, soft_cap: float | None) -> Tensor:
    """hidden @ weight^T + bias, scaled, then bent by cap * tanh(logits / cap)."""
    logits = F.linear(hidden, weight_VD, bias_V)
    if logit_scale != 1.0:
        logits = logits * logit_scale
    if soft_cap is not None:
        logits = torch.tanh(logits / soft_cap) * soft_cap
    return logits


class Head(nn.Module):
    """The projection to the vocabulary, where it is not the embedding; `Decoder` reads its weight."""

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, width))
