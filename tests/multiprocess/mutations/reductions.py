"""Patches that add known wrong normalisers and reductions.

Each patch is a context that changes the engine, or the data that it reads, in one worker process;
the reference never runs under it. The functions are at the top level because worker processes
receive them by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from shardwright.numerics import ChunkedLoss
from shardwright.parallel import ParallelModel, ddp
from shardwright.training import step
from shardwright.verification import cell

# Normaliser


@contextmanager
def average_means_of_micro_batches() -> Iterator[None]:
    """Divide every micro-batch by its own tokens and average the means."""
    forward = Decoder.forward

    def divide_by_own_tokens(self: Decoder, *arguments: Any, **named: Any) -> Tensor:
        return forward(self, *arguments, **named) / (named["labels_BT"] != -100).sum().clamp(min=1)

    def count(model: ParallelModel, micro_batches: Sequence[MicroBatch]) -> Tensor:
        return torch.tensor(len(micro_batches) * model.layout.data_ranks)

    with (
        patch.object(Decoder, "forward", divide_by_own_tokens),
        patch.object(step, "count_supervised", count),
    ):
        yield


@contextmanager
def divide_by_tokens_of_own_rank() -> Iterator[None]:
    """Divide by the tokens of the own rank and average gradients over ranks."""

    def count(model: ParallelModel, micro_batches: Sequence[MicroBatch]) -> Tensor:
        return torch.tensor(
            sum(batch.num_supervised for batch in micro_batches) * model.layout.data_ranks
        )

    with patch.object(step, "count_supervised", count):
        yield


@contextmanager
def omit_axis_from_normaliser() -> Iterator[None]:
    """Sum the divisor over one of the two data axes."""

    def count(model: ParallelModel, micro_batches: Sequence[MicroBatch]) -> Tensor:
        tokens = torch.tensor(sum(batch.num_supervised for batch in micro_batches))
        return model.sum_over(tokens, ("dp_shard",)) * model.layout.dp_replicate

    with patch.object(step, "count_supervised", count):
        yield


@contextmanager
def report_loss_of_own_rank() -> Iterator[None]:
    """Sum the reported loss over some ranks and divide it by the tokens of all."""
    original = ParallelModel.sum_over_data

    def skip_sum_of_losses(self: ParallelModel, tensor: Tensor) -> Tensor:
        return tensor if tensor.is_floating_point() else original(self, tensor)

    with patch.object(ParallelModel, "sum_over_data", skip_sum_of_losses):
        yield


@contextmanager
def report_no_tokens_for_a_batch() -> Iterator[None]:
    """Report 0 supervised tokens for the first micro-batch."""
    original = cell.read_step_micro_batches

    def report_none(*arguments: Any) -> list[MicroBatch]:
        return [
            replace(batch, num_supervised=0) if i == 0 else batch
            for i, batch in enumerate(original(*arguments))
        ]

    with patch.object(cell, "read_step_micro_batches", report_none):
        yield


@contextmanager
def divide_by_accumulation_twice() -> Iterator[None]:
    """Divide the sum by the number of micro-batches once more."""
    original = step.count_supervised
    with patch.object(
        step, "count_supervised", lambda model, batches: original(model, batches) * len(batches)
    ):
        yield


@contextmanager
def skip_final_scaling() -> Iterator[None]:
    """Never divide the summed losses."""
    with patch.object(step, "count_supervised", lambda _model, _batches: torch.tensor(1)):
        yield


# Reductions


@contextmanager
def average_gradients_in_ddp() -> Iterator[None]:
    """Keep DDP's own mean over ranks on top of the global normaliser."""
    with patch.object(DistributedDataParallel, "register_comm_hook", lambda *_arguments: None):
        yield


@contextmanager
def average_gradients_in_fsdp() -> Iterator[None]:
    """Keep FSDP2's own mean over ranks on top of the global normaliser."""
    with (
        patch.object(FSDPModule, "set_gradient_divide_factor", lambda *_arguments: None),
        patch.object(FSDPModule, "set_force_sum_reduction_for_comms", lambda *_arguments: None),
    ):
        yield


@contextmanager
def skip_sum_over_replicas() -> Iterator[None]:
    """Skip the sum over the replicas of a shard."""
    original = FSDPModule.set_requires_all_reduce
    with patch.object(
        FSDPModule,
        "set_requires_all_reduce",
        lambda self, _on, **named: original(self, False, **named),
    ):
        yield


@contextmanager
def skip_reduction_of_single_buckets() -> Iterator[None]:
    """Never reduce a parameter that fills a bucket alone."""
    original = ddp._all_reduce_bucket

    def sum_bucket(
        reduction: ddp.BucketReduction, bucket: dist.GradBucket
    ) -> torch.futures.Future[Tensor]:
        if len(bucket.parameters()) > 1:
            return original(reduction, bucket)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    sum_bucket.__annotations__ = original.__annotations__  # DDP compares the types themselves
    with patch.object(ddp, "_all_reduce_bucket", sum_bucket):
        yield


@contextmanager
def reduce_before_last_micro_batch() -> Iterator[None]:
    """Sum over ranks before the last micro-batch is added."""
    original = ParallelModel.synchronise_gradients
    with patch.object(
        ParallelModel, "synchronise_gradients", lambda self, last: original(self, not last)
    ):
        yield


@contextmanager
def drop_gradient_of_tied_head() -> Iterator[None]:
    """Drop one of the two gradients of a tied weight."""
    call = ChunkedLoss.__call__

    def call_without_weight(
        self: ChunkedLoss, hidden_ND: Tensor, weight_VD: Tensor, *arguments: Any, **options: Any
    ) -> Tensor:
        return call(self, hidden_ND, weight_VD.detach(), *arguments, **options)

    with patch.object(ChunkedLoss, "__call__", call_without_weight):
        yield


@contextmanager
def apply_no_mutation() -> Iterator[None]:
    """Leave the process unchanged, for the cells that must pass."""
    yield
