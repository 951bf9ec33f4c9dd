"""Known wrong norms and clips, put back into a worker process while its context is entered; see
`mutations`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.layout import ParameterLayout
from shardwright.numerics import gradient_clip
from shardwright.parallel import ParallelModel
from shardwright.train import step


@contextmanager
def norm_of_the_own_shard() -> Iterator[None]:
    """29: shards are taken for copies, and not summed."""
    own = lambda gradients, _sum_over, **_: gradient_clip.compute_global_norm(
        gradients, lambda tensor, _axes: tensor
    )
    with patch.object(step, "compute_global_norm", own):
        yield


@contextmanager
def norm_counts_copies() -> Iterator[None]:
    """titan 2318: copies are taken for shards, and the norm grows by the square root of the
    replicas.
    """

    def counted(
        gradients: Iterable[tuple[Tensor | None, ParameterLayout]],
        sum_over: gradient_clip.SumOver,
        **options: Any,
    ) -> Tensor:
        return gradient_clip.compute_global_norm(
            gradients, lambda tensor, axes: sum_over(tensor, (*axes, "dp_replicate")), **options
        )

    with patch.object(step, "compute_global_norm", counted):
        yield


@contextmanager
def norm_of_some_layers() -> Iterator[None]:
    """30: the norm covers this stage's parameters only."""

    def partial_norm(
        gradients: Sequence[tuple[Tensor | None, ParameterLayout]],
        sum_over: gradient_clip.SumOver,
        **options: Any,
    ) -> Tensor:
        return gradient_clip.compute_global_norm(
            gradients[: len(gradients) // 2], sum_over, **options
        )

    with patch.object(step, "compute_global_norm", partial_norm):
        yield


@contextmanager
def clipped_per_group() -> Iterator[None]:
    """31: decayed and undecayed parameters are clipped by norms of their own."""
    original = ParallelModel.list_gradients

    def clip_vectors_first(self: ParallelModel) -> list[tuple[Tensor | None, ParameterLayout]]:
        gradients = original(self)
        vectors = [(gradient, layout) for gradient, layout in gradients if len(layout.shape) == 1]
        whole = gradient_clip.compute_global_norm(gradients, self.sum_over)
        own = gradient_clip.compute_global_norm(vectors, self.sum_over)
        if bool(own > 0):
            gradient_clip.scale_(
                [gradient for gradient, _ in vectors if gradient is not None], whole / own
            )
        return gradients

    with patch.object(ParallelModel, "list_gradients", clip_vectors_first):
        yield


@contextmanager
def clip_also_enlarges() -> Iterator[None]:
    """32: the coefficient is not held below 1."""
    with patch.object(step, "compute_clip_coefficient", lambda norm, limit: limit / (norm + 1e-6)):
        yield


@contextmanager
def clip_by_the_square() -> Iterator[None]:
    """32: the coefficient uses the squared norm."""
    with patch.object(
        step,
        "compute_clip_coefficient",
        lambda norm, limit: (limit / (norm.square() + 1e-6)).clamp(max=1.0),
    ):
        yield


@contextmanager
def infinite_gradients_are_clipped() -> Iterator[None]:
    """32: inf times a coefficient of zero becomes nan, and is stepped with."""
    with patch.object(step, "isfinite", lambda _value: True):
        yield


@contextmanager
def each_rank_decides_to_skip() -> Iterator[None]:
    """32: a rank looks at its own gradients only; the others step."""

    def own_norm(norm: Tensor, _sum_over_all: object) -> Tensor:
        return (
            norm
            if dist.get_rank() == dist.get_world_size() - 1
            else torch.nan_to_num(norm, nan=1.0, posinf=1.0)
        )

    with patch.object(step, "synchronise_norm", own_norm):
        yield


@contextmanager
def zero_norm_divides() -> Iterator[None]:
    """33: a norm of zero makes the coefficient nan."""
    with patch.object(
        step,
        "compute_clip_coefficient",
        lambda norm, limit: (limit * norm / norm.square()).clamp(max=1.0),
    ):
        yield


@contextmanager
def no_tokens_divide() -> Iterator[None]:
    """33: a step without a supervised token divides zero by zero."""
    with patch.object(step, "_replace_zero_by_one", lambda count: count):
        yield


@contextmanager
def clip_eats_an_iterator() -> Iterator[None]:
    """34: the norm walks an iterator to its end, and nothing is left to clip."""
    original = ParallelModel.list_gradients
    walked = lambda self: iter(original(self)[len(original(self)) :])
    with patch.object(ParallelModel, "list_gradients", walked):
        yield
