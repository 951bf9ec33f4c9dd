"""A decoder under a layout: forward and backward passes, gradient reduction, local parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardwright.architecture.count import EXPERT_ROLES
from shardwright.data.loader import MicroBatch
from shardwright.layout import BATCH_AXES, DATA_AXES, Held, Layout, ParameterLayout, RankGrid, held
from shardwright.model.decoder import Decoder
from shardwright.parallel.matrices import MatrixExchange
from shardwright.parallel.mesh import Mesh, sum_over
from shardwright.parallel.pipeline import Arguments, Mark, Pipeline
from shardwright.parallel.reduce import PendingSum, make_sums, narrow
from shardwright.parallel.waiting import Waits, begin_wait, end_wait


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, without a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class ParallelModel:
    """A decoder under a layout; each step calls `differentiate`, then `finish_gradients`.

    Attributes:
        module: module to call without a pipeline; its arguments are the decoder's.
        pipeline: runs the rank's stages; None without pipeline parallelism.
        decoder: the decoder itself; its parameter names are those of Hugging Face files.
        layouts: one descriptor per parameter of the whole model, by name; a pipeline rank holds
            some of these parameters.
        trainable: names of the parameters of the whole model that take gradients.
        mesh: None for one rank.
        device: device on which this rank computes.
    """

    def __init__(
        self,
        module: nn.Module,
        decoder: Decoder,
        layouts: dict[str, ParameterLayout],
        layout: Layout,
        mesh: Mesh | None,
        device: torch.device,
        groups: list[FSDPModule],
        trainable: frozenset[str],
        sums: list[PendingSum],
    ) -> None:
        self.module = module
        self.decoder = decoder
        self.layouts = layouts
        self.layout = layout
        self.mesh = mesh
        self.device = device
        self.groups = groups
        self.pipeline: Pipeline | None = None
        self.trainable = trainable
        self._when_summed: list[Callable[[], None]] = []
        self._sums = [pending for pending in sums if pending.name in trainable]
        self._here = RankGrid(layout).coordinates(0 if mesh is None else mesh.rank)
        # FSDP2 swaps a module's parameters between sharded and gathered ones. The sharded ones
        # are the model's, and always these objects.
        self._parameters = dict(decoder.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters by name: DTensors if FSDP shards them, plain tensors otherwise."""
        yield from self._parameters.items()

    def differentiate(self, micro_batches: Sequence[MicroBatch], arguments: Arguments, scale: Tensor, mark: Mark) -> Tensor:
        """Run forward and backward on a step's micro-batches, accumulating gradients.

        Args:
            arguments: returns the decoder's arguments for a micro-batch that is on the device.
            scale: gradient of each loss.
            mark: called after each phase with its name: forward, backward, waiting or
                reduction.

        Returns:
            Sum of the losses that this rank computed.
        """
        if self.pipeline is not None:
            return self.pipeline.differentiate(micro_batches, arguments, scale, mark)
        loss_sum: Tensor | None = None
        for index, batch in enumerate(micro_batches):
            is_last = index == len(micro_batches) - 1
            waits_for_reduction = self._wrapped and (is_last or self.layout.zero_stage >= 2)

            def end_backward(waits_for_reduction: bool = waits_for_reduction) -> None:
                mark("backward")
                if waits_for_reduction:  # only the embedding's gradient and this wait remain
                    begin_wait()

            with self.synchronising(is_last), self.at_backward_end(end_backward):
                loss = self.module(**arguments(batch.to(self.device)))
                mark("forward")
                loss.backward(scale.to(loss.dtype))
            if waits_for_reduction:
                end_wait("data")
            mark("reduction")
            loss_sum = loss.detach() if loss_sum is None else loss_sum + loss.detach()
        assert loss_sum is not None, "a step has at least one micro-batch"
        return loss_sum

    @property
    def _wrapped(self) -> bool:
        """True if DDP or FSDP2 reduces gradients during the backward pass."""
        return bool(self.groups) or isinstance(self.module, DistributedDataParallel)

    def losses(self, micro_batches: Sequence[MicroBatch], arguments: Arguments) -> Tensor:
        """Sum the losses that this rank computes, in fp64 and without gradients.

        Call it within `evaluating`.
        """
        if self.pipeline is not None:
            return self.pipeline.losses(micro_batches, arguments).double()
        losses = [self.module(**arguments(batch.to(self.device))).double() for batch in micro_batches]
        return torch.stack(losses).sum()

    def synchronising(self, last: bool) -> AbstractContextManager[Any]:
        """Return the context for the passes of one micro-batch; `last` for a step's last one.

        Stages 0 and 1 reduce gradients on the last micro-batch only. Stages 2 and 3 cannot
        store unsharded gradients: they reduce-scatter every time and defer only the all-reduce
        over replicas, which takes shards.
        """
        if isinstance(self.module, DistributedDataParallel):
            return nullcontext() if last else self.module.no_sync()
        if self.groups:
            root = self.groups[-1]
            if self.layout.zero_stage == 1:
                root.set_requires_gradient_sync(last)
            else:
                root.set_requires_all_reduce(last)
        return nullcontext()

    @contextmanager
    def at_backward_end(self, call: Callable[[], None]) -> Iterator[None]:
        """Call `call` when the gradient of the first block's input is computed.

        Wrap forward and backward passes in this context. After that call only the embedding's
        gradient and waiting for reductions remain. If that input takes no gradient (frozen
        embeddings), `call` runs when the context ends.
        """
        is_hooked = False

        def hook_input(_module: nn.Module, arguments: tuple[Any, ...]) -> None:
            nonlocal is_hooked
            if arguments and isinstance(arguments[0], Tensor) and arguments[0].requires_grad:
                is_hooked = True
                arguments[0].register_hook(lambda _gradient: call())

        handle = self.decoder.blocks[0].register_forward_pre_hook(hook_input)
        try:
            yield
        finally:
            handle.remove()
        if not is_hooked:
            call()

    def finish_gradients(self) -> None:
        """Complete gradient reduction and reshard parameters, after the last backward pass."""
        if self.groups and self.layout.zero_stage < 3:
            self.reshard()
        if self._sums:
            trained_parameters = {name: parameter for name, parameter in self._parameters.items() if parameter.requires_grad}
            for parameter in trained_parameters.values():
                if parameter.grad is None:  # the other ranks of its group have a gradient
                    parameter.grad = torch.zeros_like(parameter)
            gradients = {name: local_part(p.grad) for name, p in trained_parameters.items() if p.grad is not None}
            make_sums(self._sums, gradients, bucket_size_bytes=self.layout.bucket_size_bytes)
        for call in self._when_summed:
            call()

    def when_summed(self, call: Callable[[], None]) -> None:
        """Register a function to run when a step's gradients are complete, before any use."""
        self._when_summed.append(call)

    def reshard(self) -> None:
        """Free all gathered parameters. Required before parameters are read or written by name."""
        for group in self.groups:
            group.reshard()

    @contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        """Return a context for forward passes without gradients that reshards at its end."""
        try:
            with torch.no_grad():
                yield self.module
        finally:
            self.reshard()

    def gradients(self) -> list[tuple[Tensor | None, ParameterLayout]]:
        """List this rank's shard of every trainable parameter's gradient, with its descriptor."""
        return [
            (None if parameter.grad is None else local_part(parameter.grad), self.layouts[name])
            for name, parameter in self._parameters.items()
            if parameter.requires_grad
        ]

    def counted_gradients(self) -> list[tuple[Tensor | None, ParameterLayout]]:
        """List the local gradients that count in the model's norm; copies count once.

        Every rank lists every trainable parameter, with None where it has nothing to count, so
        that all ranks reduce over the same axes.
        """
        counted: list[tuple[Tensor | None, ParameterLayout]] = []
        for name in self.layouts:
            if name in self.trainable:
                parameter = self._parameters.get(name)
                parameter_layout = self.layouts[name]
                counted.append((None, parameter_layout))
                if parameter is not None and parameter.grad is not None and self._here["pp"] == parameter_layout.stages[0]:
                    gradient = local_part(parameter.grad)
                    counted += [(narrow(gradient, box.local), parameter_layout) for box in self.held(name) if box.first]
        return counted

    @property
    def stage_axes(self) -> tuple[str, ...]:
        """Axes whose ranks hold different parameters."""
        return ("pp",) if self.layout.pp > 1 else ()

    def held(self, name: str) -> tuple[Held, ...]:
        """List the boxes of a parameter (and of its gradient and moments) that this rank holds."""
        return held(self.layouts[name], self.layout, self._here)

    def waits(self) -> Waits:
        """Build the timer of this rank's waits, by kind of parallelism."""
        return Waits(self.device, {} if self.mesh is None else self.mesh.cuts())

    def block_matrices(self) -> frozenset[str]:
        """Return the names of trained matrices, and of experts' stacks of them, of all blocks."""
        specs = [spec for spec in self.decoder.shape.parameters() if spec.layer is not None and not spec.is_bias]
        matrices = (spec.name for spec in specs if len(spec.shape) == 2 or (len(spec.shape) == 3 and spec.role in EXPERT_ROLES))
        return frozenset(matrices) & self.trainable

    def exchange(self, names: Collection[str]) -> MatrixExchange:
        """Build the exchange that assembles these parameters' matrices.

        Every rank calls this with the same names of the whole model.
        """
        return MatrixExchange(self.layouts, names, self.mesh, self.layout)

    def sum_over(self, tensor: Tensor, axes: Sequence[str]) -> Tensor:
        """Sum `tensor` in place over the ranks of mesh axes."""
        return sum_over(tensor, axes, self.mesh)

    def sum_over_data(self, tensor: Tensor) -> Tensor:
        """Sum a loss in place over all ranks with different tokens.

        Of a pipeline's ranks one has computed the loss, so the sum includes `pp`.
        """
        return sum_over(tensor, ("pp", *DATA_AXES), self.mesh)

    def sum_over_batch(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` in place over all ranks that read different sequences."""
        return sum_over(tensor, BATCH_AXES, self.mesh)

    def any_rank(self, answer: bool) -> bool:
        """Return True on every rank if `answer` is True on any rank."""
        if self.mesh is None:
            return answer
        flag = torch.tensor(answer, dtype=torch.int32, device=self.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)

    def full_parameter(self, name: str) -> Tensor:
        """Gather a whole parameter on every rank (a collective)."""
        parameter = self._parameters.get(name)
        return self._whole(name, None if parameter is None else parameter.detach())

    def full_gradient(self, name: str) -> Tensor | None:
        """Gather a whole gradient on every rank (a collective); None for a frozen parameter.

        Elements for which there is no gradient are nan.
        """
        if name not in self.trainable:
            return None
        parameter = self._parameters.get(name)
        return self._whole(name, None if parameter is None else parameter.grad)

    def _whole(self, name: str, tensor: Tensor | None) -> Tensor:
        """Assemble a tensor from all ranks' boxes, each from the first rank that holds it."""
        parameter_layout = self.layouts[name]
        if self.mesh is None:
            assert tensor is not None
            return tensor
        # Packed bytes are assembled as numbers too. Every rank has a parameter in the widest
        # dtype.
        dtype = max((p.dtype for p in self._parameters.values() if p.is_floating_point()), key=lambda dtype: dtype.itemsize)
        whole = torch.zeros(parameter_layout.shape, dtype=dtype, device=self.device)
        is_first_rank = self._here["pp"] == parameter_layout.stages[0] and not any(
            self._here[axis] for axis in parameter_layout.copy_axes
        )
        for box in self.held(name) if is_first_rank else ():
            if box.first:
                part = narrow(whole, box.whole)
                part.fill_(torch.nan) if tensor is None else part.copy_(narrow(local_part(tensor), box.local))
        dist.all_reduce(whole)
        return whole
