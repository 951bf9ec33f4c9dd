"""Memory, precision and communication of other training frameworks, as changes of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.architecture.expert_shape import ExpertShape
from shardwright.config.recipe import RecomputeMode
from shardwright.layout import Layout
from shardwright.layout.pipeline_stages import PipelineStage
from shardwright.planner.engine_model import (
    OPTIMIZER_COSTS,
    BlockBytes,
    EngineModel,
    OptimizerKind,
    SavedTensors,
)
from shardwright.planner.memory.backward_peak import BlockTensorBytes
from shardwright.planner.model_costs import ModelFacts, ParameterElements
from shardwright.planner.published import stage_rules
from shardwright.planner.published.host_lead import count_unfinished_passes
from shardwright.planner.published.host_update import HOST_MEMORY_SHARE, count_host_update_bytes
from shardwright.planner.published.node_dispatch import time_node_dispatch
from shardwright.planner.time.communication import NetworkModel, StridedGroup
from shardwright.planner.time.operation_passes import (
    FEW_PASSES,
    SEPARATE_ADAPTER_PASSES,
    AdapterPasses,
    ElementwisePasses,
)
from shardwright.schedule.registry import assign_stages


@dataclass(frozen=True)
class FrameworkConventions(EngineModel):
    """Memory, precision and communication conventions of a training framework.

    Bytes are per parameter. `weight_bytes` is what stays on the rank between steps (None:
    master weights in fp32, or fp64, which are cast at use). `master_bytes` is a second copy
    that is sharded with the optimizer states. `gradient_bytes` is the accumulated gradient
    (None: same as the master weights). Peaks of the backward pass, read from allocators, are
    modelled as the largest gradients plus all saved tensors of a block.
    """

    name: str = "shardwright"
    weight_bytes: float | None = None
    master_bytes: float = 0.0
    gradient_bytes: float | None = None
    has_half_precision_states: bool = False
    """Optimizer states in half precision, like the weights."""
    has_paged_states: bool = False
    """Optimizer states are in memory that the driver moves to the host (bitsandbytes' paged
    optimizers), which no allocator reports."""
    gather_bytes: float | None = None
    """Bytes per parameter gathered by zero_stage 3, in transfer and in memory. None: compute
    precision."""
    max_live_elements: float = 0.0
    """Gathered parameters that zero_stage 3 leaves in memory at most, because a later layer or
    pass needs them."""
    reduce_bytes: float | None = None
    """Bytes per gradient element in reductions. None: fp32, or 2 with `precision.reduce_dtype:
    bf16`."""
    nf4_bytes: float = 0.5 + 4.0 / 64
    """Bytes per element of a frozen NF4 matrix: 4 bits, and an fp32 scale per block of 64."""
    adapter_passes: AdapterPasses = SEPARATE_ADAPTER_PASSES
    """Reads and writes that adapters add to those of their matrices, by the trainer's kernels."""
    elementwise_passes: ElementwisePasses = FEW_PASSES
    """Reads and writes of the trainer's norms and rotary embeddings."""
    should_drop_frozen_inputs: bool = False
    """Inputs of matmuls and norms without an adapter are not saved: only gradients of frozen
    weights would need them."""
    unquantised_bytes: float | None = None
    """Bytes per frozen parameter that stays unquantised next to NF4 matrices. None: compute
    precision."""
    dequantisation_bytes: float = 6.0
    """Bytes moved per weight and pass to dequantise a frozen matrix."""
    has_separate_gradient_sum: bool = False
    """With fp32 gradient accumulation, the half-precision gradients stay in memory with their
    sums."""
    has_separate_gradient_stream: bool = False
    """Gradient shards are allocated on the stream of their reduction, which cannot reuse memory
    of freed activations."""
    update_copy_bytes: float = 0.0
    """Bytes per updated parameter of gradients that the update first copies into one tensor,
    which also needs memory of its own."""
    update_group_elements: float = float("inf")
    """Elements that zero_stage 3 updates at a time, of which alone these copies exist."""
    has_foreach_update: bool = False
    """AdamW updates all parameters with one operation after the other, and allocates the square
    roots of all second moments (torch/optim/adamw.py, `_multi_tensor_adamw`)."""
    reduced_elements: float = 0.0
    """Gradients that zero_stage 1 copies into one tensor to reduce them. No freed activation is as
    large, so it needs memory of its own."""
    has_flat_gather: bool = False
    """zero_stage 1 gathers updated weights into one tensor; freed logits may have room for it."""
    has_owner_broadcasts: bool = False
    has_device_gradient_shards: bool = False
    has_pipeline_grid: bool = False
    """A rank also communicates with all ranks, with those of its model copy, and with each
    neighbouring stage alone."""
    has_unsharded_gradients: bool = False
    """zero_stage 1 stores unsharded gradients even without accumulation (buffers that persist
    for the whole run)."""
    adapter_input_bytes: float = 0.0
    has_padding_mask: bool = False
    host_memory_bytes_per_second: float = 256e9
    """Bandwidth of a host's memory, all sockets."""
    num_gated_tensors: float = 3.0
    """Saved tensors of feed-forward width in a gated feed-forward: gate, up, product. 4 if the
    activation is saved too."""
    num_norm_tensors: float = 2.0
    """Saved tensors of model width per norm: its input (the residual stream) and its output
    (the matmuls' input)."""
    num_rotary_tensors: float = 0.0
    """Saved copies of queries and keys in the rotary embedding, or unrotated tensors of that size
    which the saved ones keep in memory."""
    should_recompute_attention_only: bool = False
    """`recompute: selective` is Megatron's (arXiv 2205.05198, section 5): attention between its
    projections runs again, all other tensors are saved."""
    selective_share: float = 1.0
    """Share of the results of matmuls and attention that `recompute: selective` saves.
    torchtitan saves every second matmul's."""
    eager_selective_share: float | None = None
    """The same share without compilation. None: the same value."""
    should_keep_collectives: bool = False
    """`recompute: selective` saves the results of tensor-parallel collectives."""
    should_save_gathered_sequence: bool = True
    """Under sequence parallelism the gathered input of column-parallel matmuls is saved rather
    than gathered again."""
    num_sequence_buffers: float = 0.0
    """Number of gathered sequences for which sequence parallelism has a buffer that persists
    for the whole run."""
    num_unreleased_sequences: float = 0.0
    """Largest number of whole sequences whose memory is not reusable yet because another stream
    may still read them: the host runs ahead of the device by that many. If memory is full, it
    waits instead."""
    poll_seconds: float = 0.0
    """Seconds that the host sleeps until it looks again whether a header of a pipeline message
    has arrived. Each message has two headers, for whose arrival both ranks wait."""
    score_bytes: float | None = None
    """Bytes moved per attention score without a fused kernel. None: eager operations, in fp32
    with casts."""
    logit_bytes: float = 8.0
    """Bytes per logit if the loss materialises all of them at once (`loss_chunk_tokens`
    None)."""
    sharded_logit_bytes: float | None = None
    """Bytes per logit if tensor-parallel ranks shard the vocabulary. None: the same value."""
    should_save_fp4_matmuls: bool = True
    """True if `recompute: selective` saves the results of 4-bit matmuls. A list of operators
    that omits them recomputes them."""
    should_gather_logits: bool = False
    """Tensor-parallel ranks gather the logits of the whole vocabulary before the loss."""
    should_load_unsharded: bool = False
    """Every rank loads unsharded weights before sharding them, and the allocator never releases
    that memory."""
    has_node_dispatch: bool = False
    """Tokens for several experts of one node are sent to that node once (DeepEP, HybridEP)."""
    has_unsharded_experts: bool = False
    """Experts are distributed over the tensor-parallel ranks too, each one unsharded. Each rank
    sends the rows of its part of the sequence."""
    stage_rule: stage_rules.StageRule = "weighed"
    """Rule that assigns layers to pipeline stages."""
    should_gather_per_tensor: bool = False
    """zero_stage 3 gathers and reduces each tensor separately, not a block at a time."""
    should_defer_stage_2: bool = False
    """zero_stage 2 reduces gradients once per step, not once per micro-batch."""

    has_unsharded_sums: bool = False
    """zero_stage 1 sums the gradients of a step as zero_stage 0 does, but after the backward
    pass."""

    @property
    def has_master_weights(self) -> bool:
        return self.weight_bytes is None

    @property
    def has_wide_gradients(self) -> bool:
        return False

    @property
    def weight_shard_stage(self) -> int:
        return 1 if self.weight_bytes is None else 3

    def get_weight_bytes(self, master_bytes: int) -> float:
        return master_bytes if self.weight_bytes is None else self.weight_bytes

    def compute_quantised_weight_bytes(
        self, num_matrix_elements: float, num_other_elements: float, activation_bytes: int
    ) -> float:
        other_bytes = activation_bytes if self.unquantised_bytes is None else self.unquantised_bytes
        return num_other_elements * other_bytes + num_matrix_elements * self.nf4_bytes

    def compute_loading_bytes(self, unsharded_bytes: float, zero_stage: int) -> float:
        return unsharded_bytes if self.should_load_unsharded and zero_stage == 3 else 0.0

    def compute_staging_bytes(self, optimizer_bytes: float, buffer_bytes: int) -> float:
        return 0.0

    def compute_offloaded_update_seconds(
        self,
        update_seconds: float,
        num_elements: float,
        state_bytes: float,
        rate: float,
        num_local_ranks: int,
    ) -> float:
        num_bytes = count_host_update_bytes(
            num_elements,
            state_bytes,
            has_master_copies=self.master_bytes > 0,
            width=2 if self.has_half_precision_states else 4,
        )
        host_rate = HOST_MEMORY_SHARE * self.host_memory_bytes_per_second / num_local_ranks
        return num_bytes / host_rate + num_elements * 8 / rate

    @property
    def overlaps_offloaded_update(self) -> bool:
        return False

    def count_live_elements(self, num_elements: float) -> float:
        return min(self.max_live_elements, num_elements)

    def get_gather_bytes(self, activation_bytes: int) -> float:
        return float(activation_bytes) if self.gather_bytes is None else self.gather_bytes

    def should_recompute_casts(self, recompute: RecomputeMode) -> bool:
        return recompute == "full"

    def get_gradient_bytes(self, master_bytes: int) -> float:
        return float(master_bytes) if self.gradient_bytes is None else self.gradient_bytes

    def get_reduce_bytes(self, master_bytes: int, *, should_reduce_in_bf16: bool) -> float:
        if self.reduce_bytes is not None:
            return self.reduce_bytes
        return super().get_reduce_bytes(master_bytes, should_reduce_in_bf16=should_reduce_in_bf16)

    def get_optimizer_bytes(self, optimizer: OptimizerKind, master_bytes: int) -> float:
        state_bytes = OPTIMIZER_COSTS[optimizer].state_bytes * (2 if master_bytes == 8 else 1)
        if self.has_half_precision_states and optimizer != "adamw_8bit":
            state_bytes /= 2
        return (0.0 if self.has_paged_states else state_bytes) + self.master_bytes

    def compute_update_temporary_bytes(
        self, optimizer: OptimizerKind, num_elements: float
    ) -> float:
        if not self.has_foreach_update or optimizer != "adamw":
            return 0.0
        return num_elements * (2 if self.has_half_precision_states else 4)

    @property
    def has_gradient_buffers(self) -> bool:
        return self.has_unsharded_gradients

    def should_store_unsharded_gradients(self, zero_stage: int, *, is_accumulated: bool) -> bool:
        if zero_stage == 1 and self.has_unsharded_gradients:
            return True
        is_deferred = zero_stage == 2 and self.should_defer_stage_2 and is_accumulated
        return is_deferred or super().should_store_unsharded_gradients(
            zero_stage, is_accumulated=is_accumulated
        )

    def should_reduce_each_micro_batch(self, zero_stage: int) -> bool:
        return zero_stage == 3 or (zero_stage == 2 and not self.should_defer_stage_2)

    @property
    def sums_whole_stages(self) -> bool:
        return False

    def has_late_sums(self, zero_stage: int) -> bool:
        return zero_stage == 1 and self.has_unsharded_sums

    def compute_message_wait_seconds(self, num_stages: int) -> float:
        num_messages = min(4, 2 * (num_stages - 1))
        return 2 * num_messages * self.poll_seconds

    def count_other_communicators(self, layout: Layout) -> int:
        if not self.has_pipeline_grid:
            return 0
        return sum((layout.world_size > 1, layout.tp * layout.pp > 1, layout.pp > 1, layout.pp > 2))

    def compute_pending_gradient_bytes(self, num_bytes: float) -> float:
        return 0.0

    def compute_late_allocation_bytes(
        self,
        layout: Layout,
        trained: ParameterElements,
        *,
        gradient_bytes: float,
        peak_gradient_bytes: float,
        peak_logit_bytes: float,
    ) -> float:
        is_sharded = layout.zero_stage >= 1 and layout.fsdp > 1
        late_shards = (
            max(0.0, gradient_bytes - peak_gradient_bytes)
            if self.has_separate_gradient_stream and is_sharded
            else 0.0
        )
        updated = trained.sharded if layout.zero_stage else trained.local
        if layout.zero_stage == 3:
            updated = min(updated, self.update_group_elements)
        update_copies = self.update_copy_bytes * updated
        if is_sharded:
            reduced = min(self.reduced_elements, trained.local)
            update_copies += reduced * (self.reduce_bytes or 0.0)
        # The freed logits leave blocks of the copies' size.
        late_copies = max(0.0, update_copies - peak_logit_bytes)
        if self.has_flat_gather and layout.zero_stage == 1 and layout.fsdp > 1:
            gathered = (self.weight_bytes or 0.0) * trained.local
            if gathered > peak_logit_bytes * 4.0 / self.logit_bytes:  # the fp32 copy
                late_copies += gathered
        return late_shards + late_copies

    @property
    def has_ordered_frees(self) -> bool:
        return False

    def count_saved_tensors(self, adapted_roles: tuple[str, ...] | None) -> SavedTensors:
        tensors = SavedTensors(
            norm=self.num_norm_tensors,
            gated=self.num_gated_tensors,
            rotary=self.num_rotary_tensors,
            ring_outputs=0.0,
        )
        if adapted_roles is None or not self.should_drop_frozen_inputs:
            return tensors
        roles = set(adapted_roles)
        return tensors._replace(
            norm=max(2.0, self.num_norm_tensors - 1.0),
            column_inputs=bool(roles & {"query", "key", "value", "qkv"})
            + bool(roles & {"gate", "up", "gate_up"}),
            dropped_inner=int("down" not in roles),
        )

    def compute_router_input_bytes(
        self,
        fp32_input_bytes: float,
        matmul_input_bytes: float,
        *,
        has_shared_expert: bool,
        is_half_precision: bool,
        is_frozen: bool,
    ) -> float:
        return 0.0

    def compute_block_gradient_bytes(
        self, block: BlockTensorBytes, branch_gradient_bytes: float
    ) -> float:
        return branch_gradient_bytes + 2 * block.stream

    def compute_selective_bytes(
        self, block: BlockBytes, *, is_fp4: bool, is_compiled: bool
    ) -> tuple[float, float]:
        if self.should_recompute_attention_only:
            return block.total - block.attention_scores, block.attention_scores
        if is_fp4 and not self.should_save_fp4_matmuls:
            saved = block.residual + block.attention_output
            return saved, max(0.0, block.total - saved)
        eager_share = None if is_compiled else self.eager_selective_share
        share = self.selective_share if eager_share is None else eager_share
        saved = block.residual + share * (block.matmul_results + 2 * block.branch_output)
        return saved, max(0.0, block.total - block.residual - share * block.matmul_results)

    def choose_largest_backward(self, layers: Sequence[tuple[float, float]]) -> tuple[float, float]:
        return (
            max((recomputed for recomputed, _ in layers), default=0.0),
            max((gradients for _, gradients in layers), default=0.0),
        )

    def compute_sequence_buffer_bytes(
        self,
        gathered_bytes: float,
        *,
        num_layers: int,
        num_passes: float | None,
        is_accumulated: bool,
    ) -> float:
        num_unfinished = count_unfinished_passes(num_passes, is_accumulated=is_accumulated)
        # A pass sums the embedding and two branches per layer.
        num_unreleased = min(self.num_unreleased_sequences, num_unfinished * (2.0 * num_layers + 1))
        return (self.num_sequence_buffers + num_unreleased) * gathered_bytes

    def compute_full_logit_bytes(self, tokens: int, vocab_size: int, tp: int) -> float:
        vocab_on_rank = vocab_size if self.should_gather_logits else vocab_size / tp
        sharded_bytes = self.sharded_logit_bytes if tp > 1 else None
        return (
            tokens * vocab_on_rank * (self.logit_bytes if sharded_bytes is None else sharded_bytes)
        )

    @property
    def has_fused_losses(self) -> bool:
        return False

    @property
    def num_chunked_loss_inputs(self) -> int:
        return 1

    def get_score_bytes(self, activation_bytes: int) -> float:
        if self.score_bytes is not None:
            return self.score_bytes
        return super().get_score_bytes(activation_bytes)

    def count_gather_groups(self, num_block_groups: int, num_tensors: int) -> int:
        return num_tensors if self.should_gather_per_tensor else num_block_groups

    def count_expert_tensor_ranks(self, tp: int) -> int:
        return tp if self.has_unsharded_experts else 1

    def time_expert_exchange(
        self,
        network: NetworkModel,
        group: StridedGroup,
        experts: ExpertShape,
        tokens: float,
        row_bytes: int,
        sequence_group: StridedGroup | None,
    ) -> float:
        if not self.has_node_dispatch:
            return super().time_expert_exchange(
                network, group, experts, tokens, row_bytes, sequence_group
            )
        return time_node_dispatch(network, group, experts, tokens, row_bytes, sequence_group)

    def partition_layers(
        self, facts: ModelFacts, layout: Layout, sequence_length: int
    ) -> Sequence[PipelineStage]:
        if self.stage_rule == "weighed":
            return super().partition_layers(facts, layout, sequence_length)
        ranks = assign_stages(layout.schedule, layout.pp, layout.virtual_stages)
        if self.stage_rule == "even":
            counts = stage_rules.assign_evenly(facts.shape.num_layers, len(ranks))
            head_stage = len(ranks) - 1
        else:
            costs = [
                sum(float(p.num_inputs * p.num_outputs) for p in facts.kinds[slot].matmuls)
                for slot in facts.slot_of_layer
            ]
            head_cost = float(facts.head.num_inputs * facts.head.num_outputs)
            counts, head_stage = stage_rules.assign_by_running_sum(
                costs, head_cost, len(ranks), should_exceed=self.stage_rule == "running_sum"
            )
        begin = 0
        stages = []
        for index, (count, rank) in enumerate(zip(counts, ranks, strict=True)):
            stages.append(
                PipelineStage(index, rank, begin, begin + count, index == 0, index == head_stage)
            )
            begin += count
        return stages
