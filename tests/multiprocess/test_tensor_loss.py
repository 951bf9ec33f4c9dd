"""The loss over a vocabulary that is sharded over ranks, against one process with the whole of
it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardwright.errors import RankFailed
from shardwright.numerics import VocabularyShard, chunked_cross_entropy
from shardwright.parallel.collectives import copy_to_all
from shardwright.parallel.tensor_parallel import build_vocabulary_shard
from tests.multiprocess.pool import RankPool

N = 61
D = 16
CASES: list[dict[str, Any]] = [
    {},
    {"logit_scale": 0.3},
    {"soft_cap": 2.0},
    {"label_smoothing": 0.2},
    {"logit_scale": 0.3, "soft_cap": 2.0, "label_smoothing": 0.2},
]


def draw_inputs(vocab_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return hidden states, weight, bias and labels; logits vary widely, so that the ranks'
    maxima differ.
    """
    random = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> Tensor:
        return (2.0 * torch.randn(*shape, generator=random, dtype=torch.float64)).to(dtype)

    labels_N = torch.randint(0, vocab_size, (N,), generator=random)
    labels_N[::3] = -100
    return draw(N, D), draw(vocab_size, D), draw(vocab_size), labels_N


def compute_on_one_process(
    vocab_size: int, dtype: torch.dtype, with_bias: bool, options: dict[str, Any]
) -> list[Tensor]:
    hidden_ND, weight_VD, bias_V, labels_N = draw_inputs(vocab_size, dtype)
    leaves = [hidden_ND, weight_VD, bias_V][: 2 + with_bias]
    for leaf in leaves:
        leaf.requires_grad_()
    loss = chunked_cross_entropy(
        hidden_ND, weight_VD, bias_V if with_bias else None, labels_N, chunk_tokens=9, **options
    )
    return [loss.detach(), *torch.autograd.grad(loss / 17, leaves)]


def compute_on_ranks(
    vocab_size: int, dtype: torch.dtype, with_bias: bool, options: dict[str, Any]
) -> list[Tensor]:
    """Return the same with the rows of `torch.chunk` on each rank; gradients of rows are
    gathered.
    """
    group = dist.group.WORLD
    assert group is not None
    hidden_ND, weight_VD, bias_V, labels_N = draw_inputs(vocab_size, dtype)
    shard = build_vocabulary_shard(vocab_size, group)
    rows = slice(
        shard.first_row, shard.first_row + len(weight_VD.chunk(group.size())[dist.get_rank()])
    )
    leaves = [hidden_ND, weight_VD[rows].clone(), bias_V[rows].clone()][: 2 + with_bias]
    for leaf in leaves:
        leaf.requires_grad_()
    loss = chunked_cross_entropy(
        copy_to_all(hidden_ND, group),
        leaves[1],
        leaves[2] if with_bias else None,
        labels_N,
        chunk_tokens=9,
        vocabulary=shard,
        **options,
    )
    gradients = torch.autograd.grad(loss / 17, leaves)
    pieces = [[torch.empty(0)] * group.size() for _ in gradients[1:]]
    for shards, gradient in zip(pieces, gradients[1:], strict=True):
        dist.all_gather_object(shards, gradient)
    return [loss.detach(), gradients[0], *(torch.cat(shards) for shards in pieces)]


@pytest.mark.parametrize("options", CASES, ids=str)
@pytest.mark.parametrize(("num_ranks", "vocab_size"), [(2, 255), (4, 37)])
def test_loss_and_every_gradient_equal_those_of_one_process(
    ranks: RankPool, num_ranks: int, vocab_size: int, options: dict[str, Any]
) -> None:
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-6)):
        expected = compute_on_one_process(vocab_size, dtype, True, options)
        by_rank = ranks.run(num_ranks, compute_on_ranks, vocab_size, dtype, True, options)
        for got in by_rank:
            for ours, want in zip(got, expected, strict=True):
                assert ours.shape == want.shape
                assert float((ours - want).norm() / want.norm()) < tolerance
        assert all(torch.equal(got[0], by_rank[0][0]) for got in by_rank), (
            "ranks decide by the loss, so it must be equal on all"
        )


