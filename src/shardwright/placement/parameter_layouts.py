"""Parameter layouts: the shards of each parameter, and the axes that reduce its gradient.

One table by role, which planner, engine, gradient norm and checkpoint read. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from shardwright.architecture import ModelShape, ParameterSpec
from shardwright.architecture.nf4_layout import compute_code_bytes, compute_row_bytes
from shardwright.architecture.parameter_spec import ParameterRole
from shardwright.layout import (
    DATA_AXES,
    DimSection,
    Layout,
    ParameterLayout,
    PipelineStage,
    Shard,
    select_used_axes,
)

TensorParallelStyle = Literal[
    "columns", "rows", "vocabulary", "residual", "heads", "partial", "expert_columns", "expert_rows"
]
"""Ways in which tensor parallelism shards a parameter.

    columns      sharded over its outputs; each rank computes its own features
    rows         sharded over its inputs; the outputs are partial sums. The bias is added once,
                 to the sum
    vocabulary   sharded over the rows of the vocabulary
    residual     replicated, and used on the residual stream: under sequence parallelism each
                 rank sees some of its tokens
    heads        replicated, and used on a rank's heads: every rank has part of the gradient
    partial      replicated, and used before a sharded layer: latents before the heads, the
                 router before the experts' features. Every rank has part of the gradient
    expert_columns, expert_rows
                 the same within each expert; expert parallelism shards the experts themselves.
                 The bias of expert_rows is added on the first rank, before the sum

