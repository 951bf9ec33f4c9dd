"""Patches that add known wrong gradients of sparse models; see `reductions`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.model import moe
from shardwright.model.block import Block
from shardwright.model.moe import MixtureOfExperts
from shardwright.model.products.row_copies import RowCopies
from shardwright.model.routing import RouterTotals, RoutingContext
from shardwright.numerics import get_local_tensor
from shardwright.parallel import ParallelModel, apply
from shardwright.parallel.experts import expert_parallel, row_exchange, token_exchange
from shardwright.parallel.experts.expert_parallel import TokenDispatcher
from shardwright.training import step


def _list_expert_gradients(model: ParallelModel) -> list[Tensor]:
    """Return the gradients of the stacked experts of this rank."""
    return [
        get_local_tensor(p.grad)
        for name, p in model.named_parameters()
        if ".experts." in name and p.grad is not None
    ]


@contextmanager
def average_experts_over_ep() -> Iterator[None]:
    """Divide the experts' gradients by the ranks that send them tokens."""
    finish = ParallelModel.finish_gradients

    def divide(self: ParallelModel) -> None:
        finish(self)
        for gradient in _list_expert_gradients(self):
            gradient.div_(self.layout.ep)

    with patch.object(ParallelModel, "finish_gradients", divide):
        yield


@contextmanager
def average_experts_over_efsdp() -> Iterator[None]:
    """Average experts over their own, smaller group where a sum is needed."""
    finish = ParallelModel.finish_gradients

    def divide(self: ParallelModel) -> None:
        finish(self)
        for gradient in _list_expert_gradients(self):
            gradient.div_(self.layout.dp_replicate * self.layout.efsdp)

    with patch.object(ParallelModel, "finish_gradients", divide):
        yield


@contextmanager
def sum_experts_over_ep() -> Iterator[None]:
    """Treat the experts of different ranks as replicas of each other."""
    finish = ParallelModel.finish_gradients

    def add(self: ParallelModel) -> None:
        finish(self)
        assert self.mesh is not None
        for gradient in _list_expert_gradients(self):
            dist.all_reduce(gradient, group=self.mesh.group("ep"))

    with patch.object(ParallelModel, "finish_gradients", add):
        yield


@contextmanager
def reduce_experts_in_ddp() -> Iterator[None]:
    """Sum experts in DDP with all other parameters, over ranks that have other experts."""
    replicate = apply.apply_ddp
    with patch.object(
        apply,
        "apply_ddp",
        lambda *arguments, **named: replicate(*arguments, **(named | {"excluded_names": ()})),
    ):
        yield


@contextmanager
def scale_router_losses_by_accumulation() -> Iterator[None]:
    """Weight each micro-batch's router losses as if it were the whole step."""
    with _scale_row_weight(lambda model, batches: len(batches)):
        yield


@contextmanager
def scale_router_losses_by_ranks() -> Iterator[None]:
    """Average router losses over each rank's rows and sum the averages."""
    with _scale_row_weight(lambda model, batches: model.layout.data_ranks):
        yield


@contextmanager
def _scale_row_weight(factor: Any) -> Iterator[None]:
    accumulate = step.accumulate_gradients

    def accumulate_scaled(model: ParallelModel, micro_batches: Any, **named: Any) -> Any:
        forward = model.decoder.forward

        def weigh(*arguments: Any, row_weight: Tensor, **more: Any) -> Tensor:
            result: Tensor = forward(
                *arguments, row_weight=row_weight * factor(model, micro_batches), **more
            )
            return result

        with patch.object(model.decoder, "forward", weigh):
            return accumulate(model, micro_batches, **named)

    with patch("shardwright.verification.cell.accumulate_gradients", accumulate_scaled):
        yield


@contextmanager
def balance_own_tokens() -> Iterator[None]:
    """Compute the balance loss of each context rank's part of a row separately."""
    with patch.object(TokenDispatcher, "sum_over_row", lambda self, x: x * self.num_row_ranks):
        yield


@contextmanager
def add_router_losses_on_every_tensor_rank() -> Iterator[None]:
    """Add the loss on every rank that sees the same tokens, although gradients are summed."""
    prepare = TokenDispatcher.__init__

    def count_fully(self: TokenDispatcher, *arguments: Any) -> None:
        prepare(self, *arguments)
        self.loss_share = 1.0

    with patch.object(TokenDispatcher, "__init__", count_fully):
        yield


