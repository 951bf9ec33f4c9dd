"""DDP for zero_stage 0: gradients are reduced in buckets during the backward pass."""

# No `from __future__ import annotations`: DDP compares a hook's annotations with the types
# themselves, not with their names.

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


@dataclass
class BucketReduction:
    """Sums of DDP's buckets over a group, in a dtype."""

    group: dist.ProcessGroup
    dtype: torch.dtype
    report: Callable[[Sequence[Tensor]], None] | None = None
    """Called with the parameters of a bucket when the sums are in place, on the stream on which
    they are."""


class ReplicatedModule(DistributedDataParallel):
    """DDP whose buckets are summed by our own hook."""

    def __init__(self, module: nn.Module, reduction: BucketReduction, **options: Any) -> None:
        super().__init__(module, process_group=reduction.group, **options)
        self.reduction = reduction
        self.register_comm_hook(reduction, _all_reduce_bucket)


def apply_ddp(
    module: nn.Module,
    group: dist.ProcessGroup,
    *,
    bucket_size_bytes: int,
    reduce_dtype: torch.dtype,
    device: torch.device,
    excluded_names: Collection[str] = (),
) -> ReplicatedModule:
    """Wrap a module whose weights are already equal on every rank.

    The buckets are summed by our own hook: the loss contains the one normaliser, so nothing is
    divided (a mean of means is wrong if ranks have different numbers of tokens). Gradients are
    views of the buckets, so there is no second copy.

    Compiled code under DDP stays as it is compiled elsewhere: torch would divide the graph of a
    block of more than 1 MiB where its buckets end, and refuses smaller buckets.

    Args:
        reduce_dtype: dtype of the sums. bf16 halves the bytes sent of fp32 gradients and rounds
            their sums.
        excluded_names: parameters that are not reduced over `group`.
    """
    compiler_config: Any = import_module("torch._dynamo.config")
    compiler_config.optimize_ddp = False
    excluded = {
        parameter for name, parameter in module.named_parameters() if name in excluded_names
    }
    # PyTorch has no public way to exclude parameters; DDP's own tests use this one. Buffers, which
    # are working weights or belong to models run by transformers, are computed equally on every
    # rank: DDP need not broadcast them. DDP reads both the names that our decoder gives its
    # parameters and their paths in the module.
    ignored = [name for name, _ in module.named_buffers()]
    ignored += [name for name, parameter in module.named_parameters() if parameter in excluded]
    ignored += [
        f"{path}.{attribute}"
        for path, submodule in module.named_modules()
        for attribute, parameter in submodule.named_parameters(recurse=False)
        if parameter in excluded
    ]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)
    return ReplicatedModule(
        module,
        BucketReduction(group, reduce_dtype),
        device_ids=[device.index] if device.type == "cuda" else None,
        bucket_cap_mb=bucket_size_bytes / 1024**2,
        gradient_as_bucket_view=True,
        init_sync=False,  # weights depend on name and seed (or one file) only: already equal
    )


def _all_reduce_bucket(
    reduction: BucketReduction, bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    """Sum a bucket over the group, in the dtype, put the sums in place, and report them."""
    buffer = bucket.buffer()
    summed = buffer.to(reduction.dtype)
    parameters = bucket.parameters()

    def finish(_done: torch.futures.Future[list[Tensor]]) -> Tensor:
        if summed is not buffer:
            buffer.copy_(summed)
        if reduction.report is not None:
            reduction.report(parameters)
        return buffer

    reduced = dist.all_reduce(summed, group=reduction.group, async_op=True).get_future()
    return reduced.then(finish)
