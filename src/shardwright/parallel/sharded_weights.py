"""Trained weights that FSDP2 shards and an offloading keeps: when a shard is needed.

[Note: FSDP2's groups] FSDP2 reads a shard only when it copies it into a gather, in the method
`unshard` of its group of parameters, and adds to a shard's gradient in `post_backward`. It has no
hook there: hooks of modules run too late for a gather that is begun ahead of its use, and only
after the addition. So both methods of each group are wrapped. Everything else of
FSDP2's that this module uses is read only. The parameters of a unit are those of the blocks that
`fully_shard` got together; experts over `ep` are a second group of the same unit.

[Note: working shards] A gather copies each shard, flat and padded, to the compute precision. FSDP2
has one reference to that flat shard, which is used for nothing else. If it is a copy of the shard
in the compute precision, a gather has the same bits, and the fp32 shard is needed for none
(docs/decisions/0275-working-shards.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardwright.architecture import ParameterSpec
from shardwright.layout import Layout, ParameterLayout, compute_local_boxes
from shardwright.model.block import Block
from shardwright.model.block_weights import BlockWeight, BlockWeightSources, SliceReader
from shardwright.model.decoder import Decoder
from shardwright.model.products.working_weights import WorkingWeight, WorkingWeights
from shardwright.numerics import get_local_tensor
from shardwright.parallel.comm_timing import pause_wait
from shardwright.parallel.offloaded_weights import TrainedShardStore, TrainedWeightStore


def store_shards(
    decoder: Decoder,
    fsdp_modules: Sequence[FSDPModule],
    offload: TrainedShardStore,
    specs: Mapping[str, ParameterSpec],
    *,
    layouts: Mapping[str, ParameterLayout],
    layout: Layout,
    coordinates: Mapping[str, int],
    device: torch.device,
    read_slice: SliceReader,
) -> None:
    """Allocate a sharded decoder's memory unit by unit, and store the shards that `specs` names.

    So the shards of one unit are on the device at once. Values of other parameters are not
    written. From then on FSDP2's gathers bring the shards.
    """
    in_blocks = {module for block in decoder.blocks for module in block.modules()}
    for module in decoder.modules():
        if module not in in_blocks:
            module.to_empty(device=device, recurse=False)
    units = list_block_groups(fsdp_modules)
    for unit, (blocks, groups) in units.items():
        for block in blocks:
            block.to_empty(device=device)
        names = {parameter: name for name, parameter in decoder.named_parameters()}
        weights = []
        residents = []
        for block in blocks:
            for module, attribute, parameter in _list_parameters(block):
                spec = specs.get(names[parameter])
                if spec is not None:
                    weights.append(_describe_shard(spec, module, attribute, parameter))
                elif parameter.requires_grad:
                    residents.append(parameter)
        if decoder.blocks[-1] in blocks and decoder.final_norm is not None:
            residents += [item for item in decoder.final_norm.parameters() if item.requires_grad]
        boxes = {
            weight.spec.name: compute_local_boxes(layouts[weight.spec.name], layout, coordinates)
            for weight in weights
        }
        sources = BlockWeightSources(read_slice, boxes, {})
        offload.add_shards(unit, weights, residents, sources, partial(_free_reduced, groups))
        for group in groups:
            # Otherwise the first pass pads shards again, from memory that is freed now.
            group._reset_sharded_params = True
            shards = [item.parameter for item in weights]
            _bring_before_gather(group, unit, offload, shards)
            _bring_before_reduction(group, unit, offload)


def copy_shards(
    decoder: Decoder,
    fsdp_modules: Sequence[FSDPModule],
    dtype: torch.dtype,
    offload: TrainedWeightStore | None,
) -> WorkingWeights | None:
    """Let FSDP2 gather offloaded weights from copies of this rank's shards in `dtype`, in which it
    gathers.

    The resident shards that are gathered with them, for example of norms, have copies too: torch
    copies shards of one dtype by one kernel, and of two dtypes by one for each shard. Shards of
    `dtype` have none. None if no weights leave the device, for example on a CPU.
    """
    if offload is None:
        return None
    offloaded = {item for name, item in decoder.named_parameters() if name in offload.names}
    copies: dict[Tensor, WorkingWeight] = {}
    residents: list[tuple[Any, list[Tensor]]] = []
    for group in [group for module in fsdp_modules for group in list_parameter_groups(module)]:
        if offloaded.isdisjoint(item.sharded_param for item in group.fsdp_params):
            continue
        residents.append((group, []))
        for item in group.fsdp_params:
            parameter = item.sharded_param
            if parameter.dtype == dtype or not parameter.is_floating_point():
                continue
            local = get_local_tensor(parameter.detach())
            if parameter in offloaded:
                # `data` has a version counter of its own: a shard that returns has not changed.
                local = local.data
            else:
                residents[-1][1].append(parameter)
            flat = torch.zeros(
                item.padded_sharded_param_size.numel(), dtype=dtype, device=local.device
            )
            item._sharded_param_data = flat
            copies[parameter] = WorkingWeight(local, flat[: local.numel()].view(local.shape))
    working_weights = WorkingWeights(copies)
    for group, parameters in residents:
        _cast_before_gather(group, working_weights, parameters)
    offload.write_copies(working_weights)
    return working_weights


def list_block_groups(
    fsdp_modules: Sequence[FSDPModule],
) -> dict[int, tuple[list[Block], list[Any]]]:
    """Return the blocks and groups that FSDP2 gathers together, by the index of the first layer."""
    units: dict[int, tuple[list[Block], list[Any]]] = {}
    unit_of_module: dict[nn.Module, int] = {}
    groups = [group for module in fsdp_modules for group in list_parameter_groups(module)]
    for group in groups:
        blocks = [module for module in group.modules if isinstance(module, Block)]
        if blocks:
            unit = blocks[0].layer_index
            units.setdefault(unit, (blocks, []))
            unit_of_module |= {part: unit for block in blocks for part in block.modules()}
    for group in groups:
        found = unit_of_module.get(group.modules[0])
        if found is not None:
            units[found][1].append(group)
    return {unit: units[unit] for unit in sorted(units)}


def list_parameter_groups(module: FSDPModule) -> list[Any]:
    """List FSDP2's groups of parameters of a module; in torch 2.11 there is one at most."""
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _list_parameters(block: Block) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for module in block.modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            yield module, attribute, parameter


