"""Known wrong gradients of sparse models, put back into a worker process while its context is
entered; see `mutations`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.model import moe
from shardwright.model.moe import MixtureOfExperts
from shardwright.model.routing import RouterTotals, RoutingContext
from shardwright.parallel import ParallelModel, apply, expert_parallel
from shardwright.parallel.expert_parallel import TokenDispatcher
from shardwright.parallel.parallel_model import get_local_tensor
from shardwright.train import step


def _of_experts(model: ParallelModel) -> list[Tensor]:
    """Gradients of the stacked experts that this rank holds."""
    return [
        get_local_tensor(p.grad)
        for name, p in model.named_parameters()
        if ".experts." in name and p.grad is not None
    ]


@contextmanager
def experts_averaged_over_ep() -> Iterator[None]:
    """24: experts' gradients are divided by the ranks that send them tokens."""
    finish = ParallelModel.finish_gradients

    def divide(self: ParallelModel) -> None:
        finish(self)
        for gradient in _of_experts(self):
            gradient.div_(self.layout.ep)

    with patch.object(ParallelModel, "finish_gradients", divide):
        yield


@contextmanager
def experts_not_divided_as_the_rest() -> Iterator[None]:
    """24: the wrapper averages experts over their own, smaller group, and a sum was meant."""
    finish = ParallelModel.finish_gradients

    def divide(self: ParallelModel) -> None:
        finish(self)
        for gradient in _of_experts(self):
            gradient.div_(self.layout.dp_replicate * self.layout.efsdp)

    with patch.object(ParallelModel, "finish_gradients", divide):
        yield


@contextmanager
def experts_summed_over_ep() -> Iterator[None]:
    """25: experts of different ranks are taken for copies of each other."""
    finish = ParallelModel.finish_gradients

    def add(self: ParallelModel) -> None:
        finish(self)
        assert self.mesh is not None
        for gradient in _of_experts(self):
            dist.all_reduce(gradient, group=self.mesh.group("ep"))

    with patch.object(ParallelModel, "finish_gradients", add):
        yield


@contextmanager
def experts_in_the_replicas_group() -> Iterator[None]:
    """25: DDP sums experts with everything else, over ranks that hold other experts."""
    replicate = apply.apply_ddp
    with patch.object(
        apply,
        "apply_ddp",
        lambda *arguments, **named: replicate(*arguments, **(named | {"apart": ()})),
    ):
        yield


@contextmanager
def router_losses_scaled_by_accumulation() -> Iterator[None]:
    """26: each micro-batch's router losses count as if it were the whole step."""
    with _row_weight_times(lambda model, batches: len(batches)):
        yield


@contextmanager
def router_losses_scaled_by_ranks() -> Iterator[None]:
    """26: each rank averages over its own rows, and the averages are summed."""
    with _row_weight_times(lambda model, batches: model.layout.data_ranks):
        yield


@contextmanager
def _row_weight_times(factor: Any) -> Iterator[None]:
    accumulate = step.accumulate_gradients

    def scaled(model: ParallelModel, micro_batches: Any, **named: Any) -> Any:
        forward = model.decoder.forward

        def weigh(*arguments: Any, row_weight: Tensor, **more: Any) -> Tensor:
            result: Tensor = forward(
                *arguments, row_weight=row_weight * factor(model, micro_batches), **more
            )
            return result

        with patch.object(model.decoder, "forward", weigh):
            return accumulate(model, micro_batches, **named)

    with patch("shardwright.verify.cell.accumulate_gradients", scaled):
        yield


@contextmanager
def balance_of_the_own_tokens() -> Iterator[None]:
    """26: under context parallelism each rank balances its part of a row by itself."""
    with patch.object(TokenDispatcher, "sum_over_row", lambda self, x: x * self.num_row_ranks):
        yield


@contextmanager
def router_losses_counted_by_every_tensor_rank() -> Iterator[None]:
    """26: ranks that all see the same tokens all add the loss, and their gradients are summed."""
    prepare = TokenDispatcher.__init__

    def forget(self: TokenDispatcher, *arguments: Any) -> None:
        prepare(self, *arguments)
        self.loss_share = 1.0

    with patch.object(TokenDispatcher, "__init__", forget):
        yield


@contextmanager
def recompute_counts_twice() -> Iterator[None]:
    """27: what a block adds up in its forward pass it adds again when it is computed again."""
    add = RouterTotals.add
    route = MixtureOfExperts.route

    def route_and_count(self: MixtureOfExperts, x_BTD: Tensor, context: Any) -> Any:
        before = context.routing.statistics.get(self.layer_index)
        routing = route(self, x_BTD, context)
        if before is not None:
            tally.add(context.routing)
        return routing

    tally = RouterTotals()

    def add_both(self: RouterTotals, routing: RoutingContext) -> None:
        nonlocal tally
        tally = self
        add(self, routing)

    with (
        patch.object(RouterTotals, "add", add_both),
        patch.object(MixtureOfExperts, "route", route_and_count),
    ):
        yield


@contextmanager
def capacity_by_logits() -> Iterator[None]:
    """28: who fits is decided by something else than the order of the row."""
    fits = moe.mask_within_capacity
    with patch.object(
        moe, "mask_within_capacity", lambda chosen, *rest: fits(chosen.flip(1), *rest).flip(1)
    ):
        yield


@contextmanager
def capacity_of_the_own_tokens() -> Iterator[None]:
    """28: under context parallelism each rank fills an expert by itself."""
    fits = MixtureOfExperts._mask_within_capacity

    def alone(
        self: MixtureOfExperts, experts_BTK: Tensor, factor: float, _places: Tensor | None
    ) -> Tensor:
        return fits(self, experts_BTK, factor, None)

    with patch.object(MixtureOfExperts, "_mask_within_capacity", alone):
        yield


@contextmanager
def the_router_is_detached() -> Iterator[None]:
    """Automodel 2995: what experts give is weighed by numbers without a gradient."""
    choose = moe.choose_experts

    def detached(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        chosen, weights, probabilities = choose(*arguments)
        return chosen, weights.detach() + 0 * weights, probabilities

    with patch.object(moe, "choose_experts", detached):
        yield


@contextmanager
def gradients_do_not_travel_home() -> Iterator[None]:
    """Rows come back from the experts; their gradients do not."""
    wait = expert_parallel.wait_all_to_all

    class Lost:
        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
            wait(ctx.exchange.backward_work)
            return torch.zeros_like(ctx.exchange.gradient), None

    with patch.object(expert_parallel._StartAllToAll, "backward", Lost.backward):
        yield


@contextmanager
def balance_biases_move_by_the_own_tokens() -> Iterator[None]:
    """Each rank moves its copy of a balance bias by the tokens that it saw itself."""
    with patch.object(step, "_sum_router_tables", lambda model: _own_routers(model)):
        yield


def _own_routers(model: ParallelModel) -> Tensor | None:
    shape = model.decoder.shape
    assert shape.experts is not None
    return model.decoder.router_totals.pop_table(
        shape.num_layers, shape.experts.num_experts, model.device
    )
