"""Projection to the vocabulary: logits, and the loss without chunks.

Legend: B sequences, T tokens, N = B x T, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.config.data import IGNORED_LABEL
from shardwright.model.products.working_weights import declare_working_weight
from shardwright.model.tensor_parallel_hooks import VocabularyHooks

LossFunction = Callable[..., Tensor]
"""Function from the head's inputs to the summed loss.

Arguments: (hidden_ND, head_weight_VD, head_bias | None, labels_N, *, logit_scale, soft_cap).
Further keywords: `vocabulary`, if the head's rows are sharded over ranks, `weights_N`, if losses
of labels have weights, and `num_supervised`, if the host knows the number of labels.
"""


RowLoss = Callable[[Callable[[Tensor], Tensor]], LossFunction]
"""Builder of a loss that needs more of a token than its label.

Its argument is a function from a tensor of whole rows `[B, T]` to the values of the tokens
`[N]` whose hidden states the loss gets; a context-parallel rank has a part of the tokens.
"""


def compute_full_logits_loss(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    labels_N: Tensor,
    *,
    logit_scale: float = 1.0,
    soft_cap: float | None = None,
    label_smoothing: float = 0.0,
    vocabulary: VocabularyHooks | None = None,
    weights_N: Tensor | None = None,
    num_supervised: int | None = None,
) -> Tensor:
    """Compute the summed cross-entropy from all logits at once; used without a chunked loss.

    It computes the logits of unsupervised tokens too, so `num_supervised` makes no difference.
    """
    logits_NV = compute_logits(
        hidden_ND, weight_VD, bias_V, logit_scale=logit_scale, soft_cap=soft_cap
    )
    if vocabulary is not None:
        logits_NV = vocabulary.gather_logits(logits_NV)
    accumulate = torch.float64 if logits_NV.dtype == torch.float64 else torch.float32
    logits_NV = logits_NV.to(accumulate)
    losses = F.cross_entropy(
        logits_NV,
        labels_N,
        ignore_index=IGNORED_LABEL,
        reduction="sum" if weights_N is None else "none",
        label_smoothing=label_smoothing,
    )
    return losses if weights_N is None else losses @ weights_N.to(accumulate)


def compute_logits(
    hidden: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    *,
    logit_scale: float,
    soft_cap: float | None,
) -> Tensor:
    """Compute hidden @ weight^T + bias, scaled, then capped by cap * tanh(logits / cap)."""
    logits = F.linear(hidden, weight_VD, bias_V)
    if logit_scale != 1.0:
        logits = logits * logit_scale
    if soft_cap is not None:
        logits = torch.tanh(logits / soft_cap) * soft_cap
    return logits


class Head(nn.Module):
    """Weight of the projection to the vocabulary, if not tied; `Decoder` computes with it."""

    working_weight: Tensor | None

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, width))
        declare_working_weight(self, "weight")
