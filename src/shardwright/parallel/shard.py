"""zero_stage 1, 2, 3 and hybrid: parameters, gradients and optimizer states cut over the sharding ranks by FSDP2.

What a rank holds, as shares of the whole model over n sharding ranks (P parameters in compute precision, G gradients;
optimizer states and master weights are always 1/n):

    stage   P after forward   G between micro-batches   gradients are reduced
    1       1 + 1/n           1                         once per step
    2       1 + 1/n           1/n                       every micro-batch
    3       1/n               1/n                       every micro-batch
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from shardwright.layout import Layout
from shardwright.numerics.precision import Dtypes


def shard(decoder: nn.Module, blocks: Sequence[nn.Module], layout: Layout, mesh: DeviceMesh, dtypes: Dtypes) -> list[FSDPModule]:
    """Shard a decoder in place: one group per `layout.wrap_blocks` blocks, one for the rest. Returns the groups, the root last.

    Sums are sums: no group divides, on any axis, because the loss carries the one normaliser.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=dtypes.compute if dtypes.compute != dtypes.param else None,
        reduce_dtype=dtypes.reduce,
        cast_forward_inputs=False,  # rotation tables stay fp32; the model casts where it means to
    )
    data_mesh = mesh["dp_replicate", "dp_shard"] if layout.dp_replicate > 1 else mesh["dp_shard"]
    reshard_after_forward = layout.zero_stage == 3
    groups = []
    for first in range(0, len(blocks), layout.wrap_blocks):
        members = list(blocks[first : first + layout.wrap_blocks])
        fully_shard(members, mesh=data_mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
        groups.append(_as_fsdp(members[0]))
    # The root's parameters are needed at both ends of the forward pass and first in the backward pass: it never reshards between.
    fully_shard(decoder, mesh=data_mesh, mp_policy=policy, reshard_after_forward=False)
    root = _as_fsdp(decoder)
    for group in (*groups, root):
        group.set_gradient_divide_factor(1.0)
        group.set_force_sum_reduction_for_comms(True)  # else a factor asks for PREMUL_SUM, which gloo has not
    root.set_reshard_after_backward(layout.zero_stage == 3)
    _prefetch(groups, root, layout)
    return [*groups, root]


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
