"""Pipeline parallelism: one rank walks its row of a schedule.

Every rank of a pipeline reads the same micro-batches: ids, labels, positions, documents and dropout keys are there where they are
needed, and only hidden states and their gradients travel. Their shapes are those of the micro-batch at hand, so they may change
from one micro-batch to the next; nothing is kept from step to step. Receives and sends are posted as `schedule.plan_steps` says,
which `schedule.check` proves free of deadlock.

Why not torch.distributed.pipelining: docs/decisions/0031-pipeline-executor.md.

Legend: B sequences, S tokens of this rank's residual stream, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwright.data.loader import MicroBatch
from shardwright.layout import Layout, Stage
from shardwright.model.decoder import Decoder
from shardwright.model.deferral import Product, WeightGradients
from shardwright.model.linear import Linear
from shardwright.parallel.channels import Channels
from shardwright.parallel.mesh import Mesh
from shardwright.schedule import Action, Schedule, Step, forward_only, load_schedule, plan_steps, splits_backward

Arguments = Callable[[MicroBatch], Mapping[str, Any]]
"""What a decoder is called with for a micro-batch, by name."""
Mark = Callable[[str], None]
"""Told what went on since the last mark: forward, backward, waiting or reduction."""
Observer = Callable[[Action, float, float], None]
"""Told of an action when it began to compute and when it had done, in seconds of this process's clock."""


class StageRoot(nn.Module):
    """The outermost module of a sharded pipeline rank: calls its decoder or, given nothing to compute, gives that back.

    FSDP2 reduces gradients where a backward pass through its outermost module ends. W makes gradients outside any; a backward pass
    through `nothing` has FSDP2 take up what lies there.
    """

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, *, nothing: Tensor | None = None, **arguments: Any) -> Tensor:
        if nothing is not None:
            return nothing.clone()
        output: Tensor = self.decoder(**arguments)
        return output


class Kept(NamedTuple):
    """What lies between a stage's F and its backward: the leaf it began with, and its output or loss."""

    hidden_BSD: Tensor | None
    output: Tensor


class Pipeline:
    """This rank's stages, and how they run.

    Attributes:
        observe: gets the times of every action, for measurements on a CPU; None costs nothing.
    """

    def __init__(
        self,
        module: nn.Module,
        decoder: Decoder,
        stages: Sequence[Stage],
        layout: Layout,
        mesh: Mesh,
        device: torch.device,
        *,
        set_reduces: Callable[[bool], None] | None,
    ) -> None:
        """
        Args:
            module: what to call: the decoder, or its `StageRoot` where it is sharded.
            stages: of the whole pipeline.
            set_reduces: says whether FSDP2 reduces gradients at the end of the next backward passes; None where it does not shard.
        """
        self.module, self.decoder, self.stages = module, decoder, tuple(stages)
        self.layout, self.device, self.set_reduces = layout, device, set_reduces
        self.rank = mesh.coordinates["pp"]
        self.channels = Channels(mesh, device)
        self.deferral = WeightGradients()
        self.observe: Observer | None = None
        self._planned: dict[int, tuple[Step, ...]] = {}
        self.splits_backward = splits_backward(layout.schedule)
        if self.splits_backward:
            for found in decoder.modules():
                if isinstance(found, Linear):
                    found.deferral = self.deferral

    def schedule(self, num_micro_batches: int) -> Schedule:
        """The schedule of a training step.

        Raises:
            ScheduleError: it does not take as many micro-batches.
        """
        return load_schedule(self.layout.schedule, self.layout.pp, num_micro_batches, self.layout.virtual_stages)

    def differentiate(self, micro_batches: Sequence[MicroBatch], arguments: Arguments, scale: Tensor, mark: Mark) -> Tensor:
        """Forward and backward of a step; the sum of the losses where this rank has the head, else zero.

        Args:
            scale: the gradient of the loss.
        """
        number = len(micro_batches)
        if number not in self._planned:
            self._planned[number] = plan_steps(self.schedule(number))[self.rank]
        return _Walk(self, micro_batches, arguments, mark, scale).run(self._planned[number])

    @torch.no_grad()
    def losses(self, micro_batches: Sequence[MicroBatch], arguments: Arguments) -> Tensor:
        """The sum of the losses where this rank has the head, else zero; forwards alone."""
        schedule = forward_only([stage.rank for stage in self.stages], len(micro_batches))
        return _Walk(self, micro_batches, arguments, lambda _part: None, None).run(plan_steps(schedule)[self.rank])

    def hidden_shape(self, batch: MicroBatch) -> tuple[int, int, int]:
        """Shape of a stage's input on this rank, `[B, S, D]`."""
        num_rows, num_tokens = batch.input_ids_BT.shape
        cuts = self.decoder.cuts
        if cuts.context is not None:
            num_tokens = len(cuts.context.places(num_tokens))
        if cuts.tensor is not None and cuts.tensor.sequence_parallel:
            num_tokens //= cuts.tensor.degree
        return num_rows, num_tokens, self.decoder.shape.hidden_size

    @property
    def hidden_dtype(self) -> torch.dtype:
        """Precision of hidden states and of their gradients."""
        return self.decoder.compute_dtype or next(self.decoder.parameters()).dtype


