"""Uses of blocks whose weights are elsewhere in between: when they begin, and which comes next.

[Note: when weights move] A block's forward pass begins with a hook before it, its backward pass
with a hook on the gradient of its output. Autograd runs the nodes that were created last first,
so the backward pass of a block has ended when that of the block before it begins. The order of
uses differs between schedules and is learnt: each use remembers its last successor.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from shardwright.model.block import Block

Phase = Literal["forward", "inference", "backward", "input gradients", "weight gradients"]
Use = tuple[int, Phase]
"""Layer of a block and what it computes; `inference` is a forward pass without gradients. The last
two are the parts of a split backward pass."""


class BlockUses:
    """Base class that calls `_fetch` when a block begins to compute, with a guess of the next."""

    def __init__(self) -> None:
        self._backward_phase: Literal["backward", "input gradients"] = "backward"
        self._layers: list[int] = []
        self._successors: dict[Use, Use] = {}
        """Use that last followed each use."""
        self._last_use: Use | None = None

    def install_hooks(self, block: Block) -> None:
        """Call `_fetch` before each forward and backward pass of a block."""
        layer = block.layer_index
        self._layers.append(layer)

        def begin_forward(_module: nn.Module, _arguments: Any) -> None:
            self._use(layer, "forward" if torch.is_grad_enabled() else "inference")

        def prepare_backward(_module: nn.Module, _arguments: Any, output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(lambda _gradient: self._use(layer, self._backward_phase))

        # Before the hooks of others, which may read the weights' addresses.
        block.register_forward_pre_hook(begin_forward, prepend=True)
        block.register_forward_hook(prepare_backward)

    def _use(self, layer: int, phase: Phase) -> None:
        use: Use = (layer, phase)
        if self._last_use is not None:
            self._successors[self._last_use] = use
        self._last_use = use
        self._fetch(use, self._predict_next(use))

    def _predict_next(self, use: Use) -> Use | None:
        """Return the next use; on the first pass, that of the adjacent block; None at the ends."""
        if use in self._successors:
            return self._successors[use]
        layer, phase = use
        index = self._layers.index(layer) + (-1 if phase in ("backward", "input gradients") else 1)
        return (self._layers[index], phase) if 0 <= index < len(self._layers) else None

    def _fetch(self, use: Use, following: Use | None) -> None:
        """Fetch the weights of a use; start to fetch those of the next use."""
        raise NotImplementedError
