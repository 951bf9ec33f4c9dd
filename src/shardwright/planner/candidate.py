"""Everything that changes the memory or time of a training step, as one value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwright.architecture.expert_shape import ExpertShape
from shardwright.config.model import AttentionSetting
from shardwright.config.offload import DEFAULT_BUFFER_BYTES, OffloadTier
from shardwright.config.recipe import RecomputeMode
from shardwright.config.training import should_cast_once
from shardwright.layout import Layout
from shardwright.layout.degrees import DEEP_EP_ROW_UNIT
from shardwright.layout.saved_results import LayerResults
from shardwright.planner.engine_model import (
    OPTIMIZER_COSTS,
    SHARDWRIGHT_ENGINE,
    EngineModel,
    OptimizerKind,
)
from shardwright.planner.expert_loads import ExpertRankLoads
from shardwright.planner.low_precision import ScaledShares
from shardwright.planner.model_costs import ParameterElements
from shardwright.schedule.registry import has_split_backward

Precision = Literal["fp32", "fp64", "bf16", "fp16", "fp8", "nvfp4"]
"""Precision of matmuls. fp8 and nvfp4 keep activations and everything but the matmuls in
bf16, or in the precision that the recipe computes in."""

_WIDE_BYTES = {"fp32": 4, "fp64": 8}  # of precisions of more than 16 bits

OffloadKind = Literal["none", "optimizer", "optimizer_disk", "parameters"]
"""Optimizer states in host memory, or on disk; or parameters and states in host memory."""

OPTIMIZER_OFFLOADS: dict[OffloadTier, OffloadKind] = {
    "none": "none",
    "host": "optimizer",
    "disk": "optimizer_disk",
}
"""Kind of offloading by the tier of the optimizer states."""

AttentionLoads = tuple[tuple[int | None, float], ...]
"""Attention work of the busiest context-parallel rank over the mean of all, by window of the
layers (None for layers without one)."""

EXCHANGE_INDEX_BYTES = 4
"""Bytes of an index of a row or of a choice, int32."""

ReferenceKind = Literal["none", "frozen", "adapter_off"]
"""Reference model of preference training: none (no preferences), a frozen copy of the model, or
the model without its adapters. The reference computes one forward pass of every micro-batch
before the model's first one. The copy takes memory."""


@dataclass(frozen=True)
class LowRankAdapter:
    """Low-rank adapters of frozen weights, of rank `rank`, for each matrix of `roles`.

    `quantised` stores the frozen matrices of the blocks in NF4 (QLoRA, arXiv 2305.14314).
    """

    rank: int
    roles: tuple[str, ...] = (
        *("query", "key", "value", "qkv", "attention_out"),
        *("gate", "up", "gate_up", "down"),
    )
    quantised: bool = False
    unquantised: tuple[str, ...] = ()
    """Roles that stay in the compute precision when the rest is quantised (litgpt's fused
    queries, keys and values)."""
    has_magnitudes: bool = False
    """True if each output has a trained magnitude (DoRA, arXiv 2402.09353)."""
    has_dropout: bool = False
    """True if each adapter drops elements of its input: it saves the rest, and which they are."""


