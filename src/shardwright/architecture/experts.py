"""The mixture of experts of a sparse layer, as one frozen value, and its parameters by name. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from shardwright.architecture.names import Names
from shardwright.architecture.parameters import Normal, ParameterSpec, Zeros


@dataclass(frozen=True)
class ExpertShape:
    """How tokens choose among experts, and what an expert is.

    A router scores every expert for every token: `softmax` over the experts, or a `sigmoid` of each. The best
    `experts_per_token` are chosen; their scores, made to add up to one where `normalised`, and multiplied with `weight_scale`,
    weigh what they give. With `num_groups` above 1 the choice is among the experts of the `groups_per_token` best groups, a
    group being as good as its two best experts together. `balance_bias` is added to the scores for the choice alone.

    Experts are gated feed-forwards of width `intermediate_size`. `matrix_layout` says whether their matrices lie `[out, in]` or
    `[in, out]`, `gate_up_layout` whether gate and up are one after the other or feature by feature. `swiglu_limit` (and
    `swiglu_gain`) clamp gate and up: min(g, limit) * sigmoid(gain * g) * (clamp(u) + 1). Shared experts see every token.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    shared_intermediate_size: int = 0
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalised: bool = True
    weight_scale: float = 1.0
    num_groups: int = 1
    groups_per_token: int = 1
    balance_bias: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    matrix_layout: Literal["out_in", "in_out"] = "out_in"
    gate_up_layout: Literal["blocks", "interleaved"] = "blocks"
    swiglu_limit: float | None = None
    swiglu_gain: float = 1.0
    balance_loss_coefficient: float | None = None
    """What config.json asks for (`router_aux_loss_coef`); None where the family has no such field."""

    @property
    def active_share(self) -> float:
        """Share of the experts that one token is sent to."""
        return self.experts_per_token / self.num_experts


def expert_parameters(
    experts: ExpertShape, names: Names, module: str, layer: int, width: int, std: float
) -> Iterator[ParameterSpec]:
    """Router and experts of one layer, in the decoder's order; shared experts are a common feed-forward beside them."""
    num, inner = experts.num_experts, experts.intermediate_size
    router = f"{module}.{names.router}"
    yield ParameterSpec(f"{router}.weight", (num, width), "router", layer, Normal(std))
    if experts.router_bias:
        yield ParameterSpec(f"{router}.bias", (num,), "router", layer, Normal(std))
    if experts.balance_bias:
        yield ParameterSpec(f"{router}.{names.balance_bias}", (num,), "balance_bias", layer, Zeros(), trained=False)
    stack = f"{module}.{names.experts}"
    for name, files, num_in, num_out in (
        (names.expert_gate_up, names.expert_files[:2], width, 2 * inner),
        (names.expert_down, names.expert_files[2:], inner, width),
    ):
        role: Literal["expert_gate_up", "expert_down"] = "expert_gate_up" if name == names.expert_gate_up else "expert_down"
        size = (num, num_out, num_in) if experts.matrix_layout == "out_in" else (num, num_in, num_out)
        stored = tuple(f"{stack}.{{expert}}.{file}.weight" for file in files)
        yield ParameterSpec(f"{stack}.{name}", size, role, layer, Normal(std), stored=stored)
        if experts.expert_bias:
            yield ParameterSpec(f"{stack}.{name}_bias", (num, num_out), role, layer, Zeros())
