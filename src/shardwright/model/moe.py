"""The feed-forward of a sparse layer: a router, experts in stacked parameters, and shared experts that see every token.

Legend: B rows, T tokens of a row, N = B x T, D hidden, E experts, K experts per token, F an expert's width, M rows sorted by
expert (N x K of them, but for dropped ones).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.architecture import ExpertShape, ModelShape
from shardwright.model.context import ForwardContext
from shardwright.model.cuts import WHOLE, Cuts
from shardwright.model.grouped import grouped_product, put_rows, take_rows
from shardwright.model.mlp import FeedForward, gate
from shardwright.model.routing import (
    RouterStatistics,
    Routing,
    RoutingContext,
    add_to_gradient,
    choose_experts,
    count_tokens,
    count_tokens_by_row,
    within_capacity,
)


class Router(nn.Module):
    """Scores of every expert for every token. The balance bias takes no gradient: the step moves it."""

    def __init__(self, shape: ModelShape, experts: ExpertShape) -> None:
        super().__init__()
        num, names = experts.num_experts, shape.names
        self.weight = nn.Parameter(torch.empty(num, shape.hidden_size))
        self.bias = nn.Parameter(torch.empty(num)) if experts.router_bias else None
        self.balance_name = names.balance_bias if experts.balance_bias else None
        if self.balance_name is not None:
            self.register_parameter(self.balance_name, nn.Parameter(torch.empty(num), requires_grad=False))

    @property
    def balance_bias(self) -> Tensor | None:
        """Added to the scores when experts are chosen, `[E]`."""
        return None if self.balance_name is None else getattr(self, self.balance_name)

    def forward(self, x_ND: Tensor) -> Tensor:
        # In fp32 at least: which experts are chosen hangs on small differences (Switch Transformer, section 2.4).
        wide = torch.promote_types(x_ND.dtype, torch.float32)
        return F.linear(x_ND.to(wide), self.weight.to(wide), None if self.bias is None else self.bias.to(wide))


class Experts(nn.Module):
    """Gated feed-forwards, one per expert, their matrices stacked: `[E, 2F, D]` and `[E, D, F]`, or transposed."""

    def __init__(self, shape: ModelShape, experts: ExpertShape) -> None:
        super().__init__()
        self.shape, self.activation = experts, shape.activation
        self.gate_up_name, self.down_name = shape.names.expert_gate_up, shape.names.expert_down
        num, width, inner = experts.num_experts, shape.hidden_size, experts.intermediate_size
        for name, num_in, num_out in ((self.gate_up_name, width, 2 * inner), (self.down_name, inner, width)):
            size = (num, num_out, num_in) if experts.matrix_layout == "out_in" else (num, num_in, num_out)
            self.register_parameter(name, nn.Parameter(torch.empty(size)))
            if experts.expert_bias:
                self.register_parameter(f"{name}_bias", nn.Parameter(torch.empty(num, num_out)))

    def forward(self, x_MD: Tensor, counts_E: Tensor) -> Tensor:
        """What each row's expert makes of it, `[M, D]`."""
        gate_up_M2F = self._product(self.gate_up_name, x_MD, counts_E)
        return self._product(self.down_name, self._gate(gate_up_M2F), counts_E)

    def _product(self, name: str, x_MD: Tensor, counts_E: Tensor) -> Tensor:
        weight = getattr(self, name).to(x_MD.dtype)
        if self.shape.matrix_layout == "out_in":
            weight = weight.transpose(1, 2)
        out_MF = grouped_product(x_MD, weight, counts_E)
        if not self.shape.expert_bias:
            return out_MF
        bias_EF = getattr(self, f"{name}_bias").to(x_MD.dtype)
        return out_MF + bias_EF.repeat_interleave(counts_E, dim=0, output_size=x_MD.shape[0])

    def _gate(self, gate_up_M2F: Tensor) -> Tensor:
        if self.shape.gate_up_layout == "interleaved":
            gate_MF, up_MF = gate_up_M2F[..., ::2], gate_up_M2F[..., 1::2]
        else:
            gate_MF, up_MF = gate_up_M2F.chunk(2, dim=-1)
        if self.shape.swiglu_limit is None:
            return gate(self.activation, gate_MF, up_MF)
        gate_MF = gate_MF.clamp(max=self.shape.swiglu_limit)
        up_MF = up_MF.clamp(-self.shape.swiglu_limit, self.shape.swiglu_limit)
        return gate_MF * torch.sigmoid(gate_MF * self.shape.swiglu_gain) * (up_MF + 1)


