"""Choice of experts for each token, and the losses and rules that balance their load.

Two losses act on the router in training. With f_e the share of a row's tokens that choose
expert e (its tokens / T, so a row's shares sum to the experts per token), P_e the row's mean
probability of e, and E experts:

    balance   E x sum over e of f_e P_e
              (Switch Transformer, arXiv 2101.03961, equations 4 to 6, for one row and layer)
    z         mean over tokens of (logsumexp of the logits)^2
              (ST-MoE, arXiv 2202.08906, equation 5)

Both are computed per row and averaged over the sparse layers and over the rows of the global
batch, so they do not depend on layout or accumulation. They are added to the gradient directly,
not to the loss (`add_to_gradient`), each row with the weight that the train step sets;
docs/decisions/0033-expert-losses.md has the reasons.

Legend: B rows, T tokens of a row, N = B x T, E experts, K experts per token, G groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.architecture import ExpertShape, ModelShape
from shardwright.config.model import MoeSection
from shardwright.errors import RecipeError
from shardwright.model.products.row_places import RowPlaces


@dataclass(frozen=True)
class ExpertRules:
    """Load balancing of a run's experts.

    `capacity_factor` limits the tokens of a row per expert to factor x T x K / E, rounded up;
    None drops nothing. `bias_update_rate` is the change of each expert's balance bias per step,
    towards even loads.
    """

    balance_loss_coefficient: float = 0.0
    z_loss_coefficient: float = 0.0
    capacity_factor: float | None = None
    bias_update_rate: float = 0.0


def resolve_expert_rules(section: MoeSection, shape: ModelShape) -> ExpertRules | None:
    """Resolve the recipe's rules for a model, with defaults from its config.json.

    None for a dense model.

    Raises:
        RecipeError: the recipe sets something that the model does not have.
    """
    experts = shape.experts
    if experts is None:
        # Compares values: a launched rank reads a recipe in which all defaults are written out.
        for key, model_field in type(section).model_fields.items():
            if getattr(section, key) == model_field.default:
                continue
            raise RecipeError(
                "this model has no experts",
                field=f"moe.{key}",
                got=getattr(section, key),
                remedy="Remove the section `moe`, or use a sparse model "
                "(mixtral, qwen3_moe, olmoe, gpt_oss, deepseek_v3)",
            )
        return None
    if section.bias_update_rate is not None and not experts.balance_bias:
        raise RecipeError(
            f"a {shape.family} model has no balance biases to update",
            field="moe.bias_update_rate",
            got=section.bias_update_rate,
            remedy="Use moe.balance_loss_coefficient",
        )
    rate = section.bias_update_rate
    if shape.adapters is not None and rate:
        raise RecipeError(
            "balance biases belong to the base model, which adapters leave frozen",
            field="moe.bias_update_rate",
            got=rate,
            allowed="0",
            remedy="Remove it",
        )
    if rate is None:
        rate = _BIAS_UPDATE_RATE if experts.balance_bias and shape.adapters is None else 0.0
    coefficient = section.balance_loss_coefficient
    if coefficient is None:
        coefficient = experts.balance_loss_coefficient or 0.0
    return ExpertRules(coefficient, section.z_loss_coefficient, section.capacity_factor, rate)


_BIAS_UPDATE_RATE = 0.001
"""Update rate of DeepSeek-V3 (arXiv 2412.19437, section 4.2)."""


class RouterStatistics(NamedTuple):
    """Statistics of one layer's router, summed over rows."""

    tokens_E: Tensor
    """Tokens that chose each expert, dropped ones included; int64, `[E]`."""
    num_dropped: Tensor
    """Number of choices dropped because of capacity; int64."""
    balance_loss: Tensor
    """Sum of balance losses."""
    z_loss: Tensor
    """Sum of z losses."""
    num_beyond_limit: Tensor
    """Number of rows beyond the limit of a padded exchange, which has omitted them; int64."""


@dataclass
class RoutingContext:
    """Training settings and router statistics of one forward pass.

    `row_weight` is the weight of one row's router losses in the gradient. Blocks store their
    `statistics` by layer, outside the computation that is compiled and that the backward pass
    may repeat: nothing is counted twice.
    """

    rules: ExpertRules
    row_weight: Tensor | float
    num_sparse_layers: int
    statistics: dict[int, RouterStatistics] = field(default_factory=dict)


class RouterTotals:
    """Router statistics summed over forward passes, on the device, since the last `pop_table`."""

    def __init__(self) -> None:
        self._sums: dict[int, RouterStatistics] = {}

    def add(self, routing: RoutingContext) -> None:
        """Add the statistics of one forward pass."""
        for layer, statistics in routing.statistics.items():
            total = self._sums.get(layer)
            if total is not None:
                statistics = RouterStatistics(
                    *(a + b for a, b in zip(total, statistics, strict=True))
                )
            self._sums[layer] = statistics

    def count_beyond_limit(self, device: torch.device) -> Tensor:
        """Count the rows beyond the limit of padded exchanges, fp64. Call it before `pop_table`."""
        counts = [total.num_beyond_limit for total in self._sums.values()]
        zero = torch.zeros((), dtype=torch.float64, device=device)
        return torch.stack(counts).sum().double() if counts else zero

    def pop_table(self, num_layers: int, num_experts: int, device: torch.device) -> Tensor:
        """Return the sums as a table `[layers, E + 3]` in fp64, and reset them.

        Columns: tokens by expert, dropped choices, balance loss, z loss. Dense layers have
        zeros.
        """
        table = torch.zeros(num_layers, num_experts + 3, dtype=torch.float64, device=device)
        for layer, total in self._sums.items():
            table[layer, :num_experts] = total.tokens_E
            table[layer, num_experts:] = torch.stack(
                [total.num_dropped.double(), total.balance_loss.double(), total.z_loss.double()]
            )
        self._sums.clear()
        return table


