"""Pipeline parallelism: execution of one rank's row of a schedule.

Every rank of a pipeline reads the same micro-batches: ids, labels, positions, documents and
dropout keys are present where they are needed, and only hidden states and their gradients are
sent. Their shapes are those of the current micro-batch and may change from one micro-batch to
the next; nothing is stored between steps. Receives and sends are posted as
`schedule.plan_steps` orders them, which `schedule.check_schedule` proves free of deadlock.

Why not torch.distributed.pipelining: docs/decisions/0031-pipeline-executor.md.

Legend: B sequences, S tokens of this rank's residual stream, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from shardwright.architecture import ModelShape
from shardwright.data.loader import MicroBatch
from shardwright.layout import Layout, PipelineStage
from shardwright.model.decoder import Decoder
from shardwright.model.products.linear import Linear
from shardwright.model.products.product import DeferredGradient, WeightGradientStore
from shardwright.parallel.mesh import Mesh
from shardwright.parallel.p2p_channels import P2PChannels
from shardwright.parallel.sharded_weights import UnitReduction
from shardwright.schedule import (
    Action,
    Schedule,
    ScheduleStep,
    build_forward_only,
    has_split_backward,
    load_schedule,
    plan_steps,
)

DecoderArguments = Callable[[MicroBatch], Mapping[str, Any]]
"""Returns the decoder's keyword arguments for a micro-batch."""
TimeMarker = Callable[[str], None]
"""Called with the phase since the last call: forward, backward, waiting or reduction."""


class BackwardContext(Protocol):
    """Returns the context of B, I or W."""

    def __call__(
        self, completed_layers: Collection[int], /, *, is_deferring: bool
    ) -> AbstractContextManager[None]:
        """Enter with the layers whose gradients no later action changes; True for I."""
        ...


ActionObserver = Callable[[Action, float, float], None]
"""Called with an action and the times at which its computation began and ended, in seconds of
this process's clock."""


class StageRoot(nn.Module):
    """Outermost module of a sharded pipeline rank: calls its decoder or returns `nothing`.

    FSDP2 reduces gradients where a backward pass through its outermost module ends. W computes
    gradients outside of any such pass; a backward pass through `nothing` makes FSDP2 process
    the gradients that exist.
    """

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, *, nothing: Tensor | None = None, **arguments: Any) -> Tensor:
        if nothing is not None:
            return nothing.clone()
        output: Tensor = self.decoder(**arguments)
        return output


class SavedForward(NamedTuple):
    """Tensors stored between a stage's F and its backward: input leaf, and output or loss."""

    hidden_BSD: Tensor | None
    output: Tensor


