"""Padded exchanges: places of rows, rows beyond the limit, and the limit itself."""

from __future__ import annotations

import pytest
import torch

from shardwright.architecture import read_config
from shardwright.config.training import OptimizerSection, PrecisionSection
from shardwright.layout import Layout
from shardwright.model.parallel_hooks import ParallelHooks
from shardwright.model.products.row_places import place_rows, take_rows
from shardwright.model.routing import count_tokens
from shardwright.optim import build_optimizer
from shardwright.parallel.experts.expert_parallel import TokenDispatcher
from shardwright.parallel.experts.padded_exchange import PaddedExchange
from shardwright.plans import BatchPlan
from shardwright.training.row_limit import REPEATED_STEPS, RowLimit
from shardwright.training.step import update_parameters
from tests.multiprocess.models import MIXTRAL, build_model


def build_exchange(num_tokens: int, limit: float) -> PaddedExchange:
    """Build the exchange of one rank, which has all experts of Mixtral's test model."""
    experts = read_config(MIXTRAL).experts
    assert experts is not None
    return PaddedExchange(TokenDispatcher(None, None, 1), experts, num_tokens, limit)


def test_rows_come_back_and_padding_reaches_nothing() -> None:
    """Two ranks of two experts; 4 is a dropped choice. The second rank has a row too many."""
    experts_NK = torch.tensor([[3, 0], [2, 3], [4, 2], [3, 1]])
    places = place_rows(experts_NK, count_tokens(experts_NK, 4), num_ranks=2, rows_per_rank=4)
    assert places.num_beyond_limit == 1
    assert places.counts_Pe.tolist() == [[1, 1, 2], [2, 2, 0]]
    assert places.choices_X.tolist() == [1, 7, 8, 8, 2, 5, 0, 3]
    x_ND = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    rows_XD = take_rows(x_ND, places.choices_X, places.places_M, 2)
    assert torch.equal(rows_XD[:2], x_ND[[0, 3]])
    is_padding_X1 = places.choices_X[:, None] == 8
    undefined_XD = rows_XD.masked_fill(is_padding_X1, torch.nan) * 2.0
    back_MD = take_rows(undefined_XD, places.places_M, places.choices_X, 1)
    # The choices of each token that have a place.
    num_placed_N1 = torch.tensor([[2.0], [2.0], [1.0], [1.0]], dtype=torch.float64)
    assert torch.equal(back_MD.unflatten(0, (4, 2)).sum(1), 2.0 * num_placed_N1 * x_ND)
    back_MD.sum().backward()
    assert torch.equal(x_ND.grad, (2.0 * num_placed_N1).expand(4, 3))


def test_a_limit_is_raised_after_repeated_steps_up_to_the_most_uneven_choice() -> None:
    exchange = build_exchange(num_tokens=8, limit=1.0)
    exchange._dispatcher.degree = 2
    limit = RowLimit(exchange)
    rows = [exchange.rows_per_rank]
    for _ in range(2 * REPEATED_STEPS):
        limit.count_repeated_step(1)
        rows.append(exchange.rows_per_rank)
    # 8 tokens with 2 experts each: 8 rows to each of two ranks, at most 16.
    assert rows == [8, 8, 8, 12, 12, 12, 16]
    with exchange.exchange_exactly():
        assert exchange.rows_per_rank is None
    assert [exchange.raise_limit(), exchange.rows_per_rank] == [False, 16]


def test_an_update_without_the_number_of_omitted_rows_is_refused() -> None:
    batch = BatchPlan(12, 1, 1, 1)
    model = build_model(
        read_config(MIXTRAL), Layout(), batch, PrecisionSection(kind="fp32"), seed=0
    )
    optimizer = build_optimizer(
        model.named_parameters(), OptimizerSection(name="sgd"), learning_rate=1.0, weight_decay=0.0
    )
    exchange = build_exchange(num_tokens=12, limit=1.0)
    model.decoder.install_parallel_hooks(ParallelHooks(token_exchange=exchange))
    with pytest.raises(ValueError, match="rows_beyond_limit: None"):
        update_parameters(model, optimizer, learning_rate=1.0, max_grad_norm=1.0)
    before = [parameter.clone() for parameter in model.decoder.parameters()]
    for parameter in model.decoder.parameters():
        parameter.grad = torch.ones_like(parameter)
    done = update_parameters(
        model,
        optimizer,
        learning_rate=1.0,
        max_grad_norm=1.0,
        rows_beyond_limit=torch.tensor(3.0, dtype=torch.float64),
    )
    assert (done.rows_beyond_limit, done.is_skipped) == (3, True)
    for parameter, value in zip(model.decoder.parameters(), before, strict=True):
        assert parameter.grad is None
        assert torch.equal(parameter, value)
