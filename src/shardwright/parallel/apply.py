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
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardwright.layout import Layout, PipelineStage, RankGrid, compute_local_boxes
from shardwright.model.block_weights import (
    BlockWeight,
    BlockWeightSources,
    ShardGroup,
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
from shardwright.model.products.working_weights import copy_weights
from shardwright.numerics.function_compiler import compile_function, request_exact_rounding
from shardwright.numerics.precision import PrecisionDtypes, resolve_dtypes
from shardwright.parallel.code_gathers import gather_codes
from shardwright.parallel.context.context_parallel import build_context_parallel
from shardwright.parallel.ddp import apply_ddp
from shardwright.parallel.experts.expert_parallel import build_token_dispatcher
from shardwright.parallel.experts.token_exchange import build_token_exchange
from shardwright.parallel.fsdp import EarlyGathers, apply_fsdp, apply_fsdp_root
from shardwright.parallel.gradient_reduction import PendingReduction, list_pending_reductions
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
from shardwright.parallel.parameters import fill_parameters, narrow_parameters, set_dtypes
from shardwright.parallel.pipeline_parallel import Pipeline, StageRoot, find_parameter_stages
from shardwright.parallel.recompute import install_recompute
from shardwright.parallel.sharded_weights import UnitReduction, copy_shards, store_shards
from shardwright.parallel.tensor_parallel import build_tensor_parallel
from shardwright.parallel.weight_maxima import build_weight_maxima
from shardwright.plans import Plan
from shardwright.schedule import has_split_backward

logger = logging.getLogger(__name__)


def apply_layout(
    decoder: Decoder,
    plan: Plan,
    mesh: Mesh | None,
    device: torch.device,
    *,
    read_slice: SliceReader,
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
    assert decoder.shape == plan.placement.shape, "the plan is another model's"
    layout = plan.layout
    trainable = frozenset(
        name for name, parameter in decoder.named_parameters() if parameter.requires_grad
    )
    gradient_store = WeightGradientStore()
    rank = _Rank(decoder, plan, mesh, device, read_slice, storage or nullcontext(), offload)
    rank.build_blocks()
    if compile_blocks:
        _compile_blocks(decoder, plan, gradient_store)
    rank.detach_weights()
    fsdp_modules = rank.shard()
    rank.write_weights(fsdp_modules)
    gathered_codes = gather_codes(decoder, plan, fsdp_modules, rank.offloaded)
    rank.write_detached_weights()
    if plan.has_working_weights and trainable:
        rank.copy_weights(fsdp_modules, is_compiled=compile_blocks)
    module, reductions = rank.replicate(has_gradients=bool(trainable))
    model = ParallelModel(
        module,
        decoder,
        rank.layouts,
        layout,
        mesh,
        device,
        fsdp_modules,
        trainable,
        reductions,
        frozenset(rank.offloaded),
        rank.trained_offload,
    )
    # Codes are counted in the step whose products read them, so their gathers begin there.
    if fsdp_modules and layout.zero_stage < 3 and not rank.offloaded and not gathered_codes:
        model.early_gathers = EarlyGathers(decoder, fsdp_modules)
    model.weight_maxima = build_weight_maxima(
        decoder, rank.layouts, mesh, resolve_dtypes(plan.precision).compute, rank.offloaded
    )
    if plan.placement.stages is not None:
        assert mesh is not None
        model.pipeline = _build_pipeline(
            model,
            plan.placement.stages,
            mesh,
            plan.batch.gradient_accumulation_steps,
            gradient_store,
        )
    return model


class _Rank:
    """A rank's decoder on which the steps work, and the weights that an offloading keeps of it.

    Attributes:
        offloaded: matrices of all blocks that an offloading keeps, by name.
        detached: those of this rank that leave their modules before FSDP2 shards the others: all,
            unless FSDP2 shards them and their shards are offloaded.
        layouts: of all parameters by name. A detached one has no ZeRO shards.
    """

    def __init__(
        self,
        decoder: Decoder,
        plan: Plan,
        mesh: Mesh | None,
        device: torch.device,
        read_slice: SliceReader,
        storage: AbstractContextManager[Any],
        offload: BlockWeightStore | None,
    ) -> None:
        self._decoder = decoder
        self._plan = plan
        self._layout = plan.layout
        self._mesh = mesh
        self._device = device
        self._read_slice = read_slice
        self._storage = storage
        self._offload = offload
        self._shard_offload = offload if isinstance(offload, TrainedShardStore) else None
        self.trained_offload = offload if isinstance(offload, TrainedWeightStore) else None
        self._precision = resolve_dtypes(plan.precision)
        self._coordinates = RankGrid(plan.layout).coordinates(0 if mesh is None else mesh.rank)
        self.layouts = dict(plan.placement.parameters)
        self.offloaded = {} if offload is None else list_block_matrices(decoder.shape)
        self.detached: list[BlockWeight] = []
        self._shard_groups: dict[str, ShardGroup] = {}

    def build_blocks(self) -> None:
        """Reduce the decoder to this rank's stages and shapes, and install hooks (1 to 3)."""
        decoder = self._decoder
        plan = self._plan
        mesh = self._mesh
        set_dtypes(decoder, self._precision)
        stages = plan.placement.stages
        if stages is not None:
            own = [stage for stage in stages if stage.rank == self._coordinates["pp"]]
            decoder.select_stages(own)
        narrow_parameters(decoder, self.layouts, self._layout, self._coordinates)
        decoder.install_parallel_hooks(
            ParallelHooks(
                context=build_context_parallel(plan.placement, mesh),
                expert=build_token_dispatcher(decoder.shape, self._layout, mesh),
                token_exchange=build_token_exchange(plan, mesh),
                tensor=build_tensor_parallel(self._layout, mesh),
            )
        )
        install_low_precision(decoder, plan, mesh, self._device)
        install_recompute(decoder, plan)
        if plan.pointwise.kind == "compiled":
            decoder.fuse_functions(COMPILED_FUNCTIONS)

    def detach_weights(self) -> None:
        """Take offloaded weights out of the modules, unless FSDP2 shards them."""
        names = {} if self._shard_offload is not None else self.offloaded
        self.detached = detach_weights(self._decoder, names)
        self._shard_groups = find_shard_groups(self.detached, self.layouts, self._mesh)
        for name in names:
            self.layouts[name] = drop_zero_shards(self.layouts[name], self._layout)

    def shard(self) -> list[FSDPModule]:
        """Shard blocks and root by FSDP2 (5); none if no rank shares a parameter's elements."""
        if not self._layout.is_sharded:
            if self._layout.zero_stage >= 1:
                logger.info(
                    "zero_stage %d on one rank shards nothing: the model is replicated",
                    self._layout.zero_stage,
                )
            return []
        assert self._mesh is not None
        return apply_fsdp(
            self._decoder,
            self._layout,
            self._mesh,
            self._precision,
            self._plan.placement.stages,
            {weight.spec.name for weight in self.detached},
            reshards_blocks=self._shard_offload is not None,
        )

    def write_weights(self, fsdp_modules: Sequence[FSDPModule]) -> None:
        """Allocate this rank's shards and write their values (6, 7); offloaded ones are stored."""
        with self._storage:
            if self._shard_offload is None:
                self._decoder.to_empty(device=self._device)
            else:
                store_shards(
                    self._decoder,
                    fsdp_modules,
                    self._shard_offload,
                    self.offloaded,
                    layouts=self.layouts,
                    layout=self._layout,
                    coordinates=self._coordinates,
                    device=self._device,
                    read_slice=self._read_slice,
                )
            resident = {
                name: part for name, part in self.layouts.items() if name not in self.offloaded
            }
            fill_parameters(
                self._decoder, resident, self._layout, self._coordinates, self._read_slice
            )

    def write_detached_weights(self) -> None:
        """Store the detached weights (7) and make them parameters of their modules again."""
        if self._offload is None or self._shard_offload is not None:
            return
        boxes = {
            weight.spec.name: compute_local_boxes(
                self.layouts[weight.spec.name], self._layout, self._coordinates
            )
            for weight in self.detached
        }
        sources = BlockWeightSources(self._read_slice, boxes, self._shard_groups)
        with self._storage:  # a block's memory is on the device until it is stored
            self._offload.attach(self._decoder, self.detached, sources)

    def copy_weights(self, fsdp_modules: Sequence[FSDPModule], *, is_compiled: bool) -> None:
        """Copy weights, or the shards that leave the device, to the compute precision (7)."""
        decoder = self._decoder
        dtype = self._precision.compute
        trained = self.trained_offload
        with self._storage:
            if fsdp_modules:
                decoder.working_weights = copy_shards(decoder, fsdp_modules, dtype, trained)
                return
            section = self._plan.precision.low_precision
            options = {} if section is None else list_compiler_options(section.recipe)
            # One graph for each shape of a matrix.
            fill = (
                compile_function(fill_operands, max_graphs=64, options=options)
                if is_compiled
                else None
            )
            decoder.working_weights = copy_weights(decoder, dtype, fill)
            if trained is not None:
                trained.write_copies(decoder.working_weights)

    def replicate(self, *, has_gradients: bool) -> tuple[nn.Module, list[PendingReduction]]:
        """Wrap the decoder in DDP where that reduces gradients (8).

        Returns:
            The module to call, and the reductions that no wrapper makes.
        """
        is_sharded = self._layout.is_sharded
        excluded_names = frozenset() if is_sharded else self._exclude_from_ddp()
        group = _find_replica_group(self._plan, self._mesh, has_gradients=has_gradients)
        module: nn.Module = self._decoder
        if group is not None:
            with self._storage:  # DDP's buckets are memory too
                module = apply_ddp(
                    self._decoder,
                    group,
                    bucket_size_bytes=self._layout.bucket_size_bytes,
                    reduce_dtype=self._precision.reduce,
                    device=self._device,
                    excluded_names=excluded_names,
                )
        elif has_gradients and not is_sharded:
            _report_reduce_dtype(self._layout, self._precision)
        if self._mesh is None:
            return module, []
        dtype = torch.promote_types(self._precision.param, self._precision.reduce)
        return module, list_pending_reductions(
            self.layouts,
            self._mesh,
            dtype=dtype,
            has_wrapper=is_sharded or group is not None,
            excluded_names=excluded_names,
        )

    def _exclude_from_ddp(self) -> frozenset[str]:
        """Return the names of parameters whose gradients DDP must not reduce over its group.

        Experts on different `ep` ranks are not copies of each other. Gradients of offloaded weights
        leave the device before DDP's buckets are reduced.
        """
        experts = {name for name, part in self.layouts.items() if "ep" in part.shard_axes}
        trained = self.trained_offload
        return frozenset(experts if trained is None else experts | trained.names)


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
        enter_backward=model.watch_backward,
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


def _report_reduce_dtype(layout: Layout, precision: PrecisionDtypes) -> None:
    """Log that the recipe's dtype of reductions is unused, if it is not the gradients' own."""
    if precision.reduce.itemsize < precision.param.itemsize:
        logger.info(
            "precision.reduce_dtype has no effect under %s: neither DDP nor FSDP reduces its "
            "gradients; they are summed in their own dtype, %s",
            layout,
            str(precision.param).removeprefix("torch."),
        )
