"""The order in which parallelism is applied to a decoder; no other module decides it.

On the meta device until step 6:

    1  pipeline     keep the blocks of this rank's stages
    2  tensor, expert, context: parameters of this rank's shape, and the hooks that modules call;
                    8-bit products, which agree on scales over tensor ranks
    3  recompute    around each block's inner function; its norms and gates may be fused
    4  compile      the block's function with recomputation inside: around compiled code,
                    selective recomputation sees no operations to save
    5  shard        FSDP2 over dp_shard (x dp_replicate), block groups first, the root last
    6  storage      empty memory on the device, for this rank's shards only; not for weights that
                    are offloaded, which leave the model before 5
    7  weights      written by name, slice by slice; offloaded ones to their store; copies in the
                    compute precision of those that would be cast at each use
    8  replicate    DDP over dp_replicate: its buckets need real memory; not under a pipeline,
                    which accumulates gradients itself and reduces those of a stage behind the
                    backward passes of the others

Then the reductions that no wrapper makes. The descriptor of a parameter (`ParameterLayout`) is
computed from the layout alone and then checked against the sharded tensors.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardwright.architecture import HFShape
from shardwright.layout import (
    Layout,
    ParameterLayout,
    PipelineStage,
    RankGrid,
    compute_local_boxes,
    compute_local_shape,
)
from shardwright.model.block_weights import (
    BlockWeightSources,
    SliceReader,
    detach_weights,
    list_block_matrices,
)
from shardwright.model.decoder import Decoder
from shardwright.model.parallel_hooks import ParallelHooks
from shardwright.model.pointwise.functions import COMPILED_FUNCTIONS
from shardwright.model.products.operand import list_compiler_options
from shardwright.model.products.product import WeightGradientStore
from shardwright.model.products.scaled_matmul import let_compiler_trace_kernels
from shardwright.model.products.split_backward import SplitBackward
from shardwright.model.products.working_operands import fill_operands
from shardwright.model.products.working_weights import WorkingWeights, copy_weights
from shardwright.numerics import get_local_tensor
from shardwright.numerics.function_compiler import compile_function, request_exact_rounding
from shardwright.numerics.precision import PrecisionDtypes, resolve_dtypes
from shardwright.parallel.code_gathers import gather_codes
from shardwright.parallel.context.context_parallel import build_context_parallel
from shardwright.parallel.ddp import apply_ddp
from shardwright.parallel.experts.expert_parallel import build_token_dispatcher
from shardwright.parallel.experts.token_exchange import build_token_exchange
from shardwright.parallel.fsdp import EarlyGathers, apply_fsdp, apply_fsdp_root
from shardwright.parallel.gradient_reduction import list_pending_reductions, narrow_to_box
from shardwright.parallel.low_precision import install_low_precision
from shardwright.parallel.mesh import Mesh
from shardwright.parallel.offloaded_weights import (
    BlockWeightStore,
    TrainedShardStore,
    TrainedWeightStore,
    drop_zero_shards,
    find_shard_groups,
)
from shardwright.parallel.parallel_model import ParallelModel
from shardwright.parallel.pipeline_parallel import Pipeline, StageRoot, find_parameter_stages
from shardwright.parallel.recompute import install_recompute
from shardwright.parallel.sharded_weights import UnitReduction, copy_shards, store_shards
from shardwright.parallel.tensor_parallel import build_tensor_parallel
from shardwright.parallel.weight_maxima import build_weight_maxima
from shardwright.plans import Plan
from shardwright.schedule import has_split_backward

logger = logging.getLogger(__name__)

ParameterReader = SliceReader


def apply_layout(
    decoder: Decoder,
    plan: Plan,
    mesh: Mesh | None,
    device: torch.device,
    *,
    read_slice: ParameterReader,
    compile_blocks: bool = False,
    storage: AbstractContextManager[Any] | None = None,
    offload: BlockWeightStore | None = None,
) -> ParallelModel:
    """Apply a plan's parallelism to a decoder and load this rank's parameters.

    Args:
        decoder: on the meta device; freeze parameters before this call.
        mesh: from `build_mesh`; None for one rank.
        device: device on which the rank computes.
        read_slice: returns any slice of any parameter by name.
        compile_blocks: torch.compile each block; for rows of any length if the plan's differ.
        storage: context while memory is allocated and filled; in a rehearsal's it takes none.
        offload: keeps the matrices of blocks; with adapters the frozen ones, which FSDP2 does not
            shard. Without, a `TrainedWeightStore`; if ZeRO shards them, a `TrainedShardStore`.

    Raises:
        LayoutError: the mesh has another number of ranks than the plan.
    """
    layout = plan.layout
    stages = plan.placement.stages
    layouts = plan.placement.parameters
    assert decoder.shape == plan.placement.shape, "the plan is another model's"
    precision = resolve_dtypes(plan.precision)
    _set_dtypes(decoder, precision)
    trainable = frozenset(
        name for name, parameter in decoder.named_parameters() if parameter.requires_grad
    )
    coordinates = RankGrid(layout).coordinates(0 if mesh is None else mesh.rank)
    sharded = layout.is_sharded
    if stages is not None:
        decoder.select_stages([stage for stage in stages if stage.rank == coordinates["pp"]])
    _shard_parameters(decoder, layouts, layout, coordinates)
    decoder.install_parallel_hooks(
        ParallelHooks(
            context=build_context_parallel(plan.placement, mesh),
            expert=build_token_dispatcher(decoder.shape, layout, mesh),
            token_exchange=build_token_exchange(plan, mesh),
            tensor=build_tensor_parallel(layout, mesh),
        )
    )
    install_low_precision(decoder, plan, mesh, device)
    install_recompute(decoder, plan)
    if plan.pointwise.kind == "compiled":
        decoder.fuse_functions(COMPILED_FUNCTIONS)
    gradient_store = WeightGradientStore()
    if compile_blocks:
        _compile_blocks(decoder, plan, gradient_store)
    offloaded = {} if offload is None else list_block_matrices(decoder.shape)
    shard_offload = offload if isinstance(offload, TrainedShardStore) else None
    detached = {} if shard_offload is not None else offloaded
    weights = detach_weights(decoder, detached)
    groups = find_shard_groups(weights, layouts, mesh)
    layouts = {
        name: drop_zero_shards(parameter, layout) if name in detached else parameter
        for name, parameter in layouts.items()
    }
    fsdp_modules: list[FSDPModule] = []
    if sharded:
        assert mesh is not None
        fsdp_modules = apply_fsdp(
            decoder,
            layout,
            mesh,
            precision,
            stages,
            detached,
            reshards_blocks=shard_offload is not None,
        )
    elif layout.zero_stage >= 1:
        logger.info(
            "zero_stage %d on one rank shards nothing: the model is replicated", layout.zero_stage
        )
    with storage or nullcontext():
        if shard_offload is None:
            decoder.to_empty(device=device)
        else:
            store_shards(
                decoder,
                fsdp_modules,
                shard_offload,
                offloaded,
                layouts=layouts,
                layout=layout,
                coordinates=coordinates,
                device=device,
                read_slice=read_slice,
            )
        resident = {name: part for name, part in layouts.items() if name not in offloaded}
        _fill_parameters(decoder, resident, layout, coordinates, read_slice)
    gathered_codes = gather_codes(decoder, plan, fsdp_modules, offloaded)
    if offload is not None and shard_offload is None:
        boxes = {
            weight.spec.name: compute_local_boxes(layouts[weight.spec.name], layout, coordinates)
            for weight in weights
        }
        with storage or nullcontext():  # a block's memory is on the device until it is stored
            offload.attach(decoder, weights, BlockWeightSources(read_slice, boxes, groups))
    trained_offload = offload if isinstance(offload, TrainedWeightStore) else None
    if plan.has_working_weights and trainable:
        with storage or nullcontext():
            decoder.working_weights = _copy(decoder, plan, compile_blocks, offload, fsdp_modules)
    excluded_names = frozenset() if sharded else _exclude_from_ddp(layouts, trained_offload)
    replica_group = _find_replica_group(plan, mesh, has_gradients=bool(trainable))
    module: nn.Module = decoder
    if replica_group is not None:
        with storage or nullcontext():  # DDP's buckets are memory too
            module = apply_ddp(
                decoder,
                replica_group,
                bucket_size_bytes=layout.bucket_size_bytes,
                reduce_dtype=precision.reduce,
                device=device,
                excluded_names=excluded_names,
            )
    if trainable and not sharded and replica_group is None:
        _report_reduce_dtype(layout, precision)
    reductions = (
        []
        if mesh is None
        else list_pending_reductions(
            layouts,
            mesh,
            dtype=torch.promote_types(precision.param, precision.reduce),
            has_wrapper=sharded or replica_group is not None,
            excluded_names=excluded_names,
        )
    )
    model = ParallelModel(
        module,
        decoder,
        layouts,
        layout,
        mesh,
        device,
        fsdp_modules,
        trainable,
        reductions,
        frozenset(offloaded),
        trained_offload,
    )
    # Codes are counted in the step whose products read them, so their gathers begin there.
    if fsdp_modules and layout.zero_stage < 3 and not offloaded and not gathered_codes:
        model.early_gathers = EarlyGathers(decoder, fsdp_modules)
    model.weight_maxima = build_weight_maxima(decoder, layouts, mesh, precision.compute, offloaded)
    if stages is not None:
        assert mesh is not None
        model.pipeline = _build_pipeline(
            model, stages, mesh, plan.batch.gradient_accumulation_steps, gradient_store
        )
    return model


def _compile_blocks(decoder: Decoder, plan: Plan, gradient_store: WeightGradientStore) -> None:
    # Rows of a length of their own would each be a graph. None lets torch assume that shapes
    # stay, and generalise only those that change after all (an evaluation's batch).
    options: dict[str, Any] = {"dynamic": None if plan.batch.row_multiple is None else True}
    inductor_options: dict[str, Any] = {}
    section = plan.precision.low_precision
    if section is not None:
        # What is quantised may not depend on what a layout lets Inductor fuse: a cast to 16 bits
        # within a kernel is left out otherwise.
        inductor_options = request_exact_rounding() | list_compiler_options(section.recipe)
    if plan.layout.pp > 1 and has_split_backward(plan.layout.schedule):
        options["backend"] = SplitBackward(gradient_store, options=inductor_options)
    elif inductor_options:
        options["options"] = inductor_options
    let_compiler_trace_kernels()
    decoder.compile_blocks(**options)


def _copy(
    decoder: Decoder,
    plan: Plan,
    is_compiled: bool,
    offload: BlockWeightStore | None,
    fsdp_modules: Sequence[FSDPModule],
) -> WorkingWeights | None:
    """Copy weights, or the shards that leave the device, to the compute precision."""
    trained = offload if isinstance(offload, TrainedWeightStore) else None
    if fsdp_modules:
        return copy_shards(decoder, fsdp_modules, resolve_dtypes(plan.precision).compute, trained)
    section = plan.precision.low_precision
    options = {} if section is None else list_compiler_options(section.recipe)
    # One graph for each shape of a matrix.
    fill = compile_function(fill_operands, max_graphs=64, options=options) if is_compiled else None
    working_weights = copy_weights(decoder, resolve_dtypes(plan.precision).compute, fill)
    if trained is not None:
        trained.write_copies(working_weights)
    return working_weights


def _exclude_from_ddp(
    layouts: Mapping[str, ParameterLayout], offload: TrainedWeightStore | None
) -> frozenset[str]:
    """Return the names of parameters whose gradients DDP must not reduce over its group.

    Experts on different `ep` ranks are not copies of each other. Gradients of offloaded weights
    leave the device before DDP's buckets are reduced.
    """
    experts = {name for name, parameter in layouts.items() if "ep" in parameter.shard_axes}
    return frozenset(experts if offload is None else experts | offload.names)


def _find_replica_group(
    plan: Plan, mesh: Mesh | None, *, has_gradients: bool
) -> dist.ProcessGroup | None:
    """Return the group over which DDP reduces gradients; None if DDP does not wrap the model.

    A model without gradients (a frozen reference) has nothing to reduce, and DDP refuses to wrap
    it. DDP changes its buckets after the first step, so the sums of a resumed run's first step
    could be rounded differently: no DDP under deterministic algorithms.
    """
    if mesh is None or plan.layout.is_sharded or plan.placement.stages or not has_gradients:
        return None
    if torch.are_deterministic_algorithms_enabled():
        return None
    return mesh.group("dp_replicate", "fsdp")


def _build_pipeline(
    model: ParallelModel,
    stages: Sequence[PipelineStage],
    mesh: Mesh,
    num_micro_batches: int,
    gradient_store: WeightGradientStore,
) -> Pipeline:
    module: nn.Module = model.decoder
    if model.fsdp_modules:
        module = StageRoot(model.decoder)
        apply_fsdp_root(module, mesh)
    stage_of_parameter = find_parameter_stages(model.decoder.shape, stages)
    model.overlap_reductions(stage_of_parameter)
    pipeline = Pipeline(
        module,
        model.decoder,
        stages,
        model.layout,
        mesh,
        model.device,
        gradient_store,
        # A tied embedding is in the first stage, too.
        first_trained_stage=min(
            (stage_of_parameter.get(name, 0) for name in model.trainable), default=0
        ),
        set_gradient_sync=model.fsdp_modules[-1].set_requires_gradient_sync
        if model.fsdp_modules
        else None,
        end_stage=model.launch_stage_reduction,
        enter_backward=model.offload_gradients,
    )
    if model.trained_offload is not None and pipeline.has_split_backward:
        begin_block = model.trained_offload.begin_weight_gradients
        if model.fsdp_modules:
            pipeline.unit_reduction = UnitReduction(model.fsdp_modules)
            begin_block = pipeline.unit_reduction.begin_block
        blocks = {block.layer_index: block for block in model.decoder.blocks}
        gradient_store.watch_blocks(blocks, begin_block)
    warning = pipeline.schedule(num_micro_batches).describe_low_utilisation()
    if warning is not None and mesh.rank == 0:
        logger.warning(warning)
    return pipeline


def _report_reduce_dtype(layout: Layout, precision: PrecisionDtypes) -> None:
    """Log that the recipe's dtype of reductions is unused, if it is not the gradients' own."""
    if precision.reduce.itemsize < precision.param.itemsize:
        logger.info(
            "precision.reduce_dtype has no effect under %s: neither DDP nor FSDP reduces its "
            "gradients; they are summed in their own dtype, %s",
            layout,
            str(precision.param).removeprefix("torch."),
        )


def _cast_frozen(decoder: Decoder, dtype: torch.dtype) -> None:
    """Cast frozen matrices of layers with adapters to the compute dtype, in which products read
    them.

    Nothing is ever added to them, so they need no fp32 copy. Parameters that are computed in
    fp32 stay so: norms, biases, routers.
    """
    if decoder.shape.adapters is None or isinstance(decoder.shape, HFShape):
        return
    specs = {spec.name: spec for spec in decoder.shape.list_parameters()}
    for name, parameter in decoder.named_parameters():
        spec = specs[name]
        if spec.is_product_matrix and spec.packed_matrix is None:
            parameter.data = parameter.data.to(dtype)


def _set_dtypes(decoder: Decoder, precision: PrecisionDtypes) -> None:
    """Store parameters in the precision of master weights, or in what they need.

    Untrained biases of routers are in fp32 at least: their steps are too small for 16 bits.
    """
    decoder.to(precision.param)
    _cast_frozen(decoder, precision.compute)
    if precision.param != torch.bfloat16:
        return
    trained = {spec.name: spec.is_trained for spec in decoder.shape.list_parameters()}
    for name, parameter in decoder.named_parameters():
        if not trained[name]:
            parameter.data = parameter.data.to(torch.float32)


def _shard_parameters(
    decoder: Decoder,
    layouts: dict[str, ParameterLayout],
    layout: Layout,
    coordinates: dict[str, int],
) -> None:
    """Replace parameters that tp or ep shards with ones of this rank's shape, without memory."""
    names = {parameter: name for name, parameter in decoder.named_parameters()}
    for module in decoder.modules():
        for attribute, parameter in list(module.named_parameters(recurse=False)):
            parameter_layout = layouts[names[parameter]]
            shape = compute_local_shape(parameter_layout, layout, coordinates, with_zero=False)
            if shape != tuple(parameter.shape):
                local = parameter.new_empty(shape)
                setattr(module, attribute, nn.Parameter(local, parameter.requires_grad))


@torch.no_grad()
def _fill_parameters(
    decoder: Decoder,
    layouts: dict[str, ParameterLayout],
    layout: Layout,
    coordinates: dict[str, int],
    read_slice: ParameterReader,
) -> None:
    """Fill the parameters that `layouts` names."""
    for name, parameter in decoder.named_parameters():
        if name not in layouts:
            continue
        local = get_local_tensor(parameter)
        parameter_layout = layouts[name]
        # Our own invariant: sharding and FSDP2 left exactly the shape that the descriptor
        # states.
        assert tuple(local.shape) == compute_local_shape(parameter_layout, layout, coordinates), (
            f"{name}: has local shape {tuple(local.shape)}, expected {parameter_layout}"
        )
        for box in compute_local_boxes(parameter_layout, layout, coordinates):
            narrow_to_box(local, box.local_bounds).copy_(read_slice(name, box.global_bounds))
