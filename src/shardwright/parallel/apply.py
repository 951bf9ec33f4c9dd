"""The order in which parallelism is applied to a decoder; no other module decides it.

On the meta device until step 6:

    1  pipeline     keep the blocks of this rank's stages
    2  tensor, expert, context: parameters of this rank's shape, and the hooks that modules call
    3  recompute    around each block's inner function
    4  compile      the block's function with recomputation inside: around compiled code,
                    selective recomputation sees no operations to save
    5  shard        FSDP2 over dp_shard (x dp_replicate), block groups first, the root last
    6  storage      empty memory on the device, for this rank's shards only
    7  weights      written by name, slice by slice
    8  replicate    DDP over dp_replicate: its buckets need real memory; not under a pipeline,
                    which accumulates gradients itself and reduces them at its end

Then the reductions that no wrapper makes. The descriptor of a parameter (`ParameterLayout`) is
computed from the layout alone and then checked against the sharded tensors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardwright.architecture import ForeignShape
from shardwright.layout import (
    Bounds,
    Layout,
    ParameterLayout,
    RankGrid,
    Stage,
    held,
    local_shape,
)
from shardwright.model.cuts import Cuts
from shardwright.model.decoder import Decoder
from shardwright.numerics.precision import dtypes
from shardwright.numerics.recompute import recompute_runner
from shardwright.parallel.context import context_cut
from shardwright.parallel.expert import expert_cut
from shardwright.parallel.mesh import Mesh
from shardwright.parallel.model import ParallelModel, local_part
from shardwright.parallel.pipeline import Pipeline, StageRoot
from shardwright.parallel.reduce import narrow, pending_sums
from shardwright.parallel.replicate import replicate
from shardwright.parallel.shard import shard, shard_root
from shardwright.parallel.tensor import tensor_cut
from shardwright.placement import check, place, stages_of
from shardwright.plan import Plan

logger = logging.getLogger(__name__)

Fill = Callable[[str, Bounds], Tensor]
"""(parameter name, (start, length) per dimension) -> that slice of the parameter."""


def apply_layout(
    decoder: Decoder,
    plan: Plan,
    mesh: Mesh | None,
    device: torch.device,
    *,
    fill: Fill,
    compile_blocks: bool = False,
    storage: AbstractContextManager[Any] | None = None,
) -> ParallelModel:
    """Apply a plan's parallelism to a decoder and load this rank's parameters.

    Args:
        decoder: on the meta device; freeze parameters before this call.
        mesh: from `build_mesh`; None for one rank.
        device: device on which the rank computes.
        fill: returns any slice of any parameter by name.
        compile_blocks: torch.compile each block.
        storage: context entered while memory is allocated and filled; a rehearsal passes one in
            which tensors take no memory.

    Raises:
        LayoutError: the degrees do not divide the model.
    """
    layout = plan.layout
    check(decoder.shape, layout, plan.batch.sequence_length)
    precision = dtypes(plan.precision)
    decoder.to(precision.param)
    _hold_frozen(decoder, precision.compute)
    stages = stages_of(decoder.shape, layout, plan.batch.sequence_length)
    layouts = place(decoder.shape, layout, stages)
    trainable = frozenset(name for name, parameter in decoder.named_parameters() if parameter.requires_grad)
    coordinates = RankGrid(layout).coordinates(0 if mesh is None else mesh.rank)
    sharded = layout.zero_stage >= 1 and layout.fsdp > 1
    if layout.zero_stage >= 1 and not sharded:
        logger.info("zero_stage %d on one rank shards nothing: the model is replicated", layout.zero_stage)

    if stages is not None:
        decoder.keep([stage for stage in stages if stage.rank == coordinates["pp"]])
    _cut_parameters(decoder, layouts, layout, coordinates)
    decoder.install_cuts(
        Cuts(
            context=context_cut(decoder.shape, layout, mesh, plan.batch.sequence_length),
            expert=expert_cut(decoder.shape, layout, mesh),
            tensor=tensor_cut(layout, mesh),
        )
    )
    decoder.set_recompute(recompute_runner(plan.recompute))
    if compile_blocks:
        decoder.compile_blocks()
    fsdp_modules: list[FSDPModule] = []
    if sharded:
        assert mesh is not None
        fsdp_modules = shard(decoder, layout, mesh, precision, stages)
    with storage or nullcontext():
        decoder.to_empty(device=device)
        _fill(decoder, layouts, layout, coordinates, fill)
    module: nn.Module = decoder
    # A model without gradients (a frozen reference) has nothing to reduce, and DDP refuses to
    # wrap it.
    replica_group = None if mesh is None or sharded or stages or not trainable else mesh.group("dp_replicate", "fsdp")
    # Experts on different `ep` ranks are not copies of each other, so DDP must not reduce them
    # over its group.
    excluded_names = frozenset(name for name, parameter in layouts.items() if "ep" in parameter.shard_axes and not sharded)
    if replica_group is not None:
        with storage or nullcontext():  # DDP's buckets are memory too
            module = replicate(
                decoder,
                replica_group,
                bucket_size_bytes=layout.bucket_size_bytes,
                reduce_dtype=precision.reduce,
                device=device,
                apart=excluded_names,
            )
    if precision.reduce != precision.param and trainable and not sharded and replica_group is None:
        logger.info(
            "precision.reduce_dtype has no effect under %s: neither DDP nor FSDP reduces its "
            "gradients; they are summed in their own dtype, %s",
            layout,
            str(precision.param).removeprefix("torch."),
        )
    reductions = (
        [] if mesh is None else pending_sums(layouts, mesh, wrapped=sharded or replica_group is not None, apart=excluded_names)
    )
    model = ParallelModel(module, decoder, layouts, layout, mesh, device, fsdp_modules, trainable, reductions)
    if stages is not None:
        assert mesh is not None
        model.pipeline = _build_pipeline(model, stages, mesh, plan.batch.gradient_accumulation_steps)
    return model


def _build_pipeline(model: ParallelModel, stages: Sequence[Stage], mesh: Mesh, num_micro_batches: int) -> Pipeline:
    module: nn.Module = model.decoder
    if model.groups:
        module = StageRoot(model.decoder)
        shard_root(module, mesh)
    pipeline = Pipeline(
        module,
        model.decoder,
        stages,
        model.layout,
        mesh,
        model.device,
        set_reduces=model.groups[-1].set_requires_gradient_sync if model.groups else None,
    )
    warning = pipeline.schedule(num_micro_batches).warning()
    if warning is not None and mesh.rank == 0:
        logger.warning(warning)
    return pipeline


def _hold_frozen(decoder: Decoder, dtype: torch.dtype) -> None:
    """Cast frozen matrices beside adapters to the compute dtype, in which products read them.

    Nothing is ever added to them, so they need no fp32 copy. Parameters that are computed in
    fp32 stay so: norms, biases, routers.
    """
    if decoder.shape.adapters is None or isinstance(decoder.shape, ForeignShape):
        return
    specs = {spec.name: spec for spec in decoder.shape.parameters()}
    for name, parameter in decoder.named_parameters():
        spec = specs[name]
        if spec.part is None and spec.packed is None and len(spec.shape) >= 2 and not spec.is_bias and spec.role != "router":
            parameter.data = parameter.data.to(dtype)


def _cut_parameters(decoder: Decoder, layouts: dict[str, ParameterLayout], layout: Layout, here: dict[str, int]) -> None:
    """Replace parameters that tp or ep shards by ones of this rank's shape, without memory."""
    for name, parameter in list(decoder.named_parameters()):
        shape = local_shape(layouts[name], layout, here, zero=False)
        if shape != tuple(parameter.shape):
            owner, _, leaf = name.rpartition(".")
            local = nn.Parameter(parameter.new_empty(shape), requires_grad=parameter.requires_grad)
            setattr(decoder.get_submodule(owner), leaf, local)


@torch.no_grad()
def _fill(decoder: Decoder, layouts: dict[str, ParameterLayout], layout: Layout, here: dict[str, int], fill: Fill) -> None:
    for name, parameter in decoder.named_parameters():
        local = local_part(parameter)
        parameter_layout = layouts[name]
        # Our own invariant: sharding and FSDP2 left exactly the shape that the descriptor
        # states.
        assert tuple(local.shape) == local_shape(parameter_layout, layout, here), (
            f"{name}: has local shape {tuple(local.shape)}, expected {parameter_layout}"
        )
        for box in held(parameter_layout, layout, here):
            narrow(local, box.local).copy_(fill(name, box.whole))
