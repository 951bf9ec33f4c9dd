"""FSDP2 for zero_stage 1, 2 and 3: sharded parameters, gradients and optimizer states.

Memory of a rank, as shares of the whole model over n sharding ranks (P parameters in compute
precision, G gradients; master weights and optimizer states are always 1/n):

    stage   P after forward   G between micro-batches   gradients are reduced
    1       1 + 1/n           1                         once per step
    2       1 + 1/n           1/n                       every micro-batch
    3       1/n               1/n                       every micro-batch

Stages 1 and 2 gather the parameters of the next step while the optimizer updates them.

`tests/multiprocess/test_memory.py` measures these numbers on live tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    UnshardHandle,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard import _fsdp_common

from shardwright.architecture.flop_count import EXPERT_ROLES
from shardwright.layout import Layout, PipelineStage
from shardwright.model import Decoder
from shardwright.model.block import Block
from shardwright.model.moe import Experts
from shardwright.numerics import ChunkedLoss, PrecisionDtypes, chunked_cross_entropy
from shardwright.numerics.liger_loss import liger_cross_entropy
from shardwright.optim.sharded_optimizer import UpdatePart
from shardwright.parallel.comm_timing import time_fsdp_waits
from shardwright.parallel.direct_collectives import ShardGather
from shardwright.parallel.mesh import Mesh
from shardwright.parallel.sharded_weights import list_parameter_groups

# Documented for fully_shard (`shard_placement_fn`), but not exported. Newer than FSDP2 itself:
# torch 2.11 has one mesh per module.
_HAS_MESH_PER_PARAMETER = hasattr(_fsdp_common, "ShardPlacementResult")


def apply_fsdp(
    decoder: Decoder,
    layout: Layout,
    mesh: Mesh,
    dtypes: PrecisionDtypes,
    stages: Sequence[PipelineStage] | None = None,
    ignored_names: Collection[str] = (),
    *,
    reshards_blocks: bool = False,
) -> list[FSDPModule]:
    """Shard a decoder in place; return its FSDP modules, the root last.

    Parameters of `ignored_names` are left as they are. `reshards_blocks` frees the gathered
    parameters of blocks after each use at stages 1 and 2, too.

    There is one group per `layout.wrap_blocks` blocks and one for the rest. If the decoder has
    only some of a pipeline's `stages`, a group stays within one stage, because stages run
    separately.

    Under expert parallelism a block's experts are sharded over `efsdp`, but gathered and freed
    with their block: hooks on the experts alone would run inside the recomputed function, a
    different number of times than in the forward pass, which selective recomputation refuses.
    Where FSDP2 cannot do that (torch 2.11), they are wrapped separately, and their hooks
    are moved to their block; they then come first in the list.

    The root holds the embeddings and the head. The final norm joins the last blocks, because
    its weight is read in the backward pass and the root's weights are not: an embedding's
    gradient needs indices only, and the chunked loss computes the head's in the forward pass.
    So at stage 3 the two largest matrices of a small model are gathered once per micro-batch
    and freed before the backward pass.

    Gradients are summed, never averaged, on every axis, because the loss contains the one
    normaliser.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=dtypes.compute if dtypes.compute != dtypes.param else None,
        reduce_dtype=dtypes.reduce,
        cast_forward_inputs=False,  # rotation tables stay fp32; the model casts explicitly
    )
    # Untrained parameters stay replicated, in their own precision.
    trained = {spec.name: spec.is_trained for spec in decoder.shape.list_parameters()}
    untrained = {
        parameter
        for name, parameter in decoder.named_parameters()
        if not trained[name] or name in ignored_names
    }
    place_experts = _build_expert_placement(decoder, mesh) if layout.ep > 1 else None
    options: dict[str, Any] = {"mp_policy": policy, "ignored_params": untrained}
    # With a second mesh for the experts, FSDP2 accepts no custom collectives.
    has_own_collectives = mesh.device_type == "cpu" and place_experts is None
    reshards_after_use = layout.zero_stage == 3
    reshards_blocks = reshards_blocks or reshards_after_use
    expert_groups: list[FSDPModule] = []
    if layout.ep > 1 and place_experts is None:
        expert_options = options | {"reshard_after_forward": reshards_blocks}
        expert_groups = _shard_experts(decoder, mesh, expert_options)
    wrap: Callable[..., None] = partial(
        _shard_modules, mesh=mesh.device_mesh("fsdp"), shard_placement_fn=place_experts, **options
    )
    final_norm = decoder.final_norm
    stage_groups: list[list[FSDPModule]] = []
    for blocks in _group_blocks_by_stage(decoder, stages):
        stage_groups.append([])
        for first in range(0, len(blocks), layout.wrap_blocks):
            members: list[nn.Module] = list(blocks[first : first + layout.wrap_blocks])
            if decoder.blocks[-1] in members and final_norm is not None:
                members.append(final_norm)
            wrap(members, reshard_after_forward=reshards_blocks)
            time_fsdp_waits(members, has_gradient_waits=has_own_collectives)
            stage_groups[-1].append(_to_fsdp_module(members[0]))
    groups = [group for run in stage_groups for group in run]
    root_is_read_backward = decoder.is_root_read_in_backward or not _is_chunked_loss(
        decoder.loss_function
    )
    wrap(decoder, reshard_after_forward=reshards_after_use and not root_is_read_backward)
    time_fsdp_waits([decoder], has_gradient_waits=has_own_collectives)
    root = _to_fsdp_module(decoder)
    if reshards_after_use and not root_is_read_backward:
        root.set_unshard_in_backward(False)
        decoder.register_forward_hook(_refuse_logits, with_kwargs=True)
    for group in (*expert_groups, *groups, root):
        group.set_gradient_divide_factor(1.0)
        # Otherwise FSDP2 uses PREMUL_SUM for the factor, which gloo lacks.
        group.set_force_sum_reduction_for_comms(True)
        if has_own_collectives:
            group.set_custom_all_gather(ShardGather())  # type: ignore[arg-type]
    root.set_reshard_after_backward(reshards_blocks)
    root.set_reshard_after_backward(reshards_after_use, recurse=False)
    for run in stage_groups:
        _set_prefetch(run, root, layout)
    if len(stage_groups) > 1:  # the schedule decides which stage comes next
        root.set_modules_to_forward_prefetch([])
        root.set_modules_to_backward_prefetch([root])
    return [*expert_groups, *groups, root]


