"""Known wrong gradients of pipelines, put back into a worker process while its context is entered;
see `mutations`.
"""

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
from shardwright.model.weight_gradient_store import DeferredProduct
from shardwright.parallel import ParallelModel, pipeline_parallel
from shardwright.parallel.p2p_channels import P2PChannels
from shardwright.parallel.pipeline_parallel import Pipeline, StageRoot
from shardwright.schedule import Action, Transfer

_Walk = pipeline_parallel._StepExecution


@contextmanager
def every_stage_rescales() -> Iterator[None]:
    """10: each stage divides what it gives back by the number of micro-batches, not the last one
    alone.
    """
    backward = _Walk._backward

    def divide(self: Any, action: Action, gradient: Tensor | None) -> Tensor | None:
        return backward(
            self, action, None if gradient is None else gradient / len(self.micro_batches)
        )

    with patch.object(_Walk, "_backward", divide):
        yield


@contextmanager
def pipeline_forgets_the_normaliser() -> Iterator[None]:
    """11: under a pipeline the loss is not divided by the supervised tokens."""
    differentiate = Pipeline.forward_backward

    def unscaled(self: Pipeline, batches: Any, arguments: Any, scale: Tensor, mark: Any) -> Tensor:
        return differentiate(self, batches, arguments, torch.ones_like(scale), mark)

    with patch.object(Pipeline, "forward_backward", unscaled):
        yield


@contextmanager
def norm_of_the_own_stage() -> Iterator[None]:
    """30: each pipeline rank takes the norm of its own gradients for the model's."""
    with patch.object(ParallelModel, "stage_axes", ()):
        yield


@contextmanager
def restart_wipes_gradients() -> Iterator[None]:
    """42: something in the middle of a step sets the pipeline up anew, accumulated gradients with
    it.
    """
    forward = _Walk._forward

    def wipe(self: Any, action: Action, hidden_BSD: Tensor | None) -> Tensor | None:
        if self.scale is not None and action.micro_batch == len(self.micro_batches) - 1:
            self.pipeline.decoder.zero_grad()
        return forward(self, action, hidden_BSD)

    with patch.object(_Walk, "_forward", wipe):
        yield


@contextmanager
def tied_copies_go_apart() -> Iterator[None]:
    """44: each stage that has the tied embedding keeps the gradient that it made."""
    from shardwright.parallel import apply

    pending = apply.list_pending_reductions

    def without_stages(layouts: dict[str, ParameterLayout], *arguments: Any, **named: Any) -> Any:
        alone = {
            name: replace(layout, stages=layout.pp_ranks[:1]) for name, layout in layouts.items()
        }
        return pending(alone, *arguments, **named)

    with patch.object(apply, "list_pending_reductions", without_stages):
        yield


@contextmanager
def tied_copies_count_twice() -> Iterator[None]:
    """44, 29: a tied embedding on two stages is in the norm twice."""
    counted = ParallelModel.list_norm_gradients

    def twice(self: ParallelModel) -> Any:
        here = self._coordinates["pp"]
        own = {
            n: replace(d, pp_ranks=(here, *d.pp_ranks)) if here in d.pp_ranks else d
            for n, d in self.layouts.items()
        }
        with patch.object(self, "layouts", own):
            return counted(self)

    with patch.object(ParallelModel, "list_norm_gradients", twice):
        yield


@contextmanager
def weight_gradients_are_dropped() -> Iterator[None]:
    """A product that waits is never multiplied where another one is there already."""
    add = DeferredProduct.accumulate

    def once(self: DeferredProduct) -> None:
        if self.weight.grad is None:
            add(self)

    with patch.object(DeferredProduct, "accumulate", once):
        yield


@contextmanager
def weight_gradients_are_not_reduced() -> Iterator[None]:
    """FSDP2 reduces where I ends; what W makes afterwards stays where it is."""
    forward = StageRoot.forward

    def away_from_the_root(
        self: StageRoot, *, nothing: Tensor | None = None, **arguments: Any
    ) -> Tensor:
        if nothing is None:
            return forward(self, **arguments)
        for parameter in self.decoder.parameters():
            parameter.grad = None if parameter.grad is None else parameter.grad * 0
        return forward(self, nothing=nothing)

    with patch.object(StageRoot, "forward", away_from_the_root):
        yield


@contextmanager
def stages_do_not_reduce_last() -> Iterator[None]:
    """23: the stage's last gradients are left out of the one reduction of the step."""
    compute = _Walk._compute

    def early(self: Any, action: Action, received: Tensor | None, *, ends: bool) -> Tensor | None:
        return compute(
            self, action, received, ends=ends or (action.kind != "F" and action.micro_batch == 1)
        )

    set_reduces = Pipeline.__init__

    def once(self: Pipeline, *arguments: Any, **named: Any) -> None:
        set_reduces(self, *arguments, **named)
        told: list[bool] = []
        tell = self.set_gradient_sync
        assert tell is not None

        def only_the_first(reduces: bool) -> None:
            tell(reduces and not any(told))
            told.append(reduces)

        self.set_gradient_sync = only_the_first

    with patch.object(_Walk, "_compute", early), patch.object(Pipeline, "__init__", once):
        yield


@contextmanager
def messages_change_places() -> Iterator[None]:
    """Two micro-batches' gradients, both waiting in a rank's buffers, are taken one for the
    other.
    """
    take = P2PChannels.wait_receive

    def other(self: P2PChannels, transfer: Transfer) -> Tensor:
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
        return take(self, transfer)

    with patch.object(P2PChannels, "wait_receive", other):
        yield


@contextmanager
def documents_of_another_micro_batch() -> Iterator[None]:
    """Later stages see the masks and positions of the first micro-batch."""
    forward = _Walk._forward

    def first_documents(self: Any, action: Action, hidden_BSD: Tensor | None) -> Tensor | None:
        arguments = self.arguments
        first = self.micro_batches[0]
        borrowed = {"document_ids_BT": first.document_ids_BT, "positions_BT": first.positions_BT}
        if action.stage > 0:
            self.arguments = lambda batch: arguments(batch) | borrowed
        try:
            return forward(self, action, hidden_BSD)
        finally:
            self.arguments = arguments

    with patch.object(_Walk, "_forward", first_documents):
        yield


@contextmanager
def layers_are_numbered_by_stage() -> Iterator[None]:
    """Each stage counts its layers from 0, so that layers of different stages drop the same
    features.
    """
    forward = Block.forward

    def renumbered(self: Block, *arguments: Any) -> Tensor:
        index, self.layer_index = self.layer_index, self.layer_index % 2
        try:
            return forward(self, *arguments)
        finally:
            self.layer_index = index

    with patch.object(Block, "forward", renumbered):
        yield
