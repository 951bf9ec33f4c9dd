"""What a step's routers did: loads told and watched, balance biases moved.

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
    """Loads of one optimizer step, over all ranks and micro-batches, by layer number."""

    tokens: dict[int, tuple[int, ...]]
    """Tokens that chose each expert, before any is dropped."""
    dropped: int
    """Choices that an expert's capacity had no room for."""
    balance_loss: float
    """Mean over rows and layers; the experts per token when loads are even."""
    z_loss: float
    """Mean over rows and layers."""

    @property
    def busiest(self) -> float:
        """The busiest expert's tokens over its even share, the worst of all layers."""
        return max(max(tokens) * len(tokens) / max(1, sum(tokens)) for tokens in self.tokens.values())


def read_loads(routers_LE3: Tensor, shape: ModelShape, num_rows: int) -> ExpertLoads:
    """The table of `RouterTally.take`, summed over all ranks, as numbers (waits for the device)."""
    sparse = [index for index, layer in enumerate(shape.layers) if layer.sparse]
    table = routers_LE3[sparse].tolist()
    count = num_rows * len(sparse)
    return ExpertLoads(
        tokens={index: tuple(int(value) for value in row[:-3]) for index, row in zip(sparse, table, strict=True)},
        dropped=int(sum(row[-3] for row in table)),
        balance_loss=sum(row[-2] for row in table) / count,
        z_loss=sum(row[-1] for row in table) / count,
    )


@torch.no_grad()
def move_balance_biases(decoder: Decoder, routers_LE3: Tensor) -> None:
    """A step of each expert's balance bias towards even loads: up where it got less than its share, down where more.

    The loads are those of all ranks, so every rank moves its copy alike. Source: auxiliary-loss-free balancing, arXiv 2408.15664,
    algorithm 1.
    """
    rate = decoder.expert_rules.bias_update_rate
    if rate == 0.0:
        return
    for block in decoder.blocks:
        mixture = getattr(block, block.names.mlp)
        if isinstance(mixture, MixtureOfExperts) and mixture.balance_bias is not None:
            tokens_E = routers_LE3[block.index, :-3]
            missing_E = (tokens_E.mean() - tokens_E).sign()
            mixture.balance_bias.add_(missing_E.to(mixture.balance_bias.dtype), alpha=rate)


@dataclass
class LoadWatch:
    """Names an expert that has been overloaded for a while.

    `observe` keeps a running mean of each expert's load over its even share (the last `STEPS` steps weigh most) and returns a
    warning when the worst expert crosses the limit, then again only after its load has fallen below.
    """

    STEPS = 20

    experts_per_token: int
    _loads: dict[tuple[int, int], float] = field(default_factory=dict)
    _named: set[tuple[int, int]] = field(default_factory=set)
    _seen: int = 0

    def limit(self, num_experts: int) -> float:
        """Times the even share: four, or half way to all tokens where that is less."""
        return min(4.0, (1.0 + num_experts / self.experts_per_token) / 2)

    def observe(self, loads: ExpertLoads) -> str | None:
        """The warning to give after this step, if any."""
        self._seen += 1
        weight = 1.0 / min(self._seen, self.STEPS)
        worst: tuple[float, int, int] | None = None
        for layer, tokens in loads.tokens.items():
            even = max(1, sum(tokens)) / len(tokens)
            limit = self.limit(len(tokens))
            for expert, count in enumerate(tokens):
                key = (layer, expert)
                mean = self._loads[key] = self._loads.get(key, 0.0) * (1 - weight) + weight * count / even
                if mean <= limit:
                    self._named.discard(key)
                elif key not in self._named and self._seen >= self.STEPS and (worst is None or mean > worst[0]):
                    worst = (mean, layer, expert)
        if worst is None:
            return None
        mean, layer, expert = worst
        self._named.add((layer, expert))
        tokens = loads.tokens[layer]
        share = tokens[expert] / max(1, sum(tokens))
        return (
            f"expert {expert} of layer {layer} is overloaded: over the last {self.STEPS} steps it took {mean:.1f} times its even "
            f"share, in this one {tokens[expert]} of {sum(tokens)} choices ({share:.0%}; even is {1 / len(tokens):.0%})"
        )
