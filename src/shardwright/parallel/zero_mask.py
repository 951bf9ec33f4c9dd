"""Preservation of zeros: a pruned model's zero weights stay zero during training."""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn

from shardwright.errors import RecipeError
from shardwright.parallel.parallel_model import ParallelModel, get_local_tensor

logger = logging.getLogger(__name__)


class ZeroMask:
    """Masks of the zeros in a rank's trained matrices, one byte per element.

    Matrices without zeros have no mask. Gradients are masked before the norm is computed, so
    that the optimizer never sees them; weights are reset after the step, because some update
    rules (Muon's) change weights without a gradient.
    """

    def __init__(self, model: ParallelModel) -> None:
        self._masks: list[tuple[nn.Parameter, Tensor]] = []
        count = elements = 0
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.ndim >= 2 and not name.endswith("bias"):
                zero = get_local_tensor(parameter.detach()) == 0.0
                elements += zero.numel()
                if bool(zero.any()):
                    count += int(zero.sum())
                    self._masks.append((parameter, zero))
        self.zero_fraction = count / max(1, elements)
        """Share of zeros among the elements of this rank's trained matrices, 0 to 1."""

    @torch.no_grad()
    def mask_gradients(self) -> None:
        """Set the gradients of preserved zeros to zero."""
        for parameter, zero in self._masks:
            if parameter.grad is not None:
                get_local_tensor(parameter.grad).masked_fill_(zero, 0.0)

    @torch.no_grad()
    def restore_zeros(self) -> None:
        """Set preserved zeros to zero again."""
        for parameter, zero in self._masks:
            get_local_tensor(parameter.detach()).masked_fill_(zero, 0.0)


def keep_zeros(model: ParallelModel, optimizer: torch.optim.Optimizer) -> ZeroMask:
    """Preserve the zeros that the model's matrices have now; every rank calls this.

    Raises:
        RecipeError: no rank has any zeros.
    """
    zero_mask = ZeroMask(model)
    if not model.any_rank(zero_mask.zero_fraction > 0.0):
        raise RecipeError(
            "the model's matrices contain no zeros",
            field="model.keep_zeros",
            got=True,
            remedy="Remove this key, or prune the model first",
        )
    model.add_gradient_hook(zero_mask.mask_gradients)
    if model.early_gathers is not None:
        model.early_gathers = None
        logger.info(
            "gathers of updated parameters begin in the next forward pass: "
            "model.keep_zeros restores zeros after the update"
        )
    optimizer.register_step_post_hook(lambda *_: zero_mask.restore_zeros())
    return zero_mask
