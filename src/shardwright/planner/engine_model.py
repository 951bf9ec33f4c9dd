"""Formulas of shardwright's own engine at the points where training frameworks differ.

The planner calls them through `Candidate.engine`. `planner.published.conventions` overrides them
for other frameworks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from shardwright.architecture.expert_shape import ExpertShape
from shardwright.config.recipe import RecomputeMode
from shardwright.config.training import OptimizerName, OptimizerSection
from shardwright.layout import Layout
from shardwright.layout.pipeline_stages import PipelineStage
from shardwright.placement import partition_stages
from shardwright.planner.memory.backward_peak import BlockTensorBytes, compute_peak_gradient_bytes
from shardwright.planner.model_costs import ModelFacts, ParameterElements
from shardwright.planner.time.communication import NetworkModel, StridedGroup
from shardwright.planner.time.operation_passes import (
    OWN_ADAPTER_PASSES,
    OWN_PASSES,
    AdapterPasses,
    ElementwisePasses,
)

OptimizerKind = OptimizerName | Literal["sgd_momentum"]


class OptimizerCosts(NamedTuple):
    """Bytes per trained fp32 parameter, and the places where an optimizer can run.

    Not counted: Adafactor's states (`memory.state_memory` has them), Muon's matmuls and traffic.
    """

    state_bytes: float
    """Bytes of state, without master weights, of a matrix of a block."""
    update_bytes: float
    """Bytes that norm, clip and update read and write, 4 of them for the norm."""
    has_one_pass: bool
    """True if a compiled update multiplies gradients by the factor of clipping (8 of the bytes) and
    writes working weights itself."""
    can_update_on_host: bool
    """True if the update needs no other rank and no matrix products, so a host can run it."""
    other_bytes: float = 0.0
    """Bytes of state that parameters other than matrices of blocks have in addition."""


OPTIMIZER_COSTS: dict[OptimizerKind, OptimizerCosts] = {
    "adamw": OptimizerCosts(8.0, 40.0, has_one_pass=True, can_update_on_host=True),
    # One fp32 scale per block of 256 elements, for each moment.
    "adamw_8bit": OptimizerCosts(2.0 + 8.0 / 256, 28.0, has_one_pass=True, can_update_on_host=True),
    "adafactor": OptimizerCosts(0.0, 36.0, has_one_pass=False, can_update_on_host=False),
    "muon": OptimizerCosts(4.0, 44.0, has_one_pass=False, can_update_on_host=False, other_bytes=4),
    "sgd": OptimizerCosts(0.0, 24.0, has_one_pass=False, can_update_on_host=True),
    "sgd_momentum": OptimizerCosts(4.0, 32.0, has_one_pass=False, can_update_on_host=True),
}


def choose_optimizer_kind(section: OptimizerSection) -> OptimizerKind:
    """Choose the row of costs of a recipe's optimizer."""
    return "sgd_momentum" if section.name == "sgd" and section.momentum else section.name


_NF4_BYTES = 0.5 + 4.0 / 64
"""Bytes per element of a frozen NF4 matrix: 4 bits, and an fp32 scale per block of 64."""
_DEQUANTISATION_BYTES = 6.0
"""Bytes moved per NF4 weight of a matmul: 4 bits read, looked up and written, scaled by scales
that are quantised too."""


class SavedTensors(NamedTuple):
    """Numbers of tensors that a block saves for its backward pass."""

    norm: float = 2.0
    """Per norm, of model width: its input (the residual stream) and its output (the matmuls'
    input)."""
    column_inputs: int = 2
    """Shared inputs of column-parallel matmuls: one per branch."""
    gated: float = 3.0
    """Of feed-forward width in a gated feed-forward: gate, up, product."""
    dropped_inner: int = 0
    """Of feed-forward width, counted above, that a dense block does not save."""
    rotary: float = 0.0
    """Copies of queries and keys in the rotary embedding."""
    ring_outputs: float = 1.0
    """Additional outputs of ring attention, saved in head order and in token order."""
    expert_outputs: float = 1.0
    """Of the results of experts in the order of experts, besides those in token order."""


