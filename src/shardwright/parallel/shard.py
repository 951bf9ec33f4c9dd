"""zero_stage 1, 2, 3 and hybrid: parameters, gradients and optimizer states cut over the sharding ranks by FSDP2.

What a rank holds, as shares of the whole model over n sharding ranks (P parameters in compute precision, G gradients; master
weights and optimizer states are always 1/n):

    stage   P after forward   G between micro-batches   gradients are reduced
    1       1 + 1/n           1                         once per step
    2       1 + 1/n           1/n                       every micro-batch
    3       1/n               1/n                       every micro-batch

`tests/multiprocess/test_memory.py` reads these numbers off live tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from shardwright.architecture.count import EXPERT_ROLES
from shardwright.layout import Layout, Stage
from shardwright.model import Decoder
from shardwright.model.block import Block
from shardwright.model.moe import Experts
from shardwright.numerics import Dtypes, chunked_cross_entropy
from shardwright.parallel.mesh import Mesh
from shardwright.parallel.waiting import mark_gathers


def shard(decoder: Decoder, layout: Layout, mesh: Mesh, dtypes: Dtypes, stages: Sequence[Stage] | None = None) -> list[FSDPModule]:
    """Shard a decoder in place: one group per `layout.wrap_blocks` blocks, one for the rest. Returns the groups, the root last.

    Of a pipeline's `stages` the decoder has some: a group keeps to one, because each of them runs by itself.

    Under expert parallelism a block's experts are cut over `efsdp`, but gathered and freed with their block: hooks on the experts
    alone would run inside what is recomputed, another number of times than in the forward pass, which selective recompute refuses.
    Only where FSDP2 cannot do that (before torch 2.13) are they wrapped by themselves, and come first among the groups.

    The root holds the embeddings and the head. The final norm joins the last blocks, because its weight is read in the backward
    pass and the root's are not: an embedding's gradient needs indices only, and the chunked loss makes the head's in the forward
    pass. So at stage 3 the two largest matrices of a small model are gathered once per micro-batch and freed before the backward.

    Sums are sums: no group divides, on any axis, because the loss carries the one normaliser.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=dtypes.compute if dtypes.compute != dtypes.param else None,
        reduce_dtype=dtypes.reduce,
        cast_forward_inputs=False,  # rotation tables stay fp32; the model casts where it means to
    )
    # What no gradient trains stays as it is, whole and in its own precision.
    trained = {spec.name: spec.trained for spec in decoder.shape.parameters()}
    untrained = {parameter for name, parameter in decoder.named_parameters() if not trained[name]}
    place_experts = _place_experts(decoder, mesh) if layout.ep > 1 else None
    options: dict[str, Any] = {"mp_policy": policy, "ignored_params": untrained}
    # Where FSDP2 has a second mesh for the experts it takes no reduce-scatter but its own.
    reduction_blocks = mesh.device_type == "cpu" and place_experts is None
    free = layout.zero_stage == 3
    apart: list[FSDPModule] = []
    if layout.ep > 1 and place_experts is None:
        for experts in [part for part in decoder.modules() if isinstance(part, Experts)]:
            fully_shard(experts, mesh=mesh.device_mesh("efsdp"), reshard_after_forward=free, **options)
            mark_gathers([experts], reduces=reduction_blocks)
            apart.append(_as_fsdp(experts))
    wrap = partial(fully_shard, mesh=mesh.device_mesh("fsdp"), shard_placement_fn=place_experts, **options)
    final_norm = decoder.final_norm
    runs: list[list[FSDPModule]] = []
    for blocks in _blocks_by_stage(decoder, stages):
        runs.append([])
        for first in range(0, len(blocks), layout.wrap_blocks):
            members: list[nn.Module] = list(blocks[first : first + layout.wrap_blocks])
            if decoder.blocks[-1] in members and final_norm is not None:
                members.append(final_norm)
            wrap(members, reshard_after_forward=free)
            mark_gathers(members, reduces=reduction_blocks)
            runs[-1].append(_as_fsdp(members[0]))
    groups = [group for run in runs for group in run]
    root_is_read_backward = decoder.reads_root_backward or not _is_chunked(decoder.loss_function)
    wrap(decoder, reshard_after_forward=free and not root_is_read_backward)
    mark_gathers([decoder], reduces=reduction_blocks)
    root = _as_fsdp(decoder)
    if free and not root_is_read_backward:
        root.set_unshard_in_backward(False)
        decoder.register_forward_hook(_refuse_logits, with_kwargs=True)
    for group in (*apart, *groups, root):
        group.set_gradient_divide_factor(1.0)
        group.set_force_sum_reduction_for_comms(True)  # else a factor asks for PREMUL_SUM, which gloo has not
    root.set_reshard_after_backward(free)
    for run in runs:
        _prefetch(run, root, layout)
    if len(runs) > 1:  # which stage comes next is the schedule's to say
        root.set_modules_to_forward_prefetch([])
        root.set_modules_to_backward_prefetch([root])
    return [*apart, *groups, root]


