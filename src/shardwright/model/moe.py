"""Feed-forward of a sparse layer: router, stacked experts and shared experts.

Legend: B rows, T tokens of a row, N = B x T, D hidden, E experts, K experts per token, F an
expert's width, M rows sorted by expert (N x K minus dropped ones).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.architecture import AdapterShape, ExpertShape, ModelShape
from shardwright.architecture.nf4_layout import compute_row_bytes
from shardwright.model.dropout import Dropout
from shardwright.model.forward_context import ForwardContext
from shardwright.model.mlp import FeedForward, apply_clamped_gate, apply_gate
from shardwright.model.parallel_hooks import (
    NO_PARALLEL_HOOKS,
    ExpertParallelHooks,
    ParallelHooks,
)
from shardwright.model.pointwise.functions import FusedFunctions
from shardwright.model.products.grouped_matmul import (
    gather_rows,
    repeat_by_expert,
    scatter_rows,
    take_first,
)
from shardwright.model.products.product import ProductRule, multiply_by_expert
from shardwright.model.products.scaled_product import ScaledProducts
from shardwright.model.products.working_weights import declare_working_weight
from shardwright.model.result_names import name_results
from shardwright.model.routing import (
    RouterStatistics,
    Routing,
    add_to_gradient,
    choose_experts,
    count_tokens,
    count_tokens_by_row,
    mask_within_capacity,
)


class Router(nn.Module):
    """Linear layer from tokens to expert logits.

    `balance_bias`, `[E]`, is added to the scores for the choice of experts; the train step
    updates it. None if the family has none.
    """

    def __init__(self, shape: ModelShape, experts: ExpertShape) -> None:
        super().__init__()
        num_experts = experts.num_experts
        self.weight = nn.Parameter(torch.empty(num_experts, shape.hidden_size))
        self.bias = nn.Parameter(torch.empty(num_experts)) if experts.router_bias else None
        self.balance_bias = (
            nn.Parameter(torch.empty(num_experts), requires_grad=False)
            if experts.balance_bias
            else None
        )

    def forward(self, x_ND: Tensor) -> Tensor:
        # In fp32 or fp64: small differences decide the choice of experts (Switch Transformer,
        # section 2.4).
        wide = torch.promote_types(x_ND.dtype, torch.float32)
        return F.linear(
            x_ND.to(wide), self.weight.to(wide), None if self.bias is None else self.bias.to(wide)
        )


class ExpertStack(nn.Module):
    """One matrix of every expert, `[E, out, in]`, or `[E, in, out]` if `is_transposed`.

    After `add_adapter` each expert computes with W + scale x B A: A `[E, R, in]`, B `[E, out, R]`,
    for both layouts of W.
    """

    scaled: ScaledProducts | None = None
    """Products of quantised operands with its own weight; adapters multiply in x's precision."""
    adapters: AdapterShape | None = None
    is_adapter_enabled: bool = True
    working_weight: Tensor | None
    working_lora_A: Tensor | None
    working_lora_B: Tensor | None

    def __init__(self, experts: ExpertShape, num_in: int, num_out: int) -> None:
        super().__init__()
        self.is_transposed = experts.matrix_layout == "in_out"
        self.num_experts = experts.num_experts
        self.num_in = num_in
        self.num_out = num_out
        sides = (num_in, num_out) if self.is_transposed else (num_out, num_in)
        self.weight = nn.Parameter(torch.empty(self.num_experts, *sides))
        self.bias = (
            nn.Parameter(torch.empty(self.num_experts, num_out)) if experts.expert_bias else None
        )
        declare_working_weight(self, "weight")

    def add_adapter(self, adapters: AdapterShape) -> None:
        """Add an adapter to every expert's matrix."""
        self.adapters = adapters
        self.lora_A = nn.Parameter(torch.empty(self.num_experts, adapters.rank, self.num_in))
        self.lora_B = nn.Parameter(torch.empty(self.num_experts, self.num_out, adapters.rank))
        declare_working_weight(self, "lora_A", "lora_B")

    def quantise(self) -> None:
        """Freeze the weights and store them as bytes (`nf4`)."""
        assert not self.is_transposed, "quantisation blocks lie along a product's inputs"
        shape = (self.num_experts, self.num_out, compute_row_bytes(self.num_in))
        self.weight = nn.Parameter(
            torch.empty(shape, dtype=torch.uint8, device=self.weight.device), requires_grad=False
        )

    def forward(self, x_MD: Tensor, counts_E: Tensor, *, bias_factor: float = 1.0) -> Tensor:
        """Multiply each row by its expert's matrix, `[M, out]`.

        If `counts_E` has one more entry, it is the number of rows of padding, which come last.
        Their results are undefined.
        """
        counts_with_padding = counts_E
        counts_E = counts_E[: self.weight.shape[0]]
        rule = ProductRule(self.num_in, self.is_transposed, scaled=self.scaled)
        with name_results("experts"):
            out_MF = multiply_by_expert(x_MD, self.weight, counts_E, rule, self.working_weight)
        if self.adapters is not None and self.is_adapter_enabled:
            low_MR = multiply_by_expert(
                x_MD, self.lora_A, counts_E, ProductRule(self.num_in), self.working_lora_A
            )
            rank_rule = ProductRule(self.adapters.rank)
            out_MF = out_MF + multiply_by_expert(
                low_MR * self.adapters.scale,
                self.lora_B,
                counts_E,
                rank_rule,
                self.working_lora_B,
            )
        if self.bias is None:
            return out_MF
        bias_EF = self.bias.to(x_MD.dtype)
        bias_MF = repeat_by_expert(bias_EF, counts_with_padding, x_MD.shape[0])
        return out_MF + (bias_MF if bias_factor == 1.0 else bias_MF * bias_factor)


