"""Known wrong buffers and accumulations, put back into a worker process while its context is
entered; see `mutations`.
"""

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
from shardwright.parallel import ParallelModel, ddp
from shardwright.train import step
from shardwright.verify import cell


@contextmanager
def buckets_share_a_buffer() -> Iterator[None]:
    """37: a bucket's sum is overwritten by the next one's before it is read."""
    shared = torch.zeros(1 << 20, dtype=torch.float64)

    def sum_bucket(
        group: dist.ProcessGroup, bucket: dist.GradBucket
    ) -> torch.futures.Future[Tensor]:
        place = shared[: bucket.buffer().numel()].copy_(bucket.buffer())
        dist.all_reduce(place, group=group)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(place)
        return future

    sum_bucket.__annotations__ = (
        ddp._all_reduce_bucket.__annotations__
    )  # DDP compares the types themselves
    with patch.object(ddp, "_all_reduce_bucket", sum_bucket):
        yield


@contextmanager
def gradients_alias_parameters() -> Iterator[None]:
    """38: a gathered parameter lies in the memory of a gradient."""
    original = ParallelModel.finish_gradients

    def alias(self: ParallelModel) -> None:
        original(self)
        _, parameter = next(iter(self.named_parameters()))
        parameter.grad = parameter.detach()

    with patch.object(ParallelModel, "finish_gradients", alias):
        yield


@contextmanager
def padding_is_summed() -> Iterator[None]:
    """39: the padding of uneven shards is not zero, and counts in the norm."""

    def padded(
        gradients: Sequence[tuple[Tensor | None, ParameterLayout]],
        sum_over: gradient_clip.SumOver,
        **options: Any,
    ) -> Tensor:
        grown = [
            (
                None
                if g is None
                else torch.cat([g.flatten(), g.new_ones(-layout.shape[0] % dist.get_world_size())]),
                layout,
            )
            for g, layout in gradients
        ]
        return gradient_clip.compute_global_norm(grown, sum_over, **options)

    with patch.object(step, "compute_global_norm", padded):
        yield


@contextmanager
def stale_parameters_are_kept() -> Iterator[None]:
    """38: gathered parameters outlive the optimizer step, and the next forward pass reads them."""
    with patch.object(ParallelModel, "finish_gradients", lambda _self: None):
        yield


@contextmanager
def some_gradients_keep_the_loss_scale() -> Iterator[None]:
    """41: only what lies in the big buffer is scaled; vectors are forgotten."""
    original = step.scale_
    with patch.object(
        step,
        "scale_",
        lambda gradients, factor: original([g for g in gradients if g.ndim > 1], factor),
    ):
        yield


@contextmanager
def loss_scale_is_not_divided() -> Iterator[None]:
    """43: the update does not know of the loss scale."""
    original = cell.update_parameters
    with patch.object(
        cell,
        "update_parameters",
        lambda *arguments, **named: original(*arguments, **(named | {"scaler": None})),
    ):
        yield


@contextmanager
def accumulated_gradients_are_wiped() -> Iterator[None]:
    """42: a micro-batch starts by clearing what the ones before it left."""
    original = ParallelModel.synchronise_gradients

    def wipe(self: ParallelModel, last: bool) -> Any:
        for _, parameter in self.named_parameters():
            parameter.grad = None
        return original(self, last)

    with patch.object(ParallelModel, "synchronise_gradients", wipe):
        yield


@contextmanager
def gradients_are_not_dropped() -> Iterator[None]:
    """43: zero_grad is skipped, and the next step adds to this one's gradients."""
    with patch.object(torch.optim.Optimizer, "zero_grad", lambda _self, **_named: None):
        yield
