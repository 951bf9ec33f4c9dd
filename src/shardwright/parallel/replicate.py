"""zero_stage 0: every rank holds the whole model; gradients are summed in buckets while the backward pass goes on."""

# No `from __future__ import annotations`: DDP compares a hook's annotations with the types themselves, not with their names.

from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def replicate(
    module: nn.Module,
    group: dist.ProcessGroup,
    *,
    bucket_size_bytes: int,
    reduce_dtype: torch.dtype,
    device: torch.device,
    apart: Collection[str] = (),
) -> DistributedDataParallel:
    """Wrap a module whose weights are already equal on every rank.

    The buckets' sums are ours: the loss carries the one normaliser, so nothing is divided (a mean of means is wrong when ranks
    see different numbers of tokens). Gradients live in the buckets themselves, so no second copy is kept.

    Args:
        reduce_dtype: bf16 halves the bytes sent and rounds the sum; anything else sums in the gradients' own dtype.
        apart: names of parameters that are not summed over `group`.
    """
    # PyTorch has no public way to leave parameters to somebody else; this one stands in DDP's own tests.
    # Buffers, which only foreign models have, are computed alike on every rank: DDP need not send them.
    ignored = [*apart, *(name for name, _ in module.named_buffers())]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)
    wrapped = DistributedDataParallel(
        module,
        device_ids=[device.index] if device.type == "cuda" else None,
        process_group=group,
        bucket_cap_mb=bucket_size_bytes / 1024**2,
        gradient_as_bucket_view=True,
        init_sync=False,  # weights are a function of name and seed (or of one file): they are equal before they are sent
    )
    wrapped.register_comm_hook(group, _sum_bucket_in_bf16 if reduce_dtype == torch.bfloat16 else _sum_bucket)
    return wrapped


def _sum_bucket(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    buffer = bucket.buffer()
    return dist.all_reduce(buffer, group=group, async_op=True).get_future().then(lambda _done: buffer)


def _sum_bucket_in_bf16(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    buffer = bucket.buffer()
    rounded = buffer.to(torch.bfloat16)
    return dist.all_reduce(rounded, group=group, async_op=True).get_future().then(lambda _done: buffer.copy_(rounded))
