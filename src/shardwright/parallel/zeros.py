"""Zeros that stay: the matrices of a pruned model keep theirs through training."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardwright.errors import RecipeError
from shardwright.parallel.model import ParallelModel, local_part


class KeptZeros:
    """Which elements of a rank's trained matrices are zero, a byte each; nothing is kept for a matrix without any.

    Gradients lose theirs before the norm is taken, so that nothing of the optimizer is made of them; weights are set back after the
    step, because not every rule (Muon's) leaves alone what has no gradient.
    """

    def __init__(self, model: ParallelModel) -> None:
        self._masks: list[tuple[nn.Parameter, Tensor]] = []
        count = elements = 0
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.ndim >= 2 and not name.endswith("bias"):
                zero = local_part(parameter.detach()) == 0.0
                elements += zero.numel()
                if bool(zero.any()):
                    count += int(zero.sum())
                    self._masks.append((parameter, zero))
        self.share = count / max(1, elements)
        """Of the elements of this rank's trained matrices."""

    @torch.no_grad()
    def mask_gradients(self) -> None:
        """Set the gradients of kept zeros to zero."""
        for parameter, zero in self._masks:
            if parameter.grad is not None:
                local_part(parameter.grad).masked_fill_(zero, 0.0)

    @torch.no_grad()
    def restore(self) -> None:
        """Set kept zeros to zero again."""
        for parameter, zero in self._masks:
            local_part(parameter.detach()).masked_fill_(zero, 0.0)


def keep_zeros(model: ParallelModel, optimizer: torch.optim.Optimizer) -> KeptZeros:
    """Keep the zeros that the model's matrices have now, from here on; every rank calls this.

    Raises:
        RecipeError: there are none on any rank.
    """
    kept = KeptZeros(model)
    if not model.any_rank(kept.share > 0.0):
        raise RecipeError(
            "the folder's matrices have no zeros to keep", field="model.keep_zeros", got=True, remedy="Leave it out, or prune first"
        )
    model.when_summed(kept.mask_gradients)
    optimizer.register_step_post_hook(lambda *_: kept.restore())
    return kept
