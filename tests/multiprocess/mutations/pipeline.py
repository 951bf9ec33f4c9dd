"""Patches that add known wrong gradients of pipelines; see `reductions`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from shardwright.layout import ParameterLayout
from shardwright.model import Block
from shardwright.model.products.product import DeferredProduct
from shardwright.parallel import ParallelModel, apply, pipeline_parallel
from shardwright.parallel.p2p_channels import P2PChannels
from shardwright.parallel.pipeline_parallel import Pipeline, StageRoot
from shardwright.schedule import Action, Transfer

_StepExecution = pipeline_parallel._StepExecution


@contextmanager
def rescale_in_every_stage() -> Iterator[None]:
    """Divide the gradients of every stage by the number of micro-batches, not of the last
    alone.
    """
    backward = _StepExecution._backward

    def divide(self: Any, action: Action, gradient: Tensor | None) -> Tensor | None:
        return backward(
            self, action, None if gradient is None else gradient / len(self.micro_batches)
        )

    with patch.object(_StepExecution, "_backward", divide):
        yield


@contextmanager
def omit_normaliser_in_pipeline() -> Iterator[None]:
    """Skip the division of the loss by the supervised tokens under a pipeline."""
    differentiate = Pipeline.forward_backward

    def omit_scale(
        self: Pipeline, batches: Any, arguments: Any, scale: Tensor, mark: Any
    ) -> Tensor:
        return differentiate(self, batches, arguments, torch.ones_like(scale), mark)

    with patch.object(Pipeline, "forward_backward", omit_scale):
        yield


@contextmanager
def compute_norm_of_own_stage() -> Iterator[None]:
    """Use the norm of each pipeline rank's own gradients as the model's."""
    with patch.object(ParallelModel, "stage_axes", ()):
        yield


@contextmanager
def clear_gradients_on_restart() -> Iterator[None]:
    """Set the pipeline up again within a step, which clears the accumulated gradients."""
    forward = _StepExecution._forward

    def clear(self: Any, action: Action, hidden_BSD: Tensor | None) -> Tensor | None:
        if self.scale is not None and action.micro_batch == len(self.micro_batches) - 1:
            self.pipeline.decoder.zero_grad()
        return forward(self, action, hidden_BSD)

    with patch.object(_StepExecution, "_forward", clear):
        yield


@contextmanager
def keep_tied_gradients_apart() -> Iterator[None]:
    """Keep each stage's own gradient of the tied embedding."""
    pending = apply.list_pending_reductions

    def list_own_stage(layouts: dict[str, ParameterLayout], *arguments: Any, **named: Any) -> Any:
        own_layouts = {
            name: replace(layout, pp_ranks=layout.pp_ranks[:1]) for name, layout in layouts.items()
        }
        return pending(own_layouts, *arguments, **named)

    with patch.object(apply, "list_pending_reductions", list_own_stage):
        yield


@contextmanager
def count_tied_copies_twice() -> Iterator[None]:
    """Include a tied embedding of two stages in the norm twice."""
    original = ParallelModel.list_norm_gradients

    def count_twice(self: ParallelModel) -> Any:
        stage_rank = self._coordinates["pp"]
        layouts = {
            n: replace(d, pp_ranks=(stage_rank, *d.pp_ranks)) if stage_rank in d.pp_ranks else d
            for n, d in self.layouts.items()
        }
        with patch.object(self, "layouts", layouts):
            return original(self)

    with patch.object(ParallelModel, "list_norm_gradients", count_twice):
        yield


@contextmanager
def drop_deferred_products() -> Iterator[None]:
    """Drop a deferred product where a gradient exists already."""
    add = DeferredProduct.accumulate

    def accumulate_once(self: DeferredProduct) -> None:
        if self.weight.grad is None:
            add(self)

    with patch.object(DeferredProduct, "accumulate", accumulate_once):
        yield


@contextmanager
def skip_reduction_after_w() -> Iterator[None]:
    """Let FSDP2 reduce after I, so that the gradients that W computes stay local."""
    forward = StageRoot.forward

    def drop_at_root(self: StageRoot, *, nothing: Tensor | None = None, **arguments: Any) -> Tensor:
        if nothing is None:
            return forward(self, **arguments)
        for parameter in self.decoder.parameters():
            parameter.grad = None if parameter.grad is None else parameter.grad * 0
        return forward(self, nothing=nothing)

    with patch.object(StageRoot, "forward", drop_at_root):
        yield


@contextmanager
def reduce_stage_too_early() -> Iterator[None]:
    """Leave the stage's last gradients out of the one reduction of the step."""
    compute = _StepExecution._compute

    def end_early(
        self: Any, action: Action, received: Tensor | None, *, is_last_backward: bool, **named: Any
    ) -> Tensor | None:
        is_last_backward |= action.kind != "F" and action.micro_batch == 1
        return compute(self, action, received, is_last_backward=is_last_backward, **named)

    initialise = Pipeline.__init__

    def sync_once(self: Pipeline, *arguments: Any, **named: Any) -> None:
        initialise(self, *arguments, **named)
        earlier: list[bool] = []
        set_sync = self.set_gradient_sync
        assert set_sync is not None

        def sync_first_only(should_sync: bool) -> None:
            set_sync(should_sync and not any(earlier))
            earlier.append(should_sync)

        self.set_gradient_sync = sync_first_only

    with (
        patch.object(_StepExecution, "_compute", end_early),
        patch.object(Pipeline, "__init__", sync_once),
    ):
        yield


@contextmanager
def swap_messages_of_micro_batches() -> Iterator[None]:
    """Swap two micro-batches' gradients that wait in a rank's buffers."""
    receive = P2PChannels.wait_receive

    def receive_twin(self: P2PChannels, transfer: Transfer) -> Tensor:
        twin = next(
            (
                t
                for t in self._pending_receives
                if t.sender == transfer.sender and t != transfer and t.is_gradient
            ),
            None,
        )
        if twin is not None and transfer.is_gradient:
            for _, work in (self._pending_receives[transfer], self._pending_receives[twin]):
                if work is not None:
                    work.wait()
            self._pending_receives[transfer], self._pending_receives[twin] = (
                (self._pending_receives[twin][0], None),
                (self._pending_receives[transfer][0], None),
            )
        return receive(self, transfer)

    with patch.object(P2PChannels, "wait_receive", receive_twin):
        yield


@contextmanager
def use_documents_of_first_micro_batch() -> Iterator[None]:
    """Give later stages the masks and positions of the first micro-batch."""
    forward = _StepExecution._forward

    def forward_with_first(self: Any, action: Action, hidden_BSD: Tensor | None) -> Tensor | None:
        arguments = self.arguments
        first = self.micro_batches[0]
        first_inputs = {
            "document_ids_BT": first.document_ids_BT,
            "positions_BT": first.positions_BT,
        }
        if action.stage > 0:
            self.arguments = lambda batch: arguments(batch) | first_inputs
        try:
            return forward(self, action, hidden_BSD)
        finally:
            self.arguments = arguments

    with patch.object(_StepExecution, "_forward", forward_with_first):
        yield


@contextmanager
def number_layers_by_stage() -> Iterator[None]:
    """Number each stage's layers from 0, so that layers of different stages drop the same
    features.
    """
    forward = Block.forward

    def renumber(self: Block, *arguments: Any) -> Tensor:
        index = self.layer_index
        self.layer_index = index % 2
        try:
            return forward(self, *arguments)
        finally:
            self.layer_index = index

    with patch.object(Block, "forward", renumber):
        yield