def _shard_modules(modules: nn.Module | list[nn.Module], **options: Any) -> None:
    """Call `fully_shard`, also for matrices of packed bytes.

    FSDP2 of torch 2.11 makes every parameter trainable for a moment, which integers cannot be, and
    casts them all to the compute dtype.
    """
    if _HAS_MESH_PER_PARAMETER:
        fully_shard(modules, **options)
        return
    source: Any = import_module("torch.distributed.fsdp._fully_shard._fsdp_param")
    source.nn = SimpleNamespace(Module=nn.Module, Parameter=_build_sharded_parameter)
    try:
        fully_shard(modules, **options)
    finally:
        source.nn = nn
    first = modules[0] if isinstance(modules, list) else modules
    for group in list_parameter_groups(_to_fsdp_module(first)):
        for parameter in group.fsdp_params:
            if not parameter.sharded_param.is_floating_point():
                set_dtypes = parameter.init_dtype_attrs
                parameter.init_dtype_attrs = partial(_keep_dtype, set_dtypes)


def _build_sharded_parameter(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=values.is_floating_point())


def _keep_dtype(set_dtypes: Callable[[MixedPrecisionPolicy], None], _policy: Any) -> None:
    set_dtypes(MixedPrecisionPolicy())


def _shard_experts(decoder: Decoder, mesh: Mesh, options: dict[str, Any]) -> list[FSDPModule]:
    """Shard the experts of each block over `efsdp`; gather and free them with their block."""
    groups = []
    for block in decoder.blocks:
        for experts in [part for part in block.modules() if isinstance(part, Experts)]:
            _shard_modules(experts, mesh=mesh.device_mesh("efsdp"), **options)
            groups.append(_to_fsdp_module(experts))
            state: Any = groups[-1]._get_fsdp_state()
            state._pre_forward_hook_handle.remove()
            state._post_forward_hook_handle.remove()
            block.register_forward_pre_hook(state._pre_forward, prepend=True, with_kwargs=True)
            block.register_forward_hook(state._post_forward)
    return groups


def apply_fsdp_root(module: nn.Module, mesh: Mesh) -> None:
    """Make a module around a sharded decoder FSDP2's outermost one; it has no own parameters."""
    fully_shard(module, mesh=mesh.device_mesh("fsdp"))


