"""The feed-forward of a block: two products around an activation, or three with a gate.

Legend: B sequences, T tokens, D hidden, F feed-forward width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.architecture import ModelShape
from shardwright.model.linear import Linear

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


class FeedForward(nn.Module):
    """down(activation(gate x) * up x), or down(activation(up x)) without a gate."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.names = names = shape.names
        self.activation = ACTIVATIONS[shape.activation]
        self.gated = shape.gated
        width, inner, transposed = shape.hidden_size, shape.intermediate_size, shape.matrix_layout == "in_out"
        wide = [names.gate_up] if names.gate_up else [names.gate, names.up]
        for name in wide:
            if name is not None:
                num_out = 2 * inner if name == names.gate_up else inner
                self.add_module(name, Linear(width, num_out, bias=shape.mlp_bias, transposed=transposed))
        self.add_module(names.down, Linear(inner, width, bias=shape.mlp_bias, transposed=transposed))

    def forward(self, x_BTD: Tensor) -> Tensor:
        names = self.names
        if names.gate_up is not None:
            gate_BTF, up_BTF = getattr(self, names.gate_up)(x_BTD).chunk(2, dim=-1)
            inner_BTF = self.activation(gate_BTF) * up_BTF
        elif names.gate is not None:
            inner_BTF = self.activation(getattr(self, names.gate)(x_BTD)) * getattr(self, names.up)(x_BTD)
        else:
            inner_BTF = self.activation(getattr(self, names.up)(x_BTD))
        return getattr(self, names.down)(inner_BTF)