@dataclass(frozen=True)
class Candidate:
    """A layout with its batch arithmetic, precision, recomputation, optimizer and adapters.

    Under pp the micro-batches of the schedule are the accumulation steps. `document_tokens` is
    the mean length of packed documents, if the attention kernel skips others. None: one per row.
    """

    layout: Layout
    sequence_length: int
    micro_batch_size: int = 1
    gradient_accumulation_steps: int = 1
    precision: Precision = "bf16"
    scaled_shares: ScaledShares | None = None
    """With `fp8` or `nvfp4` as this trainer computes it: the products with such operands. None: all
    products of the blocks, with weights quantised once per step, as in published runs."""
    recompute: RecomputeMode = "none"
    saved_results: tuple[LayerResults, ...] | None = None
    """Results that each layer of the model saves with `mixed` recomputation; None otherwise."""
    optimizer: OptimizerKind = "adamw"
    scale_block_size: int = 256
    """Elements of an 8-bit moment that share a scale (`optimizer.block_size`)."""
    adapter: LowRankAdapter | None = None
    offload: OffloadKind = "none"
    is_updated_on_host: bool = False
    """True if the host updates offloaded states: moments do not pass through the device."""
    parameter_offload: OffloadTier = "none"
    """Tier of the matrices of blocks between their uses; with adapters the frozen ones."""
    keeps_zeros: bool = False
    """True if zeros of weights are restored after each update (`model.keep_zeros`)."""
    needs_gradient_norm: bool = True
    """False if no update of offloaded states waits for the norm of the whole gradient."""
    activation_offload: OffloadTier = "none"
    """Tier to which blocks move what they save for the backward pass."""
    offload_buffer_bytes: int = DEFAULT_BUFFER_BYTES
    """Size of a staging buffer of offloaded states."""
    ahead_bytes: int = 0
    """Device memory, beyond staging buffers, for moments in host memory that are read early."""
    resident_state_bytes: int = 2 * DEFAULT_BUFFER_BYTES
    """Two buffers: moments on disk beyond a third one stay in them from step to step."""
    reference: ReferenceKind = "none"
    should_reduce_in_bf16: bool = False
    has_bf16_masters: bool = False
    """True if weights, gradients and moments are stored in bf16 (`precision.master_weights`)."""
    working_weights: bool | Literal["auto"] = False
    """Setting of `precision.working_weights`."""
    compile: bool = False
    flash_attention: bool = True
    attention: AttentionSetting = "auto"
    has_masked_kernels: bool = False
    """True if the device has fused kernels for documents, windows, soft caps and sinks (CUDA)."""
    has_fused_norms: bool = True
    """True if one kernel computes a norm's gradient. On the CPU separate fp32 operations do."""
    has_wide_products: bool = True
    """True if one kernel multiplies 16-bit operands and writes fp32: not on the CPU."""
    has_fused_functions: bool = False
    """True if norms, gates and rotations are compiled functions (`model.fused_pointwise`)."""
    compile_functions: bool | Literal["auto"] = False
    """Setting of `model.compile_functions`."""
    document_tokens: int | None = None
    num_fp4_layers: int | None = None
    """With `nvfp4`: number of first layers that use it; the others use bf16. None: all."""
    loss_chunk_tokens: int | None = 1024
    has_liger_loss: bool = False
    """True if Liger's kernel computes the loss; predicted as chunks of `loss_chunk_tokens`."""
    is_loss_chunk_auto: bool = False
    """True if a run on a GPU may take more than `loss_chunk_tokens` (`planner.memory_settings`)."""
    is_read_ahead_auto: bool = False
    """The same for `ahead_bytes`."""
    expert_loads: ExpertRankLoads | None = None
    """Loads of expert-parallel ranks that a run logged. None: even loads."""
    attention_loads: AttentionLoads = ()
    """Loads of context-parallel ranks that share packed rows. Empty: even."""
    engine: EngineModel = SHARDWRIGHT_ENGINE
    """Formulas of the framework that runs the step."""

    @property
    def has_fused_losses(self) -> bool:
        """True if a chunk's losses and gradient are one compiled function. Ranks that share the
        vocabulary exchange sums in between, and preferences read losses before gradients."""
        has_compiled_functions = self.compile or self.has_fused_functions
        has_whole_chunks = self.layout.tp == 1 and self.reference == "none"
        return has_compiled_functions and has_whole_chunks and self.engine.has_fused_losses

    @property
    def global_batch_size(self) -> int:
        """Sequences per optimizer step."""
        return self.micro_batch_size * self.layout.data_ranks * self.gradient_accumulation_steps

    @property
    def global_batch_tokens(self) -> int:
        """Tokens per optimizer step."""
        return self.global_batch_size * self.sequence_length

    @property
    def is_runnable(self) -> bool:
        """True if `train` supports this candidate. Other frameworks' offloading and 4-bit products
        are predicted only, and some settings need all weights on the device."""
        return (
            self.offload != "parameters"
            and (self.precision != "nvfp4" or self.scaled_shares is not None)
            and (self.parameter_offload == "none" or self._can_offload_weights)
        )

    @property
    def _can_offload_weights(self) -> bool:
        """True if `train` can offload weights, trained ones with their update."""
        has_place = (
            not self.is_updated_on_host or OPTIMIZER_COSTS[self.optimizer].can_update_on_host
        )
        is_updated = self.offload != "none" and self.optimizer != "sgd" and has_place
        return self.reference != "frozen" and (self.adapter is not None or is_updated)

    @property
    def quantised_shares(self) -> ScaledShares | None:
        """`scaled_shares` if the precision has quantised operands, else None."""
        return self.scaled_shares if self.precision in ("fp8", "nvfp4") else None

    @property
    def has_resident_sums(self) -> bool:
        """True if FSDP2 adds up offloaded shards' gradients until it sums them over replicas."""
        is_accumulated = self.gradient_accumulation_steps > 1
        return self.has_offloaded_shards and is_accumulated and self.layout.dp_replicate > 1

    @property
    def optimizer_tier(self) -> OffloadTier:
        """Value of `offload.optimizer` in a recipe."""
        tiers = {kind: tier for tier, kind in OPTIMIZER_OFFLOADS.items()}
        return tiers.get(self.offload, "none")

    @property
    def read_ahead_bytes(self) -> int:
        """`ahead_bytes` if moments are in host memory and updated on the device, else 0."""
        is_used = self.optimizer_tier == "host" and not self.is_updated_on_host
        return self.ahead_bytes if is_used else 0

    @property
    def overlaps_update(self) -> bool:
        """True if a pass can run during the update of offloaded states, as
        `update_place.find_overlap_obstacle` says."""
        shares = self.quantised_shares
        has_weight_maxima = shares is not None and shares.spanning is not None
        return (
            self.engine.overlaps_offloaded_update
            and self.optimizer_tier != "none"
            and (self.is_updated_on_host or not self.offloads_trained_weights)
            and not self.keeps_zeros
            and OPTIMIZER_COSTS[self.optimizer].can_update_on_host
            and not (has_weight_maxima and self.layout.tp > 1)
        )

    @property
    def is_deferring(self) -> bool:
        """True if the schedule computes gradients of weights later than those of inputs."""
        return self.layout.pp > 1 and has_split_backward(self.layout.schedule)

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of one micro-batch on one rank."""
        return self.micro_batch_size * self.sequence_length // self.layout.cp

    @property
    def residual_tokens(self) -> float:
        """Tokens of the residual stream on one rank."""
        return self.micro_batch_tokens / (self.layout.tp if self.layout.sequence_parallel else 1)

    @property
    def expert_load(self) -> float:
        """Tokens of the experts of the busiest expert-parallel rank, divided by the even share."""
        return 1.0 if self.expert_loads is None else self.expert_loads.get_ratio(self.layout.ep)

    def get_attention_load(self, window: int | None) -> float:
        """Return the attention work of the busiest context-parallel rank over the mean, in layers
        with this window."""
        return dict(self.attention_loads).get(window, 1.0) if self.attention_loads else 1.0

    @property
    def num_expert_parts(self) -> int:
        """Number of parts in which a micro-batch's rows are sent to their experts."""
        return 2 if self.layout.ep > 1 and self.layout.expert_dispatch == "halves" else 1

    def count_expert_rows(self, experts_per_token: int) -> float:
        """Count the rows of one micro-batch that the busiest expert-parallel rank processes, as if
        its own tokens had the loads of all."""
        return self.micro_batch_tokens * experts_per_token * self.expert_load

    def count_sent_rows(self, experts_per_token: int) -> float:
        """Count the same rows with those of padding, which are sent and stored but not computed."""
        rows = self.count_expert_rows(experts_per_token)
        if not self.has_padding:
            return rows
        even = self.micro_batch_tokens * experts_per_token
        return max(rows, even * self.layout.expert_row_limit)

    @property
    def has_padding(self) -> bool:
        """True if ranks exchange equal numbers of rows for experts."""
        return self.layout.ep > 1 and self.layout.expert_dispatch == "padded"

    @property
    def has_rows_per_rank(self) -> bool:
        """True if a token's row is sent once to each rank with one of its experts."""
        return self.layout.ep > 1 and self.layout.expert_dispatch in ("once_per_rank", "deep_ep")

    def count_exchanged_rows(self, experts: ExpertShape) -> float:
        """Count the rows of one micro-batch that the busiest expert-parallel rank receives if a
        token's row is sent once per rank."""
        reached = experts.count_reached_ranks(self.layout.ep)
        return self.micro_batch_tokens * self.expert_load * reached

    def count_index_bytes(self, experts: ExpertShape) -> float:
        """Count the bytes of indices that a layer keeps for rows sent once per rank
        (`parallel.experts.token_exchange`): of choices sent, of choices received in three orders,
        of rows sent in two, and of rows received and tokens. With DeepEP of choices received in
        three orders and of rows received in two, weights of the rows received, and for each token
        and rank a flag and an index (`parallel.experts.deep_ep_exchange`)."""
        choices = self.count_expert_rows(experts.experts_per_token)
        rows = self.count_exchanged_rows(experts)
        if self.layout.expert_dispatch == "deep_ep":
            indices = 3 * choices + (2 + experts.experts_per_token) * rows
            handle = self.micro_batch_tokens * self.layout.ep * (1 + EXCHANGE_INDEX_BYTES)
            return EXCHANGE_INDEX_BYTES * indices + handle
        return EXCHANGE_INDEX_BYTES * (4 * choices + 3 * rows + self.micro_batch_tokens)

    def count_plan_bytes(self, experts: ExpertShape) -> float:
        """Count the bytes that DeepEP's ranks receive before the rows: for each row zeros, and K
        choices in int64 and weights in fp32."""
        zeros = DEEP_EP_ROW_UNIT * self.activation_bytes
        return self.count_exchanged_rows(experts) * (zeros + 12 * experts.experts_per_token)

    @property
    def is_sharded(self) -> bool:
        """True if ZeRO shards parameters or states over more than one rank."""
        return self.layout.is_sharded

    def get_gather_bytes(self, elements: ParameterElements) -> float:
        """Return the mean bytes of an element of gathered parameters, in transfer and in memory."""
        size = self.engine.get_gather_bytes(self.activation_bytes)
        share = self.compute_coded_share(elements)
        if not share:
            return size
        assert self.scaled_shares is not None
        assert self.scaled_shares.code_gathers is not None
        return size - share * (size - self.scaled_shares.code_gathers.element_bytes)

    def compute_coded_share(self, elements: ParameterElements) -> float:
        """Compute the share of gathered parameters whose codes are gathered."""
        gathers = None if self.scaled_shares is None else self.scaled_shares.code_gathers
        if gathers is None:
            return 0.0
        if self.saved_results is None:
            share = float(self.gathers_codes(is_recomputed=self.recompute != "none"))
        else:  # of the layers that keep all results, and of the others
            whole = self.saved_results.count(None) / len(self.saved_results)
            share = whole * self.gathers_codes(is_recomputed=False)
            share += (1.0 - whole) * self.gathers_codes(is_recomputed=True)
        in_blocks = elements.count_in_blocks(gathers.block_rows)
        return share * gathers.share * in_blocks / max(1.0, elements.local)

    def gathers_codes(self, *, is_recomputed: bool) -> bool:
        """Return True if ZeRO gathers codes of a layer's weights whose shards are whole blocks.

        Codes that differ between the passes need a gather for each, and a backward pass that does
        not compute outputs again. Frozen matrices in 4 bits are gathered as they are stored;
        offloaded ones, and all matrices with DoRA, are counted in bf16.
        """
        gathers = None if self.scaled_shares is None else self.scaled_shares.code_gathers
        if gathers is None or not self.is_sharded:
            return False
        if (adapter := self.adapter) is not None and (
            adapter.quantised or adapter.has_magnitudes or self.parameter_offload != "none"
        ):
            return False
        if gathers.has_agreed_maxima and self.has_offloaded_shards:
            return False
        return gathers.has_one_set or (
            self.gathers_each_pass and not is_recomputed and not self.compile
        )

    @property
    def gathers_each_pass(self) -> bool:
        """True if ZeRO gathers the weights of blocks in the forward and in the backward pass."""
        return self.is_sharded and (self.layout.zero_stage == 3 or self.has_offloaded_shards)

    @property
    def offloads_trained_weights(self) -> bool:
        """True if the blocks' matrices are trained and leave the device between their uses."""
        return self.parameter_offload != "none" and self.adapter is None

    @property
    def moves_weights(self) -> bool:
        """True if passes bring offloaded weights to the device, and read no working weights."""
        has_copies = self.offloads_trained_weights and self.has_working_weights
        return self.parameter_offload != "none" and not has_copies

    @property
    def has_offloaded_shards(self) -> bool:
        """True if the blocks' trained weights are offloaded as the shards that ZeRO makes."""
        return self.offloads_trained_weights and self.is_sharded

    @property
    def has_working_weights(self) -> bool:
        """True if trained matrices are cast to the compute precision once per step."""
        return (
            (not self.is_sharded or self.offloads_trained_weights)
            and self.activation_bytes != self.master_bytes
            and should_cast_once(
                self.working_weights,
                has_recompute=self.recompute != "none",
                gradient_accumulation_steps=self.gradient_accumulation_steps,
                has_adapters=self.adapter is not None,
                is_offloaded=self.offloads_trained_weights,
            )
        )

    @property
    def has_working_operands(self) -> bool:
        """True if weights of quantised products are quantised once per step."""
        has_whole_weights = self.has_working_weights and not self.is_sharded
        return has_whole_weights and self.adapter is None and bool(self.quantised_shares)

    @property
    def adapted_roles(self) -> tuple[str, ...] | None:
        """Roles of the matrices with adapters. None if all weights are trained."""
        return None if self.adapter is None else self.adapter.roles

    @property
    def compute_precision(self) -> str:
        """Precision of activations, and of products of operands that are not quantised."""
        return self.quantised_shares.compute if self.quantised_shares else self.precision

    @property
    def activation_bytes(self) -> int:
        """Bytes per element of the activations."""
        return _WIDE_BYTES.get(self.compute_precision, 2)

    @property
    def master_bytes(self) -> int:
        """Bytes per element of the master weights."""
        return 2 if self.has_bf16_masters else max(4, self.activation_bytes)

    @property
    def reduce_bytes(self) -> float:
        """Bytes per gradient element in reductions."""
        return self.engine.get_reduce_bytes(
            self.master_bytes, should_reduce_in_bf16=self.should_reduce_in_bf16
        )

    def describe(self) -> str:
        """Describe the layout in one line: degrees above 1, then other differences from the
        default."""
        layout = self.layout
        axes = [axis for axis in ("pp", "tp", "cp", "ep") if layout.degree(axis) > 1]
        degrees = [f"{axis} {layout.degree(axis)}" for axis in axes]
        degrees += layout.describe_data_ranks()
        if layout.pp > 1:
            num_stages = layout.virtual_stages or 1
            degrees.append(layout.schedule + (f" x{num_stages}" if num_stages > 1 else ""))
        if layout.cp > 1:
            degrees.append(layout.cp_method)
        if layout.tp > 1 and not layout.sequence_parallel:
            degrees.append("no sequence parallel")
        if self.offload != "none":
            degrees.append(f"offload {self.offload.replace('_', ' on ')}")
        if self.parameter_offload != "none":
            degrees.append(f"parameters on {self.parameter_offload}")
        if self.activation_offload != "none":
            degrees.append(f"activations on {self.activation_offload}")
        return ", ".join(degrees) or "one GPU"