class Experts(nn.Module):
    """Gated feed-forwards of all experts, each product computed by a stack of matrices."""

    fused: FusedFunctions | None = None
    parallel_hooks: ParallelHooks = NO_PARALLEL_HOOKS

    def __init__(self, shape: ModelShape, experts: ExpertShape) -> None:
        super().__init__()
        self.shape = experts
        self.activation = shape.activation
        width = shape.hidden_size
        inner = experts.intermediate_size
        self.gate_up = ExpertStack(experts, width, 2 * inner)
        self.down = ExpertStack(experts, inner, width)

    def forward(self, x_MD: Tensor, counts_E: Tensor) -> Tensor:
        """Apply each row's expert, `[M, D]`."""
        inner_MF = self._apply_gate(self.gate_up(x_MD, counts_E))
        # Tensor-parallel ranks compute partial sums, so only the first adds the bias. The
        # others multiply it by 0: DDP needs every parameter in the graph.
        is_first = self.parallel_hooks.tensor is None or self.parallel_hooks.tensor.rank == 0
        out_MD: Tensor = self.down(inner_MF, counts_E, bias_factor=1.0 if is_first else 0.0)
        return out_MD

    def _apply_gate(self, gate_up_M2F: Tensor) -> Tensor:
        if self.shape.gate_up_layout == "interleaved":
            gate_MF = gate_up_M2F[..., ::2]
            up_MF = gate_up_M2F[..., 1::2]
        else:
            gate_MF, up_MF = gate_up_M2F.chunk(2, dim=-1)
        if self.shape.swiglu_limit is None:
            return apply_gate(self.activation, gate_MF, up_MF, self.fused)
        return apply_clamped_gate(
            gate_MF, up_MF, self.shape.swiglu_limit, self.shape.swiglu_gain, self.fused
        )


class _TokenPart(NamedTuple):
    """Some of the tokens, with their choices of experts."""

    x_ND: Tensor
    weights_NK: Tensor
    counts_E: Tensor
    slots_M: Tensor
    """Index of each choice, sorted by expert. Dropped ones come last."""
    has_drops: bool


def _gather_choices(part: _TokenPart, slots_M: Tensor) -> Tensor:
    """Gather the token of each choice, `[M, D]`."""
    return gather_rows(part.x_ND, slots_M, part.weights_NK.shape[1], has_gaps=part.has_drops)


def _sum_choices(part: _TokenPart, slots_M: Tensor, out_MD: Tensor) -> Tensor:
    """Compute the weighted sum of each token's experts, `[N, D]`, from the rows of its choices."""
    num_tokens, copies = part.weights_NK.shape
    out_SD = scatter_rows(out_MD, slots_M, num_tokens * copies, has_gaps=part.has_drops)
    out_NKD = out_SD.unflatten(0, (num_tokens, copies))
    return (part.weights_NK.to(part.x_ND.dtype).unsqueeze(1) @ out_NKD).squeeze(1)