def _group_blocks_by_stage(
    decoder: Decoder, stages: Sequence[PipelineStage] | None
) -> list[list[Block]]:
    """Group the decoder's blocks by pipeline stage."""
    if stages is None:
        return [decoder.blocks]
    groups = [
        [block for block in decoder.blocks if block.layer_index in stage.layers] for stage in stages
    ]
    return [run for run in groups if run]


def _build_expert_placement(decoder: Decoder, mesh: Mesh) -> Callable[[nn.Parameter], Any] | None:
    """Build FSDP2's placement function: experts over `efsdp`, other parameters as their block.

    None if this PyTorch's FSDP2 has one mesh per module.
    """
    if not _HAS_MESH_PER_PARAMETER:
        return None
    expert_names = {
        spec.name for spec in decoder.shape.list_parameters() if spec.role in EXPERT_ROLES
    }
    parameters = {
        parameter for name, parameter in decoder.named_parameters() if name in expert_names
    }
    efsdp = mesh.device_mesh("efsdp")
    info = (
        _fsdp_common.FSDPMeshInfo(efsdp, shard_mesh_dim=0)
        if efsdp.ndim == 1
        else _fsdp_common.HSDPMeshInfo(efsdp, shard_mesh_dim=1, replicate_mesh_dim=0)
    )
    placement = _fsdp_common.ShardPlacementResult(placement=None, mesh_info=info)
    return lambda parameter: placement if parameter in parameters else None


def _is_chunked_loss(loss_function: Any) -> bool:
    """True for losses whose backward pass does not read the head's weight."""
    function = loss_function.func if isinstance(loss_function, partial) else loss_function
    is_chunked = isinstance(function, ChunkedLoss)
    return is_chunked or function in (chunked_cross_entropy, liger_cross_entropy)


def _refuse_logits(
    _decoder: nn.Module, _arguments: Any, named: dict[str, Any], output: Tensor
) -> None:
    """Assert that no logits take a gradient.

    Their backward pass would read the head's weight, which is freed by then.
    """
    stage: PipelineStage | None = named.get("stage")
    hidden = stage is not None and not stage.has_head
    assert hidden or output.ndim == 0 or not output.requires_grad, (
        "under zero_stage 3 gradients of logits are unsupported; compute the loss in the decoder"
    )


def _set_prefetch(groups: list[FSDPModule], root: FSDPModule, layout: Layout) -> None:
    """Set prefetching: gather `prefetch_depth` groups ahead of use.

    Never more than `max_gathers_in_flight` groups are gathered, the one in use included.
    """
    ahead = layout.num_gathers_ahead
    for index, group in enumerate(groups):
        following = groups[index + 1 : index + 1 + ahead]
        preceding = groups[max(0, index - ahead) : index][::-1]
        group.set_modules_to_forward_prefetch(following)
        # FSDP2 reads an empty list as "one group ahead". A group that prefetches itself is
        # already gathered, so nothing happens.
        group.set_modules_to_backward_prefetch(preceding or [group])
    root.set_modules_to_forward_prefetch(groups[:ahead])
    root.set_modules_to_backward_prefetch(groups[len(groups) - ahead :][::-1] or [root])


class EarlyGathers:
    """Gathers of updated parameters that begin when their shards are updated.

    Without them the gathers of stages 1 and 2 begin in the next forward pass. A group's forward
    pass waits for its own gather. The order is that of use: embeddings and head, then blocks.
    """

    def __init__(self, decoder: Decoder, fsdp_modules: Sequence[FSDPModule]) -> None:
        """`fsdp_modules` are those of `apply_fsdp`: the root is the last one."""
        names = {parameter: name for name, parameter in decoder.named_parameters()}
        self._modules = [fsdp_modules[-1], *fsdp_modules[:-1]]
        self._handles: list[UnshardHandle] = []
        self.parts = [
            UpdatePart(
                frozenset(
                    names[getattr(info.module, info.param_name)]
                    for group in list_parameter_groups(module)
                    for info in (parameter._module_info for parameter in group.fsdp_params)
                ),
                partial(self._begin, module),
            )
            for module in self._modules
        ]

    def _begin(self, module: FSDPModule) -> None:
        handle = module.unshard(async_op=True)
        assert handle is not None
        self._handles.append(handle)

    def begin(self) -> None:
        """Begin all gathers."""
        for part in self.parts:
            part.end()

    def discard(self) -> None:
        """Free gathered parameters, also those that no pass has used: their shards will change."""
        for handle in self._handles:
            handle.wait()
        self._handles.clear()
        for module in self._modules:
            module.reshard()


def _to_fsdp_module(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module
