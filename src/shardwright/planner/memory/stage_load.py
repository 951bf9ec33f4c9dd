"""Layers of a pipeline rank, and the passes in its memory at each backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from operator import mul
from typing import NamedTuple

from shardwright.planner.candidate import Candidate


class BackwardMoment(NamedTuple):
    """Passes in memory besides the one that runs backward, under a schedule that defers gradients
    of weights."""

    num_saved: float
    num_deferred: float
    """Passes whose weight gradients wait."""
    num_staying: int
    """1 if the last layer of another pass has just run forward: not offloaded yet."""
    gradient_share: float
    """Share of the rank's stages that have gradients of weights when the pass ends."""
    num_messages: int
    """Inputs and outputs of stages in these passes and the one that runs, and inputs that are
    received early."""
    num_losses: int
    """Losses of passes that are saved: each keeps the gradients that it has computed."""
    is_deferring: bool
    """True if the pass defers its own weight gradients."""


class RankStage(NamedTuple):
    """Layers of a stage: their places in the model, and how many of each kind."""

    layers: range
    num_layers: tuple[int, ...]


class RankPass(NamedTuple):
    """A pass through a stage of a rank, and the other passes that are in memory while it runs, by
    stage of the rank."""

    kind: str
    """`F`, `B` or `I`, as in schedules."""
    stage: int
    """Index among the stages of the rank."""
    is_last: bool
    """True for the last backward pass through the stage, in which ZeRO-1 reduces gradients."""
    num_saved: tuple[int, ...]
    num_deferred: tuple[int, ...]
    """Passes whose weight gradients wait."""
    has_gradients: tuple[bool, ...]
    """True for stages that have gradients of weights when the pass begins."""
    num_early: tuple[int]
    """Messages that are being received for later passes, of all stages."""


@dataclass(frozen=True)
class StageLoad:
    """Layers and activations of one pipeline rank: layers per kind (of all its stages),
    embedding, head, and micro-batches in flight.

    `num_in_flight` counts micro-batches whose activations are saved at once, in passes through all
    layers of the rank: a rank with two stages that saves three passes through one of them has
    1.5.
    """

    layers: tuple[int, ...]
    has_embedding: bool = True
    has_head: bool = True
    num_in_flight: float = 1.0
    num_stages: int = 1
    num_gradient_senders: int = 0
    """Stages whose input's gradient goes to another rank."""
    backward_moments: tuple[BackwardMoment, ...] = ()
    """Under a schedule that defers gradients of weights: the moments with most in memory."""
    stages: tuple[RankStage, ...] = ()
    """The stages of the rank, if `passes` has any."""
    passes: tuple[RankPass, ...] = ()
    """In a pipeline with frozen parameters: the passes with most in memory. Its stages differ in
    what they save; others count as equal."""

    def count_saving_passes(self) -> tuple[float, ...]:
        """Count the passes through layers of each kind, times layers, that are saved at once, when
        all stages have gradients of weights."""
        if not self.passes:
            return tuple(self.num_in_flight * num_layers for num_layers in self.layers)
        counts = []
        for each in self.passes:
            if each.kind != "F" and all(each.has_gradients):
                numbers = list(each.num_saved)
                numbers[each.stage] += 1
                counts.append(self.count_layers(numbers))
        return max(counts, key=sum, default=(0.0,) * len(self.layers))

    def count_layers(self, num_passes: Sequence[int]) -> tuple[float, ...]:
        """Count the layers of each kind in these numbers of passes through each stage."""
        by_kind = zip(*(stage.num_layers for stage in self.stages), strict=True)
        return tuple(float(sum(map(mul, num_passes, numbers))) for numbers in by_kind)

    def count_staying_layers(self, min_gradient_share: float = 0.0) -> int:
        """Return 1 if the last layer of another pass has just run forward in some backward pass,
        and at least this share of the stages has gradients then."""
        if not self.backward_moments:
            return int(self.num_in_flight * self.num_stages > 1.0)
        return max(
            (
                moment.num_staying
                for moment in self.backward_moments
                if moment.gradient_share >= min_gradient_share
            ),
            default=0,
        )

    def count_resident_layers(self, candidate: Candidate) -> float:
        """Count the layers whose saved tensors are on the device at most; inf without offloading.

        One layer computes while another one's tensors leave or return. The last layer of the latest
        forward pass stays, too, until the next one begins.
        """
        if candidate.activation_offload == "none":
            return inf
        return 1.0 + (sum(self.layers) > self.num_stages) + self.count_staying_layers()
