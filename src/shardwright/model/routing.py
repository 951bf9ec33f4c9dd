"""Which experts a token goes to and what each weighs; the losses and the bias that keep them evenly used.

Two losses act on the router while training. With f_e the chosen share of expert e in a row (its tokens / T, so that a row's
shares add up to the experts per token), P_e the row's mean probability of e, and E experts:

    balance   E x sum over e of f_e P_e      (Switch Transformer, arXiv 2101.03961, equations 4 to 6, for one row and layer)
    z         mean over tokens of (logsumexp of the logits)^2      (ST-MoE, arXiv 2202.08906, equation 5)

Both are taken per row, averaged over the sparse layers and over the rows of the global batch: no cut and no accumulation
changes them. They enter the gradient beside the loss and not through it (`add_to_gradient`), each row with the weight that the
step says; docs/decisions/0033-expert-losses.md says why.

Legend: B rows, T tokens of a row, N = B x T, E experts, K experts per token, G groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.architecture import ExpertShape, ModelShape
from shardwright.config.model import MoeSection
from shardwright.errors import RecipeError


@dataclass(frozen=True)
class ExpertRules:
    """How a run keeps experts evenly used.

    `capacity_factor` bounds the tokens that an expert takes of one row: factor x T x K / E, rounded up; None drops nothing.
    `bias_update_rate` is by how much a step moves each expert's balance bias towards even loads.
    """

    balance_loss_coefficient: float = 0.0
    z_loss_coefficient: float = 0.0
    capacity_factor: float | None = None
    bias_update_rate: float = 0.0


def resolve_rules(section: MoeSection, shape: ModelShape) -> ExpertRules | None:
    """The recipe's rules for a model, None for a dense one; what the recipe leaves open is told by the model's config.json.

    Raises:
        RecipeError: the recipe sets something that the model does not have.
    """
    experts = shape.experts
    if experts is None:
        # By value, not by what was written: the launcher's ranks read the whole recipe, defaults and all.
        for key, known in type(section).model_fields.items():
            if getattr(section, key) == known.default:
                continue
            raise RecipeError(
                "this model has no experts",
                field=f"moe.{key}",
                got=getattr(section, key),
                remedy="Leave the section `moe` out, or take a sparse model (mixtral, qwen3_moe, olmoe, gpt_oss, deepseek_v3)",
            )
        return None
    if section.bias_update_rate is not None and not experts.balance_bias:
        raise RecipeError(
            f"a {shape.family} model has no balance biases to move",
            field="moe.bias_update_rate",
            got=section.bias_update_rate,
            remedy="Use moe.balance_loss_coefficient",
        )
    rate = section.bias_update_rate
    if shape.adapters is not None and rate:
        raise RecipeError(
            "balance biases are the base's, which stays as it is beside adapters",
            field="moe.bias_update_rate",
            got=rate,
            allowed="0",
            remedy="Leave it out",
        )
    if rate is None:
        rate = _BIAS_UPDATE_RATE if experts.balance_bias and shape.adapters is None else 0.0
    coefficient = section.balance_loss_coefficient
    if coefficient is None:
        coefficient = experts.balance_loss_coefficient or 0.0
    return ExpertRules(coefficient, section.z_loss_coefficient, section.capacity_factor, rate)


_BIAS_UPDATE_RATE = 0.001
"""DeepSeek-V3's (arXiv 2412.19437, section 4.2)."""


@dataclass(frozen=True)
class RouterStatistics:
    """What one layer's router did; sums over rows, on the device or read off it."""

    tokens_E: Tensor
    """Tokens that chose each expert, before any is dropped; int64."""
    dropped: Tensor
    """Choices dropped for want of capacity; int64."""
    balance: Tensor
    """Balance losses."""
    z: Tensor
    """z losses."""


@dataclass
class RoutingContext:
    """Training's side of one forward pass: rules, what a row's losses weigh in the gradient, and what was seen.

    `statistics` are kept by layer: a block that is computed again in the backward pass writes its own again and adds nothing.
    """

    rules: ExpertRules
    row_weight: Tensor | float
    num_sparse_layers: int
    statistics: dict[int, RouterStatistics] = field(default_factory=dict)