def test_bf16_products_keep_the_loss_in_fp32(ranks: RankPool) -> None:
    options = {"label_smoothing": 0.1}
    expected = compute_on_one_process(255, torch.bfloat16, False, options)
    for got in ranks.run(2, compute_on_ranks, 255, torch.bfloat16, False, options):
        assert got[0].dtype == torch.float32
        torch.testing.assert_close(got[0], expected[0], rtol=2e-6, atol=0)
        assert [gradient.dtype for gradient in got[1:]] == [torch.bfloat16] * 2
        for ours, want in zip(got[1:], expected[1:], strict=True):
            assert float((ours - want).norm() / want.norm()) < 1e-2


def count_collectives(num_chunks: int) -> int:
    """Count the collectives of one loss over `num_chunks` chunks."""
    group = dist.group.WORLD
    assert group is not None
    shard = build_vocabulary_shard(8, group)
    calls = 0

    def count_and_gather(tensor: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return shard.gather_ranks(tensor)

    counting_shard = VocabularyShard(
        shard.first_row, shard.vocab_size, count_and_gather, shard.gather_logits
    )
    weight_VD = torch.randn(4, 3, requires_grad=True)
    labels_N = torch.arange(num_chunks * 2) % 8
    chunked_cross_entropy(
        torch.randn(num_chunks * 2, 3),
        weight_VD,
        None,
        labels_N,
        chunk_tokens=2,
        vocabulary=counting_shard,
    ).backward()
    return calls


def test_a_chunk_needs_one_collective(ranks: RankPool) -> None:
    assert ranks.run(2, count_collectives, 5) == [5, 5]


def gather_logits(vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return all logits, gathered from the ranks' own, and the gradient of the own ones in a
    loss that every rank computes.
    """
    group = dist.group.WORLD
    assert group is not None
    _, _, bias_V, _ = draw_inputs(vocab_size, torch.float64)
    own_V = bias_V.chunk(group.size())[dist.get_rank()].clone().requires_grad_()
    whole_V = build_vocabulary_shard(vocab_size, group).gather_logits(own_V)
    F.cross_entropy(whole_V[None], torch.tensor([2])).backward()
    assert own_V.grad is not None
    return whole_V.detach(), own_V.grad


@pytest.mark.parametrize(("num_ranks", "vocab_size"), [(2, 7), (4, 13)])
def test_whole_logits_and_their_gradient(ranks: RankPool, num_ranks: int, vocab_size: int) -> None:
    whole_V = draw_inputs(vocab_size, torch.float64)[2].requires_grad_()
    F.cross_entropy(whole_V[None], torch.tensor([2])).backward()
    assert whole_V.grad is not None
    got = ranks.run(num_ranks, gather_logits, vocab_size)
    assert all(torch.equal(logits_V, whole_V) for logits_V, _ in got)
    torch.testing.assert_close(
        torch.cat([gradient for _, gradient in got]), whole_V.grad, rtol=1e-14, atol=0
    )


def compute_loss_of_outside_label() -> None:
    """Compute a loss with a label that is outside every rank's shard."""
    group = dist.group.WORLD
    assert group is not None
    shard = build_vocabulary_shard(8, group)
    hidden_ND = torch.ones(1, 3)
    weight_VD = torch.ones(4, 3)
    chunked_cross_entropy(
        hidden_ND, weight_VD, None, torch.tensor([8]), chunk_tokens=2, vocabulary=shard
    )


def test_a_label_outside_the_vocabulary_is_an_error(ranks: RankPool) -> None:
    with pytest.raises(RankFailed, match="out of bounds"):
        ranks.run(2, compute_loss_of_outside_label)
