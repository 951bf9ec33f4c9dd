"""Patches that add known wrong uses of buffers and accumulated gradients; see `reductions`."""

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
from shardwright.parallel import ParallelModel, ddp
from shardwright.parallel.fsdp import EarlyGathers
from shardwright.training import step
from shardwright.verification import cell


@contextmanager
def share_buffer_between_buckets() -> Iterator[None]:
    """Overwrite a bucket's sum with the next one's before it is read."""
    shared = torch.zeros(1 << 20, dtype=torch.float64)

    def sum_bucket(
        reduction: ddp.BucketReduction, bucket: dist.GradBucket
    ) -> torch.futures.Future[Tensor]:
        slot = shared[: bucket.buffer().numel()].copy_(bucket.buffer())
        dist.all_reduce(slot, group=reduction.group)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(slot)
        return future

    # DDP compares the types themselves
    sum_bucket.__annotations__ = ddp._all_reduce_bucket.__annotations__
    with patch.object(ddp, "_all_reduce_bucket", sum_bucket):
        yield


@contextmanager
def alias_gradient_and_parameter() -> Iterator[None]:
    """Return a gathered parameter's memory as a gradient."""
    original = ParallelModel.finish_gradients

    def alias(self: ParallelModel) -> None:
        original(self)
        _, parameter = next(iter(self.named_parameters()))
        parameter.grad = parameter.detach()

    with patch.object(ParallelModel, "finish_gradients", alias):
        yield


@contextmanager
def sum_padding_into_norm() -> Iterator[None]:
    """Pad uneven shards with ones, which the norm then includes."""

    def add_padding(
        gradients: Sequence[tuple[Tensor | None, ParameterLayout]],
        sum_over: gradient_clip.SumOver,
        **options: Any,
    ) -> Tensor:
        padded_gradients = [
            (
                None
                if g is None
                else torch.cat([g.flatten(), g.new_ones(-layout.shape[0] % dist.get_world_size())]),
                layout,
            )
            for g, layout in gradients
        ]
        return gradient_clip.compute_global_norm(padded_gradients, sum_over, **options)

    with patch.object(step, "compute_global_norm", add_padding):
        yield


@contextmanager
def keep_stale_gathered_parameters() -> Iterator[None]:
    """Keep gathered parameters during the optimizer step, so that the next forward pass reads
    them. Both places that free them are left out.
    """
    with (
        patch.object(ParallelModel, "finish_gradients", lambda _self: None),
        patch.object(EarlyGathers, "discard", lambda _self: None),
    ):
        yield


@contextmanager
def scale_matrices_only() -> Iterator[None]:
    """Scale only the gradients of the large buffer and omit vectors."""
    original = local_updates.scale_gradients
    with patch.object(
        local_updates,
        "scale_gradients",
        lambda pieces, factor: original([p for p in pieces if p.local.ndim > 1], factor),
    ):
        yield


@contextmanager
def keep_loss_scale_in_update() -> Iterator[None]:
    """Update without dividing the loss scale out."""
    original = cell.update_parameters
    with patch.object(
        cell,
        "update_parameters",
        lambda *arguments, **named: original(*arguments, **(named | {"scaler": None})),
    ):
        yield


@contextmanager
def clear_accumulated_gradients() -> Iterator[None]:
    """Clear the gradients of earlier micro-batches at the start of each one."""
    original = ParallelModel.synchronise_gradients

    def clear(self: ParallelModel, last: bool) -> Any:
        for _, parameter in self.named_parameters():
            parameter.grad = None
        return original(self, last)

    with patch.object(ParallelModel, "synchronise_gradients", clear):
        yield


@contextmanager
def skip_zero_grad() -> Iterator[None]:
    """Skip zero_grad, so that the next step adds to the gradients of this one."""
    with patch.object(torch.optim.Optimizer, "zero_grad", lambda _self, **_named: None):
        yield