class MixtureOfExperts(nn.Module):
    """Every token through the experts that its router chose, weighed, and through the shared experts."""

    cuts: Cuts = WHOLE

    def __init__(self, shape: ModelShape, index: int) -> None:
        super().__init__()
        assert shape.experts is not None
        self.index, self.shape, self.names = index, shape.experts, shape.names
        self.add_module(self.names.router, Router(shape, self.shape))
        self.add_module(self.names.experts, Experts(shape, self.shape))
        if self.shape.shared_intermediate_size:
            self.add_module(self.names.shared_experts, FeedForward(shape, self.shape.shared_intermediate_size))

    @property
    def balance_bias(self) -> Tensor | None:
        """Added to the scores when experts are chosen, `[E]`; None where the family has none."""
        router: Router = getattr(self, self.names.router)
        return router.balance_bias

    def forward(self, x_BTD: Tensor, context: ForwardContext) -> Tensor:
        shared: Callable[[], Tensor] | None = None
        if self.shape.shared_intermediate_size:
            shared = lambda: getattr(self, self.names.shared_experts)(x_BTD)  # noqa: E731
        routing = self.route(x_BTD, context.routing)
        routed_BTD = self.run_experts(x_BTD.flatten(0, 1), routing).view_as(x_BTD)
        return routed_BTD if shared is None else routed_BTD + shared()

    def run_experts(self, x_ND: Tensor, routing: Routing) -> Tensor:
        """The weighed sum of what each token's experts make of it, `[N, D]`."""
        num_tokens, copies = routing.experts_NK.shape
        counts_E = count_tokens(routing.experts_NK, self.shape.num_experts)
        slots_M = routing.experts_NK.flatten().argsort(stable=True)
        if routing.has_drops:
            slots_M = slots_M[: int(counts_E.sum())]  # drops sort last
        rows_MD = take_rows(x_ND, slots_M, copies)
        out_MD = getattr(self, self.names.experts)(rows_MD, counts_E)
        out_NKD = put_rows(out_MD, slots_M, num_tokens * copies).unflatten(0, (num_tokens, copies))
        return (routing.weights_NK.to(x_ND.dtype).unsqueeze(1) @ out_NKD).squeeze(1)

    def route(self, x_BTD: Tensor, training: RoutingContext | None) -> Routing:
        """Choose experts; in training also count, drop beyond capacity, and add the router's losses to the gradient."""
        router: Router = getattr(self, self.names.router)
        logits_NE = router(x_BTD.flatten(0, 1))
        experts_NK, weights_NK, probabilities_NE = choose_experts(self.shape, logits_NE, router.balance_bias)
        if training is None:
            return Routing(experts_NK, weights_NK)
        rows, rules, num_experts = x_BTD.shape[0], training.rules, self.shape.num_experts
        experts_BTK = experts_NK.unflatten(0, (rows, -1))
        num_tokens = experts_BTK.shape[1]
        shares_BE = count_tokens_by_row(experts_BTK, num_experts).to(probabilities_NE.dtype) / num_tokens
        means_BE = probabilities_NE.unflatten(0, (rows, -1)).mean(1)
        balance = num_experts * (shares_BE * means_BE).sum()
        z = logits_NE.logsumexp(-1).square().unflatten(0, (rows, -1)).mean(1).sum()
        loss = rules.balance_loss_coefficient * balance + rules.z_loss_coefficient * z
        if rules.balance_loss_coefficient or rules.z_loss_coefficient:
            weights_NK = add_to_gradient(weights_NK, loss, training.row_weight / training.num_sparse_layers)
        tokens_E = count_tokens(experts_NK, num_experts)
        dropped = tokens_E.new_zeros(())
        if rules.capacity_factor is not None:
            kept_NK = within_capacity(experts_BTK, num_experts, rules.capacity_factor).flatten(0, 1)
            experts_NK, weights_NK = experts_NK.masked_fill(~kept_NK, num_experts), weights_NK.masked_fill(~kept_NK, 0.0)
            dropped = (~kept_NK).sum()
        training.statistics[self.index] = RouterStatistics(tokens_E, dropped, balance.detach(), z.detach())
        return Routing(experts_NK, weights_NK, has_drops=rules.capacity_factor is not None)
