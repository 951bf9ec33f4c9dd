"""Preservation of zeros: a pruned model's zero weights stay zero during training."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.errors import RecipeError
from shardwright.numerics import get_local_tensor
from shardwright.parallel.parallel_model import ParallelModel

logger = logging.getLogger(__name__)


class ZeroMask:
    """Masks of the zeros in a rank's trained matrices, on the device, one bit per element.

    Matrices without zeros have no mask. Gradients are masked before the norm is computed, so
    that the optimizer never sees them; weights are reset after the step, because some update
    rules (Muon's) change weights without a gradient. With offloading both happen just before the
    gradients, and the updated weights, of a block leave the device.
    """

    def __init__(self, model: ParallelModel) -> None:
        self._masks: dict[str, tuple[nn.Parameter, Tensor]] = {}
        self._host_bits: dict[str, Tensor] = {}
        """The same bits in host memory, of weights that the host updates."""
        count = elements = 0
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.ndim >= 2 and not name.endswith("bias"):
                weight = model.read_parameter(name)
                assert weight is not None
                zero = weight == 0.0
                elements += zero.numel()
                if bool(zero.any()):
                    count += int(zero.sum())
                    self._masks[name] = parameter, _pack_bits(zero)
        self.zero_fraction = count / max(1, elements)
        """Share of zeros among the elements of this rank's trained matrices, 0 to 1."""

    @torch.no_grad()
    def mask_gradients(self, names: Iterable[str]) -> None:
        """Set the gradients of preserved zeros to zero."""
        for parameter, bits in self._select(names):
            if parameter.grad is not None:
                _set_to_zero(get_local_tensor(parameter.grad), bits)

    @torch.no_grad()
    def restore_zeros(self, names: Iterable[str]) -> None:
        """Set preserved zeros to zero again."""
        for parameter, bits in self._select(names):
            _set_to_zero(get_local_tensor(parameter.detach()), bits)

    @torch.no_grad()
    def restore_piece(self, name: str, first_element: int, values: Tensor) -> None:
        """Set preserved zeros to zero again in a piece of a weight that the host updates.

        Args:
            first_element: Place of the piece in this rank's flattened part; a multiple of 8.
        """
        if name not in self._masks:
            return
        if name not in self._host_bits:
            self._host_bits[name] = self._masks[name][1].cpu()
        assert first_element % 8 == 0
        first = first_element // 8
        _set_to_zero(values, self._host_bits[name][first : first + -(-values.numel() // 8)])

    def _select(self, names: Iterable[str]) -> list[tuple[nn.Parameter, Tensor]]:
        return [self._masks[name] for name in names if name in self._masks]


def _pack_bits(values: Tensor) -> Tensor:
    """Pack truth values into bytes, `[ceil(N / 8)]`, the first one into the lowest bit."""
    bits = F.pad(values.reshape(-1).to(torch.uint8), (0, -values.numel() % 8)).view(-1, 8)
    shifts = torch.arange(8, dtype=torch.uint8, device=values.device)
    return (bits << shifts).sum(1, dtype=torch.uint8)


def _set_to_zero(target: Tensor, bits: Tensor) -> None:
    """Set the elements to zero whose packed bit is set."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    selected = ((bits[:, None] >> shifts) & 1).view(-1)[: target.numel()]
    target.masked_fill_(selected.view(target.shape).bool(), 0.0)


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
    resident = [name for name, _ in model.named_parameters() if name not in model.offloaded_names]
    model.add_gradient_hook(partial(zero_mask.mask_gradients, resident))
    if model.trained_offload is not None:
        model.add_offloaded_gradient_hook(zero_mask.mask_gradients)
        model.trained_offload.watch_updates(zero_mask.restore_zeros, zero_mask.restore_piece)
    if model.early_gathers is not None:
        model.early_gathers = None
        logger.info(
            "gathers of updated parameters begin in the next forward pass: "
            "model.keep_zeros restores zeros after the update"
        )
    optimizer.register_step_post_hook(lambda *_: zero_mask.restore_zeros(resident))
    return zero_mask
