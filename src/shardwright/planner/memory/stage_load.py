"""Layers of a pipeline rank, and the passes in its memory at each backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
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