def _describe_shard(
    spec: ParameterSpec, module: nn.Module, attribute: str, parameter: nn.Parameter
) -> BlockWeight:
    shape = tuple(get_local_tensor(parameter.detach()).shape)
    return BlockWeight(
        spec, module, attribute, shape, parameter.dtype, is_trained=parameter.requires_grad
    )


def _free_reduced(groups: Sequence[Any]) -> None:
    """Drop the memory of gradients that FSDP2 has summed over replicas.

    It keeps them until the backward pass has ended, because another stream sums them. Training's
    stream has waited for their copies, and so for the sums.
    """
    for group in groups:
        group._all_reduce_state = None


def _bring_before_gather(
    group: Any, unit: int, offload: TrainedShardStore, shards: Sequence[nn.Parameter]
) -> None:
    """Make an FSDP2 group fetch its unit's shards before it gathers."""
    unshard: Callable[[bool], None] = group.unshard
    locals_of_shards = [get_local_tensor(parameter.detach()) for parameter in shards]

    def bring_and_unshard(async_op: bool = False) -> None:
        is_gathered = group.is_unsharded or group._all_gather_result is not None
        if is_gathered:
            return
        with pause_wait("data"):  # this rank's own transfers
            offload.bring_shards(unit)
        if group.device.type != "cuda" or not hasattr(group.comm_ctx, "all_gather_copy_in_stream"):
            unshard(async_op)
            return
        # The shards arrive on the stream of training; FSDP2 copies them on another one, after
        # which the memory may be used again.
        copying, _ = group.comm_ctx.get_all_gather_streams(async_op, group._training_state)
        copying.wait_stream(torch.cuda.current_stream(group.device))
        unshard(async_op)
        for local in locals_of_shards:
            local.record_stream(copying)

    group.unshard = bring_and_unshard


def _cast_before_gather(
    group: Any, working_weights: WorkingWeights, parameters: Sequence[Tensor]
) -> None:
    """Make an FSDP2 group cast its resident shards that have changed before it gathers."""
    unshard: Callable[[bool], None] = group.unshard

    def cast_and_unshard(async_op: bool = False) -> None:
        if not (group.is_unsharded or group._all_gather_result is not None):
            working_weights.update(parameters)
        unshard(async_op)

    group.unshard = cast_and_unshard


def _bring_before_reduction(group: Any, unit: int, offload: TrainedShardStore) -> None:
    """Make an FSDP2 group fetch the gradients of its unit's shards before it adds to them."""
    post_backward: Callable[..., None] = group.post_backward

    def bring_and_reduce(*arguments: Any) -> None:
        if group.reduce_grads and any(map(_has_gradient, group.fsdp_params)):
            with pause_wait("data"):
                offload.bring_gradients(unit, {item.sharded_param for item in group.fsdp_params})
        post_backward(*arguments)

    group.post_backward = bring_and_reduce


def _has_gradient(parameter: Any) -> bool:
    """Return True if FSDP2 has a gradient to reduce of one of its parameters."""
    gathered = getattr(parameter, "_unsharded_param", None)
    return parameter.unsharded_accumulated_grad is not None or (
        gathered is not None and gathered.grad is not None
    )


class UnitReduction:
    """Reduction of deferred gradients, unit by unit while W computes them.

    Otherwise FSDP2 reduces them after W, when those of all blocks of a stage are on the device.
    """

    def __init__(self, fsdp_modules: Sequence[FSDPModule]) -> None:
        units = list_block_groups(fsdp_modules)
        self._groups = {unit: groups for unit, (_, groups) in units.items()}
        self._unit_of_layer = {
            block.layer_index: unit for unit, (blocks, _) in units.items() for block in blocks
        }
        self._unit: int | None = None
        self._is_active = False

    def begin_block(self, layer: int) -> None:
        """Reduce the last block's gradients if this block is of another unit."""
        unit = self._unit_of_layer[layer]
        if unit != self._unit:
            self._reduce()
        self._unit = unit

    @contextmanager
    def reduce_units(self, *, is_active: bool) -> Iterator[None]:
        """Reduce units in this context if `is_active`."""
        self._is_active = is_active
        yield
        self._reduce()
        self._unit = None

    @torch.no_grad()
    def _reduce(self) -> None:
        if self._unit is None or not self._is_active:
            return
        for group in reversed(self._groups[self._unit]):
            # The first call casts what I has computed to the precision of the reduction.
            for should_reduce in (False, True):
                group.reduce_grads = group.all_reduce_grads = should_reduce
                group.post_backward()
            group.reduce_grads = group.all_reduce_grads = False