class BlockBytes(NamedTuple):
    """Bytes of a block's tensors: all saved ones, the residual stream, results of matmuls and
    attention, a branch's output, the attention kernel's output, unfused scores, results of
    adapters' products, and the excess of results of emulated products over 16 bits."""

    total: float
    residual: float
    matmul_results: float
    branch_output: float
    attention_output: float
    attention_scores: float = 0.0
    saved_communication: float | None = None
    """Bytes of the results of tensor-parallel collectives; None without tensor parallelism."""
    released_communication: float = 0.0
    """Part of them that is among `total`, or freed as soon as the block has run again."""
    adapter_results: float = 0.0
    widening: float = 0.0


@dataclass(frozen=True)
class EngineModel:
    """Memory, precision and communication of shardwright's engine. Bytes are per parameter
    unless a method states otherwise."""

    @property
    def adapter_passes(self) -> AdapterPasses:
        """Reads and writes of adapters in addition to their matrices."""
        return OWN_ADAPTER_PASSES

    @property
    def elementwise_passes(self) -> ElementwisePasses:
        """Reads and writes of norms and rotary embeddings that are not compiled."""
        return OWN_PASSES

    @property
    def has_ordered_frees(self) -> bool:
        """True if a peak is that of the operations in their order: each frees what only it needed.
        False if peaks were read from allocators."""
        return True

    # Weights.

    @property
    def has_master_weights(self) -> bool:
        """True if the weights between steps are the master weights, which are cast or gathered
        in the compute precision at use."""
        return True

    @property
    def has_wide_gradients(self) -> bool:
        """True if products write gradients of fp32 weights in fp32 where the device can."""
        return True

    @property
    def weight_shard_stage(self) -> int:
        """Lowest ZeRO stage that shards the weights: all parameters are FSDP2's from stage 1."""
        return 1

    def get_weight_bytes(self, master_bytes: int) -> float:
        """Return the bytes of a trained weight between steps."""
        return master_bytes

    def compute_quantised_weight_bytes(
        self, num_matrix_elements: float, num_other_elements: float, activation_bytes: int
    ) -> float:
        """Compute the total bytes of a frozen model in NF4 and of its unquantised parameters."""
        return num_other_elements * activation_bytes + num_matrix_elements * _NF4_BYTES

    def compute_loading_bytes(self, unsharded_bytes: float, zero_stage: int) -> float:
        """Compute total bytes that remain allocated after a frozen model is loaded."""
        return 0.0

    def count_live_elements(self, num_elements: float) -> float:
        """Count the gathered elements that zero_stage 3 leaves in memory for later use, of
        `num_elements` of the rank's stage."""
        return 0.0

    def get_gather_bytes(self, activation_bytes: int) -> float:
        """Return the bytes of a gathered parameter, in transfer and in memory."""
        return float(activation_bytes)

    def should_recompute_casts(self, recompute: RecomputeMode) -> bool:
        """Return True if casts of replicated weights are repeated rather than saved."""
        return recompute != "none"

    @property
    def dequantisation_bytes(self) -> float:
        """Bytes moved per weight and pass to dequantise a frozen matrix."""
        return _DEQUANTISATION_BYTES

    # Gradients and optimizer states.

    def get_gradient_bytes(self, master_bytes: int) -> float:
        """Return the bytes of an accumulated gradient."""
        return float(master_bytes)

    def get_reduce_bytes(self, master_bytes: int, *, should_reduce_in_bf16: bool) -> float:
        """Return the bytes of a gradient element in reductions."""
        return 2.0 if should_reduce_in_bf16 else max(4.0, float(master_bytes))

    def get_optimizer_bytes(self, optimizer: OptimizerKind, master_bytes: int) -> float:
        """Return the bytes of optimizer states of a matrix of a block, and of master weights in
        addition to the weights."""
        scale = 1.0 if optimizer == "adamw_8bit" else master_bytes / 4  # codes keep their size
        return OPTIMIZER_COSTS[optimizer].state_bytes * scale

    def compute_staging_bytes(self, optimizer_bytes: float, buffer_bytes: int) -> float:
        """Compute total device bytes of the buffers through which offloaded states pass."""
        return min(optimizer_bytes, 3.0 * buffer_bytes)

    def compute_update_temporary_bytes(
        self, optimizer: OptimizerKind, num_elements: float
    ) -> float:
        """Compute total bytes that the update allocates in addition to its states."""
        return 0.0

    def compute_offloaded_update_seconds(
        self,
        update_seconds: float,
        num_elements: float,
        state_bytes: float,
        rate: float,
        num_local_ranks: int,
    ) -> float:
        """Compute the seconds of an update whose states are read and written back at `rate` bytes
        per second in each direction, during the update. `num_local_ranks` share a host."""
        return max(update_seconds, state_bytes / rate)

    @property
    def overlaps_offloaded_update(self) -> bool:
        """True if each module waits for the update of its own weights only."""
        return True

    @property
    def has_gradient_buffers(self) -> bool:
        """True if buffers of unsharded gradients persist for the whole run."""
        return False

    def should_store_unsharded_gradients(self, zero_stage: int, *, is_accumulated: bool) -> bool:
        """Return True if gradients are unsharded until their last micro-batch."""
        return zero_stage == 0 or (zero_stage == 1 and is_accumulated)

    def should_reduce_each_micro_batch(self, zero_stage: int) -> bool:
        """Return True if sharded gradients are reduced after each micro-batch."""
        return zero_stage >= 2

    @property
    def sums_whole_stages(self) -> bool:
        """True if replicated gradients of a pipeline stage are summed over data ranks when its last
        backward pass has ended, during those of the rank's other stages. False if they are summed
        in buckets during that pass."""
        return True

    def has_late_sums(self, zero_stage: int) -> bool:
        """Return True if one all-reduce sums all gradients after the last backward pass, and one
        all-gather follows the update; neither overlaps."""
        return False

    @property
    def has_device_gradient_shards(self) -> bool:
        """True if reduced shards of gradients of offloaded parameters are on the device until the
        backward pass ends."""
        return False

    @property
    def has_owner_broadcasts(self) -> bool:
        """True if zero_stage 1 updates each tensor on one rank, to which its gradients are reduced
        and which then broadcasts it, one after the other; only reductions overlap."""
        return False

    def compute_message_wait_seconds(self, num_stages: int) -> float:
        """Compute the seconds that the host of a pipeline rank waits for messages of a micro-batch
        while its device has no work."""
        return 0.0

    def count_other_communicators(self, layout: Layout) -> int:
        """Count a rank's communicators besides those of the axes of the layout."""
        return 0

    def compute_pending_gradient_bytes(self, num_bytes: float) -> float:
        """Return total gradient bytes not yet allocated at the peak of the first layer's backward
        pass, of `num_bytes` that are allocated during or after it."""
        return num_bytes

    def compute_late_allocation_bytes(
        self,
        layout: Layout,
        trained: ParameterElements,
        *,
        gradient_bytes: float,
        peak_gradient_bytes: float,
        peak_logit_bytes: float,
    ) -> float:
        """Compute total bytes allocated after the peak because no freed block is large enough
        or belongs to that stream. Given are total bytes and those at the peak."""
        return 0.0

    # Activations, in total bytes of one micro-batch.

    @property
    def adapter_input_bytes(self) -> float:
        """Bytes that an adapter saves per element of its input, beyond those of its product."""
        return 0.0

    @property
    def has_padding_mask(self) -> bool:
        """True if attention takes the mask of padded rows, with which no kernel skips keys."""
        return False

    def count_saved_tensors(self, adapted_roles: tuple[str, ...] | None) -> SavedTensors:
        """Count the tensors that a block saves. `adapted_roles` have adapters, None without."""
        return SavedTensors(expert_outputs=0.0)

    @property
    def should_keep_collectives(self) -> bool:
        """True if `recompute: selective` saves the results of tensor-parallel collectives."""
        return True

    @property
    def should_save_gathered_sequence(self) -> bool:
        """True if sequence parallelism saves the gathered input of column-parallel matmuls
        rather than gathering it again."""
        return True

    def compute_router_input_bytes(
        self,
        fp32_input_bytes: float,
        matmul_input_bytes: float,
        *,
        has_shared_expert: bool,
        is_half_precision: bool,
        is_frozen: bool,
    ) -> float:
        """Compute the bytes that a sparse layer saves of its input beyond a dense layer.

        The router saves its input in fp32, unless its weight is frozen. The experts save the rows
        sent to them instead of the layer's input, which only a shared expert saves in the compute
        precision.
        """
        if is_frozen:
            return 0.0 if has_shared_expert else -matmul_input_bytes
        if has_shared_expert:
            return fp32_input_bytes if is_half_precision else 0.0
        return fp32_input_bytes - matmul_input_bytes

    def compute_block_gradient_bytes(
        self, block: BlockTensorBytes, branch_gradient_bytes: float
    ) -> float:
        """Compute the peak bytes of a block's backward pass beyond its saved tensors.
        `branch_gradient_bytes`: all gradients of the larger branch."""
        return compute_peak_gradient_bytes(block)

    @property
    def should_recompute_attention_only(self) -> bool:
        """True if `recompute: selective` repeats attention between its projections and saves all
        other tensors."""
        return False

    def compute_selective_bytes(
        self, block: BlockBytes, *, is_fp4: bool, is_compiled: bool
    ) -> tuple[float, float]:
        """Return bytes that `recompute: selective` saves and recomputes.

        It saves the block's input, the results of matmuls, and attention's output. Each branch
        ends with a matmul of the residual width. The result of attention's output projection is
        freed as soon as the block runs again: nothing else reads it. Under tensor parallelism the
        results of the collectives are saved in place of those two matmuls'. With adapters nothing
        reads the results of products either, only their sums, nor with emulated products, which
        are saved in fp32, only their 16-bit copies; the recomputed bytes may be negative.
        """
        others = block.adapter_results + block.widening
        if block.saved_communication is not None:
            saved = block.residual + block.matmul_results + block.saved_communication
            if others:
                return saved + others, block.total - saved - others
            recomputed = block.total - block.residual - block.matmul_results
            return saved, max(0.0, recomputed - block.released_communication)
        saved = block.residual + (block.matmul_results + 2 * block.branch_output)
        if others:
            return saved + others, block.total - saved - others
        recomputed = block.total - block.residual - block.branch_output - block.matmul_results
        return saved, max(0.0, recomputed)

    def choose_largest_backward(self, layers: Sequence[tuple[float, float]]) -> tuple[float, float]:
        """Return recomputed and gradient bytes of the layer with the largest sum of both."""
        return max([(0.0, 0.0), *layers], key=sum)

    def compute_sequence_buffer_bytes(
        self,
        gathered_bytes: float,
        *,
        num_layers: int,
        num_passes: float | None,
        is_accumulated: bool,
    ) -> float:
        """Compute bytes of gathered sequences that outlive their use. `gathered_bytes`: one.
        `num_passes`: passes in flight through the rank's layers, None without a pipeline.
        `is_accumulated`: a step has several micro-batches."""
        return 0.0

    def compute_full_logit_bytes(self, tokens: int, vocab_size: int, tp: int) -> float:
        """Compute bytes at the loss if it materialises all logits at once: 8 per logit."""
        return tokens * (vocab_size / tp) * 8.0

    @property
    def has_fused_losses(self) -> bool:
        """True if compiled code replaces a chunk's logits by their gradient in one pass."""
        return True

    @property
    def num_chunked_loss_inputs(self) -> int:
        """Tensors of the hidden states' size in the chunked loss: their gradient, and the hidden
        states, which every chunk reads."""
        return 2

    # Time.

    def get_score_bytes(self, activation_bytes: int) -> float:
        """Return bytes moved per attention score without a fused kernel: about ten passes, in
        fp32 and the compute precision."""
        return 8 + 6 * activation_bytes

    def count_gather_groups(self, num_block_groups: int, num_tensors: int) -> int:
        """Count the calls that gather a rank's parameters: one per group of blocks."""
        return num_block_groups

    def count_expert_tensor_ranks(self, tp: int) -> int:
        """Return over how many tensor-parallel ranks whole experts are distributed. 1 if each
        expert is sharded instead."""
        return 1

    def time_expert_exchange(
        self,
        network: NetworkModel,
        group: StridedGroup,
        experts: ExpertShape,
        tokens: float,
        row_bytes: int,
        sequence_group: StridedGroup | None,
    ) -> float:
        """Return seconds to send a rank's rows to their experts and the results back.

        `sequence_group` are the tensor-parallel ranks among which the sequence of sharded experts
        is sharded, None if it is not.
        """
        return 2 * network.time_all_to_all(group, tokens * experts.experts_per_token * row_bytes)

    def partition_layers(
        self, facts: ModelFacts, layout: Layout, sequence_length: int
    ) -> Sequence[PipelineStage]:
        """Partition the layers into pipeline stages."""
        stages = partition_stages(facts.shape, layout, sequence_length)
        assert stages is not None, layout
        return stages


SHARDWRIGHT_ENGINE = EngineModel()