class _Walk:
    """One step of one rank; what lies between its actions."""

    def __init__(
        self,
        pipeline: Pipeline,
        micro_batches: Sequence[MicroBatch],
        arguments: Arguments,
        mark: Mark,
        scale: Tensor | None,
    ) -> None:
        self.pipeline, self.micro_batches, self.arguments = pipeline, micro_batches, arguments
        self.mark, self.scale = mark, scale
        self.kept: dict[tuple[int, int], Kept] = {}
        self.handed: dict[tuple[bool, int, int], Tensor] = {}
        """From one of this rank's stages to another: (is it a hidden state, the stage that takes it, micro-batch)."""
        self.products: dict[tuple[int, int], list[Product]] = {}
        self.loss_sum: Tensor | None = None

    def run(self, steps: Sequence[Step]) -> Tensor:
        """Walk a row; returns the sum of the losses computed here."""
        channels, observe = self.pipeline.channels, self.pipeline.observe
        last_backward = max((place for place, step in enumerate(steps) if step.action.kind != "F"), default=-1)
        for place, step in enumerate(steps):
            for transfer in step.posts:
                shape = self.pipeline.hidden_shape(self.micro_batches[transfer.action.micro_batch])
                channels.post(transfer, shape, self.pipeline.hidden_dtype)
            received = self._receive(step)
            self.mark("waiting")
            began = perf_counter()
            made = self._compute(step.action, received, ends=place == last_backward)
            if observe is not None:
                observe(step.action, began, perf_counter())
            self.mark("forward" if step.action.kind == "F" else "backward")
            if step.sends is not None:
                assert made is not None
                channels.send(step.sends, made)
            elif made is not None:
                forward = step.action.kind == "F"
                self.handed[forward, step.action.stage + (1 if forward else -1), step.action.micro_batch] = made
        channels.finish()
        self.mark("waiting")
        left = [*self.kept, *self.handed, *self.products]
        assert not left, f"a schedule that was checked leaves nothing: {left}"
        if self.loss_sum is None:
            return torch.zeros((), dtype=torch.float64, device=self.pipeline.device)
        return self.loss_sum

    def _receive(self, step: Step) -> Tensor | None:
        if step.needs is not None:
            return self.pipeline.channels.take(step.needs)
        action = step.action
        return self.handed.pop((action.kind == "F", action.stage, action.micro_batch), None)

    def _compute(self, action: Action, received: Tensor | None, *, ends: bool) -> Tensor | None:
        """What the next stage (after F) or the one before (after B and I) waits for; None where there is none."""
        if action.kind == "F":
            return self._forward(action, received)
        # Stages 2 and 3 reduce every micro-batch; I leaves half of its gradients to W, after which both are reduced.
        reduces = ends or (action.kind != "I" and self.pipeline.layout.zero_stage >= 2)
        splits = self.pipeline.splits_backward
        self._set_reduces(reduces and not splits)
        if action.kind == "W":
            for product in self.products.pop((action.stage, action.micro_batch)):
                product.add()
            self._take_up()
            made = None
        else:
            made = self._backward(action, received)
        if reduces and splits:
            self._set_reduces(True)
            self._take_up()
        return made

    def _forward(self, action: Action, hidden_BSD: Tensor | None) -> Tensor | None:
        stage = self.pipeline.stages[action.stage]
        batch = self.micro_batches[action.micro_batch].to(self.pipeline.device)
        if hidden_BSD is not None and self.scale is not None:
            hidden_BSD.requires_grad_()
        output: Tensor = self.pipeline.module(**self.arguments(batch), stage=stage, hidden_BTD=hidden_BSD)
        if self.scale is not None:
            self.kept[action.stage, action.micro_batch] = Kept(hidden_BSD, output)
        if not stage.head:
            return output.detach()
        loss = output.detach()
        self.loss_sum = loss if self.loss_sum is None else self.loss_sum + loss
        return None

    def _backward(self, action: Action, gradient: Tensor | None) -> Tensor | None:
        assert self.scale is not None
        where = action.stage, action.micro_batch
        hidden_BSD, output = self.kept.pop(where)
        if gradient is None:
            gradient = self.scale.to(output.dtype)
        if action.kind == "I":
            with self.pipeline.deferral.deferring() as products:
                self._differentiate(output, gradient)
            self.products[where] = products
        else:
            self._differentiate(output, gradient)
        if hidden_BSD is None:
            return None
        return torch.zeros_like(hidden_BSD) if hidden_BSD.grad is None else hidden_BSD.grad

    @staticmethod
    def _differentiate(output: Tensor, gradient: Tensor) -> None:
        if output.requires_grad:  # a first stage may be frozen altogether
            output.backward(gradient)

    def _set_reduces(self, reduces: bool) -> None:
        if self.pipeline.set_reduces is not None:
            self.pipeline.set_reduces(reduces)

    def _take_up(self) -> None:
        """Have FSDP2 look at all gradients that lie here: reduce them if it is to, else widen them to the precision of its sums.

        Where a backward is split it must widen before it reduces: what I made has been widened when W comes, and one reduction
        takes gradients of one dtype.
        """
        if self.pipeline.set_reduces is not None:
            self.pipeline.module(nothing=torch.zeros((), requires_grad=True, device=self.pipeline.device)).backward()