Adapters have the role of their matrix, and are sharded with it (`_build_adapter_shard`).
"""

TENSOR_PARALLEL_STYLES: dict[ParameterRole, TensorParallelStyle] = {
    "embedding": "vocabulary",
    "head": "vocabulary",
    "positions": "residual",
    "norm": "residual",
    "query": "columns",
    "key": "columns",
    "value": "columns",
    "qkv": "columns",
    "attention_out": "rows",
    "query_norm": "heads",
    "key_norm": "heads",
    "gate": "columns",
    "up": "columns",
    "gate_up": "columns",
    "down": "rows",
    "sinks": "columns",
    "query_latent": "partial",
    "query_latent_norm": "partial",
    "key_value_latent": "partial",
    "key_value_latent_norm": "partial",
    "key_value": "columns",
    "router": "partial",
    "balance_bias": "residual",
    "expert_gate_up": "expert_columns",
    "expert_down": "expert_rows",
    "projection": "residual",
    "other": "residual",
}

EXPERT_PARALLEL_STYLES: tuple[TensorParallelStyle, ...] = ("expert_columns", "expert_rows")
"""Styles of parameters whose dimension 0 is the experts: sharded over `ep`, and by ZeRO over
`efsdp`."""


def build_parameter_layouts(
    shape: ModelShape, layout: Layout, stages: Sequence[PipelineStage] | None = None
) -> dict[str, ParameterLayout]:
    """Build the descriptor of every parameter of the whole model, by name.

    Args:
        stages: the pipeline stages; None for one stage with everything.
    """
    return {
        spec.name: _build_parameter_layout(spec, shape, layout, stages)
        for spec in shape.list_parameters()
    }


def _build_parameter_layout(
    spec: ParameterSpec, shape: ModelShape, layout: Layout, stages: Sequence[PipelineStage] | None
) -> ParameterLayout:
    style = TENSOR_PARALLEL_STYLES[spec.role]
    # Tokens reach experts over ep: a rank's gradient already covers the tokens of all these
    # ranks.
    is_exchanged = style in EXPERT_PARALLEL_STYLES and layout.ep > 1
    zero_axis, data_axes = (
        ("efsdp", ("dp_replicate", "efsdp")) if is_exchanged else ("fsdp", DATA_AXES)
    )
    shards = [Shard("ep", 0)] if is_exchanged else []
    tensor_shard = None if layout.tp == 1 else _build_tensor_shard(spec, style, shape, layout.tp)
    shards += [] if tensor_shard is None else [tensor_shard]
    # Untrained parameters stay whole: FSDP2 would gather them rounded to the compute precision.
    if layout.zero_stage >= 1 and layout.degree(zero_axis) > 1 and spec.is_trained:
        shards.append(Shard(zero_axis, 0))
    has_partial_gradient = tensor_shard is None and (
        style in ("heads", "partial", *EXPERT_PARALLEL_STYLES)
        or layout.sequence_parallel
        or spec.adapter_part is not None
    )
    reduced_axes = select_used_axes(layout, *data_axes, *(("tp",) if has_partial_gradient else ()))
    pp_ranks = (0,) if stages is None else _find_pp_ranks(spec, shape, stages)
    if len(pp_ranks) > 1:
        reduced_axes = ("pp", *reduced_axes)
    sharded_axes = {
        axis
        for part in shards
        for axis in (("dp_shard", "cp") if part.axis == "fsdp" else (part.axis,))
    }
    replicated_axes = tuple(
        axis for axis in select_used_axes(layout, *data_axes, "tp") if axis not in sharded_axes
    )
    return ParameterLayout(
        spec.name, spec.shape, tuple(shards), replicated_axes, reduced_axes, pp_ranks
    )


def _build_expert_shard(spec: ParameterSpec, shape: ModelShape, degree: int) -> Shard | None:
    """Shard each expert of a stack over `degree` tensor-parallel ranks.

    None for the bias of the down projection, which is replicated.
    """
    experts = shape.experts
    assert experts is not None
    intermediate_size = experts.intermediate_size
    is_transposed = experts.matrix_layout == "in_out"
    if spec.role == "expert_down":
        return (
            None
            if spec.is_bias
            else Shard("tp", 1 if is_transposed else 2, (DimSection(0, intermediate_size, degree),))
        )
    outputs = 1 if spec.is_bias or not is_transposed else 2
    if experts.gate_up_layout == "interleaved":
        return Shard("tp", outputs, (DimSection(0, 2 * intermediate_size, degree),))
    return Shard(
        "tp",
        outputs,
        (
            DimSection(0, intermediate_size, degree),
            DimSection(intermediate_size, intermediate_size, degree),
        ),
    )


def _build_tensor_shard(
    spec: ParameterSpec, style: TensorParallelStyle, shape: ModelShape, degree: int
) -> Shard | None:
    """Shard a parameter over `degree` tensor-parallel ranks; None if it is replicated."""
    if spec.adapted_matrix is not None:
        return _build_adapter_shard(spec, spec.adapted_matrix, style, shape, degree)
    if spec.packed_matrix is not None:
        return _build_packed_shard(spec.packed_matrix, style, shape, degree)
    if style in EXPERT_PARALLEL_STYLES:
        return _build_expert_shard(spec, shape, degree)
    if style == "vocabulary":
        return Shard("tp", 0, (DimSection(0, spec.shape[0], degree),))
    outputs, inputs = (0, 1) if shape.matrix_layout == "out_in" else (1, 0)
    if style == "columns":
        return Shard(
            "tp", 0 if spec.is_bias else outputs, _build_column_sections(spec, shape, degree)
        )
    if style == "rows" and not spec.is_bias:
        return Shard("tp", inputs, (DimSection(0, spec.shape[inputs], degree),))
    if style == "heads" and shape.qk_norm == "full":
        return Shard("tp", 0, _build_column_sections(spec, shape, degree))
    return None


def _build_packed_shard(
    matrix: ParameterSpec, style: TensorParallelStyle, shape: ModelShape, degree: int
) -> Shard | None:
    """Shard packed bytes as their matrix; within rows, codes and scales separately.

    The boundaries lie between blocks of weights (`_check_quantised_blocks`).
    """
    matrix_shard = _build_tensor_shard(matrix, style, shape, degree)
    if matrix_shard is None or matrix_shard.dim != len(matrix.shape) - 1:
        return matrix_shard
    codes = compute_code_bytes(matrix.shape[-1])
    all_bytes = compute_row_bytes(matrix.shape[-1])
    return replace(
        matrix_shard,
        sections=(DimSection(0, codes, degree), DimSection(codes, all_bytes - codes, degree)),
    )


def _build_adapter_shard(
    spec: ParameterSpec,
    matrix: ParameterSpec,
    style: TensorParallelStyle,
    shape: ModelShape,
    degree: int,
) -> Shard | None:
    """Shard an adapter as its matrix: A over inputs, B and magnitude over outputs.

    Otherwise it is replicated, and used next to sharded parts: A computes the features that all
    shards of B take, B gives partial sums of the outputs of A's shards, and so every rank has
    part of the gradient.
    """
    matrix_shard = _build_tensor_shard(matrix, style, shape, degree)
    if matrix_shard is None:
        return None
    inputs = len(matrix.shape) - 1
    outputs = len(matrix.shape) - 2
    if shape.is_in_out(matrix):
        inputs, outputs = outputs, inputs
    if spec.adapter_part == "lora_A":
        return (
            replace(matrix_shard, dim=len(spec.shape) - 1) if matrix_shard.dim == inputs else None
        )
    return replace(matrix_shard, dim=len(matrix.shape) - 2) if matrix_shard.dim == outputs else None


def _build_column_sections(
    spec: ParameterSpec, shape: ModelShape, degree: int
) -> tuple[DimSection, ...]:
    """Build the sections of a column-parallel projection's outputs, in units of heads.

    With fewer key-value heads than ranks, several ranks hold the same head.
    """
    queries = shape.query_width
    keys = shape.kv_width
    kv_pieces = min(degree, shape.num_kv_heads)
    if spec.role in ("key", "value", "key_norm"):
        return (DimSection(0, keys, kv_pieces),)
    if spec.role == "qkv" and shape.qkv_layout == "blocks":
        return (
            DimSection(0, queries, degree),
            DimSection(queries, keys, kv_pieces),
            DimSection(queries + keys, keys, kv_pieces),
        )
    if spec.role == "gate_up":
        intermediate_size = shape.intermediate_size
        return (
            DimSection(0, intermediate_size, degree),
            DimSection(intermediate_size, intermediate_size, degree),
        )
    outputs = 0 if spec.is_bias or shape.matrix_layout == "out_in" else 1
    return (DimSection(0, spec.shape[outputs], degree),)


def _find_pp_ranks(
    spec: ParameterSpec, shape: ModelShape, stages: Sequence[PipelineStage]
) -> tuple[int, ...]:
    """Find the positions on axis pp whose stages have the parameter, ascending."""
    if spec.layer is not None:
        return tuple(stage.rank for stage in stages if spec.layer in stage.layers)
    at_start = spec.role in ("embedding", "positions")
    at_end = not at_start or (spec.role == "embedding" and shape.tied_embeddings)
    return tuple(
        sorted(
            {
                stage.rank
                for stage in stages
                if (stage.has_embedding and at_start) or (stage.has_head and at_end)
            }
        )
    )
