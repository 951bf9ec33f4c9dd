"""The one place that says in which order a decoder is cut, and the cut model that the trainer drives.

The order, on the meta device until storage is given:

    1  pipeline     keep the blocks of this rank's stages          (not built yet; refused by layout.check_supported)
    2  tensor, expert, context                                     (not built yet)
    3  recompute    around each block's inner function
    4  compile      the block's function with its recompute inside: around compiled code, selective sees nothing to keep
    5  shard        FSDP2 over dp_shard (x dp_replicate), block groups first, the root last
    6  storage      empty memory on the device, for this rank's shards only
    7  weights      written by name, slice by slice
    8  replicate    DDP over dp_replicate: its buckets need real memory

A parameter's descriptor (`ParameterLayout`) is computed from the layout alone and then checked against what was done.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard as DTensorShard
from torch.nn.parallel import DistributedDataParallel

from shardwright.layout import (
    DATA_AXES,
    Layout,
    ParameterLayout,
    RankGrid,
    check_supported,
    local_slice,
    place_parameter,
)
from shardwright.model.decoder import Decoder
from shardwright.numerics.precision import dtypes
from shardwright.numerics.recompute import recompute_runner
from shardwright.parallel.mesh import sum_over
from shardwright.parallel.replicate import replicate
from shardwright.parallel.shard import shard
from shardwright.plan import Plan

logger = logging.getLogger(__name__)

Fill = Callable[[str, tuple[tuple[int, int], ...]], Tensor]
"""(parameter name, (start, length) per dimension) -> that slice of the parameter."""


def apply_layout(
    decoder: Decoder,
    plan: Plan,
    mesh: DeviceMesh | None,
    device: torch.device,
    *,
    fill: Fill,
    compile_blocks: bool = False,
) -> ParallelModel:
    """Cut a decoder as the plan says and fill what this rank holds.

    Args:
        decoder: on the meta device; freeze parameters before this.
        mesh: from `build_mesh`; None for one rank.
        device: where the rank computes.
        fill: gives any slice of any parameter by name.
        compile_blocks: torch.compile each block.

    Raises:
        LayoutError: a degree that is not built yet.
    """
    layout = plan.layout
    check_supported(layout)
    kinds = dtypes(plan.precision)
    decoder.to(kinds.param)
    shapes = {name: tuple(parameter.shape) for name, parameter in decoder.named_parameters()}
    layouts = {name: place_parameter(name, shape, layout) for name, shape in shapes.items()}
    sharded = any(parameter.shards for parameter in layouts.values())
    if layout.zero_stage >= 1 and not sharded:
        logger.info("zero_stage %d over one rank shards nothing: the model is replicated", layout.zero_stage)

    decoder.set_recompute(recompute_runner(plan.recompute))
    if compile_blocks:
        decoder.compile_blocks()
    groups: list[FSDPModule] = []
    if sharded:
        assert mesh is not None
        groups = shard(decoder, layout, mesh, kinds)
    decoder.to_empty(device=device)
    _check_placements(decoder, layouts, layout, mesh)
    _fill(decoder, layouts, layout, mesh, fill)
    module: nn.Module = decoder
    if not sharded and layout.dp_replicate > 1:
        assert mesh is not None
        group = mesh.get_group("dp_replicate")
        module = replicate(decoder, group, bucket_size_bytes=layout.bucket_size_bytes, reduce_dtype=kinds.reduce, device=device)
    return ParallelModel(module, decoder, layouts, layout, mesh, device, groups)


def _coordinates(layout: Layout, mesh: DeviceMesh | None) -> dict[str, int]:
    return RankGrid(layout).coordinates(0 if mesh is None else mesh.get_rank())


def _check_placements(decoder: Decoder, layouts: dict[str, ParameterLayout], layout: Layout, mesh: DeviceMesh | None) -> None:
    """Our own check: what FSDP2 did is what the descriptors say."""
    here = _coordinates(layout, mesh)
    for name, parameter in decoder.named_parameters():
        expected = layouts[name]
        cut: tuple[tuple[str, int], ...] = ()
        if isinstance(parameter, DTensor):
            axes = parameter.device_mesh.mesh_dim_names
            assert axes is not None
            cut = tuple(
                (axis, placement.dim)
                for axis, placement in zip(axes, parameter.placements, strict=True)
                if isinstance(placement, DTensorShard)
            )
        assert cut == tuple((part.axis, part.dim) for part in expected.shards), f"{name}: cut {cut}, described {expected}"
        lengths = tuple(length for _, length in local_slice(expected, layout, here))
        assert tuple(local_part(parameter).shape) == lengths, f"{name}: holds {tuple(local_part(parameter).shape)}, not {lengths}"


@torch.no_grad()
def _fill(decoder: Decoder, layouts: dict[str, ParameterLayout], layout: Layout, mesh: DeviceMesh | None, fill: Fill) -> None:
    here = _coordinates(layout, mesh)
    for name, parameter in decoder.named_parameters():
        local_part(parameter).copy_(fill(name, local_slice(layouts[name], layout, here)))


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor; no copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class ParallelModel:
    """A decoder under a layout: call `module`, bracket each micro-batch with `synchronising`, then `finish_gradients`.

    Attributes:
        module: what to call; arguments are the decoder's.
        decoder: the decoder itself, whose parameter names are those of Hugging Face files.
        layouts: one descriptor per parameter, by name.
        mesh: None for one rank.
        device: where it computes.
    """

    def __init__(
        self,
        module: nn.Module,
        decoder: Decoder,
        layouts: dict[str, ParameterLayout],
        layout: Layout,
        mesh: DeviceMesh | None,
        device: torch.device,
        groups: list[FSDPModule],
    ) -> None:
        self.module = module
        self.decoder = decoder
        self.layouts = layouts
        self.layout = layout
        self.mesh = mesh
        self.device = device
        self.groups = groups
        # FSDP2 swaps a module's parameters between sharded and whole; the sharded ones are the model's, always these objects.
        self._parameters = dict(decoder.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters as held: DTensors where cut, plain tensors where copied."""
        yield from self._parameters.items()

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
            if arguments[0].requires_grad:
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

    def sum_over(self, tensor: Tensor, axes: Sequence[str]) -> Tensor:
        """`tensor` summed in place over the ranks of mesh axes."""
        return sum_over(tensor, axes, self.mesh)

    def sum_over_data(self, tensor: Tensor) -> Tensor:
        """`tensor` summed in place over all ranks that see different tokens."""
        return sum_over(tensor, DATA_AXES, self.mesh)

    def any_rank(self, answer: bool) -> bool:
        """Whether any rank says yes; every rank gets the same answer."""
        if self.mesh is None:
            return answer
        flag = torch.tensor(answer, dtype=torch.int32, device=self.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)

    def full_parameter(self, name: str) -> Tensor:
        """A whole parameter on every rank (a collective)."""
        return _whole(self._parameters[name].detach())

    def full_gradient(self, name: str) -> Tensor | None:
        """A whole gradient on every rank (a collective); None where there is none."""
        gradient = self._parameters[name].grad
        return None if gradient is None else _whole(gradient)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
