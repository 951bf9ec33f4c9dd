"""The one place that says in which order a decoder is cut.

The order, on the meta device until storage is given:

    1  pipeline     keep the blocks of this rank's stages
    2  tensor, expert, context: parameters of this rank's shape, and the cuts that the modules call
    3  recompute    around each block's inner function
    4  compile      the block's function with its recompute inside: around compiled code, selective sees nothing to keep
    5  shard        FSDP2 over dp_shard (x dp_replicate), block groups first, the root last
    6  storage      empty memory on the device, for this rank's shards only
    7  weights      written by name, slice by slice
    8  replicate    DDP over dp_replicate: its buckets need real memory; not under a pipeline, which accumulates
                    gradients by itself and sums them when its last micro-batch has come back

Then the sums that no wrapper makes. A parameter's descriptor (`ParameterLayout`) is computed from the layout alone and then checked
against what was done.
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
    """Cut a decoder as the plan says and fill what this rank holds.

    Args:
        decoder: on the meta device; freeze parameters before this.
        mesh: from `build_mesh`; None for one rank.
        device: where the rank computes.
        fill: gives any slice of any parameter by name.
        compile_blocks: torch.compile each block.
        storage: entered while memory is given and filled: a rehearsal's tensors are none.

    Raises:
        LayoutError: degrees that do not divide the model.
    """
    layout = plan.layout
    check(decoder.shape, layout, plan.batch.sequence_length)
    kinds = dtypes(plan.precision)
    decoder.to(kinds.param)
    _hold_frozen(decoder, kinds.compute)
    stages = stages_of(decoder.shape, layout, plan.batch.sequence_length)
    layouts = place(decoder.shape, layout, stages)
    trainable = frozenset(name for name, parameter in decoder.named_parameters() if parameter.requires_grad)
    here = RankGrid(layout).coordinates(0 if mesh is None else mesh.rank)
    sharded = layout.zero_stage >= 1 and layout.fsdp > 1
    if layout.zero_stage >= 1 and not sharded:
        logger.info("zero_stage %d over one rank shards nothing: the model is replicated", layout.zero_stage)

    if stages is not None:
        decoder.keep([stage for stage in stages if stage.rank == here["pp"]])
    _cut_parameters(decoder, layouts, layout, here)
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
    groups: list[FSDPModule] = []
    if sharded:
        assert mesh is not None
        groups = shard(decoder, layout, mesh, kinds, stages)
    with storage or nullcontext():
        decoder.to_empty(device=device)
        _fill(decoder, layouts, layout, here, fill)
    module: nn.Module = decoder
    # A model without gradients (a frozen reference) has nothing to sum, and DDP refuses to wrap it.
    replicas = None if mesh is None or sharded or stages or not trainable else mesh.group("dp_replicate", "fsdp")
    # Experts that lie over ranks are no copies of each other: what replicas they have is not what DDP sums over.
    apart = frozenset(name for name, parameter in layouts.items() if "ep" in parameter.shard_axes and not sharded)
    if replicas is not None:
        with storage or nullcontext():  # its buckets are memory, too
            module = replicate(
                decoder,
                replicas,
                bucket_size_bytes=layout.bucket_size_bytes,
                reduce_dtype=kinds.reduce,
                device=device,
                apart=apart,
            )
    if kinds.reduce != kinds.param and trainable and not sharded and replicas is None:
        logger.info(
            "precision.reduce_dtype has no effect under %s: no wrapper sums its gradients, which are summed as they are, in %s",
            layout,
            str(kinds.param).removeprefix("torch."),
        )
    sums = [] if mesh is None else pending_sums(layouts, mesh, wrapped=sharded or replicas is not None, apart=apart)
    model = ParallelModel(module, decoder, layouts, layout, mesh, device, groups, trainable, sums)
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
    """Keep the matrices beside adapters in the precision to which products cast them anyway: nothing is ever added to them.

    What is computed in fp32 stays so: norms, biases, routers.
    """
    if decoder.shape.adapters is None or isinstance(decoder.shape, ForeignShape):
        return
    specs = {spec.name: spec for spec in decoder.shape.parameters()}
    for name, parameter in decoder.named_parameters():
        spec = specs[name]
        if spec.part is None and spec.packed is None and len(spec.shape) >= 2 and not spec.is_bias and spec.role != "router":
            parameter.data = parameter.data.to(dtype)


def _cut_parameters(decoder: Decoder, layouts: dict[str, ParameterLayout], layout: Layout, here: dict[str, int]) -> None:
    """Put parameters of this rank's own shape in place of those that tensor and expert parallelism cut; still without memory."""
    for name, parameter in list(decoder.named_parameters()):
        shape = local_shape(layouts[name], layout, here, zero=False)
        if shape != tuple(parameter.shape):
            owner, _, leaf = name.rpartition(".")
            local = nn.Parameter(parameter.new_empty(shape), requires_grad=parameter.requires_grad)
            setattr(decoder.get_submodule(owner), leaf, local)


@torch.no_grad()
def _fill(decoder: Decoder, layouts: dict[str, ParameterLayout], layout: Layout, here: dict[str, int], fill: Fill) -> None:
    for name, parameter in decoder.named_parameters():
        local, described = local_part(parameter), layouts[name]
        # Our own check: what the cuts and FSDP2 left is what the descriptor says.
        assert tuple(local.shape) == local_shape(described, layout, here), f"{name}: holds {tuple(local.shape)}, not {described}"
        for box in held(described, layout, here):
            narrow(local, box.local).copy_(fill(name, box.whole))
