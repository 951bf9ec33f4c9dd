"""Comparison of a run's first steps with their prediction, by part of the step.

The parts are those that both sides have: `products` (everything that a rank computes), `traffic`
by parallelism (exposed), `input` (samples that are not ready), and `waiting` (for ranks whose
own work takes longer than that of their peers).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Literal

from shardwright.layout import Layout, RankGrid
from shardwright.planner.prediction import TimeParts

StepPart = Literal["products", "traffic", "input", "waiting"]

TRAFFIC_AXES: dict[str, tuple[str, ...]] = {
    "data": ("dp_replicate", "fsdp"),
    "tensor": ("tp",),
    "context": ("cp",),
    "expert": ("ep",),
    "pipeline": ("pp",),
    "world": ("pp", "dp_replicate", "fsdp", "tp"),
}
"""Axes of the ranks that exchange the traffic of a parallelism; `world` sums over all ranks."""


@dataclass(frozen=True)
class RankStep:
    """Seconds of one rank's step: in total, waiting for samples, and waiting for other ranks by
    parallelism."""

    step: float
    input: float
    waits: Mapping[str, float]

    @property
    def products(self) -> float:
        """Seconds in which the rank waited for nothing."""
        return max(0.0, self.step - self.input - sum(self.waits.values()))


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of a step by part, predicted or measured. `slow_rank` is the rank for which the
    others wait, if it is one."""

    step: float
    products: float
    traffic: Mapping[str, float]
    input: float = 0.0
    waiting: float = 0.0
    slow_rank: int | None = None

    def list_parts(self) -> dict[tuple[StepPart, str | None], float]:
        """Return the seconds by part and, for traffic, parallelism."""
        parts: dict[tuple[StepPart, str | None], float] = {
            ("products", None): self.products,
            ("input", None): self.input,
            ("waiting", None): self.waiting,
        }
        return parts | {("traffic", name): seconds for name, seconds in self.traffic.items()}


def split_prediction(time: TimeParts) -> StepSeconds:
    """Return a predicted step by the parts that a run measures. A pipeline's bubble is traffic:
    its ranks cannot distinguish a late message from a slow one."""
    traffic = {
        "data": time.data,
        "tensor": time.tensor,
        "context": time.context,
        "expert": time.expert,
        "pipeline": time.pipeline + time.bubble,
    }
    products = time.step - sum(traffic.values()) - time.imbalance
    return StepSeconds(time.step, products, traffic, waiting=time.imbalance)


def combine_ranks(ranks: Sequence[RankStep], layout: Layout) -> StepSeconds:
    """Combine the times of all ranks, in rank order, into one step.

    A rank that arrives late at a collective waits only for its transfer, so the least wait in a
    group is its traffic; of several groups the slowest counts. Ranks of a stage have the same
    products, of which the lower median counts, and of several stages the slowest. The rest of
    the step is waiting.
    """
    grid = RankGrid(layout)
    traffic = {
        name: max(
            min(ranks[rank].waits.get(name, 0.0) for rank in group)
            for group in grid.groups(TRAFFIC_AXES[name])
        )
        for name in dict.fromkeys(name for rank in ranks for name in rank.waits)
    }
    stages = grid.groups(("dp_replicate", "fsdp", "tp"))
    usual = [median_low([ranks[rank].products for rank in stage]) for stage in stages]
    lateness = {
        rank: ranks[rank].products - stage_seconds
        for stage, stage_seconds in zip(stages, usual, strict=True)
        for rank in stage
    }
    step = max(rank.step for rank in ranks)
    products = max(usual)
    read = max(rank.input for rank in ranks)
    waiting = max(0.0, step - products - read - sum(traffic.values()))
    latest = max(lateness, key=lambda rank: lateness[rank])
    is_alone = waiting > 0 and lateness[latest] >= waiting / 2
    return StepSeconds(step, products, traffic, read, waiting, latest if is_alone else None)


@dataclass(frozen=True)
class SlowPart:
    """Part of the step that exceeds its prediction most; `parallelism` is set for traffic."""

    part: StepPart
    parallelism: str | None
    predicted_seconds: float
    measured_seconds: float
    slow_rank: int | None = None

    def describe(self) -> str:
        """Describe the part in the singular, for a sentence with its seconds."""
        if self.part == "traffic":
            return (
                "the traffic of sums over all ranks"
                if self.parallelism == "world"
                else f"the traffic of {self.parallelism} parallelism"
            )
        if self.part == "waiting":
            return "waiting " + (
                "of the ranks for each other"
                if self.slow_rank is None
                else f"for rank {self.slow_rank}"
            )
        return {"products": "the work of each rank (products)", "input": "reading the input"}[
            self.part
        ]


def find_slow_part(predicted: StepSeconds, measured: StepSeconds) -> SlowPart:
    """Return the part that exceeds its prediction by the most seconds."""
    expected = predicted.list_parts()
    parts = measured.list_parts()
    part, parallelism = max(parts, key=lambda key: parts[key] - expected.get(key, 0.0))
    return SlowPart(
        part,
        parallelism,
        expected.get((part, parallelism), 0.0),
        parts[part, parallelism],
        measured.slow_rank if part == "waiting" else None,
    )
