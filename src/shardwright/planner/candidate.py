"""Everything that changes the memory or time of a training step, as one value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwright.config.recipe import RecomputeKind
from shardwright.layout import Layout
from shardwright.planner.stage_assignment import StageRule

Precision = Literal["fp32", "fp64", "bf16", "fp16", "fp8", "nvfp4"]
"""Precision of matmuls. fp8 and nvfp4 keep activations and everything but the matmuls in
bf16."""

OptimizerKind = Literal["adamw", "adamw_8bit", "adafactor", "muon", "sgd", "sgd_momentum"]
OffloadKind = Literal["none", "optimizer", "parameters"]

ReferenceKind = Literal["none", "frozen", "adapter_off"]
"""Reference model of preference training: none (no preferences), a frozen copy of the model, or
the model without its adapters. The reference computes one forward pass of every micro-batch
before the model's first one. The copy takes memory."""

OPTIMIZER_STATE_BYTES: dict[OptimizerKind, float] = {
    "adamw": 8.0,
    "adamw_8bit": 2.0 + 8.0 / 256,
    "adafactor": 0.0,
    "muon": 4.0,
    "sgd": 0.0,
    "sgd_momentum": 4.0,
}
"""Bytes of optimizer state per trained parameter, without master weights (8-bit: one fp32 scale
per block of 256 for each moment).

Not counted: Adafactor's two vectors per matrix, and Muon's larger AdamW states (8 bytes) of the
embedding and head.
"""


@dataclass(frozen=True)
class LowRankAdapter:
    """Low-rank adapters beside frozen weights, of rank `rank`, for each matrix of `roles`.

    `quantised` stores the frozen matrices of the blocks in NF4 (QLoRA, arXiv 2305.14314).
    """

    rank: int
    roles: tuple[str, ...] = (
        "query",
        "key",
        "value",
        "qkv",
        "attention_out",
        "gate",
        "up",
        "gate_up",
        "down",
    )
    quantised: bool = False
    unquantised: tuple[str, ...] = ()
    """Roles that stay in the compute precision when the rest is quantised (litgpt's fused
    queries, keys and values)."""


@dataclass(frozen=True)
class FrameworkConventions:
    """Memory, precision and communication conventions of a training framework. The defaults are
    those of shardwright.

    Bytes are per parameter. `weight_bytes` is what stays on the rank between steps (None:
    master weights in fp32, or fp64, which are cast at use). `master_bytes` is a second copy
    that is sharded with the optimizer states. `gradient_bytes` is the accumulated gradient
    (None: same as the master weights).
    """

    name: str = "shardwright"
    weight_bytes: float | None = None
    master_bytes: float = 0.0
    gradient_bytes: float | None = None
    has_half_precision_states: bool = False
    """Optimizer states in half precision, like the weights."""
    gather_bytes: float | None = None
    """Bytes per parameter gathered by zero_stage 3, in transfer and in memory. None: compute
    precision."""
    reduce_bytes: float | None = None
    """Bytes per gradient element in reductions. None: fp32, or 2 with `precision.reduce_dtype:
    bf16`."""
    nf4_bytes: float = 0.5 + 4.0 / 64
    """Bytes per element of a frozen NF4 matrix: 4 bits, and an fp32 scale per block of 64."""
    should_drop_frozen_inputs: bool = False
    """Inputs of matmuls and norms without an adapter are not saved: only gradients of frozen
    weights would need them."""
    unquantised_bytes: float | None = None
    """Bytes per frozen parameter that stays unquantised beside NF4 matrices. None: compute
    precision."""
    should_cast_at_use: bool = True
    """Replicated weights are cast to the compute precision at each use, and the copies are
    saved for the backward pass."""
    has_separate_gradient_sum: bool = False
    """With fp32 gradient accumulation, the half-precision gradients stay in memory beside their
    sums."""
    micro_batch_gradient_bytes: float = 0.0
    """Bytes per parameter of one micro-batch's gradients, live beside the sums to which they
    are added. Few fit into the memory that freed activations leave."""
    has_separate_gradient_stream: bool = False
    """Gradient shards are allocated on the stream of their reduction, which cannot reuse memory
    of freed activations."""
    update_copy_bytes: float = 0.0
    """Bytes per updated parameter of gradients that the update first copies into one tensor,
    which also needs memory of its own."""
    has_unsharded_gradients: bool = False
    """zero_stage 1 stores unsharded gradients even without accumulation (buffers that persist
    for the whole run)."""
    num_gated_tensors: float = 3.0
    """Saved tensors of feed-forward width in a gated feed-forward: gate, up, product. 4 if the
    activation is saved too."""
    num_ungated_tensors: float = 2.0
    """Saved tensors of feed-forward width without a gate: before and after the activation."""
    num_norm_tensors: float = 2.0
    """Saved tensors of model width per norm: its input (the residual stream) and its output
    (the matmuls' input)."""
    num_rotary_tensors: float = 0.0
    """Saved copies of queries and keys in the rotary embedding."""
    selective_share: float = 1.0
    """Share of the results of matmuls and attention that `recompute: selective` saves.
    torchtitan saves every second matmul's."""
    eager_selective_share: float | None = None
    """The same share without compilation. None: the same value."""
    should_save_gathered_sequence: bool = True
    """Under sequence parallelism the gathered input of column-parallel matmuls is saved rather
    than gathered again."""
    num_sequence_buffers: float = 0.0
    """Number of gathered sequences for which sequence parallelism has a buffer that persists
    for the whole run."""
    num_unreleased_sequences: float = 0.0
    """Number of gathered sequences whose memory is not reusable yet because another stream may
    still read them: the host runs ahead of the device by that many. If memory is full, it waits
    instead."""
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
    stage_rule: StageRule = "weighed"
    """Rule that assigns layers to pipeline stages."""
    should_gather_per_tensor: bool = False
    """zero_stage 3 gathers and reduces each tensor separately, not a block at a time."""
    should_defer_stage_2: bool = False
    """zero_stage 2 reduces gradients once per step, not once per micro-batch."""
    should_track_backward_frees: bool = False
    """The backward pass is modelled operation by operation, including what each one frees
    (`planner.backward`). Peaks of other frameworks, read from allocators, are modelled as the
    largest gradients beside all saved tensors of a block."""


