"""Patches that add known wrong norms and clipping; see `reductions`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.layout import ParameterLayout
from shardwright.numerics import gradient_clip
from shardwright.optim import local_updates
from shardwright.parallel import ParallelModel
from shardwright.training import step

Gradients = Sequence[tuple[Tensor | None, ParameterLayout]]


@contextmanager
def compute_norm_of_own_shard() -> Iterator[None]:
    """Treat shards as replicas and omit their sum."""

    def compute_local(gradients: Gradients, _sum_over: gradient_clip.SumOver, **_: Any) -> Tensor:
        return gradient_clip.compute_global_norm(gradients, lambda tensor, _axes: tensor)

    with patch.object(step, "compute_global_norm", compute_local):
        yield


@contextmanager
def count_replicas_in_norm() -> Iterator[None]:
    """Treat replicas as shards, so that the norm grows by the square root of their number."""

    def count_replicas(
        gradients: Gradients,
        sum_over: gradient_clip.SumOver,
        **options: Any,
    ) -> Tensor:
        return gradient_clip.compute_global_norm(
            gradients, lambda tensor, axes: sum_over(tensor, (*axes, "dp_replicate")), **options
        )

    with patch.object(step, "compute_global_norm", count_replicas):
        yield


@contextmanager
def compute_norm_of_half_the_layers() -> Iterator[None]:
    """Compute the norm of half of the parameters only."""

    def compute_partial(
        gradients: Gradients,
        sum_over: gradient_clip.SumOver,
        **options: Any,
    ) -> Tensor:
        return gradient_clip.compute_global_norm(
            gradients[: len(gradients) // 2], sum_over, **options
        )

    with patch.object(step, "compute_global_norm", compute_partial):
        yield


@contextmanager
def clip_per_parameter_group() -> Iterator[None]:
    """Clip decayed and undecayed parameters by separate norms."""
    original = step._scale_gradients

    def scale_vectors_first(model: ParallelModel, optimizer: Any, factor: float) -> None:
        gradients = model.list_gradients()
        vectors = [(gradient, layout) for gradient, layout in gradients if len(layout.shape) == 1]
        whole = gradient_clip.compute_global_norm(gradients, model.sum_over)
        own = gradient_clip.compute_global_norm(vectors, model.sum_over)
        if bool(own > 0):
            gradient_clip.scale_(
                [gradient for gradient, _ in vectors if gradient is not None], whole / own
            )
        original(model, optimizer, factor)

    with patch.object(step, "_scale_gradients", scale_vectors_first):
        yield


@contextmanager
def leave_clip_coefficient_unbounded() -> Iterator[None]:
    """Let the coefficient exceed 1."""
    with patch.object(step, "compute_clip_coefficient", lambda norm, limit: limit / (norm + 1e-6)):
        yield


@contextmanager
def clip_by_squared_norm() -> Iterator[None]:
    """Compute the coefficient from the squared norm."""
    with patch.object(
        step,
        "compute_clip_coefficient",
        lambda norm, limit: min(1.0, limit / (norm**2 + 1e-6)),
    ):
        yield


@contextmanager
def clip_infinite_gradients() -> Iterator[None]:
    """Multiply inf by a coefficient of zero and update with the resulting nan."""
    with patch.object(step, "isfinite", lambda _value: True):
        yield


@contextmanager
def decide_skips_per_rank() -> Iterator[None]:
    """Let one rank skip by its own gradients while the others update."""

    def hide_own_norm(norm: Tensor, _sum_over_all: object) -> Tensor:
        return (
            norm
            if dist.get_rank() == dist.get_world_size() - 1
            else torch.nan_to_num(norm, nan=1.0, posinf=1.0)
        )

    with patch.object(step, "synchronise_norm", hide_own_norm):
        yield


@contextmanager
def divide_by_zero_norm() -> Iterator[None]:
    """Compute a nan coefficient from a norm of zero."""
    with patch.object(
        step,
        "compute_clip_coefficient",
        lambda norm, limit: min(1.0, limit / norm) if norm else float("nan"),
    ):
        yield


@contextmanager
def divide_by_zero_tokens() -> Iterator[None]:
    """Divide zero by zero in a step without supervised tokens."""
    with patch.object(step, "_replace_zero_by_one", lambda count: count):
        yield


@contextmanager
def exhaust_gradient_iterator() -> Iterator[None]:
    """Clip nothing, as after a norm that has exhausted the iterator of gradients."""
    with patch.object(local_updates, "scale_gradients", lambda _pieces, _factor: None):
        yield
