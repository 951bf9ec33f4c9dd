"""Mixture of experts of a sparse layer, with its parameters by name. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, comb
from typing import Literal

from shardwright.architecture.module_names import ModuleNames
from shardwright.architecture.parameter_spec import NormalInit, ParameterSpec, ZerosInit


@dataclass(frozen=True)
class ExpertShape:
    """Routing and experts of a sparse layer.

    The router scores every expert for every token: `softmax` over the experts, or a `sigmoid`
    of each. The token uses the `experts_per_token` experts with the highest scores, and their
    outputs are summed with the scores as weights; `normalised` weights sum to one, and
    `weight_scale` multiplies them. With `num_groups` above 1, a token chooses among the experts
    of its `groups_per_token` best groups; a group's score is the sum of its two highest expert
    scores. `balance_bias` is added to the scores for the choice only, not for the weights.

    Experts are gated feed-forwards of width `intermediate_size`. `matrix_layout` is the layout
    of their matrices. In `gate_up_layout` "blocks" all gate features precede all up features;
    "interleaved" alternates them. `swiglu_limit` and `swiglu_gain` clamp gate and up:
    min(g, limit) * sigmoid(gain * g) * (clamp(u) + 1). Shared experts process every token.
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
    """`router_aux_loss_coef` of config.json. None for families without this field."""

    @property
    def active_share(self) -> float:
        """Fraction of the experts that one token uses."""
        return self.experts_per_token / self.num_experts

    def count_row_limit(self, num_tokens: int, num_ranks: int, limit: float) -> int:
        """Count the rows that a rank can send to each of `num_ranks` ranks, which share the
        experts: its even share times `limit`, at most those of the most uneven choice."""
        even = num_tokens * self.experts_per_token / num_ranks
        most = num_tokens * min(self.experts_per_token, self.num_experts // num_ranks)
        return min(most, ceil(even * limit))

    def count_reached_ranks(self, num_ranks: int) -> float:
        """Return the expected number of ranks with at least one of a token's experts.

        Each rank has as many consecutive experts. A token's groups are drawn without replacement,
        then its experts among those of the groups: a rank with s of the n experts to choose from
        is missed with probability C(n - s, k) / C(n, k) (hypergeometric distribution).
        """
        groups = self.num_groups
        chosen_groups = 1 if groups == 1 else self.groups_per_token
        group_size = self.num_experts // groups
        rank_size = self.num_experts // num_ranks
        rank_groups = max(1, rank_size // group_size)
        part_size = min(rank_size, group_size)
        num_open = chosen_groups * group_size
        num_drawn = self.experts_per_token
        reached = 0.0
        for hits in range(1, min(rank_groups, chosen_groups) + 1):
            ways = comb(rank_groups, hits) * comb(groups - rank_groups, chosen_groups - hits)
            missed = comb(num_open - hits * part_size, num_drawn) / comb(num_open, num_drawn)
            reached += ways / comb(groups, chosen_groups) * (1.0 - missed)
        return num_ranks * reached


def build_expert_parameters(
    experts: ExpertShape, names: ModuleNames, module: str, layer: int, width: int, std: float
) -> Iterator[ParameterSpec]:
    """Yield router and expert parameters of one layer in the decoder's order.

    Shared experts are not included; they are an ordinary feed-forward.
    """
    num_experts = experts.num_experts
    inner = experts.intermediate_size
    router = f"{module}.{names.router}"
    yield ParameterSpec(f"{router}.weight", (num_experts, width), "router", layer, NormalInit(std))
    if experts.router_bias:
        yield ParameterSpec(f"{router}.bias", (num_experts,), "router", layer, NormalInit(std))
    if experts.balance_bias:
        balance_bias = f"{router}.{names.balance_bias}"
        yield ParameterSpec(
            balance_bias, (num_experts,), "balance_bias", layer, ZerosInit(), is_trained=False
        )
    stack = f"{module}.{names.experts}"
    for name, files, num_in, num_out in (
        (names.expert_gate_up, names.expert_files[:2], width, 2 * inner),
        (names.expert_down, names.expert_files[2:], inner, width),
    ):
        role: Literal["expert_gate_up", "expert_down"] = (
            "expert_gate_up" if name == names.expert_gate_up else "expert_down"
        )
        sides = (num_out, num_in) if experts.matrix_layout == "out_in" else (num_in, num_out)
        patterns = tuple(f"{stack}.{{expert}}.{file}.weight" for file in files)
        yield ParameterSpec(
            f"{stack}.{name}",
            (num_experts, *sides),
            role,
            layer,
            NormalInit(std),
            file_patterns=patterns,
        )
        if experts.expert_bias:
            yield ParameterSpec(
                f"{stack}.{name}_bias", (num_experts, num_out), role, layer, ZerosInit()
            )
