"""One way to run a training step: everything that changes its memory or its time, and nothing else. Torch-free values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwright.config.schema import RecomputeKind
from shardwright.layout import Layout
from shardwright.planner.stage_rules import StageRule

Precision = Literal["fp32", "fp64", "bf16", "fp16", "fp8", "nvfp4"]
"""Of matrix products. fp8 and nvfp4 keep activations, and all but the products, in bf16."""

OptimizerKind = Literal["adamw", "adamw_8bit", "adafactor", "muon", "sgd", "sgd_momentum"]
Offload = Literal["none", "optimizer", "parameters"]

Reference = Literal["none", "frozen", "adapter_off"]
"""What a preference run is held to: nothing (no preferences), a frozen copy of the model, or the model without its adapters. Either
answers every micro-batch once before the model sees the first; the copy takes memory."""

STATE_BYTES: dict[OptimizerKind, float] = {
    "adamw": 8.0,
    "adamw_8bit": 2.0 + 8.0 / 256,
    "adafactor": 0.0,
    "muon": 4.0,
    "sgd": 0.0,
    "sgd_momentum": 4.0,
}
"""Bytes of optimizer state per trained parameter, master weights not counted (8-bit: one fp32 scale per block of 256, twice).

Adafactor's two vectors per matrix are not counted, nor what Muon's embeddings and head have more, which is AdamW's (8)."""


@dataclass(frozen=True)
class Adapter:
    """Low-rank adapters beside frozen weights: `rank` columns in and out of each matrix of `roles`.

    `quantised` holds the frozen matrices of the blocks in NF4 (QLoRA, arXiv 2305.14314).
    """

    rank: int
    roles: tuple[str, ...] = ("query", "key", "value", "qkv", "attention_out", "gate", "up", "gate_up", "down")
    quantised: bool = False
    unquantised: tuple[str, ...] = ()
    """Roles that stay in the compute precision where the rest is quantised (litgpt's fused queries, keys and values)."""


@dataclass(frozen=True)
class Engine:
    """How a trainer keeps things, where trainers differ; the defaults are shardwright's own habits.

    Bytes are per parameter. `weight_bytes` is what stays on the rank between steps (None: master weights in fp32, or fp64, which
    are cast at use), `master_bytes` a second copy that is sharded with the optimizer's states, `gradient_bytes` what accumulates
    (None: as the master weights).
    """

    name: str = "shardwright"
    weight_bytes: float | None = None
    master_bytes: float = 0.0
    gradient_bytes: float | None = None
    half_states: bool = False
    """The optimizer's states are in half precision, as the weights are."""
    gather_bytes: float | None = None
    """Of parameters gathered by zero_stage 3, sent and held; None: the compute precision's."""
    reduce_bytes: float | None = None
    """Of gradients on the wire; None: fp32, or 2 with `precision.reduce_dtype: bf16`."""
    nf4_bytes: float = 0.5 + 4.0 / 64
    """Per element of a frozen matrix in NF4: 4 bits, and an fp32 scale per block of 64."""
    frozen_drops_inputs: bool = False
    """What only a frozen matrix's gradient would need is not kept: inputs of products and norms that nothing adapts."""
    unquantised_bytes: float | None = None
    """Of frozen parameters that stay unquantised beside such matrices; None: the compute precision's."""
    casts_at_use: bool = True
    """Replicated weights are cast to the compute precision at each use, and the copies are kept for the backward pass."""
    summed_apart: bool = False
    """Where gradients are summed in fp32, those in half precision stay beside their sums."""
    fresh_gradient_bytes: float = 0.0
    """Of a micro-batch's own gradients, which are there beside what they are then added to. Few find room in what activations
    leave."""
    gradients_apart: bool = False
    """Shards of gradients are made in the stream of their reduction, whose allocations take no room that activations leave."""
    update_bytes: float = 0.0
    """Of gradients that the update copies before it reads them, in one tensor: room of its own, too. Per element that the rank
    updates."""
    whole_gradients: bool = False
    """zero_stage 1 holds whole gradients even without accumulation (buffers that live as long as the run)."""
    gated_tensors: float = 3.0
    """Tensors of feed-forward width that a gated feed-forward keeps: gate, up, product; 4 where the activation is kept too."""
    plain_tensors: float = 2.0
    """The same without a gate: before and after the activation."""
    norm_tensors: float = 2.0
    """Tensors of model width that a norm keeps: its input (the residual stream) and its output (the products' input)."""
    rotary_tensors: float = 0.0
    """Copies of queries and keys that the rotation keeps."""
    selective_share: float = 1.0
    """Of the results of products and attention, how much `recompute: selective` keeps; torchtitan keeps every second product's."""
    eager_selective_share: float | None = None
    """The same where nothing is compiled; None: alike."""
    keeps_gathered_sequence: bool = True
    """Under sequence parallelism the gathered input of the column-cut products is kept, rather than gathered again."""
    sequence_buffers: float = 0.0
    """Gathered sequences for which sequence parallelism keeps a buffer as long as the run."""
    waiting_sequences: float = 0.0
    """Gathered sequences whose room waits for another stream before it is given away again: the host runs ahead of the device by so
    many. Where memory is full it waits instead."""
    score_bytes: float | None = None
    """Moved per attention score where no fused attention kernel keeps scores on the chip; None: spelled out, in
    fp32 with casts."""
    logit_bytes: float = 8.0
    """Per logit, where the loss holds all of them at once (`loss_chunk_tokens` None)."""
    cut_logit_bytes: float | None = None
    """The same where tensor-parallel ranks hold a part of the vocabulary each; None: alike."""
    keeps_fp4_products: bool = True
    """Whether `recompute: selective` knows the products in 4-bit floats: what a list of operators does not name is done again."""
    whole_logits: bool = False
    """Tensor-parallel ranks gather the logits of the whole vocabulary before the loss."""
    loads_whole: bool = False
    """Whole weights are loaded on every rank before they are sharded, and the allocator never gives that room back."""
    node_dispatch: bool = False
    """Tokens that several experts of one node wait for cross to that node once (DeepEP, HybridEP)."""
    whole_experts: bool = False
    """Experts lie over the tensor-parallel ranks, too, none of them cut; each rank sends the rows of its part of the sequence."""
    stage_rule: StageRule = "weighed"
    """How layers are dealt to pipeline stages."""
    gathers_tensors: bool = False
    """zero_stage 3 gathers and reduces each tensor by itself, rather than a block's together."""
    defers_stage_2: bool = False
    """zero_stage 2 reduces gradients once per step rather than with every micro-batch."""
    frees_in_backward: bool = False
    """The backward pass is followed operation by operation, with what each lets go of (`planner.backward`). Other trainers' peaks,
    read from allocators, are taken from the widest gradients beside all that a block keeps."""


