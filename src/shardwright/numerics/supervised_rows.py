"""Choice of the rows whose losses are computed.

Shapes: N tokens, S tokens whose losses are computed (S <= N), D hidden.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from shardwright.config.data import IGNORED_LABEL

_MIN_SUPERVISED = 127 / 128
"""Share of supervised tokens from which a GPU computes the logits of all rows: a selection passes
over all hidden states and their gradient several times, and products of odd sizes are slower."""


class SupervisedRows(NamedTuple):
    """Rows whose losses are computed."""

    hidden_SD: Tensor
    labels_S: Tensor
    weights_S: Tensor | None
    index_S: Tensor | None
    """Places of the rows; None for all rows."""


def select_supervised(
    hidden_ND: Tensor, labels_N: Tensor, weights_N: Tensor | None, num_supervised: int | None
) -> SupervisedRows:
    """Select the labelled rows. On a GPU a few others stay, with the weight 0.

    If their number is not known, the host waits once for the device, which costs less than the
    logits of masked tokens.
    """
    if num_supervised == labels_N.numel():
        return SupervisedRows(hidden_ND, labels_N, weights_N, None)
    is_supervised_N = labels_N != IGNORED_LABEL
    if num_supervised is None:
        index_S = is_supervised_N.nonzero().squeeze(1)
    elif labels_N.is_cuda and num_supervised >= _MIN_SUPERVISED * labels_N.numel():
        sum_dtype = torch.promote_types(hidden_ND.dtype, torch.float32)
        all_weights_N = (
            is_supervised_N.to(sum_dtype) if weights_N is None else weights_N * is_supervised_N
        )
        return SupervisedRows(hidden_ND, labels_N.where(is_supervised_N, 0), all_weights_N, None)
    else:
        index_S = is_supervised_N.nonzero_static(size=num_supervised).squeeze(1)
    if index_S.numel() == labels_N.numel():
        return SupervisedRows(hidden_ND, labels_N, weights_N, None)
    selected = (hidden_ND.index_select(0, index_S), labels_N.index_select(0, index_S))
    return SupervisedRows(
        *selected, None if weights_N is None else weights_N.index_select(0, index_S), index_S
    )
