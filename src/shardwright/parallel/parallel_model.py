"""A decoder under a layout: forward and backward passes, gradient reduction, local parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardwright.data.loader import MicroBatch
from shardwright.layout import (
    BATCH_AXES,
    DATA_AXES,
    Layout,
    ParameterBox,
    ParameterLayout,
    RankGrid,
    compute_local_boxes,
)
from shardwright.model.decoder import Decoder
from shardwright.numerics import GradientSquares, get_local_tensor, sum_gradient_squares
from shardwright.parallel.comm_timing import CommunicationTimer, begin_wait, end_wait
from shardwright.parallel.ddp import ReplicatedModule
from shardwright.parallel.fsdp import EarlyGathers
from shardwright.parallel.gradient_reduction import (
    LaunchedReduction,
    PendingReduction,
    complete_gradients,
    launch_reductions,
    narrow_to_box,
    reduce_gradients,
)
from shardwright.parallel.gradient_watch import (
    GradientListener,
    GradientWatch,
    call_at_backward_end,
)
from shardwright.parallel.matrix_exchange import (
    DistributedMatrixExchange,
    assemble_tensor,
    choose_assembly_dtype,
    list_exchanged_matrices,
)
from shardwright.parallel.mesh import Mesh, sum_over
from shardwright.parallel.offloaded_weights import TrainedWeightStore, offload_gradients
from shardwright.parallel.pipeline_parallel import DecoderArguments, Pipeline, TimeMarker
from shardwright.parallel.weight_maxima import WeightMaxima, agree_on_maxima


class ParallelModel:
    """A decoder under a layout; each step calls `forward_backward`, then `finish_gradients`.

    Attributes:
        module: module to call without a pipeline; its arguments are the decoder's.
        pipeline: runs the rank's stages; None without pipeline parallelism.
        decoder: the decoder itself; its parameter names are those of Hugging Face files.
        layouts: descriptors of the whole model's parameters by name; a pipeline rank has some.
        trainable: names of the parameters of the whole model that take gradients.
        mesh: None for one rank.
        device: device on which this rank computes.
        offloaded_names: parameters whose values are on the device only while their block computes
            or is updated. Nothing else may read them.
        trained_offload: keeps those of `offloaded_names` if the run trains them; None if they are
            frozen because only adapters are trained.
    """

    def __init__(
        self,
        module: nn.Module,
        decoder: Decoder,
        layouts: dict[str, ParameterLayout],
        layout: Layout,
        mesh: Mesh | None,
        device: torch.device,
        fsdp_modules: list[FSDPModule],
        trainable: frozenset[str],
        pending_reductions: list[PendingReduction],
        offloaded_names: frozenset[str] = frozenset(),
        trained_offload: TrainedWeightStore | None = None,
    ) -> None:
        self.module = module
        self.decoder = decoder
        self.layouts = layouts
        self.layout = layout
        self.mesh = mesh
        self.device = device
        self.fsdp_modules = fsdp_modules
        self.pipeline: Pipeline | None = None
        self.trainable = trainable
        self.offloaded_names = offloaded_names
        self.trained_offload = trained_offload
        self.weight_maxima: WeightMaxima | None = None
        self.early_gathers: EarlyGathers | None = None
        self._gradient_hooks: list[Callable[[], None]] = []
        self._offloaded_gradient_hooks: list[Callable[[Sequence[str]], None]] = []
        self._gradient_watch: GradientWatch | None = None
        trained = [item for item in pending_reductions if item.name in trainable]
        self._offloaded_reductions = [item for item in trained if item.name in offloaded_names]
        self._pending_reductions = [item for item in trained if item.name not in offloaded_names]
        self._gradient_squares: dict[str, list[GradientSquares]] = {}
        """Squares of gradients that count in the norm and may have been freed, by name."""
        self._stage_reductions: dict[int, list[PendingReduction]] = {}
        self._launched_reductions: list[LaunchedReduction] = []
        self._coordinates = RankGrid(layout).coordinates(0 if mesh is None else mesh.rank)
        # FSDP2 swaps a module's parameters between sharded and gathered ones. The sharded ones
        # are the model's, and always these objects.
        self._parameters = dict(decoder.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters by name: DTensors if FSDP shards them, plain tensors otherwise."""
        yield from self._parameters.items()

    def forward_backward(
        self,
        micro_batches: Sequence[MicroBatch],
        arguments: DecoderArguments,
        scale: Tensor,
        mark: TimeMarker,
    ) -> Tensor:
        """Run forward and backward on a step's micro-batches, accumulating gradients.

        Args:
            arguments: returns the decoder's arguments for a micro-batch that is on the device.
            scale: gradient of each loss.
            mark: called with each phase at its end: forward, backward, waiting or reduction.

        Returns:
            Sum of the losses that this rank computed.
        """
        self._gradient_squares.clear()
        if self.pipeline is not None:
            return self.pipeline.forward_backward(micro_batches, arguments, scale, mark)
        loss_sum: Tensor | None = None
        has_wrapper = bool(self.fsdp_modules) or isinstance(self.module, ReplicatedModule)
        for index, batch in enumerate(micro_batches):
            is_last = index == len(micro_batches) - 1
            waits_for_reduction = has_wrapper and (is_last or self.layout.zero_stage >= 2)

            def end_backward(waits_for_reduction: bool = waits_for_reduction) -> None:
                mark("backward")
                if waits_for_reduction:  # only the embedding's gradient and this wait remain
                    begin_wait()

            with (
                self.synchronise_gradients(is_last),
                call_at_backward_end(self.decoder.blocks[0], end_backward),
            ):
                loss = self.module(**arguments(batch.to(self.device)))
                mark("forward")
                with self.watch_backward(range(self.decoder.shape.num_layers if is_last else 0)):
                    loss.backward(scale.to(loss.dtype))
            if waits_for_reduction:
                end_wait("data")
            loss_sum = loss.detach() if loss_sum is None else loss_sum + loss.detach()
            mark("reduction")
        assert loss_sum is not None, "a step has at least one micro-batch"
        return loss_sum

    @contextmanager
    def watch_backward(
        self, completed_layers: Collection[int], *, is_deferring: bool = False
    ) -> Iterator[None]:
        """Offload gradients in a backward pass, or a part of it, and report those it completes."""
        finish = self._finish_gradients_of
        with offload_gradients(self.trained_offload, finish, completed_layers, is_deferring):
            if self._gradient_watch is None:
                yield
                return
            with self._gradient_watch.complete(self._list_completed(completed_layers)):
                yield

    def _list_completed(self, completed_layers: Collection[int]) -> Collection[str]:
        """List the parameters whose gradients only a pass that completes these layers changes."""
        if self._gradient_hooks or not completed_layers:
            return ()
        reductions = [*self._pending_reductions, *chain(*self._stage_reductions.values())]
        names = self._parameters.keys() - {pending.name for pending in reductions}
        if self.pipeline is None:
            return names
        return names & self.pipeline.list_completed_parameters(completed_layers)

    def compute_losses(
        self, micro_batches: Sequence[MicroBatch], arguments: DecoderArguments
    ) -> Tensor:
        """Sum the losses that this rank computes, in fp64 and without gradients.

        Call it within `evaluate_mode`.
        """
        if self.pipeline is not None:
            return self.pipeline.compute_losses(micro_batches, arguments).double()
        losses = [
            self.module(**arguments(batch.to(self.device))).double() for batch in micro_batches
        ]
        return torch.stack(losses).sum()

    def synchronise_gradients(self, is_last: bool) -> AbstractContextManager[Any]:
        """Return the context for the passes of one micro-batch; `is_last` for a step's last one.

        Stages 0 and 1 reduce gradients on the last micro-batch only. Stages 2 and 3 cannot
        store unsharded gradients: they reduce-scatter every time and defer only the all-reduce
        over replicas, which takes shards.
        """
        if isinstance(self.module, ReplicatedModule):
            return nullcontext() if is_last else self.module.no_sync()
        if self.fsdp_modules:
            root = self.fsdp_modules[-1]
            if self.layout.zero_stage == 1:
                root.set_requires_gradient_sync(is_last)
            else:
                root.set_requires_all_reduce(is_last)
        return nullcontext()

    def finish_gradients(self) -> None:
        """Complete gradient reduction and reshard parameters, after the last backward pass."""
        if self.fsdp_modules and self.layout.zero_stage < 3:
            self.reshard()
        for launched in self._launched_reductions:
            launched.wait()
        self._launched_reductions.clear()
        if self._pending_reductions:
            names = [name for name in self._parameters if name not in self.offloaded_names]
            reduce_gradients(
                self._pending_reductions,
                complete_gradients(self._parameters, names),
                bucket_size_bytes=self.layout.bucket_size_bytes,
            )
        for call in self._gradient_hooks:
            call()
        if self._gradient_watch is not None:
            self._gradient_watch.end()

    @property
    def completes_gradients_early(self) -> bool:
        """True if the last backward pass completes every gradient."""
        is_late = isinstance(self.module, ReplicatedModule) or self.pipeline is not None
        return not (is_late or self._pending_reductions or self._gradient_hooks)

    def watch_gradients(self, listener: GradientListener, *, may_free: bool = False) -> None:
        """Report the gradient of each parameter that is trained on the device once it is complete.

        That is in the last backward pass of the step, or of its stage, on the stream that has
        computed or reduced it; or in `finish_gradients`, which makes other reductions.
        Squares are summed before the report to a listener that `may_free` gradients.
        """
        assert self._gradient_watch is None
        sum_squares = self._finish_gradients_of if may_free else None
        watched = {n: p for n, p in self._parameters.items() if n not in self.offloaded_names}
        self._gradient_watch = GradientWatch(watched, listener, sum_squares)
        if isinstance(self.module, ReplicatedModule):
            assert not may_free, "gradients are DDP's buckets"
            self.module.reduction.report = self._gradient_watch.take_reduced
        else:
            self._gradient_watch.install_hooks()

    def _finish_gradients_of(self, names: Sequence[str]) -> None:
        """Reduce offloaded gradients and sum squares, before gradients leave or are freed."""
        reductions = [item for item in self._offloaded_reductions if item.name in names]
        reduce_gradients(
            reductions,
            complete_gradients(self._parameters, [pending.name for pending in reductions]),
            bucket_size_bytes=self.layout.bucket_size_bytes,
        )
        for call in self._offloaded_gradient_hooks:
            call(names)
        for name in names:
            parts = self._list_counted_parts(name)
            self._gradient_squares[name] = [sum_gradient_squares(part) for part in parts]

    def read_parameter(self, name: str) -> Tensor | None:
        """Return this rank's part of a parameter; None if it is frozen and offloaded."""
        if name not in self.offloaded_names:
            return get_local_tensor(self._parameters[name].detach())
        return None if self.trained_offload is None else self.trained_offload.read_weight(name)

    def overlap_reductions(self, stage_of_parameter: Mapping[str, int]) -> None:
        """Reduce gradients over data ranks as soon as their stage's last backward pass has ended.

        Args:
            stage_of_parameter: index of the only stage that uses a parameter, by name; a
                parameter that is left out is reduced at the end of the step.
        """
        remaining = []
        for pending in self._pending_reductions:
            stage = stage_of_parameter.get(pending.name)
            if stage is None or not pending.is_over_data:
                remaining.append(pending)
            else:
                self._stage_reductions.setdefault(stage, []).append(pending)
        self._pending_reductions = remaining

    def launch_stage_reduction(self, stage: int) -> None:
        """Begin to reduce the gradients of a stage; `finish_gradients` waits for it."""
        reductions = self._stage_reductions.get(stage, ())
        self._launched_reductions += launch_reductions(
            reductions,
            complete_gradients(self._parameters, [pending.name for pending in reductions]),
            bucket_size_bytes=self.layout.bucket_size_bytes,
        )

    def invalidate_weights(self) -> None:
        """State that parameters are about to be written. Identical on all ranks."""
        if self.early_gathers is not None:
            self.early_gathers.discard()
        if self.decoder.working_weights is not None:
            self.decoder.working_weights.mark_changed()

    def add_gradient_hook(self, callback: Callable[[], None]) -> None:
        """Register a function to run when a step's gradients are complete, before any use."""
        self._gradient_hooks.append(callback)

    def add_offloaded_gradient_hook(self, callback: Callable[[Sequence[str]], None]) -> None:
        """Register a function of the names of offloaded parameters with complete gradients."""
        self._offloaded_gradient_hooks.append(callback)

    def reshard(self) -> None:
        """Free all gathered parameters. Required before parameters are read or written by name."""
        for group in self.fsdp_modules:
            group.reshard()

    @contextmanager
    def evaluate_mode(self) -> Iterator[nn.Module]:
        """Return a context for forward passes without gradients that reshards at its end."""
        try:
            with torch.no_grad(), agree_on_maxima(self.weight_maxima):
                yield self.module
        finally:
            self.reshard()

    def list_gradients(self) -> list[tuple[Tensor | None, ParameterLayout]]:
        """List this rank's shard of every trainable parameter's gradient, with its descriptor.

        Offloaded gradients are left out; one may be on its way to the device for a next use.
        """
        return [
            (None if p.grad is None else get_local_tensor(p.grad), self.layouts[name])
            for name, p in self._parameters.items()
            if p.requires_grad and name not in self.offloaded_names
        ]

    def list_norm_gradients(self) -> list[tuple[Tensor | GradientSquares | None, ParameterLayout]]:
        """List the local gradients that count in the model's norm; copies count once.

        Every rank lists every trainable parameter, with None where it has nothing to count, so
        that all ranks reduce over the same axes. Of one that may be freed the squares are listed.
        """
        counted: list[tuple[Tensor | GradientSquares | None, ParameterLayout]] = []
        for name, parameter_layout in self.layouts.items():
            if name in self.trainable:
                counted.append((None, parameter_layout))
                parts: Sequence[Tensor | GradientSquares] = self._gradient_squares.get(name, ())
                if name not in self.offloaded_names:
                    parts = parts or self._list_counted_parts(name)
                elif self.trained_offload is not None and name not in self._gradient_squares:
                    assert not self.trained_offload.has_gradient(name), f"{name} left too early"
                counted += [(part, parameter_layout) for part in parts]
        return counted

    def _list_counted_parts(self, name: str) -> list[Tensor]:
        """List the parts of a local gradient that count in the norm on this rank."""
        parameter = self._parameters.get(name)
        is_counted = self._coordinates["pp"] == self.layouts[name].pp_ranks[0]
        if parameter is None or parameter.grad is None or not is_counted:
            return []
        return [
            narrow_to_box(get_local_tensor(parameter.grad), box.local_bounds)
            for box in self.local_boxes(name)
            if box.is_first_copy
        ]

    @property
    def stage_axes(self) -> tuple[str, ...]:
        """Axes whose ranks hold different parameters."""
        return ("pp",) if self.layout.pp > 1 else ()

    def local_boxes(self, name: str) -> tuple[ParameterBox, ...]:
        """List the boxes of a parameter (and of its gradient and moments) that this rank holds."""
        return compute_local_boxes(self.layouts[name], self.layout, self._coordinates)

    def build_comm_timer(self) -> CommunicationTimer:
        """Build the timer of this rank's waits, by kind of parallelism."""
        return CommunicationTimer(
            self.device, {} if self.mesh is None else self.mesh.map_groups_to_parallelisms()
        )

    def block_matrices(self) -> frozenset[str]:
        """Return the names of trained matrices, and of experts' stacks of them, of all blocks."""
        return list_exchanged_matrices(self.decoder.shape) & self.trainable

    def build_matrix_exchange(self, names: Collection[str]) -> DistributedMatrixExchange:
        """Build the exchange of these parameters' matrices; all ranks call it with equal names."""
        return DistributedMatrixExchange(self.layouts, names, self.mesh, self.layout)

    def sum_over(self, tensor: Tensor, axes: Sequence[str]) -> Tensor:
        """Sum `tensor` in place over the ranks of mesh axes."""
        return sum_over(tensor, axes, self.mesh)

    def sum_over_data(self, tensor: Tensor) -> Tensor:
        """Sum a loss in place over all ranks with different tokens, and over pipelines."""
        return sum_over(tensor, ("pp", *DATA_AXES), self.mesh)

    def sum_over_batch(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` in place over all ranks that read different sequences."""
        return sum_over(tensor, BATCH_AXES, self.mesh)

    def any_rank(self, value: bool) -> bool:
        """Return True on every rank if `value` is True on any rank."""
        if self.mesh is None:
            return value
        flag = torch.tensor(value, dtype=torch.int32, device=self.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)

    def gather_parameter(self, name: str) -> Tensor:
        """Gather a whole parameter on every rank (a collective)."""
        if name not in self._parameters:
            return self._gather_full(name, None)
        local = self.read_parameter(name)
        assert local is not None, f"{name} is offloaded"
        return self._gather_full(name, local)

    def gather_gradient(self, name: str) -> Tensor | None:
        """Gather a whole gradient on every rank (a collective); None for a frozen parameter.

        Elements for which there is no gradient are nan.
        """
        if name not in self.trainable:
            return None
        parameter = self._parameters.get(name)
        return self._gather_full(name, None if parameter is None else parameter.grad)

    def _gather_full(self, name: str, tensor: Tensor | None) -> Tensor:
        """Assemble a tensor from all ranks' boxes, each from the first rank that holds it."""
        parameter_layout = self.layouts[name]
        if self.mesh is None:
            assert tensor is not None
            return tensor
        dtype = choose_assembly_dtype(self._parameters.values())
        is_first_rank = self._coordinates["pp"] == parameter_layout.pp_ranks[0] and not any(
            self._coordinates[axis] for axis in parameter_layout.replicated_axes
        )
        return assemble_tensor(
            None if tensor is None else get_local_tensor(tensor),
            [box for box in self.local_boxes(name) if is_first_rank and box.is_first_copy],
            torch.zeros(parameter_layout.shape, dtype=dtype, device=self.device),
        )
