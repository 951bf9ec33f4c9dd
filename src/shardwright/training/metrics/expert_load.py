"""Expert loads of a step: statistics, overload warnings and updates of the balance biases.

Legend: L layers, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwright.architecture import ModelShape
from shardwright.model.decoder import Decoder
from shardwright.model.moe import MixtureOfExperts


@dataclass(frozen=True)
class ExpertLoads:
    """Expert loads of one optimizer step, over all ranks and micro-batches, by layer number."""

    tokens_by_layer: dict[int, tuple[int, ...]]
    """Tokens routed to each expert, before any are dropped."""
    num_dropped: int
    """Choices dropped because the expert's capacity was full."""
    balance_loss: float
    """Mean over rows and layers; equals the experts per token if loads are even."""
    z_loss: float
    """Mean over rows and layers."""

    @property
    def max_load_ratio(self) -> float:
        """Largest ratio of an expert's tokens to its even share, over all layers."""
        return max(
            max(tokens) * len(tokens) / max(1, sum(tokens))
            for tokens in self.tokens_by_layer.values()
        )


def read_expert_loads(routers_LE3: Tensor, shape: ModelShape, num_rows: int) -> ExpertLoads:
    """Convert `RouterTotals.take`'s table, summed over all ranks and in host memory."""
    sparse = [index for index, layer in enumerate(shape.layers) if layer.sparse]
    table = routers_LE3[sparse].tolist()
    count = num_rows * len(sparse)
    return ExpertLoads(
        tokens_by_layer={
            index: tuple(int(value) for value in row[:-3])
            for index, row in zip(sparse, table, strict=True)
        },
        num_dropped=int(sum(row[-3] for row in table)),
        balance_loss=sum(row[-2] for row in table) / count,
        z_loss=sum(row[-1] for row in table) / count,
    )


@torch.no_grad()
def update_balance_biases(decoder: Decoder, routers_LE3: Tensor) -> None:
    """Raise the balance bias of each expert below its even share, lower it above.

    Uses the loads of all ranks, so all copies of a bias stay identical. Source:
    auxiliary-loss-free balancing, arXiv 2408.15664, algorithm 1.
    """
    rate = decoder.expert_rules.bias_update_rate
    if rate == 0.0:
        return
    for block in decoder.blocks:
        if not isinstance(block.mlp, MixtureOfExperts):
            continue
        bias_E = block.mlp.router.balance_bias
        if bias_E is not None:
            tokens_E = routers_LE3[block.layer_index, :-3]
            missing_E = (tokens_E.mean() - tokens_E).sign()
            bias_E.add_(missing_E.to(bias_E.dtype), alpha=rate)


@dataclass
class ExpertLoadMonitor:
    """Detector of experts that stay overloaded.

    Keeps a running mean of each expert's load relative to its even share, over about the last
    `WINDOW_STEPS` steps. An expert is reported when its mean crosses the limit, and again only
    after the mean has fallen below it.
    """

    WINDOW_STEPS = 20

    experts_per_token: int
    _loads: dict[tuple[int, int], float] = field(default_factory=dict)
    _reported: set[tuple[int, int]] = field(default_factory=set)
    _num_steps: int = 0

    def compute_limit(self, num_experts: int) -> float:
        """Return the limit as a multiple of the even share.

        Four, or half-way between the even share and all tokens if that is less.
        """
        return min(4.0, (1.0 + num_experts / self.experts_per_token) / 2)

    def observe(self, loads: ExpertLoads) -> str | None:
        """Add a step's loads; return a warning if another expert is overloaded."""
        self._num_steps += 1
        weight = 1.0 / min(self._num_steps, self.WINDOW_STEPS)
        worst: tuple[float, int, int] | None = None
        for layer, tokens in loads.tokens_by_layer.items():
            even = max(1, sum(tokens)) / len(tokens)
            limit = self.compute_limit(len(tokens))
            for expert, count in enumerate(tokens):
                key = (layer, expert)
                mean = self._loads[key] = (
                    self._loads.get(key, 0.0) * (1 - weight) + weight * count / even
                )
                if mean <= limit:
                    self._reported.discard(key)
                elif (
                    key not in self._reported
                    and self._num_steps >= self.WINDOW_STEPS
                    and (worst is None or mean > worst[0])
                ):
                    worst = (mean, layer, expert)
        if worst is None:
            return None
        mean, layer, expert = worst
        self._reported.add((layer, expert))
        tokens = loads.tokens_by_layer[layer]
        share = tokens[expert] / max(1, sum(tokens))
        return (
            f"expert {expert} of layer {layer} is overloaded: "
            f"over the last {self.WINDOW_STEPS} steps "
            f"it received {mean:.1f} times its even share, "
            f"in this step {tokens[expert]} of {sum(tokens)} choices "
            f"({share:.0%}; even is {1 / len(tokens):.0%})"
        )