class Pipeline:
    """This rank's stages and their execution.

    Attributes:
        observe: receives the times of every action, for measurements on a CPU; None costs
            nothing.
    """

    def __init__(
        self,
        module: nn.Module,
        decoder: Decoder,
        stages: Sequence[PipelineStage],
        layout: Layout,
        mesh: Mesh,
        device: torch.device,
        gradient_store: WeightGradientStore,
        *,
        first_trained_stage: int,
        set_gradient_sync: Callable[[bool], None] | None,
        end_stage: Callable[[int], None] | None = None,
        enter_backward: BackwardContext | None = None,
    ) -> None:
        """Build the executor of this rank's stages; every rank of the world calls this.

        Args:
            module: module to call: the decoder, or its `StageRoot` if FSDP2 shards it.
            stages: all stages of the pipeline.
            gradient_store: collects the weight gradients that I leaves to W.
            first_trained_stage: first stage of the pipeline that is not entirely frozen; no
                gradient passes through those before it.
            set_gradient_sync: sets whether FSDP2 reduces gradients at the end of the next
                backward passes; None without FSDP2.
            end_stage: called with a stage when its gradients are complete, while other stages
                still run; None to call nothing.
            enter_backward: returns the context of B, I and W; None for no context.
        """
        self.enter_backward = enter_backward or (lambda *_, **__: nullcontext())
        self.module = module
        self.decoder = decoder
        self.stages = tuple(stages)
        self.layout = layout
        self.device = device
        self.first_trained_stage = first_trained_stage
        self.set_gradient_sync = set_gradient_sync
        self.end_stage = end_stage
        self.rank = mesh.coordinates["pp"]
        self.channels = P2PChannels(mesh, device, [stage.rank for stage in self.stages])
        self.gradient_store = gradient_store
        self.unit_reduction: UnitReduction | None = None
        """Reduces what W has computed before W ends; None reduces it afterwards."""
        self.action_observer: ActionObserver | None = None
        self._planned_steps: dict[int, tuple[ScheduleStep, ...]] = {}
        self.has_split_backward = has_split_backward(layout.schedule)
        if self.has_split_backward:
            for submodule in decoder.modules():
                if isinstance(submodule, Linear):
                    submodule.gradient_store = gradient_store

    def schedule(self, num_micro_batches: int) -> Schedule:
        """Load the schedule of a training step.

        Raises:
            ScheduleError: it does not support this number of micro-batches.
        """
        return load_schedule(
            self.layout.schedule, self.layout.pp, num_micro_batches, self.layout.virtual_stages
        )

    def list_completed_parameters(self, completed_layers: Collection[int]) -> frozenset[str]:
        """List the parameters that only stages use all of whose layers are completed."""
        completed = {
            stage.index for stage in self.stages if set(stage.layers).issubset(completed_layers)
        }
        stage_of_parameter = find_parameter_stages(self.decoder.shape, self.stages)
        return frozenset(name for name, stage in stage_of_parameter.items() if stage in completed)

    def forward_backward(
        self,
        micro_batches: Sequence[MicroBatch],
        arguments: DecoderArguments,
        scale: Tensor,
        mark: TimeMarker,
    ) -> Tensor:
        """Run forward and backward of a step.

        Args:
            scale: gradient of the loss.

        Returns:
            Sum of the losses if this rank has the head, else zero.
        """
        num_micro_batches = len(micro_batches)
        if num_micro_batches not in self._planned_steps:
            self._planned_steps[num_micro_batches] = plan_steps(self.schedule(num_micro_batches))[
                self.rank
            ]
        return _StepExecution(self, micro_batches, arguments, mark, scale).run(
            self._planned_steps[num_micro_batches]
        )

    @torch.no_grad()
    def compute_losses(
        self, micro_batches: Sequence[MicroBatch], arguments: DecoderArguments
    ) -> Tensor:
        """Run forward passes only.

        Returns:
            Sum of the losses if this rank has the head, else zero.
        """
        schedule = build_forward_only([stage.rank for stage in self.stages], len(micro_batches))
        return _StepExecution(self, micro_batches, arguments, lambda _part: None, None).run(
            plan_steps(schedule)[self.rank]
        )

    def hidden_shape(self, batch: MicroBatch) -> tuple[int, int, int]:
        """Return the shape of a stage's input on this rank, `[B, S, D]`."""
        num_rows, num_tokens = batch.input_ids_BT.shape
        parallelism = self.decoder.parallel_hooks
        if parallelism.context is not None:
            num_tokens = parallelism.context.count_local_tokens(num_tokens)
        if parallelism.tensor is not None and parallelism.tensor.sequence_parallel:
            num_tokens //= parallelism.tensor.degree
        return num_rows, num_tokens, self.decoder.shape.hidden_size

    @property
    def hidden_dtype(self) -> torch.dtype:
        """Dtype of hidden states and of their gradients."""
        return self.decoder.compute_dtype or next(self.decoder.parameters()).dtype


