"""Liger Kernel's fused linear cross-entropy in place of the chunked one (`model.loss_kernel`).

Shapes: N tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from shardwright.config.data import IGNORED_LABEL
from shardwright.errors import RunFailed

PACKAGE = "liger-kernel"
MIN_VERSION = "0.8.5"
"""Version with which results were compared."""


def find_liger_obstacle(device: torch.device) -> str | None:
    """Return why Liger's loss cannot run on a device, as one clause; None if it can."""
    if importlib.util.find_spec("liger_kernel") is None:
        return f"the package {PACKAGE} is not installed"
    if device.type != "cuda":
        return f"the device is a {device.type.upper()}, and {PACKAGE} has kernels for CUDA"
    if importlib.util.find_spec("triton") is None:
        return f"Triton, which {PACKAGE} needs, is not installed"
    if "accum_dtype" not in inspect.signature(_import_loss()).parameters:
        return (
            f"{PACKAGE} {metadata.version(PACKAGE)} sums the head's gradient in 16 bits; "
            f"{MIN_VERSION} can sum in fp32"
        )
    return None


def liger_cross_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    labels_N: Tensor,
    *,
    logit_scale: float = 1.0,
    soft_cap: float | None = None,
    label_smoothing: float = 0.0,
    vocabulary: object = None,
    weights_N: Tensor | None = None,
    num_supervised: int | None = None,
) -> Tensor:
    """Sum the cross-entropy of the supervised tokens, in nats, as an fp32 scalar.

    As `chunked_cross_entropy`, with these differences: the weight is multiplied, and its gradient
    rounded once at the end, in the dtype of the hidden states; the number of tokens per chunk is
    Liger's; the host waits for the device to count supervised tokens, so `num_supervised` makes no
    difference.

    Raises:
        RunFailed: tokens have loss weights, which Liger's loss lacks.

    Source: Liger Kernel (Hsu et al. 2024), arXiv 2410.10989.
    """
    assert vocabulary is None, "checked before the run: ranks do not share the vocabulary"
    assert logit_scale == 1.0, "checked before the run: logits have no factor"
    if weights_N is not None:
        raise RunFailed(
            f"model.loss_kernel: the data has loss weights, which {PACKAGE}'s loss does not "
            "support. Set model.loss_kernel: chunked"
        )
    if torch.is_grad_enabled() and weight_VD.requires_grad and not hidden_ND.requires_grad:
        # Liger computes the weight's gradient only together with that of the hidden states.
        hidden_ND = hidden_ND.detach().requires_grad_()
    function = _import_loss()(
        ignore_index=IGNORED_LABEL,
        label_smoothing=label_smoothing,
        reduction="sum",
        softcap=soft_cap,
        accum_dtype=torch.float32,
    )
    bias_V = None if bias_V is None else bias_V.to(hidden_ND.dtype)
    loss: Tensor = function(weight_VD.to(hidden_ND.dtype), hidden_ND, labels_N, bias_V)
    return loss


def _import_loss() -> Any:
    module = importlib.import_module("liger_kernel.transformers.fused_linear_cross_entropy")
    return module.LigerFusedLinearCrossEntropyLoss