@dataclass(frozen=True)
class Routing:
    """Experts and weights of every token."""

    experts_NK: Tensor
    """Expert indices, int64; E for a dropped choice, whose weight is 0."""
    weights_NK: Tensor
    has_drops: bool = False
    statistics: RouterStatistics | None = None
    """Statistics of a training step's routing; None otherwise."""
    places: RowPlaces | None = None
    """Places of the rows in a padded exchange; None for an exact one."""


def choose_experts(
    experts: ExpertShape, logits_NE: Tensor, bias_E: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose experts: return indices and weights, `[N, K]`, and all probabilities, `[N, E]`.

    Weights and probabilities have the precision of the logits.
    """
    if experts.score == "softmax":
        scores_NE = probabilities_NE = logits_NE.softmax(-1)
    else:
        scores_NE = logits_NE.sigmoid()
        probabilities_NE = scores_NE / scores_NE.sum(-1, keepdim=True)
    with torch.no_grad():
        choice_scores_NE = scores_NE if bias_E is None else scores_NE + bias_E.to(scores_NE.dtype)
        if experts.num_groups > 1:
            choice_scores_NE = _mask_other_groups(choice_scores_NE, experts)
        experts_NK = choice_scores_NE.topk(experts.experts_per_token, dim=-1).indices
    weights_NK = scores_NE.gather(1, experts_NK)
    if experts.normalised:
        weights_NK = weights_NK / (
            weights_NK.sum(-1, keepdim=True) + (1e-20 if experts.score == "sigmoid" else 0.0)
        )
    if experts.weight_scale != 1.0:
        weights_NK = weights_NK * experts.weight_scale
    return experts_NK, weights_NK, probabilities_NE


def _mask_other_groups(scores_NE: Tensor, experts: ExpertShape) -> Tensor:
    """Set the scores of experts outside the token's best groups to -inf (node-limited routing).

    Source: DeepSeek-V3, arXiv 2412.19437, section 2.1.2.
    """
    scores_NGe = scores_NE.unflatten(-1, (experts.num_groups, -1))
    group_scores_NG = scores_NGe.topk(2, dim=-1).values.sum(-1)
    is_outside_NG = torch.ones_like(group_scores_NG, dtype=torch.bool)
    is_outside_NG.scatter_(1, group_scores_NG.topk(experts.groups_per_token, dim=-1).indices, False)
    return scores_NGe.masked_fill(is_outside_NG[..., None], float("-inf")).flatten(-2)


def mask_within_capacity(experts_BTK: Tensor, num_experts: int, capacity_factor: float) -> Tensor:
    """Return True for choices within the experts' capacity for their row, `[B, T, K]`.

    Earlier tokens of the row come first, so dropping a token does not depend on later tokens,
    as a causal model requires.
    """
    num_tokens, per_token = experts_BTK.shape[1:]
    capacity = math.ceil(capacity_factor * num_tokens * per_token / num_experts)
    chosen_BTE = F.one_hot(experts_BTK, num_experts).sum(2)
    count_BTE = chosen_BTE.cumsum(1)
    return count_BTE.gather(2, experts_BTK) <= capacity


def count_tokens(experts: Tensor, num_experts: int) -> Tensor:
    """Count the tokens of each expert, `[E]`, int64; dropped choices (index E) do not count."""
    flat = experts.flatten()
    counts = flat.new_zeros(num_experts + 1).scatter_add_(0, flat, torch.ones_like(flat))
    return counts[:num_experts]


def count_tokens_by_row(experts_BTK: Tensor, num_experts: int) -> Tensor:
    """Count the tokens of each expert in each row, `[B, E]`; dropped choices not allowed."""
    flat_BM = experts_BTK.flatten(1)
    counts = flat_BM.new_zeros(flat_BM.shape[0], num_experts).scatter_add_(
        1, flat_BM, torch.ones_like(flat_BM)
    )
    return counts


def add_to_gradient(x: Tensor, loss: Tensor, weight: Tensor | float) -> Tensor:
    """Return `x` unchanged; the backward pass adds the gradient of weight x loss."""
    out: Tensor = _AddToGradient.apply(x, loss, weight)
    return out


class _AddToGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, weight: Tensor | float) -> Tensor:
        ctx.weight = weight
        ctx.like = (loss.dtype, loss.device)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        dtype, device = ctx.like
        return gradients[0], torch.as_tensor(ctx.weight, dtype=dtype, device=device), None
