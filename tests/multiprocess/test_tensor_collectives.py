"""Every collective that gradients go through, against the sum that its ranks' parts make on one
process.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.parallel import collectives
from tests.multiprocess.pool import RankPool

SHARES = ("copy_to_all", "sum_shared", "gather", "scatter_sum")
"""After these every rank goes on differently: the whole loss is the sum of the ranks' losses."""
COPIES = ("sum_over", "gather_copies")
"""After these every rank goes on alike: the loss of one rank is the whole loss."""


def weights(rank: int, shape: torch.Size) -> Tensor:
    """What a rank multiplies its result by."""
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(100 + rank), dtype=torch.float64
    )


def operand(rank: int) -> Tensor:
    return torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def run(name: str, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Result on this rank, and the gradient of its operand under the losses that `SHARES` and
    `COPIES` tell of.
    """
    group = dist.group.WORLD
    rank = dist.get_rank()
    x = (
        operand(0 if name in ("copy_to_all", "take_slice") else rank)
        .to(dtype)
        .transpose(0, 1)
        .contiguous()
        .transpose(0, 1)
    )
    x.requires_grad_()  # not contiguous, as an activation may be
    function: Callable[..., Tensor] = getattr(collectives, name)
    y = (
        function(x, group)
        if name in ("copy_to_all", "sum_over", "sum_shared")
        else function(x, dim, group)
    )
    alike = name in COPIES
    (y * weights(0 if alike else rank, y.shape).to(dtype)).sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


def expected(name: str, dim: int, num_ranks: int) -> list[tuple[Tensor, Tensor]]:
    """The same on one process, which holds every rank's operand and differentiates the one loss."""
    alike_in = name in ("copy_to_all", "take_slice")
    leaves = [operand(0 if alike_in else rank).requires_grad_() for rank in range(num_ranks)]
    xs = [leaves[0]] * num_ranks if alike_in else leaves
    total = torch.stack(xs).sum(0)
    ys = {
        "copy_to_all": lambda: xs,
        "sum_over": lambda: [total] * num_ranks,
        "sum_shared": lambda: [total] * num_ranks,
        "gather": lambda: [torch.cat(xs, dim)] * num_ranks,
        "gather_copies": lambda: [torch.cat(xs, dim)] * num_ranks,
        "scatter_sum": lambda: list(total.chunk(num_ranks, dim)),
        "take_slice": lambda: list(xs[0].chunk(num_ranks, dim)),
    }[name]()
    if name in COPIES:
        loss = (ys[0] * weights(0, ys[0].shape)).sum()
    else:
        loss = torch.stack([(y * weights(rank, y.shape)).sum() for rank, y in enumerate(ys)]).sum()
    loss.backward()
    gradients = [leaves[0].grad if alike_in else leaf.grad for leaf in leaves]
    return [
        (y.detach(), gradient)
        for y, gradient in zip(ys, gradients, strict=True)
        if gradient is not None
    ]


@pytest.mark.parametrize("dim", [1, -2])
@pytest.mark.parametrize("name", [*SHARES, *COPIES, "take_slice"])
def test_forward_and_backward_are_each_others_transpose(
    ranks: RankPool, name: str, dim: int
) -> None:
    for num_ranks in (2, 4):
        wanted = expected(name, dim, num_ranks)
        for dtype, tolerance in (
            (torch.float64, 1e-14),
            (torch.float32, 1e-6),
            (torch.bfloat16, 2e-2),
        ):
            for got, want in zip(ranks.run(num_ranks, run, name, dim, dtype), wanted, strict=True):
                for ours, theirs in zip(got, want, strict=True):
                    assert ours.dtype == dtype
                    assert ours.shape == theirs.shape
                    assert float((ours.double() - theirs).norm() / theirs.norm()) < tolerance


def test_one_rank_is_left_alone() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    for function in (
        collectives.copy_to_all,
        collectives.all_reduce,
        collectives.all_reduce_shared,
    ):
        assert function(x, None) is x
    for moving in (
        collectives.all_gather,
        collectives.reduce_scatter,
        collectives.all_gather_copies,
        collectives.slice_copies,
    ):
        assert moving(x, 1, None) is x