class _StepExecution:
    """State of one step on one rank, between its actions."""

    def __init__(
        self,
        pipeline: Pipeline,
        micro_batches: Sequence[MicroBatch],
        arguments: DecoderArguments,
        mark: TimeMarker,
        scale: Tensor | None,
    ) -> None:
        self.pipeline = pipeline
        self.micro_batches = micro_batches
        self.arguments = arguments
        self.mark = mark
        self.scale = scale
        self.saved_forwards: dict[tuple[int, int], SavedForward] = {}
        self.local_transfers: dict[tuple[bool, int, int], Tensor] = {}
        """Tensors between this rank's stages, by (is a hidden state, receiver, micro-batch)."""
        self.deferred_products: dict[tuple[int, int], list[DeferredGradient]] = {}
        self.loss_sum: Tensor | None = None

    def run(self, steps: Sequence[ScheduleStep]) -> Tensor:
        """Execute a row of the schedule; return the sum of the losses computed on this rank."""
        channels = self.pipeline.channels
        observer = self.pipeline.action_observer
        last_backward = max(
            (index for index, step in enumerate(steps) if step.action.kind != "F"), default=-1
        )
        last_of_stage = {
            step.action.stage: index for index, step in enumerate(steps) if step.action.kind != "F"
        }
        for index, step in enumerate(steps):
            for transfer in step.posted_receives:
                shape = self.pipeline.hidden_shape(self.micro_batches[transfer.action.micro_batch])
                channels.post_receive(transfer, shape, self.pipeline.hidden_dtype)
            received = self._receive(step)
            self.mark("waiting")
            start = perf_counter()
            self._expect_products(steps[index + 1 : index + 2])
            output = self._compute(
                step.action,
                received,
                is_last_backward=index == last_backward,
                is_last_of_stage=last_of_stage.get(step.action.stage) == index,
            )
            if observer is not None:
                observer(step.action, start, perf_counter())
            self.mark("forward" if step.action.kind == "F" else "backward")
            if step.sent_transfer is not None:
                assert output is not None
                channels.send(step.sent_transfer, output)
            elif output is not None:
                is_forward = step.action.kind == "F"
                self.local_transfers[
                    is_forward,
                    step.action.stage + (1 if is_forward else -1),
                    step.action.micro_batch,
                ] = output
            # After the send, which the next rank waits for.
            if (
                self.pipeline.end_stage is not None
                and last_of_stage.get(step.action.stage) == index
            ):
                self.pipeline.end_stage(step.action.stage)
        channels.finish()
        self.mark("waiting")
        remaining = [*self.saved_forwards, *self.local_transfers, *self.deferred_products]
        assert not remaining, f"tensors remain after a checked schedule: {remaining}"
        if self.loss_sum is None:
            return torch.zeros((), dtype=torch.float64, device=self.pipeline.device)
        return self.loss_sum

    def _expect_products(self, next_steps: Sequence[ScheduleStep]) -> None:
        """Let offloaded inputs of W return before it if it is the next action."""
        for step in next_steps:
            action = step.action
            if action.kind == "W":
                products = self.deferred_products.get((action.stage, action.micro_batch), ())
                self.pipeline.gradient_store.expect(products)

    def _receive(self, step: ScheduleStep) -> Tensor | None:
        if step.awaited_transfer is not None:
            received = self.pipeline.channels.wait_receive(step.awaited_transfer)
            self.pipeline.channels.release_sends(step.completed_sends)
            return received
        action = step.action
        return self.local_transfers.pop(
            (action.kind == "F", action.stage, action.micro_batch), None
        )

    def _compute(
        self,
        action: Action,
        received: Tensor | None,
        *,
        is_last_backward: bool,
        is_last_of_stage: bool,
    ) -> Tensor | None:
        """Run an action.

        Returns:
            Tensor for the next stage (after F) or the previous one (after B and I), if any.
        """
        if action.kind == "F":
            return self._forward(action, received)
        # ZeRO stages 2 and 3 reduce after every micro-batch. I leaves part of its gradients to
        # W, after which both parts are reduced.
        should_reduce = is_last_backward or (
            action.kind != "I" and self.pipeline.layout.zero_stage >= 2
        )
        is_split = self.pipeline.has_split_backward
        self._set_gradient_sync(should_reduce and not is_split)
        with self.pipeline.enter_backward(
            self._list_completed_layers(action.stage, is_last_of_stage, is_last_backward),
            is_deferring=action.kind == "I",
        ):
            if action.kind == "W":
                products = self.deferred_products.pop((action.stage, action.micro_batch))
                units = self.pipeline.unit_reduction
                with units.reduce_units(is_active=should_reduce) if units else nullcontext():
                    self.pipeline.gradient_store.accumulate(products)
                self._trigger_fsdp_reduction()
                output = None
            else:
                output = self._backward(action, received)
            if should_reduce and is_split:
                self._set_gradient_sync(True)
                self._trigger_fsdp_reduction()
        return output

    def _list_completed_layers(
        self, stage: int, is_last_of_stage: bool, is_last_backward: bool
    ) -> Collection[int]:
        """List the layers whose gradients no later action changes, reductions included."""
        pipeline = self.pipeline
        if pipeline.set_gradient_sync is not None and pipeline.layout.zero_stage < 2:
            # FSDP2 reduces those of all stages at once.
            return range(pipeline.stages[-1].last_layer if is_last_backward else 0)
        return pipeline.stages[stage].layers if is_last_of_stage else ()

    def _forward(self, action: Action, hidden_BSD: Tensor | None) -> Tensor | None:
        stage = self.pipeline.stages[action.stage]
        batch = self.micro_batches[action.micro_batch].to(self.pipeline.device)
        if hidden_BSD is not None and self.scale is not None:
            hidden_BSD.requires_grad_(action.stage > self.pipeline.first_trained_stage)
        output: Tensor = self.pipeline.module(
            **self.arguments(batch), stage=stage, hidden_BTD=hidden_BSD
        )
        if self.scale is not None:
            self.saved_forwards[action.stage, action.micro_batch] = SavedForward(hidden_BSD, output)
        if not stage.has_head:
            return output.detach()
        loss = output.detach()
        self.loss_sum = loss if self.loss_sum is None else self.loss_sum + loss
        return None

    def _backward(self, action: Action, gradient: Tensor | None) -> Tensor | None:
        assert self.scale is not None
        key = action.stage, action.micro_batch
        hidden_BSD, output = self.saved_forwards.pop(key)
        if gradient is None:
            gradient = self.scale.to(output.dtype)
        if action.kind == "I":
            with self.pipeline.gradient_store.defer() as products:
                self._run_backward(output, gradient)
            self.deferred_products[key] = products
        else:
            self._run_backward(output, gradient)
        if hidden_BSD is None:
            return None
        return torch.zeros_like(hidden_BSD) if hidden_BSD.grad is None else hidden_BSD.grad

    @staticmethod
    def _run_backward(output: Tensor, gradient: Tensor) -> None:
        if output.requires_grad:  # the first stages may be entirely frozen
            output.backward(gradient)

    def _set_gradient_sync(self, should_sync: bool) -> None:
        if self.pipeline.set_gradient_sync is not None:
            self.pipeline.set_gradient_sync(should_sync)

    def _trigger_fsdp_reduction(self) -> None:
        """Make FSDP2 reduce the existing gradients or, without sync, cast them to its dtype.

        Under a split backward pass the cast must come first: gradients that I computed are cast
        before W runs, and one reduction takes gradients of one dtype.
        """
        if self.pipeline.set_gradient_sync is not None:
            self.pipeline.module(
                nothing=torch.zeros((), requires_grad=True, device=self.pipeline.device)
            ).backward()


def find_parameter_stages(shape: ModelShape, stages: Sequence[PipelineStage]) -> dict[str, int]:
    """Return the stage of each parameter that only one stage uses: all but a tied embedding."""
    found = {}
    for spec in shape.list_parameters():
        is_input = spec.role in ("embedding", "positions")
        if spec.role == "embedding" and shape.tied_embeddings:
            continue
        found[spec.name] = next(
            stage.index
            for stage in stages
            if (
                spec.layer in stage.layers
                if spec.layer is not None
                else stage.has_embedding
                if is_input
                else stage.has_head
            )
        )
    return found
