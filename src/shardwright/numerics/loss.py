"""Chunked cross-entropy from hidden states; holds the logits of at most one chunk of tokens.

Shapes: N tokens, S tokens whose losses are computed (S <= N), C tokens of one chunk, D hidden, V
vocabulary (this rank's rows, if it is sharded).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version

from shardwright.numerics.supervised_rows import select_supervised
from shardwright.numerics.vocabulary_shard import VocabularyShard
from shardwright.numerics.wide_sums import add_lower_precision, add_product, has_wide_sums

FusedLosses = Callable[[Tensor, Tensor, Tensor, float, float, float], Tensor]
"""(logits `[C, V]`, labels `[C, 1]`, factors of the gradient `[C, 1]`, scale, soft cap or 0, label
smoothing) -> losses `[C, 1]`, in one pass that replaces the logits by their gradient."""


def chunked_cross_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    labels_N: Tensor,
    *,
    chunk_tokens: int,
    logit_scale: float = 1.0,
    soft_cap: float | None = None,
    label_smoothing: float = 0.0,
    vocabulary: VocabularyShard | None = None,
    weights_N: Tensor | None = None,
    num_supervised: int | None = None,
    fused_losses: FusedLosses | None = None,
    working_VD: Tensor | None = None,
    loss_gradient: Tensor | None = None,
) -> Tensor:
    """Sum the cross-entropy of the supervised tokens, in nats.

    The result is an fp32 scalar (fp64 for fp64 hidden states).

    logits = (hidden @ weight.T + bias) * logit_scale, then soft_cap * tanh(logits / soft_cap)
    if a cap is given. So Granite, which divides by `logits_scaling`, passes `logit_scale=1 /
    logits_scaling`, and Gemma 2 passes `final_logit_softcapping`.

    The forward pass takes `chunk_tokens` supervised tokens at a time: it computes logits, loss, and
    at once their gradient with respect to hidden states and weight, so that nothing is recomputed
    and at most C x V logits exist. Tokens labelled -100 are dropped before the first product and
    cost nothing, unless they are so few that a GPU is faster with all rows. Matrix products run in
    the dtype of the hidden states; softmax and loss in fp32 or wider; the weight's gradient is
    summed over chunks in fp32 or wider and has the dtype of the given weight, so an fp32 weight
    under bf16 hidden states gets an fp32 gradient. The backward pass does not read the weight: FSDP
    may reshard it.

    The backward pass only multiplies the stored gradients by the incoming scalar, in place: a
    second backward pass through the same graph is an error, as is a second derivative. It need
    not if `fused_losses` have multiplied by the same scalar (`loss_gradient`). Otherwise, under
    fp16, the gradients are computed before the loss scale is known, so probabilities below 6e-8
    are lost (bf16 and fp32 lose none). Without any supervised token the loss is exactly zero,
    with zero gradients.

    If several ranks each hold consecutive rows (`vocabulary`), every rank passes the same
    hidden states and labels and its own rows of weight and bias, and gets the same loss; each
    chunk takes one collective of two numbers per token (three under label smoothing). The
    gradients of weight and bias are those of the rank's rows; that of the hidden states is the
    rank's share, which the caller sums over the ranks (`collectives.copy_to_all` or `gather`
    does).

    Args:
        labels_N: int64, in [0, size of the whole vocabulary) or -100; already shifted.
        chunk_tokens: tokens whose logits exist at a time.
        label_smoothing: share of each target spread evenly over the whole vocabulary.
        vocabulary: this rank's rows; None for all rows.
        weights_N: factor of each token's loss, of either sign, without gradient; None for 1.
        num_supervised: number of labels that are not -100, if the host knows it; None reads it
            from the device.
        fused_losses: computes losses and gradient of a chunk's logits where gradients are needed,
            the head has no bias and the rank all rows. It needs no wide copy of the logits.
        working_VD: the weight in the dtype of the hidden states; None casts it.
        loss_gradient: the tensor that the backward pass will get, if it is known. Another one is
            allowed, and costs what no `loss_gradient` does.

    Source: Liger Kernel (Hsu et al. 2024) computes the gradient in the forward pass;
    torch.nn.functional.linear_cross_entropy (torch 2.13) likewise. Why not the latter:
    docs/decisions/0001-chunked-cross-entropy.md.
    """
    rows = select_supervised(hidden_ND, labels_N, weights_N, num_supervised)
    head = _LogitTransform(
        bias_V, logit_scale, soft_cap, label_smoothing, vocabulary, fused_losses, loss_gradient
    )
    grad_enabled = torch.is_grad_enabled()
    loss: Tensor = _ChunkedCrossEntropy.apply(
        rows.hidden_SD,
        weight_VD,
        bias_V,
        rows.labels_S,
        rows.weights_S,
        chunk_tokens,
        head,
        grad_enabled,
        working_VD,
    )
    return loss


@torch.no_grad()
def compute_token_losses(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    labels_N: Tensor,
    *,
    chunk_tokens: int,
    logit_scale: float = 1.0,
    soft_cap: float | None = None,
    vocabulary: VocabularyShard | None = None,
    num_supervised: int | None = None,
) -> Tensor:
    """Compute the cross-entropy of every token in nats, `[N]`, without gradient.

    It is 0 for unsupervised tokens. See `chunked_cross_entropy`.
    """
    hidden_SD, labels_S, weights_S, index_S = select_supervised(
        hidden_ND, labels_N, None, num_supervised
    )
    head = _LogitTransform(bias_V, logit_scale, soft_cap, 0.0, vocabulary)
    weight_VD = weight_VD.to(hidden_SD.dtype)
    losses_S = hidden_SD.new_zeros(
        len(labels_S), dtype=torch.promote_types(hidden_SD.dtype, torch.float32)
    )
    buffers = _ChunkBuffers.allocate(
        min(chunk_tokens, len(labels_S)), weight_VD, has_logit_transform=not head.is_identity
    )
    for start in range(0, len(labels_S), chunk_tokens):
        hidden_CD = hidden_SD[start : start + chunk_tokens]
        labels_C1 = labels_S[start : start + chunk_tokens].unsqueeze(1)
        chunk = buffers.slice_rows(hidden_CD.shape[0])
        torch.mm(hidden_CD, weight_VD.T, out=chunk.logits_CV)
        losses_S[start : start + chunk_tokens] = head.compute_losses(chunk, labels_C1)
    if weights_S is not None:
        losses_S *= weights_S
    if index_S is None:
        return losses_S
    return losses_S.new_zeros(len(labels_N)).index_copy(0, index_S, losses_S)


@dataclass(frozen=True)
class _ChunkBuffers:
    """Memory of one chunk, reused by every chunk; one matrix if losses are fused.

    On a CPU new memory costs more than the arithmetic.
    """

    logits_CV: Tensor
    """Result of the product, in its dtype."""
    final_logits_CV: Tensor
    """Logits after bias, scale and cap, in fp32 or wider; shares memory with `logits_CV` if the
    dtypes agree."""
    probs_CV: Tensor
    """Log-probabilities, then the gradient, in fp32 or wider."""

    @classmethod
    def allocate(
        cls,
        num_tokens: int,
        weight_VD: Tensor,
        *,
        has_logit_transform: bool,
        is_fused: bool = False,
    ) -> _ChunkBuffers:
        shape = (num_tokens, weight_VD.shape[0])
        sum_dtype = torch.promote_types(weight_VD.dtype, torch.float32)
        logits_CV = weight_VD.new_empty(shape)
        if is_fused:
            return cls(logits_CV, logits_CV, logits_CV)
        needs_own_memory = has_logit_transform and sum_dtype != weight_VD.dtype
        return cls(
            logits_CV=logits_CV,
            final_logits_CV=weight_VD.new_empty(shape, dtype=sum_dtype)
            if needs_own_memory
            else logits_CV,
            probs_CV=weight_VD.new_empty(shape, dtype=sum_dtype),
        )

    def slice_rows(self, num_tokens: int) -> _ChunkBuffers:
        """Return the first rows, for the last chunk, which may be short."""
        return _ChunkBuffers(
            self.logits_CV[:num_tokens],
            self.final_logits_CV[:num_tokens],
            self.probs_CV[:num_tokens],
        )


@dataclass(frozen=True)
class _LogitTransform:
    """Transform from product to loss, and its gradient."""

    bias_V: Tensor | None
    logit_scale: float
    soft_cap: float | None
    label_smoothing: float
    vocabulary: VocabularyShard | None
    fused_losses: FusedLosses | None = None
    loss_gradient: Tensor | None = None
    """Factor of the gradient that fused losses compute; None for 1."""

    @property
    def is_identity(self) -> bool:
        """True if the product already is the logits."""
        return self.bias_V is None and self.logit_scale == 1.0 and self.soft_cap is None

    @property
    def is_fused(self) -> bool:
        """True if one function computes losses and gradients."""
        has_all = self.bias_V is None and self.vocabulary is None
        return self.fused_losses is not None and has_all

    def compute_chunk(
        self,
        chunk: _ChunkBuffers,
        labels_C1: Tensor,
        weights_C: Tensor | None,
        *,
        needs_gradient: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Sum the weighted losses of a chunk's tokens; also return d loss / d product, times
        `loss_gradient` if losses are fused."""
        grad_CV = None
        if needs_gradient and self.is_fused:
            assert self.fused_losses is not None
            options = (self.logit_scale, self.soft_cap or 0.0, self.label_smoothing)
            sum_dtype = torch.promote_types(chunk.logits_CV.dtype, torch.float32)
            factors_C1 = labels_C1.new_ones(labels_C1.shape, dtype=sum_dtype)
            if self.loss_gradient is not None:
                factors_C1 *= self.loss_gradient
            if weights_C is not None:
                factors_C1 *= weights_C.unsqueeze(1)
            loss_C = self.fused_losses(chunk.logits_CV, labels_C1, factors_C1, *options).squeeze(1)
            grad_CV = chunk.logits_CV
        else:
            loss_C = self.compute_losses(chunk, labels_C1)
            if needs_gradient:
                grad_CV = self.compute_gradient(chunk, labels_C1)
                if weights_C is not None:
                    grad_CV *= weights_C.unsqueeze(1)
        return loss_C.sum() if weights_C is None else loss_C @ weights_C, grad_CV

    def compute_losses(self, chunk: _ChunkBuffers, labels_C1: Tensor) -> Tensor:
        """Compute the losses of a chunk's tokens, `[C]`; writes log-probabilities to the chunk."""
        if chunk.final_logits_CV.dtype != chunk.logits_CV.dtype:
            chunk.final_logits_CV.copy_(chunk.logits_CV)
        if self.bias_V is not None:
            chunk.final_logits_CV.add_(self.bias_V)
        if self.logit_scale != 1.0:
            chunk.final_logits_CV.mul_(self.logit_scale)
        if self.soft_cap is not None:
            chunk.final_logits_CV.div_(self.soft_cap).tanh_().mul_(self.soft_cap)
        if chunk.final_logits_CV.dtype == chunk.probs_CV.dtype:
            torch.log_softmax(chunk.final_logits_CV, dim=1, out=chunk.probs_CV)
        else:  # log_softmax with a dtype would first make a wide copy of the chunk
            torch.log_softmax(
                chunk.probs_CV.copy_(chunk.final_logits_CV), dim=1, out=chunk.probs_CV
            )
        if self.vocabulary is not None:
            return self._compute_shard_losses(self.vocabulary, chunk, labels_C1)
        loss_C = -chunk.probs_CV.gather(1, labels_C1).squeeze(1)
        if self.label_smoothing:
            loss_C = (
                1.0 - self.label_smoothing
            ) * loss_C - self.label_smoothing * chunk.probs_CV.mean(1)
        return loss_C

    def _compute_shard_losses(
        self, vocabulary: VocabularyShard, chunk: _ChunkBuffers, labels_C1: Tensor
    ) -> Tensor:
        """Compute the losses if this rank has only some rows of the vocabulary.

        `probs_CV` has log-probabilities among this rank's rows so far.
        """
        rows_C1, own_C1 = vocabulary.map_labels_to_rows(labels_C1, chunk.probs_CV.shape[1])
        target_C1 = torch.where(
            own_C1, chunk.final_logits_CV.gather(1, rows_C1).to(chunk.probs_CV.dtype), 0.0
        )
        target_C, mean_C = vocabulary.normalise(
            chunk.final_logits_CV,
            chunk.probs_CV,
            target_C1,
            has_smoothing=self.label_smoothing > 0.0,
        )
        return -((1.0 - self.label_smoothing) * target_C + self.label_smoothing * mean_C)

    def compute_gradient(self, chunk: _ChunkBuffers, labels_C1: Tensor) -> Tensor:
        """Compute d loss / d product in place of the log-probabilities.

        It is softmax - target, through the derivatives of cap (1 - tanh^2) and scale.
        """
        grad_CV = chunk.probs_CV.exp_()
        if self.label_smoothing:
            vocab_size = grad_CV.shape[1] if self.vocabulary is None else self.vocabulary.vocab_size
            grad_CV -= self.label_smoothing / vocab_size
        at_target_C1 = grad_CV.new_full(labels_C1.shape, self.label_smoothing - 1.0)
        if self.vocabulary is not None:
            labels_C1, own_C1 = self.vocabulary.map_labels_to_rows(labels_C1, grad_CV.shape[1])
            at_target_C1 *= own_C1
        grad_CV.scatter_add_(1, labels_C1, at_target_C1)
        if self.soft_cap is not None:
            grad_CV *= chunk.final_logits_CV.div_(self.soft_cap).square_().neg_().add_(1.0)
        if self.logit_scale != 1.0:
            grad_CV *= self.logit_scale
        return grad_CV


