"""Every collective with a gradient, against the same sum on one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.parallel import collectives
from tests.multiprocess.pool import RankPool

SHARES = ("copy_to_all", "all_reduce_shared", "all_gather", "reduce_scatter")
"""Ranks compute differently after these collectives: the whole loss is the sum of the ranks'
losses.
"""
COPIES = ("all_reduce", "all_gather_copies")
"""Ranks compute the same after these collectives: the loss of one rank is the whole loss."""


def draw_weights(rank: int, shape: torch.Size) -> Tensor:
    """Return the factors of a rank's result in its loss."""
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(100 + rank), dtype=torch.float64
    )


def draw_operand(rank: int) -> Tensor:
    return torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def run_collective(name: str, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return this rank's result and the gradient of its operand under the losses of `SHARES`
    and `COPIES`.
    """
    group = dist.group.WORLD
    rank = dist.get_rank()
    x = (
        draw_operand(0 if name == "copy_to_all" else rank)
        .to(dtype)
        .transpose(0, 1)
        .contiguous()
        .transpose(0, 1)
    )
    x.requires_grad_()  # not contiguous, as an activation may be
    function: Callable[..., Tensor] = getattr(collectives, name)
    y = (
        function(x, group)
        if name in ("copy_to_all", "all_reduce", "all_reduce_shared")
        else function(x, dim, group)
    )
    is_copy = name in COPIES
    (y * draw_weights(0 if is_copy else rank, y.shape).to(dtype)).sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


def compute_on_one_process(name: str, dim: int, num_ranks: int) -> list[tuple[Tensor, Tensor]]:
    """Return the same on one process, which has every rank's operand and differentiates the one
    loss.
    """
    is_copied_operand = name == "copy_to_all"
    leaves = [
        draw_operand(0 if is_copied_operand else rank).requires_grad_() for rank in range(num_ranks)
    ]
    xs = [leaves[0]] * num_ranks if is_copied_operand else leaves
    total = torch.stack(xs).sum(0)
    ys = {
        "copy_to_all": lambda: xs,
        "all_reduce": lambda: [total] * num_ranks,
        "all_reduce_shared": lambda: [total] * num_ranks,
        "all_gather": lambda: [torch.cat(xs, dim)] * num_ranks,
        "all_gather_copies": lambda: [torch.cat(xs, dim)] * num_ranks,
        "reduce_scatter": lambda: list(total.chunk(num_ranks, dim)),
    }[name]()
    if name in COPIES:
        loss = (ys[0] * draw_weights(0, ys[0].shape)).sum()
    else:
        loss = torch.stack(
            [(y * draw_weights(rank, y.shape)).sum() for rank, y in enumerate(ys)]
        ).sum()
    loss.backward()
    gradients = [leaves[0].grad if is_copied_operand else leaf.grad for leaf in leaves]
    return [
        (y.detach(), gradient)
        for y, gradient in zip(ys, gradients, strict=True)
        if gradient is not None
    ]


@pytest.mark.parametrize("dim", [1, -2])
@pytest.mark.parametrize("name", [*SHARES, *COPIES])
def test_forward_and_backward_equal_those_of_one_process(
    ranks: RankPool, name: str, dim: int
) -> None:
    for num_ranks in (2, 4):
        expected = compute_on_one_process(name, dim, num_ranks)
        for dtype, tolerance in (
            (torch.float64, 1e-14),
            (torch.float32, 1e-6),
            (torch.bfloat16, 2e-2),
        ):
            for got, want in zip(
                ranks.run(num_ranks, run_collective, name, dim, dtype), expected, strict=True
            ):
                for value, reference in zip(got, want, strict=True):
                    assert value.dtype == dtype
                    assert value.shape == reference.shape
                    assert float((value.double() - reference).norm() / reference.norm()) < tolerance


def test_collectives_of_one_rank_return_their_operand() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    for function in (
        collectives.copy_to_all,
        collectives.all_reduce,
        collectives.all_reduce_shared,
    ):
        assert function(x, None) is x
    for dim_function in (
        collectives.all_gather,
        collectives.reduce_scatter,
        collectives.all_gather_copies,
    ):
        assert dim_function(x, 1, None) is x


def sum_operands() -> tuple[dict[str, bool], str]:
    """Return which operands a sum overwrites, and the error if an operation saved one."""
    group = dist.group.WORLD
    leaf = torch.ones(3, 4, requires_grad=True)
    operands = {
        "result": leaf * 2,
        "leaf": leaf,
        "constant": torch.ones(3, 4),
        "view": (leaf * 2)[0],
        "transposed": (leaf * 2).t() + 0,
    }
    is_overwritten = {}
    for name, operand in operands.items():
        before = operand.detach().clone()
        total = collectives.all_reduce(operand, group)
        assert torch.equal(total, 2 * before)
        is_overwritten[name] = not torch.equal(operand, before)
    saved = leaf.exp()
    with pytest.raises(RuntimeError) as failure:
        collectives.all_reduce(saved, group).sum().backward()
    return is_overwritten, str(failure.value)


def test_a_sum_overwrites_results_of_operations_and_nothing_else(ranks: RankPool) -> None:
    for is_overwritten, failure in ranks.run(2, sum_operands):
        assert is_overwritten == {
            "result": True,
            "leaf": False,
            "constant": True,
            "view": False,
            "transposed": False,
        }
        assert "modified by an inplace operation" in failure
