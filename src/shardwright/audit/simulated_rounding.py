"""Simulated rounding: random relative changes of weights, and of outputs and their gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


def perturb(tensor: Tensor, noise: float, generator: torch.Generator) -> Tensor:
    """Multiply every element by a random number near 1, at most `noise` / 2 away from it."""
    change = torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype) - 0.5
    return tensor * (1.0 + noise * change)


@contextlib.contextmanager
def add_noise(module: nn.Module, noise: float, generator: torch.Generator) -> Iterator[None]:
    """Perturb the output of every leaf module, and the output's gradient, inside this context."""
    if not noise:
        yield
        return

    def perturb_output(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        if isinstance(output, Tensor) and output.is_floating_point():
            output = perturb(output, noise, generator)
            if output.requires_grad:
                output.register_hook(lambda gradient: perturb(gradient, noise, generator))
            return output
        return None

    leaves = [m for m in module.modules() if not any(True for _ in m.children())]
    handles = [leaf.register_forward_hook(perturb_output) for leaf in leaves]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
