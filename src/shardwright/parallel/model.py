"""A decoder under a layout, as the trainer drives it: forward and backward, sums, norms, and who holds what."""

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
    """What this rank holds of a tensor; no copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class ParallelModel:
    """A decoder under a layout: `differentiate` a step's micro-batches, then `finish_gradients`.

    Attributes:
        module: what to call, without a pipeline; arguments are the decoder's.
        pipeline: runs the rank's stages; None without one.
        decoder: the decoder itself, whose parameter names are those of Hugging Face files.
        layouts: one descriptor per parameter of the whole model, by name; a pipeline rank holds some of them.
        trainable: names of the parameters of the whole model that take gradients.
        mesh: None for one rank.
        device: where it computes.
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
        # FSDP2 swaps a module's parameters between sharded and whole; the sharded ones are the model's, always these objects.
        self._parameters = dict(decoder.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters as held: DTensors where cut, plain tensors where copied."""
        yield from self._parameters.items()

    def differentiate(self, micro_batches: Sequence[MicroBatch], arguments: Arguments, scale: Tensor, mark: Mark) -> Tensor:
        """Forward and backward of a step's micro-batches, accumulating gradients; the sum of the losses that this rank computed.

        Args:
            arguments: what the decoder is called with for a micro-batch, which is on the device by then.
            scale: the gradient of each loss.
            mark: told what went on since it was told last: forward, backward, waiting or reduction.
        """
        if self.pipeline is not None:
            return self.pipeline.differentiate(micro_batches, arguments, scale, mark)
        loss_sum: Tensor | None = None
        for number, batch in enumerate(micro_batches):
            last = number == len(micro_batches) - 1
            sums = self._wrapped and (last or self.layout.zero_stage >= 2)

            def end_backward(sums: bool = sums) -> None:
                mark("backward")
                if sums:  # what is left of the backward pass is the embedding's gradient and the wait for sums
                    begin_wait()

            with self.synchronising(last), self.at_backward_end(end_backward):
                loss = self.module(**arguments(batch.to(self.device)))
                mark("forward")
                loss.backward(scale.to(loss.dtype))
            if sums:
                end_wait("data")
            mark("reduction")
            loss_sum = loss.detach() if loss_sum is None else loss_sum + loss.detach()
        assert loss_sum is not None, "a step has at least one micro-batch"
        return loss_sum

    @property
    def _wrapped(self) -> bool:
        """Whether DDP or FSDP2 sums gradients during the backward pass."""
        return bool(self.groups) or isinstance(self.module, DistributedDataParallel)

    def losses(self, micro_batches: Sequence[MicroBatch], arguments: Arguments) -> Tensor:
        """The sum of the losses that this rank computes, in fp64 and without gradients; call it within `evaluating`."""
        if self.pipeline is not None:
            return self.pipeline.losses(micro_batches, arguments).double()
        losses = [self.module(**arguments(batch.to(self.device))).double() for batch in micro_batches]
        return torch.stack(losses).sum()

    def synchronising(self, last: bool) -> AbstractContextManager[Any]:
        """Bracket forward and backward of one micro-batch; `last` says that the step's gradients end with it.

        Stages 0 and 1 reduce on the last micro-batch only. Stages 2 and 3 cannot hold whole gradients: they reduce-scatter every
        time, and defer only the sum over replicas, whose operand is a shard.
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
        """Bracket forward and backward: `call` runs when the gradient of the first block's input is there.

        What then remains of the backward pass is the embedding's gradient, and waiting for sums. Where that input takes no gradient
        (frozen embeddings) `call` runs at the end of the bracket.
        """
        hooked = False

        def hook_input(_module: nn.Module, arguments: tuple[Any, ...]) -> None:
            nonlocal hooked
            if arguments and isinstance(arguments[0], Tensor) and arguments[0].requires_grad:
                hooked = True
                arguments[0].register_hook(lambda _gradient: call())

        handle = self.decoder.blocks[0].register_forward_pre_hook(hook_input)
        try:
            yield
        finally:
            handle.remove()
        if not hooked:
            call()

    def finish_gradients(self) -> None:
        """After the last backward: gradients are summed, and every parameter is its shard again."""
        if self.groups and self.layout.zero_stage < 3:
            self.reshard()
        if self._sums:
            held_here = {name: parameter for name, parameter in self._parameters.items() if parameter.requires_grad}
            for parameter in held_here.values():
                if parameter.grad is None:  # the others of its group have one
                    parameter.grad = torch.zeros_like(parameter)
            gradients = {name: local_part(p.grad) for name, p in held_here.items() if p.grad is not None}
            make_sums(self._sums, gradients, bucket_size_bytes=self.layout.bucket_size_bytes)
        for call in self._when_summed:
            call()

    def when_summed(self, call: Callable[[], None]) -> None:
        """Have this called whenever a step's gradients are there, before anybody reads them."""
        self._when_summed.append(call)

    def reshard(self) -> None:
        """Free all gathered parameters. Needed before anything reads or writes parameters by name."""
        for group in self.groups:
            group.reshard()

    @contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        """Bracket forward passes without gradients; parameters are shards again afterwards."""
        try:
            with torch.no_grad():
                yield self.module
        finally:
            self.reshard()

    def gradients(self) -> list[tuple[Tensor | None, ParameterLayout]]:
        """This rank's shard of every trainable parameter's gradient, with its descriptor."""
        return [
            (None if parameter.grad is None else local_part(parameter.grad), self.layouts[name])
            for name, parameter in self._parameters.items()
            if parameter.requires_grad
        ]

    def counted_gradients(self) -> list[tuple[Tensor | None, ParameterLayout]]:
        """What this rank counts in the model's norm: of what neighbours hold alike, the first one's.

        Every trainable parameter is listed on every rank, with None where it has nothing to count, so that all of them sum over the
        same axes.
        """
        counted: list[tuple[Tensor | None, ParameterLayout]] = []
        for name in self.layouts:
            if name in self.trainable:
                parameter, described = self._parameters.get(name), self.layouts[name]
                counted.append((None, described))
                if parameter is not None and parameter.grad is not None and self._here["pp"] == described.stages[0]:
                    gradient = local_part(parameter.grad)
                    counted += [(narrow(gradient, box.local), described) for box in self.held(name) if box.first]
        return counted

    @property
    def stage_axes(self) -> tuple[str, ...]:
        """Axes whose ranks hold different parameters."""
        return ("pp",) if self.layout.pp > 1 else ()

    def held(self, name: str) -> tuple[Held, ...]:
        """The boxes of a parameter (of its gradient, of its moments) that this rank holds."""
        return held(self.layouts[name], self.layout, self._here)

    def waits(self) -> Waits:
        """Measures what this rank waits for, by the cut that the traffic serves."""
        return Waits(self.device, {} if self.mesh is None else self.mesh.cuts())

    def block_matrices(self) -> frozenset[str]:
        """Trained parameters of the whole model's blocks that are matrices, or experts' stacks of them."""
        specs = [spec for spec in self.decoder.shape.parameters() if spec.layer is not None and not spec.is_bias]
        wide = (spec.name for spec in specs if len(spec.shape) == 2 or (len(spec.shape) == 3 and spec.role in EXPERT_ROLES))
        return frozenset(wide) & self.trainable

    def exchange(self, names: Collection[str]) -> MatrixExchange:
        """Puts these parameters' matrices together; every rank calls this with the same names of the whole model."""
        return MatrixExchange(self.layouts, names, self.mesh, self.layout)

    def sum_over(self, tensor: Tensor, axes: Sequence[str]) -> Tensor:
        """`tensor` summed in place over the ranks of mesh axes."""
        return sum_over(tensor, axes, self.mesh)

    def sum_over_data(self, tensor: Tensor) -> Tensor:
        """A loss summed in place over all ranks that see different tokens; of a pipeline's ranks one has computed it."""
        return sum_over(tensor, ("pp", *DATA_AXES), self.mesh)

    def sum_over_batch(self, tensor: Tensor) -> Tensor:
        """`tensor` summed in place over all ranks that read different sequences."""
        return sum_over(tensor, BATCH_AXES, self.mesh)

    def any_rank(self, answer: bool) -> bool:
        """Whether any rank says yes; every rank gets the same answer."""
        if self.mesh is None:
            return answer
        flag = torch.tensor(answer, dtype=torch.int32, device=self.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)

    def full_parameter(self, name: str) -> Tensor:
        """A whole parameter on every rank (a collective)."""
        parameter = self._parameters.get(name)
        return self._whole(name, None if parameter is None else parameter.detach())

    def full_gradient(self, name: str) -> Tensor | None:
        """A whole gradient on every rank (a collective); None where the parameter is frozen. What lacks is nan."""
        if name not in self.trainable:
            return None
        parameter = self._parameters.get(name)
        return self._whole(name, None if parameter is None else parameter.grad)

    def _whole(self, name: str, tensor: Tensor | None) -> Tensor:
        """Boxes of all ranks put together, each from the first rank that holds it."""
        described = self.layouts[name]
        if self.mesh is None:
            assert tensor is not None
            return tensor
        # Of bytes, too, numbers are put together. Every rank has some parameter in the widest precision.
        dtype = max((p.dtype for p in self._parameters.values() if p.is_floating_point()), key=lambda dtype: dtype.itemsize)
        whole = torch.zeros(described.shape, dtype=dtype, device=self.device)
        counts = self._here["pp"] == described.stages[0] and not any(self._here[axis] for axis in described.copy_axes)
        for box in self.held(name) if counts else ():
            if box.first:
                part = narrow(whole, box.whole)
                part.fill_(torch.nan) if tensor is None else part.copy_(narrow(local_part(tensor), box.local))
        dist.all_reduce(whole)
        return whole
