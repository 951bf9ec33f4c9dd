"""Known wrong gradients, put back into a worker process while its context is entered. Numbers are
docs/silent-bugs.md's.

Each is a patch of the engine or of what feeds it; the reference never sees it. Functions stand at
the top of the module because they travel to the workers by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from shardwright.data.loader import MicroBatch
from shardwright.model import Decoder
from shardwright.parallel import ParallelModel, ddp
from shardwright.train import step
from shardwright.verify import cell

# One normaliser


@contextmanager
def mean_of_means_over_accumulation() -> Iterator[None]:
    """1: every micro-batch is divided by its own tokens, and the means are averaged."""
    forward = Decoder.forward

    def mean_loss(self: Decoder, *arguments: Any, **named: Any) -> Tensor:
        return forward(self, *arguments, **named) / (named["labels_BT"] != -100).sum().clamp(min=1)

    def count(model: ParallelModel, micro_batches: Sequence[MicroBatch]) -> Tensor:
        return torch.tensor(len(micro_batches) * model.layout.data_ranks)

    with patch.object(Decoder, "forward", mean_loss), patch.object(step, "count_supervised", count):
        yield


@contextmanager
def tokens_counted_per_rank() -> Iterator[None]:
    """2: every rank divides by its own tokens, and gradients are averaged over ranks."""

    def count(model: ParallelModel, micro_batches: Sequence[MicroBatch]) -> Tensor:
        return torch.tensor(
            sum(batch.num_supervised for batch in micro_batches) * model.layout.data_ranks
        )

    with patch.object(step, "count_supervised", count):
        yield


@contextmanager
def normaliser_forgets_an_axis() -> Iterator[None]:
    """4: the divisor is summed over one of the two data axes."""

    def count(model: ParallelModel, micro_batches: Sequence[MicroBatch]) -> Tensor:
        tokens = torch.tensor(sum(batch.num_supervised for batch in micro_batches))
        return model.sum_over(tokens, ("dp_shard",)) * model.layout.dp_replicate

    with patch.object(step, "count_supervised", count):
        yield


@contextmanager
def loss_of_the_own_rank() -> Iterator[None]:
    """5: the reported loss is summed over some ranks and divided by the tokens of all."""
    original = ParallelModel.sum_over_data

    def forget_losses(self: ParallelModel, tensor: Tensor) -> Tensor:
        return tensor if tensor.is_floating_point() else original(self, tensor)

    with patch.object(ParallelModel, "sum_over_data", forget_losses):
        yield


@contextmanager
def a_batch_reports_no_tokens() -> Iterator[None]:
    """6: one path forgets to count its tokens."""
    original = cell.read_step_micro_batches

    def forgetful(*arguments: Any) -> list[MicroBatch]:
        return [
            replace(batch, num_supervised=0) if i == 0 else batch
            for i, batch in enumerate(original(*arguments))
        ]

    with patch.object(cell, "read_step_micro_batches", forgetful):
        yield


@contextmanager
def rescaled_by_accumulation() -> Iterator[None]:
    """10: the sum is divided by the number of micro-batches once more."""
    original = step.count_supervised
    with patch.object(
        step, "count_supervised", lambda model, batches: original(model, batches) * len(batches)
    ):
        yield


@contextmanager
def final_scaling_skipped() -> Iterator[None]:
    """11: summed losses are never divided."""
    with patch.object(step, "count_supervised", lambda _model, _batches: torch.tensor(1)):
        yield


# A reduction missing or wrong


@contextmanager
def gradients_averaged_by_ddp() -> Iterator[None]:
    """2: DDP's own mean over ranks, on top of the global normaliser."""
    with patch.object(DistributedDataParallel, "register_comm_hook", lambda *_arguments: None):
        yield


@contextmanager
def gradients_averaged_by_fsdp() -> Iterator[None]:
    """2: FSDP2's own mean over ranks, on top of the global normaliser."""
    with (
        patch.object(FSDPModule, "set_gradient_divide_factor", lambda *_arguments: None),
        patch.object(FSDPModule, "set_force_sum_reduction_for_comms", lambda *_arguments: None),
    ):
        yield


@contextmanager
def replicas_not_summed() -> Iterator[None]:
    """17: the sum over replicas of a shard is lost."""
    original = FSDPModule.set_requires_all_reduce
    with patch.object(
        FSDPModule,
        "set_requires_all_reduce",
        lambda self, _on, **named: original(self, False, **named),
    ):
        yield


@contextmanager
def a_bucket_of_one_is_not_reduced() -> Iterator[None]:
    """22: a parameter that fills a bucket by itself is never reduced."""
    original = ddp._all_reduce_bucket

    def sum_bucket(
        group: dist.ProcessGroup, bucket: dist.GradBucket
    ) -> torch.futures.Future[Tensor]:
        if len(bucket.parameters()) > 1:
            return original(group, bucket)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    sum_bucket.__annotations__ = original.__annotations__  # DDP compares the types themselves
    with patch.object(ddp, "_all_reduce_bucket", sum_bucket):
        yield


@contextmanager
def last_micro_batch_after_the_reduction() -> Iterator[None]:
    """23: the sum over ranks is taken before the last micro-batch is added."""
    original = ParallelModel.synchronise_gradients
    with patch.object(
        ParallelModel, "synchronise_gradients", lambda self, last: original(self, not last)
    ):
        yield


@contextmanager
def embedding_counted_once() -> Iterator[None]:
    """44: of a tied weight's two gradients one is lost."""
    original = Decoder.head_weight
    assert isinstance(original, property)
    with patch.object(Decoder, "head_weight", property(lambda self: original.fget(self).detach())):  # type: ignore[misc]
        yield


@contextmanager
def nothing() -> Iterator[None]:
    """No bug: what must pass."""
    with ExitStack():
        yield