SHARDWRIGHT_CONVENTIONS = FrameworkConventions(should_track_backward_frees=True)


@dataclass(frozen=True)
class Candidate:
    """A layout with its batch arithmetic, precision, recomputation, optimizer and adapters.

    Under pp the micro-batches of the schedule are the accumulation steps. `document_tokens` is
    the mean length of the documents of packed rows, if the attention kernel skips tokens of
    other documents. None means one document per row.
    """

    layout: Layout
    sequence_length: int
    micro_batch_size: int = 1
    gradient_accumulation_steps: int = 1
    precision: Precision = "bf16"
    recompute: RecomputeKind = "none"
    optimizer: OptimizerKind = "adamw"
    adapter: LowRankAdapter | None = None
    offload: OffloadKind = "none"
    reference: ReferenceKind = "none"
    should_reduce_in_bf16: bool = False
    compile: bool = False
    flash_attention: bool = True
    has_fused_norms: bool = True
    """True if one kernel computes a norm's gradient. On the CPU separate fp32 operations do."""
    document_tokens: int | None = None
    num_fp4_layers: int | None = None
    """With `nvfp4`: number of layers, from the first, that use it; the others use bf16. None:
    all layers."""
    loss_chunk_tokens: int | None = 1024
    conventions: FrameworkConventions = SHARDWRIGHT_CONVENTIONS

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
        """True if `train` supports it. Offload and 8-bit floats are predicted only."""
        return self.offload == "none" and self.precision not in ("fp8", "nvfp4")

    @property
    def activation_bytes(self) -> int:
        """Bytes per element of the activations."""
        return {"fp64": 8, "fp32": 4}.get(self.precision, 2)

    @property
    def master_bytes(self) -> int:
        """Bytes per element of the master weights."""
        return 8 if self.precision == "fp64" else 4

    def describe(self) -> str:
        """Describe the layout in one line: degrees above 1, then other differences from the
        default."""
        layout = self.layout
        degrees = [
            f"{axis} {layout.degree(axis)}"
            for axis in ("pp", "tp", "cp", "ep")
            if layout.degree(axis) > 1
        ]
        degrees += _describe_data_degrees(layout)
        if layout.pp > 1:
            virtual = (
                f" x{layout.virtual_stages}"
                if layout.virtual_stages and layout.virtual_stages > 1
                else ""
            )
            degrees.append(layout.schedule + virtual)
        if layout.cp > 1:
            degrees.append(layout.cp_method)
        if layout.tp > 1 and not layout.sequence_parallel:
            degrees.append("no sequence parallel")
        return ", ".join(degrees) or "one GPU"


def _describe_data_degrees(layout: Layout) -> list[str]:
    if layout.zero_stage == 0:
        return [f"DDP {layout.dp_replicate}"] if layout.dp_replicate > 1 else []
    shards = f"ZeRO-{layout.zero_stage} over {layout.fsdp}"
    return [shards, f"{layout.dp_replicate} replicas"] if layout.dp_replicate > 1 else [shards]