def _add_product(
    sum_VD: Tensor, grad_CV: Tensor, hidden_CD: Tensor, product_VD: Tensor | None, *, is_first: bool
) -> None:
    """Add a chunk's product to the sum, or replace it by the first; `product_VD` is memory for a
    product of lower precision, None if it has the sum's."""
    if product_VD is None:
        sum_VD.addmm_(grad_CV.T, hidden_CD, beta=int(not is_first))
        return
    torch.mm(grad_CV.T, hidden_CD, out=product_VD)
    if is_first:
        sum_VD.copy_(product_VD)
    else:
        add_lower_precision(sum_VD, product_VD)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of token losses; gradients are computed in forward and scaled in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_SD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        labels_S: Tensor,
        weights_S: Tensor | None,
        chunk_tokens: int,
        head: _LogitTransform,
        grad_enabled: bool,
        working_VD: Tensor | None,
    ) -> Tensor:
        # Gradient mode is always off here, so the caller states whether a backward pass
        # follows.
        needs_grad = [grad_enabled and needed for needed in ctx.needs_input_grad[:3]]
        compute_dtype = hidden_SD.dtype
        sum_dtype = torch.promote_types(compute_dtype, torch.float32)
        if working_VD is None or working_VD.dtype != compute_dtype:
            working_VD = weight_VD.to(compute_dtype)
        product_weight_VD = working_VD
        chunks = range(0, hidden_SD.shape[0], chunk_tokens)
        buffers = _ChunkBuffers.allocate(
            min(chunk_tokens, hidden_SD.shape[0]),
            product_weight_VD,
            has_logit_transform=not head.is_identity,
            is_fused=head.is_fused and any(needs_grad),
        )

        sums_wide = compute_dtype != sum_dtype and has_wide_sums(hidden_SD)
        loss = hidden_SD.new_zeros((), dtype=sum_dtype)
        grad_hidden_SD = torch.empty_like(hidden_SD) if needs_grad[0] else None
        allocate = hidden_SD.new_empty if chunks else hidden_SD.new_zeros
        grad_weight_VD = allocate(weight_VD.shape, dtype=sum_dtype) if needs_grad[1] else None
        grad_bias_V = (
            hidden_SD.new_zeros(weight_VD.shape[0], dtype=sum_dtype) if needs_grad[2] else None
        )
        product_VD = (
            torch.empty_like(product_weight_VD)
            if needs_grad[1] and compute_dtype != sum_dtype and not sums_wide
            else None
        )

        for start in chunks:
            hidden_CD = hidden_SD[start : start + chunk_tokens]
            labels_C1 = labels_S[start : start + chunk_tokens].unsqueeze(1)
            chunk = buffers.slice_rows(hidden_CD.shape[0])
            torch.mm(hidden_CD, product_weight_VD.T, out=chunk.logits_CV)
            weights_C = (
                None if weights_S is None else weights_S[start : start + chunk_tokens].to(sum_dtype)
            )
            loss_sum, grad_CV = head.compute_chunk(
                chunk, labels_C1, weights_C, needs_gradient=any(needs_grad)
            )
            loss += loss_sum
            if grad_CV is None:
                continue
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.sum(0)
            if grad_CV.dtype != compute_dtype:
                # Reuses the logits' memory, which has the dtype of the products.
                grad_CV = chunk.logits_CV.copy_(grad_CV)
            if grad_hidden_SD is not None:
                torch.mm(
                    grad_CV, product_weight_VD, out=grad_hidden_SD[start : start + chunk_tokens]
                )
            if grad_weight_VD is not None and sums_wide:
                add_product(grad_weight_VD, grad_CV.T, hidden_CD, is_first=start == 0)
            elif grad_weight_VD is not None:
                _add_product(grad_weight_VD, grad_CV, hidden_CD, product_VD, is_first=start == 0)

        ctx.save_for_backward(grad_hidden_SD, grad_weight_VD, grad_bias_V)
        ctx.loss_gradient = head.loss_gradient if head.is_fused else None
        ctx.dtypes = (hidden_SD.dtype, weight_VD.dtype, None if bias_V is None else bias_V.dtype)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        # In place: a copy would be a second gradient of the size of the vocabulary. Saved
        # tensors have a version, so a second backward pass through the same graph raises
        # instead of scaling twice.
        known: Tensor | None = ctx.loss_gradient
        if known is not None and known is not grad_loss:
            grad_loss = torch.where(known == grad_loss, 1.0, grad_loss / known)
        gradients: list[Tensor | None] = []
        for stored, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True):
            if stored is not None and known is grad_loss:
                increment_version(stored)
            elif stored is not None:
                stored.mul_(grad_loss)
            gradients.append(None if stored is None else stored.to(dtype))
        return (*gradients, *[None] * 6)