@contextmanager
def count_tokens_twice_in_recompute() -> Iterator[None]:
    """Add the router statistics of a block again when the block is recomputed."""
    add = RouterTotals.add
    compute = Block.compute

    def compute_and_count(self: Block, x_BTD: Tensor, context: Any, dropout: Any) -> Any:
        # Before the computation: a repeated one stops as soon as it has what was not saved.
        if self.layer_index in context.routing.statistics:
            tally.add(context.routing)
        return compute(self, x_BTD, context, dropout)

    tally = RouterTotals()

    def add_both(self: RouterTotals, routing: RoutingContext) -> None:
        nonlocal tally
        tally = self
        add(self, routing)

    with (
        patch.object(RouterTotals, "add", add_both),
        patch.object(Block, "compute", compute_and_count),
    ):
        yield


@contextmanager
def fill_capacity_in_wrong_order() -> Iterator[None]:
    """Decide which tokens fit an expert by another order than the row's."""
    fits = moe.mask_within_capacity
    with patch.object(
        moe, "mask_within_capacity", lambda chosen, *rest: fits(chosen.flip(1), *rest).flip(1)
    ):
        yield


@contextmanager
def fill_capacity_per_rank() -> Iterator[None]:
    """Let each context rank fill an expert by itself."""
    fits = MixtureOfExperts._mask_within_capacity

    def ignore_other_ranks(
        self: MixtureOfExperts, experts_BTK: Tensor, factor: float, _places: Tensor | None
    ) -> Tensor:
        return fits(self, experts_BTK, factor, None)

    with patch.object(MixtureOfExperts, "_mask_within_capacity", ignore_other_ranks):
        yield


@contextmanager
def detach_router() -> Iterator[None]:
    """Weight the experts' outputs by numbers without a gradient."""
    choose = moe.choose_experts

    def choose_detached(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        chosen, weights, probabilities = choose(*arguments)
        return chosen, weights.detach() + 0 * weights, probabilities

    with patch.object(moe, "choose_experts", choose_detached):
        yield


@contextmanager
def drop_gradients_of_dispatched_tokens() -> Iterator[None]:
    """Return the outputs of the experts but not their gradients."""
    wait = row_exchange.wait_all_to_all

    class DropGradients:
        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
            wait(ctx.exchange.backward_work)
            return torch.zeros_like(ctx.exchange.gradient), None

    with patch.object(expert_parallel._AllToAllStart, "backward", DropGradients.backward):
        yield


@contextmanager
def lose_gradients_of_sent_weights() -> Iterator[None]:
    """Weight rows on the experts' rank, but send no gradient of the weights back."""
    add = token_exchange.sum_copies

    def add_detached(y_MD: Tensor, copies: RowCopies, weights_M: Tensor | None = None) -> Tensor:
        if weights_M is not None:
            weights_M = weights_M.detach() + 0 * weights_M
        return add(y_MD, copies, weights_M)

    with patch.object(token_exchange, "sum_copies", add_detached):
        yield


@contextmanager
def ignore_rows_beyond_limit() -> Iterator[None]:
    """Apply gradients of padded exchanges that have omitted rows."""
    count = RouterTotals.count_beyond_limit
    with patch.object(RouterTotals, "count_beyond_limit", lambda *arguments: 0 * count(*arguments)):
        yield


@contextmanager
def sum_padding_into_bias() -> Iterator[None]:
    """Give rows of padding the bias of the last expert; their gradients are undefined."""

    def repeat_last(bias_EF: Tensor, counts_E: Tensor, num_rows: int) -> Tensor:
        bias_EF = torch.cat([bias_EF, bias_EF[-1:]])[: counts_E.shape[0]]
        return bias_EF.repeat_interleave(counts_E, dim=0, output_size=num_rows)

    with patch.object(moe, "repeat_by_expert", repeat_last), _fill_new_memory():
        yield


@contextmanager
def _fill_new_memory() -> Iterator[None]:
    """Fill memory with NaN when it is allocated."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def update_balance_biases_per_rank() -> Iterator[None]:
    """Update each rank's copy of a balance bias from its own tokens only."""
    with patch.object(step, "_sum_router_tables", _pop_own_router_table):
        yield


def _pop_own_router_table(model: ParallelModel) -> tuple[Tensor, None]:
    shape = model.decoder.shape
    assert shape.experts is not None
    totals = model.decoder.router_totals
    return totals.pop_table(shape.num_layers, shape.experts.num_experts, model.device), None