class RouterTally:
    """What the routers did since `take` was last called, added up on the device over forward passes."""

    def __init__(self) -> None:
        self._sums: dict[int, RouterStatistics] = {}

    def add(self, routing: RoutingContext) -> None:
        """Count one forward pass."""
        for layer, new in routing.statistics.items():
            old = self._sums.get(layer)
            if old is not None:
                pairs = ((getattr(old, f.name), getattr(new, f.name)) for f in fields(RouterStatistics))
                new = RouterStatistics(*(a + b for a, b in pairs))
            self._sums[layer] = new

    def take(self, num_layers: int, num_experts: int, device: torch.device) -> Tensor:
        """`[layers, E + 3]` in fp64: tokens by expert, dropped choices, balance and z losses; zeros where no router is. Forgets."""
        table = torch.zeros(num_layers, num_experts + 3, dtype=torch.float64, device=device)
        for layer, found in self._sums.items():
            table[layer, :num_experts] = found.tokens_E
            table[layer, num_experts:] = torch.stack([found.dropped.double(), found.balance.double(), found.z.double()])
        self._sums.clear()
        return table


@dataclass(frozen=True)
class Routing:
    """Experts of every token and what each weighs."""

    experts_NK: Tensor
    """int64; E stands for a choice that was dropped, whose weight is 0."""
    weights_NK: Tensor
    has_drops: bool = False


def choose_experts(experts: ExpertShape, logits_NE: Tensor, bias_E: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Chosen experts and their weights, `[N, K]`, and every expert's probability `[N, E]`; precision is that of the logits."""
    if experts.score == "softmax":
        scores_NE = probabilities_NE = logits_NE.softmax(-1)
    else:
        scores_NE = logits_NE.sigmoid()
        probabilities_NE = scores_NE / scores_NE.sum(-1, keepdim=True)
    with torch.no_grad():
        ranked_NE = scores_NE if bias_E is None else scores_NE + bias_E.to(scores_NE.dtype)
        if experts.num_groups > 1:
            ranked_NE = _within_best_groups(ranked_NE, experts)
        experts_NK = ranked_NE.topk(experts.experts_per_token, dim=-1).indices
    weights_NK = scores_NE.gather(1, experts_NK)
    if experts.normalised:
        weights_NK = weights_NK / (weights_NK.sum(-1, keepdim=True) + (1e-20 if experts.score == "sigmoid" else 0.0))
    if experts.weight_scale != 1.0:
        weights_NK = weights_NK * experts.weight_scale
    return experts_NK, weights_NK, probabilities_NE


def _within_best_groups(ranked_NE: Tensor, experts: ExpertShape) -> Tensor:
    """-inf for experts outside the token's best groups (DeepSeek-V3, arXiv 2412.19437, section 2.1.2, node-limited routing)."""
    ranked_NGe = ranked_NE.unflatten(-1, (experts.num_groups, -1))
    group_NG = ranked_NGe.topk(2, dim=-1).values.sum(-1)
    outside_NG = torch.ones_like(group_NG, dtype=torch.bool)
    outside_NG.scatter_(1, group_NG.topk(experts.groups_per_token, dim=-1).indices, False)
    return ranked_NGe.masked_fill(outside_NG[..., None], float("-inf")).flatten(-2)


def within_capacity(experts_BTK: Tensor, num_experts: int, capacity_factor: float) -> Tensor:
    """Which choices fit into the experts' capacity for their row, `[B, T, K]` of booleans.

    Tokens are taken in the order of the row, so that whether a token is dropped depends on none that follows it, as with
    everything else in a causal model.
    """
    num_tokens, per_token = experts_BTK.shape[1:]
    capacity = math.ceil(capacity_factor * num_tokens * per_token / num_experts)
    chosen_BTE = F.one_hot(experts_BTK, num_experts).sum(2)
    place_BTE = chosen_BTE.cumsum(1)
    return place_BTE.gather(2, experts_BTK) <= capacity


def count_tokens(experts: Tensor, num_experts: int) -> Tensor:
    """How often each expert occurs, `[E]`, int64; drops (E itself) are not counted."""
    flat = experts.flatten()
    counts = flat.new_zeros(num_experts + 1).scatter_add_(0, flat, torch.ones_like(flat))
    return counts[:num_experts]


def count_tokens_by_row(experts_BTK: Tensor, num_experts: int) -> Tensor:
    """The same for each row, `[B, E]`."""
    flat_BM = experts_BTK.flatten(1)
    counts = flat_BM.new_zeros(flat_BM.shape[0], num_experts).scatter_add_(1, flat_BM, torch.ones_like(flat_BM))
    return counts


def add_to_gradient(x: Tensor, loss: Tensor, weight: Tensor | float) -> Tensor:
    """`x` as it is; its backward pass also differentiates weight x loss."""
    added: Tensor = _AddToGradient.apply(x, loss, weight)
    return added


class _AddToGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, weight: Tensor | float) -> Tensor:
        ctx.weight, ctx.like = weight, (loss.dtype, loss.device)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        dtype, device = ctx.like
        return gradients[0], torch.as_tensor(ctx.weight, dtype=dtype, device=device), None
