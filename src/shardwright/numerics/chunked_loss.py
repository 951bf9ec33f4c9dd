"""The chunked cross-entropy with the options of a run, as a decoder's loss function."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shardwright.numerics.loss import FusedLosses, chunked_cross_entropy


class ChunkedLoss:
    """`chunked_cross_entropy` of the head's own parameter, whose gradient it computes in the
    parameter's dtype; a working weight is `working_VD`."""

    casts_weight = True
    """True for loss functions that get the parameter."""

    def __init__(self, chunk_tokens: int, fused_losses: FusedLosses | None = None) -> None:
        self._chunk_tokens = chunk_tokens
        self._fused_losses = fused_losses
        self._gradient: Tensor | None = None

    def __call__(
        self,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        labels_N: Tensor,
        **options: Any,
    ) -> Tensor:
        return chunked_cross_entropy(
            hidden_ND,
            weight_VD,
            bias_V,
            labels_N,
            chunk_tokens=self._chunk_tokens,
            fused_losses=self._fused_losses,
            loss_gradient=self._gradient,
            **options,
        )

    @contextmanager
    def expect_gradient(self, gradient: Tensor) -> Iterator[None]:
        """Return the context of passes in which each loss gets this gradient, in its own dtype."""
        self._gradient = gradient
        try:
            yield
        finally:
            self._gradient = None


@contextmanager
def expect_loss_gradient(
    loss_function: object, gradient: Tensor, compute_dtype: torch.dtype | None
) -> Iterator[Tensor]:
    """Return the context of passes that give this gradient to each loss; it yields the gradient in
    the losses' dtype if the loss function can use it.

    Args:
        compute_dtype: precision of the hidden states; None if it is not known.
    """
    if compute_dtype is None or not isinstance(loss_function, ChunkedLoss):
        yield gradient
        return
    gradient = gradient.to(torch.promote_types(compute_dtype, torch.float32))
    with loss_function.expect_gradient(gradient):
        yield gradient
