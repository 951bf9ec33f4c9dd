"""Candidate of a published row: batch, precision, recomputation, optimizer, conventions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardwright.config.recipe import RecomputeKind
from shardwright.hardware import find_node
from shardwright.layout import Layout
from shardwright.planner.candidate import Candidate, OffloadKind, Precision, ReferenceKind
from shardwright.planner.engine_model import OptimizerKind
from shardwright.planner.published.frameworks import FrameworkDefaults
from shardwright.planner.published.moe_recipes import resolve_expert_parallel
from shardwright.planner.published.row_conventions import build_conventions
from shardwright.planner.published.row_layout import DEFAULT_ACCELERATOR, read_adapter, read_integer

DEFAULT_SEQUENCE_LENGTH = 2048
"""Tokens of a row if the table does not state them."""


def read_recompute(row: Mapping[str, str], framework: FrameworkDefaults) -> RecomputeKind:
    """Return the stated recomputation, or the framework's default."""
    stated = row["recompute"]
    if stated in ("none", "selective", "full"):
        return stated  # type: ignore[return-value]
    if framework.quantised_recompute and row["task"] == "qlora":
        return framework.quantised_recompute
    if framework.multi_device_recompute and (read_integer(row, "gpus") or 1) > 1:
        return framework.multi_device_recompute
    return "selective" if row["notes.selective"] else framework.recompute


_DEFAULT_NUM_ROWS = 16
"""Sequences per rank and step, for each stage, if a row states no batch: the largest
micro-batch that is tried."""


def build_row_candidate(
    row: Mapping[str, str],
    framework: FrameworkDefaults,
    layout: Layout,
    micro_batch_size: int,
    recompute: RecomputeKind,
) -> Candidate:
    """Build the candidate of a row with this layout and recomputation."""
    has_no_batch = not (row["micro_batch"] or row["notes.local_batch"] or row["notes.grad_accum"])
    default_steps = (
        _DEFAULT_NUM_ROWS * layout.pp
        if has_no_batch
        else read_integer(row, "notes.grad_accum") or layout.pp
    )
    total = (
        read_integer(row, "global_batch") or micro_batch_size * layout.data_ranks * default_steps
    )
    steps = max(1, round(total / (micro_batch_size * layout.data_ranks)))
    if layout.virtual_stages and steps % layout.pp:
        # Interleaving needs complete rounds of micro-batches. A row without them used another
        # schedule.
        layout = replace(layout, schedule="1f1b", virtual_stages=None)
    node = find_node(row["gpu"] or DEFAULT_ACCELERATOR)
    conventions = build_conventions(row, framework, layout, node)
    _, has_unsharded_experts = resolve_expert_parallel(
        row, read_integer(row, "ep") or 1, layout.tp, layout.fsdp
    )
    conventions = replace(conventions, has_unsharded_experts=has_unsharded_experts)
    return Candidate(
        layout=layout,
        sequence_length=read_integer(row, "seq_len") or DEFAULT_SEQUENCE_LENGTH,
        micro_batch_size=micro_batch_size,
        gradient_accumulation_steps=steps,
        precision=_read_precision(row),
        recompute=recompute,
        adapter=read_adapter(row),
        offload=_read_offload(row),
        activation_offload="host"
        if row["notes.activation_offload"] or framework.should_offload_activations
        else "none",
        optimizer=_read_optimizer(row["notes.optimizer"]),
        reference=_read_reference(row),
        compile=row["compile"] == "yes",
        flash_attention={"yes": True, "no": False}.get(
            row["flash_attention"], framework.flash_attention
        ),
        # FlashAttention and cuDNN's kernel, which trainers use, have windows, documents and sinks.
        has_masked_kernels=node.accelerator.kind == "gpu",
        num_fp4_layers=int(row["notes.fp4_layers"]) + 1 if row["notes.fp4_layers"] else None,
        loss_chunk_tokens=1024 if row["notes.chunked_loss"] else None,
        should_reduce_in_bf16=row["notes.mixed_precision"] == "PURE",
        engine=conventions,
    )


def _read_precision(row: Mapping[str, str]) -> Precision:
    """Return the row's precision. Default: bf16, or fp16 on an accelerator without bf16
    units."""
    default = (
        "bf16"
        if "bf16" in find_node(row["gpu"] or DEFAULT_ACCELERATOR).accelerator.peak_flops_per_second
        else "fp16"
    )
    return row["precision"] or default  # type: ignore[return-value]


def _read_optimizer(note: str) -> OptimizerKind:
    """Return the notes' optimizer by its state per parameter (Lion's equals momentum's).
    Default: AdamW."""
    text = note.lower()
    for pattern, kind in (
        ("8", "adamw_8bit"),
        ("adafactor", "adafactor"),
        ("lion", "sgd_momentum"),
        ("muon", "muon"),
        ("sgd", "sgd"),
    ):
        if pattern in text:
            return kind  # type: ignore[return-value]
    return "adamw"


def _read_offload(row: Mapping[str, str]) -> OffloadKind:
    note = row["notes.offload"].lower()
    if not note:
        return "none"
    # FSDP's CPUOffload moves parameters, and gradients and states with them.
    is_fsdp = "fsdp" in row["notes.sharding"].lower() and "optim" not in note
    return "parameters" if is_fsdp or "param" in note or "inf" in note else "optimizer"


def _read_reference(row: Mapping[str, str]) -> ReferenceKind:
    """Return the reference of preference training: a frozen model, or the model without its
    adapters."""
    return (
        "none" if row["task"] != "dpo" else "frozen" if read_adapter(row) is None else "adapter_off"
    )
