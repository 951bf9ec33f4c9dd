"""Token cross-entropy straight from hidden states, without ever holding the logits of more than one chunk of tokens.

Shapes: N tokens, S supervised tokens (S <= N), C tokens of one chunk, D hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORED = -100
"""Label of a token that is not supervised; the value that `torch.nn.functional.cross_entropy` ignores."""


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
) -> Tensor:
    """Summed cross-entropy of the supervised tokens, in nats: a scalar in fp32 (fp64 for fp64 hidden states).

    logits = (hidden @ weight.T + bias) * logit_scale, then soft_cap * tanh(logits / soft_cap) when a cap is given. So Granite,
    which divides by `logits_scaling`, passes `logit_scale=1 / logits_scaling`, and Gemma 2 passes `final_logit_softcapping`.

    The forward pass takes `chunk_tokens` supervised tokens at a time: logits, loss, and at once their gradient with respect to
    hidden states and weight, so that nothing is recomputed and at most C x V logits exist. Tokens labelled -100 are dropped
    before the first product and cost nothing. Matrix products run in the dtype of the hidden states; softmax and loss in fp32 or
    wider; the weight's gradient is summed over chunks in fp32 or wider and has the dtype of the weight as it was given, so an
    fp32 weight under bf16 hidden states gets an fp32 gradient. The weight is not needed by the backward pass: FSDP may reshard it.

    The backward pass only multiplies the stored gradients by the incoming scalar, in place: a second backward through the
    same graph is an error, as is a second derivative. No supervised token at all gives a loss of exactly zero and zero gradients.

    Args:
        labels_N: int64, in [0, V) or -100; already shifted.
        chunk_tokens: tokens whose logits are held at a time.
        label_smoothing: share of each target spread evenly over the vocabulary.

    Source: Liger Kernel (Hsu et al. 2024) computes the gradient in the forward pass; torch.nn.functional.linear_cross_entropy
    (torch 2.13) likewise. Why not the latter: docs/decisions/0001-chunked-cross-entropy.md.
    """
    hidden_SD, labels_S = _select_supervised(hidden_ND, labels_N)
    loss: Tensor = _ChunkedCrossEntropy.apply(
        hidden_SD, weight_VD, bias_V, labels_S, chunk_tokens, logit_scale, soft_cap, label_smoothing, torch.is_grad_enabled()
    )
    return loss


def _select_supervised(hidden_ND: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    """Rows that carry a label. On CUDA this waits once for the device, which costs less than the logits of masked tokens."""
    index_S = (labels_N != IGNORED).nonzero().squeeze(1)
    if index_S.numel() == labels_N.numel():
        return hidden_ND, labels_N
    return hidden_ND.index_select(0, index_S), labels_N.index_select(0, index_S)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of token losses; the gradients are made in the forward pass and scaled in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_SD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        labels_S: Tensor,
        chunk_tokens: int,
        logit_scale: float,
        soft_cap: float | None,
        label_smoothing: float,
        grad_enabled: bool,
    ) -> Tensor:
        # Gradient mode is always off in here, so the caller says whether a backward pass will come.
        wanted = [grad_enabled and needed for needed in ctx.needs_input_grad[:3]]
        compute_dtype = hidden_SD.dtype
        sum_dtype = torch.promote_types(compute_dtype, torch.float32)
        product_weight_VD = weight_VD.to(compute_dtype)
        num_supervised, num_vocabulary = hidden_SD.shape[0], weight_VD.shape[0]

        loss = hidden_SD.new_zeros((), dtype=sum_dtype)
        grad_hidden_SD = torch.empty_like(hidden_SD) if wanted[0] else None
        grad_weight_VD = hidden_SD.new_zeros(weight_VD.shape, dtype=sum_dtype) if wanted[1] else None
        grad_bias_V = hidden_SD.new_zeros(num_vocabulary, dtype=sum_dtype) if wanted[2] else None

        for start in range(0, num_supervised, chunk_tokens):
            rows = slice(start, min(start + chunk_tokens, num_supervised))
            hidden_CD, labels_C1 = hidden_SD[rows], labels_S[rows].unsqueeze(1)
            logits_CV = (hidden_CD @ product_weight_VD.T).to(sum_dtype)
            if bias_V is not None:
                logits_CV += bias_V
            if logit_scale != 1.0:
                logits_CV *= logit_scale
            if soft_cap is not None:
                logits_CV.div_(soft_cap).tanh_().mul_(soft_cap)
            log_probs_CV = torch.log_softmax(logits_CV, dim=1)
            loss -= (1.0 - label_smoothing) * log_probs_CV.gather(1, labels_C1).sum()
            if label_smoothing:
                loss -= label_smoothing / num_vocabulary * log_probs_CV.sum()
            if not any(wanted):
                continue

            # d loss / d logits = softmax - target, then back through the cap (1 - tanh^2) and the scale.
            grad_CV = log_probs_CV.exp_()
            if label_smoothing:
                grad_CV -= label_smoothing / num_vocabulary
            grad_CV.scatter_add_(1, labels_C1, grad_CV.new_full(labels_C1.shape, label_smoothing - 1.0))
            if soft_cap is not None:
                grad_CV *= logits_CV.div_(soft_cap).square_().neg_().add_(1.0)
            if logit_scale != 1.0:
                grad_CV *= logit_scale
            del logits_CV, log_probs_CV
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.sum(0)
            grad_CV = grad_CV.to(compute_dtype)
            if grad_hidden_SD is not None:
                torch.mm(grad_CV, product_weight_VD, out=grad_hidden_SD[rows])
            if grad_weight_VD is not None:
                if sum_dtype == compute_dtype:
                    grad_weight_VD.addmm_(grad_CV.T, hidden_CD)
                else:
                    grad_weight_VD += grad_CV.T @ hidden_CD
            del grad_CV

        ctx.save_for_backward(grad_hidden_SD, grad_weight_VD, grad_bias_V)
        ctx.dtypes = (hidden_SD.dtype, weight_VD.dtype, None if bias_V is None else bias_V.dtype)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        # In place: a copy would hold a second gradient of the size of the vocabulary. Saved tensors carry a version, so a
        # second backward through the same graph raises instead of scaling twice.
        gradients = [
            None if stored is None else stored.mul_(grad_loss).to(dtype)
            for stored, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*gradients, None, None, None, None, None, None)