def shard_root(module: nn.Module, mesh: Mesh) -> None:
    """Make a module around a sharded decoder FSDP2's outermost one; it has no parameters of its own."""
    fully_shard(module, mesh=mesh.device_mesh("fsdp"))


def _blocks_by_stage(decoder: Decoder, stages: Sequence[Stage] | None) -> list[list[Block]]:
    """The decoder's blocks, those of each stage that it has by themselves."""
    if stages is None:
        return [decoder.blocks]
    runs = [[block for block in decoder.blocks if block.index in stage.layers] for stage in stages]
    return [run for run in runs if run]


def _place_experts(decoder: Decoder, mesh: Mesh) -> Callable[[nn.Parameter], Any] | None:
    """Where a parameter is cut, as FSDP2 asks: experts over `efsdp`, all others as their block.

    None where this PyTorch's FSDP2 (before 2.13) has one mesh per module.
    """
    # Named in fully_shard's documentation (`shard_placement_fn`), but not exported from its package; younger than FSDP2.
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
    except ImportError:
        return None
    expert = {spec.name for spec in decoder.shape.parameters() if spec.role in EXPERT_ROLES}
    parameters = {parameter for name, parameter in decoder.named_parameters() if name in expert}
    efsdp = mesh.device_mesh("efsdp")
    info = FSDPMeshInfo(efsdp, shard_mesh_dim=0) if efsdp.ndim == 1 else HSDPMeshInfo(efsdp, shard_mesh_dim=1, replicate_mesh_dim=0)
    cut = ShardPlacementResult(placement=None, mesh_info=info)
    return lambda parameter: cut if parameter in parameters else None


def _is_chunked(loss_function: Any) -> bool:
    """Whether the loss is the one whose backward pass does not read the head's weight."""
    return (loss_function.func if isinstance(loss_function, partial) else loss_function) is chunked_cross_entropy


def _refuse_logits(_decoder: nn.Module, _arguments: Any, named: dict[str, Any], output: Tensor) -> None:
    """Logits with a gradient would read the head's weight in the backward pass, when it is no longer there."""
    stage = named.get("stage")
    hidden = stage is not None and not stage.head
    assert hidden or output.ndim == 0 or not output.requires_grad, (
        "under zero_stage 3 a decoder is trained by its loss, not by its logits"
    )


def _prefetch(groups: list[FSDPModule], root: FSDPModule, layout: Layout) -> None:
    """Gather ahead of use: `prefetch_depth` groups, but never more than `max_gathers_in_flight` with the one in use."""
    ahead = min(layout.prefetch_depth, layout.max_gathers_in_flight - 1)
    for index, group in enumerate(groups):
        following = groups[index + 1 : index + 1 + ahead]
        preceding = groups[max(0, index - ahead) : index][::-1]
        group.set_modules_to_forward_prefetch(following)
        # An empty list means "one group ahead" to FSDP2; a group that prefetches itself, which is there already, does nothing.
        group.set_modules_to_backward_prefetch(preceding or [group])
    root.set_modules_to_forward_prefetch(groups[:ahead])
    root.set_modules_to_backward_prefetch(groups[len(groups) - ahead :][::-1] or [root])


def _as_fsdp(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module