SHARDWRIGHT = Engine(frees_in_backward=True)


@dataclass(frozen=True)
class Candidate:
    """A layout with its batch arithmetic, precision, recomputation, optimizer and adapters.

    Under pp the micro-batches of the schedule are the accumulation steps. `document_tokens` is the mean length of the documents
    of packed rows, where the attention kernel skips what lies between documents; None is one document per row.
    """

    layout: Layout
    sequence_length: int
    micro_batch_size: int = 1
    gradient_accumulation_steps: int = 1
    precision: Precision = "bf16"
    recompute: RecomputeKind = "none"
    optimizer: OptimizerKind = "adamw"
    adapter: Adapter | None = None
    offload: Offload = "none"
    reference: Reference = "none"
    reduce_in_bf16: bool = False
    compile: bool = False
    flash_attention: bool = True
    fused_norms: bool = True
    """Whether one kernel makes a norm's gradient; on the CPU it is spelled out in fp32."""
    document_tokens: int | None = None
    fp4_layers: int | None = None
    """With `nvfp4`: so many layers from the first are, the others stay in bf16; None: all."""
    loss_chunk_tokens: int | None = 1024
    engine: Engine = SHARDWRIGHT

    @property
    def global_batch_size(self) -> int:
        """Sequences per optimizer step."""
        return self.micro_batch_size * self.layout.data_ranks * self.gradient_accumulation_steps

    @property
    def global_batch_tokens(self) -> int:
        """Tokens per optimizer step."""
        return self.global_batch_size * self.sequence_length

    @property
    def runnable(self) -> bool:
        """Whether `train` can do it: offload and 8-bit floats are predicted only."""
        return self.offload == "none" and self.precision not in ("fp8", "nvfp4")

    @property
    def activation_bytes(self) -> int:
        """Per element of the activations."""
        return {"fp64": 8, "fp32": 4}.get(self.precision, 2)

    @property
    def master_bytes(self) -> int:
        """Per element of the master weights."""
        return 8 if self.precision == "fp64" else 4

    def describe(self) -> str:
        """In a line: degrees above 1, then what else differs from the plainest run."""
        layout = self.layout
        degrees = [f"{axis} {layout.degree(axis)}" for axis in ("pp", "tp", "cp", "ep") if layout.degree(axis) > 1]
        degrees += _data_degrees(layout)
        if layout.pp > 1:
            virtual = f" x{layout.virtual_stages}" if layout.virtual_stages and layout.virtual_stages > 1 else ""
            degrees.append(layout.schedule + virtual)
        if layout.cp > 1:
            degrees.append(layout.cp_method)
        if layout.tp > 1 and not layout.sequence_parallel:
            degrees.append("no sequence parallel")
        return ", ".join(degrees) or "one GPU"


def _data_degrees(layout: Layout) -> list[str]:
    if layout.zero_stage == 0:
        return [f"DDP {layout.dp_replicate}"] if layout.dp_replicate > 1 else []
    shards = f"ZeRO-{layout.zero_stage} over {layout.fsdp}"
    return [shards, f"{layout.dp_replicate} replicas"] if layout.dp_replicate > 1 else [shards]