class MixtureOfExperts(nn.Module):
    """Weighted sum of each token's chosen experts, plus the shared experts."""

    parallel_hooks: ParallelHooks = NO_PARALLEL_HOOKS

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        assert shape.experts is not None
        self.shape = shape.experts
        self.router = Router(shape, self.shape)
        self.experts = Experts(shape, self.shape)
        if self.shape.shared_intermediate_size:
            self.shared_experts = FeedForward(shape, self.shape.shared_intermediate_size)

    def forward(
        self, x_BTD: Tensor, context: ForwardContext, dropout: Dropout | None = None
    ) -> tuple[Tensor, RouterStatistics | None]:
        # Tensor-parallel ranks route the same tokens; their outputs and gradients are partial
        # sums.
        tensor = context.tensor_parallel
        x_BTD = x_BTD if tensor is None else tensor.prepare_input(x_BTD)
        routing = self.route(x_BTD, context)
        shared: Callable[[], Tensor] | None = None
        if self.shape.shared_intermediate_size:
            shared = partial(self.shared_experts, x_BTD, None, dropout)
        routed_ND, shared_BTD = self.run_experts(x_BTD.flatten(0, 1), routing, shared)
        out_BTD = routed_ND.view_as(x_BTD)
        out_BTD = out_BTD if shared_BTD is None else out_BTD + shared_BTD
        if tensor is not None:
            with name_results("down"):
                out_BTD = tensor.reduce_output(out_BTD)
        return out_BTD, routing.statistics

    def run_experts(
        self, x_ND: Tensor, routing: Routing, overlapped_compute: Callable[[], Tensor] | None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the weighted sum of each token's experts, `[N, D]`, and `overlapped_compute`'s
        result.

        `overlapped_compute` runs during the communication of expert parallelism.
        """
        exchange = self.parallel_hooks.token_exchange
        if exchange is not None and exchange.accepts(routing):
            return exchange.run_experts(self.experts, x_ND, routing, overlapped_compute)
        hooks = self.parallel_hooks.expert
        if hooks is not None and hooks.degree > 1:
            return self._exchange_rows(x_ND, routing, hooks, overlapped_compute)
        (part,) = self._split_tokens(x_ND, routing, 1)
        slots_M = part.slots_M
        if routing.has_drops:
            slots_M = take_first(slots_M, part.counts_E.sum())  # drops sort last
        out_MD = self.experts(_gather_choices(part, slots_M), part.counts_E)
        overlapped = None if overlapped_compute is None else overlapped_compute()
        return _sum_choices(part, slots_M, out_MD), overlapped

    def _exchange_rows(
        self,
        x_ND: Tensor,
        routing: Routing,
        hooks: ExpertParallelHooks,
        overlapped_compute: Callable[[], Tensor] | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Do the same with experts of other ranks, to which the rows of each part are sent.

        Rows of the second part are sent while the experts of the first compute, whose results are
        sent while the experts of the second compute. Autograd runs the latest operations first, so
        gradients overlap likewise.
        """
        parts = self._split_tokens(x_ND, routing, hooks.num_parts)
        num_choices = [part.slots_M.shape[0] for part in parts]
        counts = hooks.exchange_counts(torch.stack([part.counts_E for part in parts]), num_choices)
        slots = [part.slots_M for part in parts]
        if routing.has_drops:
            slots = list(map(hooks.keep_sent_slots, slots, counts))
        sent = []
        for part, slots_M, part_counts in zip(parts, slots, counts, strict=True):
            rows_MD = _gather_choices(part, slots_M)
            sent.append(hooks.start_dispatch(rows_MD, part_counts))
        overlapped = None if overlapped_compute is None else overlapped_compute()
        returned = []
        while sent:
            dispatched = sent.pop(0)()
            out_RD = self.experts(dispatched.rows_RD, dispatched.counts_e)
            returned.append(hooks.start_combine(out_RD, dispatched))
        results = [finish() for finish in returned]
        sums = list(map(_sum_choices, parts, slots, results))
        return sums[0] if len(sums) == 1 else torch.cat(sums), overlapped

    def _split_tokens(self, x_ND: Tensor, routing: Routing, num_parts: int) -> list[_TokenPart]:
        """Split the tokens into parts whose sizes differ by at most one."""
        wholes = (x_ND, routing.weights_NK, routing.experts_NK)
        split = [[whole] if num_parts == 1 else whole.tensor_split(num_parts) for whole in wholes]
        return [
            _TokenPart(
                tokens_ND,
                weights_NK,
                count_tokens(experts_NK, self.shape.num_experts),
                experts_NK.flatten().argsort(stable=True),
                routing.has_drops,
            )
            for tokens_ND, weights_NK, experts_NK in zip(*split, strict=True)
        ]

    def route(self, x_BTD: Tensor, context: ForwardContext) -> Routing:
        """Choose experts; in training also count, limit to capacity, and add router losses."""
        logits_NE = self.router(x_BTD.flatten(0, 1))
        experts_NK, weights_NK, probabilities_NE = choose_experts(
            self.shape, logits_NE, self.router.balance_bias
        )
        training = context.routing
        if training is None:
            return Routing(experts_NK, weights_NK)
        rules = training.rules
        experts_BTK = experts_NK.unflatten(0, (x_BTD.shape[0], -1))
        balance_loss, z_loss = self._compute_router_losses(experts_BTK, probabilities_NE, logits_NE)
        if rules.balance_loss_coefficient or rules.z_loss_coefficient:
            loss = rules.balance_loss_coefficient * balance_loss + rules.z_loss_coefficient * z_loss
            share = (
                1.0 if self.parallel_hooks.expert is None else self.parallel_hooks.expert.loss_share
            )
            weights_NK = add_to_gradient(
                weights_NK, loss, training.row_weight * (share / training.num_sparse_layers)
            )
        exchange = self.parallel_hooks.token_exchange
        tokens_E = counts_E = count_tokens(experts_NK, self.shape.num_experts)
        num_dropped = tokens_E.new_zeros(())
        if rules.capacity_factor is not None:
            dropped_NK = ~self._mask_within_capacity(
                experts_BTK, rules.capacity_factor, context.token_indices_T
            )
            experts_NK = experts_NK.masked_fill(dropped_NK, self.shape.num_experts)
            weights_NK = weights_NK.masked_fill(dropped_NK, 0.0)
            num_dropped = dropped_NK.sum()
            if exchange is not None:
                counts_E = count_tokens(experts_NK, self.shape.num_experts)
        places = None if exchange is None else exchange.place_rows(experts_NK, counts_E)
        return Routing(
            experts_NK,
            weights_NK,
            has_drops=rules.capacity_factor is not None,
            statistics=RouterStatistics(
                tokens_E,
                num_dropped,
                balance_loss.detach(),
                z_loss.detach(),
                tokens_E.new_zeros(()) if places is None else places.num_beyond_limit,
            ),
            places=places,
        )

    def _compute_router_losses(
        self, experts_BTK: Tensor, probabilities_NE: Tensor, logits_NE: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute balance and z losses summed over rows, or this context rank's part of them.

        The experts' shares of tokens have no gradient, so only their counts are summed over a
        row's ranks; each rank uses its own tokens' part of the mean probabilities.
        """
        hooks = self.parallel_hooks.expert
        num_experts = self.shape.num_experts
        num_rows, num_tokens, _ = experts_BTK.shape
        counts_BE = count_tokens_by_row(experts_BTK, num_experts)
        if hooks is not None:
            counts_BE = hooks.sum_over_row(counts_BE)
            num_tokens *= hooks.num_row_ranks
        shares_BE = counts_BE.to(probabilities_NE.dtype) / num_tokens
        means_BE = probabilities_NE.unflatten(0, (num_rows, -1)).sum(1) / num_tokens
        balance_loss = num_experts * (shares_BE * means_BE).sum()
        z_loss = logits_NE.logsumexp(-1).square().sum() / num_tokens
        return balance_loss, z_loss

    def _mask_within_capacity(
        self, experts_BTK: Tensor, capacity_factor: float, token_indices_T: Tensor | None
    ) -> Tensor:
        """Return True for choices within capacity, `[N, K]`, from all choices of the row."""
        if self.parallel_hooks.expert is None or token_indices_T is None:
            return mask_within_capacity(
                experts_BTK, self.shape.num_experts, capacity_factor
            ).flatten(0, 1)
        whole_BTK = self.parallel_hooks.expert.gather_row(experts_BTK, token_indices_T)
        return mask_within_capacity(whole_BTK, self.shape.num_experts, capacity_factor)[
            :, token_indices_T
        ].flatten(0, 1)
