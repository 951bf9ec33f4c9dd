"""Collectives with gradients, each over one process group; no-ops if the group is None.

    function        forward          backward         name in the papers
    copy_to_all     identity         all-reduce       f       (Shoeybi et al. 2019, figure 3;
                                                              Korthikanti et al. 2022, figure 4)
    sum_over        all-reduce       identity         g       (2019), f-bar (2022)
    gather          all-gather       reduce-scatter   g       (2022, figure 5)
    scatter_sum     reduce-scatter   all-gather       g-bar   (2022)
    gather_copies   all-gather       own slice        -       all ranks then compute the same
    take_slice      own slice        all-gather       -       the inverse of gather_copies
    sum_shared      all-reduce       all-reduce       -       ranks then compute their own: a
                                                              statistic over a sharded width

The right one depends on how the ranks use the result: where every rank computes the same from
it, gradients are copies and must not be summed; where each computes its share, gradients are
partial and must be summed. All collectives keep the dtype. Slices are equal: a sharded
dimension is a multiple of the group's size (`placement.place_model`).

Source: Shoeybi et al. 2019, Megatron-LM, section 3; Korthikanti et al. 2022, Reducing
Activation Recomputation, section 4.2.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import increment_version

from shardwright.model.communication_results import keep_result, keep_statistic
from shardwright.parallel.comm_timing import time_wait
from shardwright.parallel.direct_collectives import all_gather_single, reduce_scatter_single

OptionalGroup = dist.ProcessGroup | None

_Collective = Callable[[Tensor, dist.ProcessGroup, int], Tensor]


def copy_to_all(x: Tensor, group: OptionalGroup) -> Tensor:
    """Return the same tensor, of which every rank uses a different part; gradients are summed."""
    return _apply_collective(x, group, 0, _identity, _run_all_reduce)


def all_reduce(x: Tensor, group: OptionalGroup) -> Tensor:
    """Sum the ranks' partial results; every rank then computes the same with the sum.

    Overwrites `x` where autograd allows it: a copy would cost as much as a norm. An operation that
    saved `x` makes the backward pass fail.
    """
    forward = _sum_in_place if _is_overwritable(x) else _run_all_reduce
    return _apply_collective(x, group, 0, forward, _identity)


def all_reduce_shared(x: Tensor, group: OptionalGroup) -> Tensor:
    """Sum the ranks' partial results, which ranks use differently; gradients are summed too."""
    return _apply_collective(x, group, 0, _run_all_reduce, _run_all_reduce)


def all_gather(x: Tensor, dim: int, group: OptionalGroup) -> Tensor:
    """Concatenate the ranks' slices along `dim`; each rank uses a different part of the result."""
    return _apply_collective(x, group, dim, _run_all_gather, _run_reduce_scatter)


def reduce_scatter(x: Tensor, dim: int, group: OptionalGroup) -> Tensor:
    """Sum the ranks' partial results and return this rank's slice along `dim`."""
    return _apply_collective(x, group, dim, _run_reduce_scatter, _run_all_gather)


def all_gather_copies(x: Tensor, dim: int, group: OptionalGroup) -> Tensor:
    """Concatenate the ranks' slices along `dim`; every rank computes the same with the result."""
    return _apply_collective(x, group, dim, _run_all_gather, _slice_local)


def _apply_collective(
    x: Tensor, group: OptionalGroup, dim: int, forward: _Collective, backward: _Collective
) -> Tensor:
    if group is None or group.size() == 1:
        return x
    output: Tensor = _CollectiveFunction.apply(
        x, group, dim % x.ndim if x.ndim else 0, forward, backward
    )
    return output


class _CollectiveFunction(torch.autograd.Function):
    """One collective in the forward pass and its transpose in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        group: dist.ProcessGroup,
        dim: int,
        forward: _Collective,
        backward: _Collective,
    ) -> Tensor:
        ctx.group = group
        ctx.dim = dim
        ctx.backward_move = backward
        return keep_result(partial(forward, x, group, dim))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.backward_move(gradients[0], ctx.group, ctx.dim), None, None, None, None


def _identity(x: Tensor, _group: dist.ProcessGroup, _dim: int) -> Tensor:
    return x.view_as(x)  # autograd requires an output that is not the input itself


def _is_overwritable(x: Tensor) -> bool:
    """Return True if a collective may replace the values of `x`."""
    is_input = x.is_leaf and x.requires_grad
    return not (torch.compiler.is_compiling() or is_input or x._is_view()) and x.is_contiguous()


def _sum_in_place(x: Tensor, group: dist.ProcessGroup, _dim: int) -> Tensor:
    with time_wait(group):
        dist.all_reduce(x, group=group)
    increment_version(x)
    return x.detach()


def _run_all_reduce(x: Tensor, group: dist.ProcessGroup, _dim: int) -> Tensor:
    # Not in place: a gradient may also be added elsewhere.
    summed = x.clone(memory_format=torch.contiguous_format)
    with time_wait(group):
        dist.all_reduce(summed, group=group)
    return summed


def reduce_maxima(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the largest of the ranks' values, element by element, without a gradient."""
    return keep_statistic(partial(_run_maximum, x, group))


def _run_maximum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    largest = x.clone(memory_format=torch.contiguous_format)
    with time_wait(group):
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return largest


def stack_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather the ranks' tensors, `[R, *x.shape]`, without a gradient."""
    stacked = x.new_empty((group.size(), *x.shape))
    with time_wait(group):
        all_gather_single(stacked.flatten(0, 1), x.contiguous(), group=group)
    return stacked


def _run_all_gather(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    # No copy if the dimensions before `dim` are of size 1.
    return stack_ranks(x, group).movedim(0, dim).flatten(dim, dim + 1)


def _run_reduce_scatter(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    stacked = x.unflatten(dim, (group.size(), -1)).movedim(dim, 0).contiguous()
    own = torch.empty_like(stacked[0])
    with time_wait(group):
        reduce_scatter_single(own, stacked.flatten(0, 1), group=group)
    return own


def _slice_local(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    length = x.shape[dim] // group.size()
    # A copy, because a view would keep the whole tensor alive.
    return x.narrow(dim, dist.get_rank(group) * length, length).clone(
        memory_format=torch.contiguous_format
    )
