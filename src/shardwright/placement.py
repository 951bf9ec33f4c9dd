"""Which rank holds what of each parameter, and over whom its gradient is summed: one table by role, read by everybody.

Torch-free, beside the plan: the planner counts with it, the engine cuts by it, norm and checkpoint go by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Literal

from shardwright.architecture import ForeignShape, ModelShape, ParameterSpec
from shardwright.architecture.count import attention_flops_per_token, matmul_parameters
from shardwright.architecture.parameters import Role
from shardwright.architecture.quantised import BLOCK, code_width, packed_width
from shardwright.errors import LayoutError
from shardwright.layout import DATA_AXES, Layout, ParameterLayout, Section, Shard, Stage, cut_stages, in_use
from shardwright.layout.context import check_context
from shardwright.schedule import rank_of_stage

Cut = Literal["columns", "rows", "vocabulary", "residual", "heads", "partial", "expert_columns", "expert_rows"]
"""What tensor parallelism does to a parameter.

    columns      cut over its outputs; each rank computes its own features
    rows         the matrix is cut over its inputs; the outputs are partial sums. The bias is added once, to the sum
    vocabulary   cut over the rows of the vocabulary
    residual     whole, and used on the residual stream: under sequence parallelism each rank sees some tokens of it
    heads        whole, and used on the heads that a rank has: every rank has a part of the gradient
    partial      whole, and used before what is cut: latents before the heads, the router before the experts' features. Every
                 rank has a part of the gradient
    expert_columns, expert_rows
                 the same within each expert; expert parallelism cuts the experts themselves. The rows' bias is added on the
                 first rank, before the sum

Adapters share the role of the matrix that they stand beside, and are cut with it (`_adapter_shard`).
"""

TENSOR_CUTS: dict[Role, Cut] = {
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

EXPERT_CUTS: tuple[Cut, ...] = ("expert_columns", "expert_rows")
"""Of parameters whose dimension 0 is the experts: cut over `ep`, and by ZeRO over `efsdp`."""


def place(shape: ModelShape, layout: Layout, stages: Sequence[Stage] | None = None) -> dict[str, ParameterLayout]:
    """The descriptor of every parameter of the whole model, by name.

    Args:
        stages: what each pipeline stage holds; None is one stage that holds everything.
    """
    return {spec.name: _place(spec, shape, layout, stages) for spec in shape.parameters()}


def _place(spec: ParameterSpec, shape: ModelShape, layout: Layout, stages: Sequence[Stage] | None) -> ParameterLayout:
    cut = TENSOR_CUTS[spec.role]
    # Tokens come to experts over ep: a rank's gradient is already that of the tokens of all of these ranks.
    exchanged = cut in EXPERT_CUTS and layout.ep > 1
    zero_axis, data_axes = ("efsdp", ("dp_replicate", "efsdp")) if exchanged else ("fsdp", DATA_AXES)
    shards = [Shard("ep", 0)] if exchanged else []
    within = None if layout.tp == 1 else _tensor_shard(spec, cut, shape, layout.tp)
    shards += [] if within is None else [within]
    # What no gradient trains stays whole: FSDP2 would hand it out rounded to the compute precision.
    if layout.zero_stage >= 1 and layout.degree(zero_axis) > 1 and spec.trained:
        shards.append(Shard(zero_axis, 0))
    partial = within is None and (cut in ("heads", "partial", *EXPERT_CUTS) or layout.sequence_parallel or spec.part is not None)
    summed = in_use(layout, *data_axes, *(("tp",) if partial else ()))
    holders = (0,) if stages is None else _holders(spec, shape, stages)
    if len(holders) > 1:
        summed = ("pp", *summed)
    cut_axes = {axis for part in shards for axis in (("dp_shard", "cp") if part.axis == "fsdp" else (part.axis,))}
    copies = tuple(axis for axis in in_use(layout, *data_axes, "tp") if axis not in cut_axes)
    return ParameterLayout(spec.name, spec.shape, tuple(shards), copies, summed, holders)


def _expert_shard(spec: ParameterSpec, shape: ModelShape, degree: int) -> Shard | None:
    """How `degree` tensor-parallel ranks cut each expert of a stack; None for the down projection's bias, which stays whole."""
    experts = shape.experts
    assert experts is not None
    inner, transposed = experts.intermediate_size, experts.matrix_layout == "in_out"
    if spec.role == "expert_down":
        return None if spec.is_bias else Shard("tp", 1 if transposed else 2, (Section(0, inner, degree),))
    outputs = 1 if spec.is_bias or not transposed else 2
    if experts.gate_up_layout == "interleaved":
        return Shard("tp", outputs, (Section(0, 2 * inner, degree),))
    return Shard("tp", outputs, (Section(0, inner, degree), Section(inner, inner, degree)))


def _tensor_shard(spec: ParameterSpec, cut: Cut, shape: ModelShape, degree: int) -> Shard | None:
    """How `degree` ranks cut the parameter; None where each holds all of it."""
    if spec.beside is not None:
        return _adapter_shard(spec, spec.beside, cut, shape, degree)
    if spec.packed is not None:
        return _packed_shard(spec.packed, cut, shape, degree)
    if cut in EXPERT_CUTS:
        return _expert_shard(spec, shape, degree)
    if cut == "vocabulary":
        return Shard("tp", 0, (Section(0, spec.shape[0], degree),))
    outputs, inputs = (0, 1) if shape.matrix_layout == "out_in" else (1, 0)
    if cut == "columns":
        return Shard("tp", 0 if spec.is_bias else outputs, _columns(spec, shape, degree))
    if cut == "rows" and not spec.is_bias:
        return Shard("tp", inputs, (Section(0, spec.shape[inputs], degree),))
    if cut == "heads" and shape.qk_norm == "full":
        return Shard("tp", 0, _columns(spec, shape, degree))
    return None


def _packed_shard(matrix: ParameterSpec, cut: Cut, shape: ModelShape, degree: int) -> Shard | None:
    """Bytes are cut where their matrix is; within rows, codes and scales each by themselves, between blocks (`_check_blocks`)."""
    around = _tensor_shard(matrix, cut, shape, degree)
    if around is None or around.dim != len(matrix.shape) - 1:
        return around
    codes, all_bytes = code_width(matrix.shape[-1]), packed_width(matrix.shape[-1])
    return replace(around, sections=(Section(0, codes, degree), Section(codes, all_bytes - codes, degree)))


def _adapter_shard(spec: ParameterSpec, matrix: ParameterSpec, cut: Cut, shape: ModelShape, degree: int) -> Shard | None:
    """An adapter is cut as its matrix: A over the inputs, B and the magnitude over the outputs, else whole.

    What is whole meets what is cut: A makes the features that all pieces of B take in, B gives partial sums of what the pieces of A
    make, and so every rank has a part of the gradient.
    """
    around = _tensor_shard(matrix, cut, shape, degree)
    if around is None:
        return None
    inputs, outputs = len(matrix.shape) - 1, len(matrix.shape) - 2
    if shape.lies_in_out(matrix):
        inputs, outputs = outputs, inputs
    if spec.part == "lora_A":
        return replace(around, dim=len(spec.shape) - 1) if around.dim == inputs else None
    return replace(around, dim=len(matrix.shape) - 2) if around.dim == outputs else None


def _columns(spec: ParameterSpec, shape: ModelShape, degree: int) -> tuple[Section, ...]:
    """The sections of a column-cut projection's outputs. Heads are the unit; of few key-value heads several ranks hold one."""
    queries, keys = shape.query_width, shape.kv_width
    kv_pieces = min(degree, shape.num_kv_heads)
    if spec.role in ("key", "value", "key_norm"):
        return (Section(0, keys, kv_pieces),)
    if spec.role == "qkv" and shape.qkv_layout == "blocks":
        return (
            Section(0, queries, degree),
            Section(queries, keys, kv_pieces),
            Section(queries + keys, keys, kv_pieces),
        )
    if spec.role == "gate_up":
        inner = shape.intermediate_size
        return (Section(0, inner, degree), Section(inner, inner, degree))
    outputs = 0 if spec.is_bias or shape.matrix_layout == "out_in" else 1
    return (Section(0, spec.shape[outputs], degree),)


def _holders(spec: ParameterSpec, shape: ModelShape, stages: Sequence[Stage]) -> tuple[int, ...]:
    """Positions on axis pp whose stages have the parameter, ascending."""
    if spec.layer is not None:
        return tuple(stage.rank for stage in stages if spec.layer in stage.layers)
    at_start = spec.role in ("embedding", "positions")
    at_end = not at_start or (spec.role == "embedding" and shape.tied_embeddings)
    return tuple(sorted({stage.rank for stage in stages if (stage.embedding and at_start) or (stage.head and at_end)}))


def stages_of(shape: ModelShape, layout: Layout, sequence_length: int) -> tuple[Stage, ...] | None:
    """What each pipeline stage of a layout holds; None without a pipeline.

    Layers are weighed by the FLOPs that a token costs in them, the head by those of its product, the embedding by the elements that
    it moves.

    Raises:
        LayoutError: fewer layers than stages.
        ScheduleError: no such schedule, or virtual stages that it does not take.
    """
    if layout.pp == 1:
        return None
    ranks = rank_of_stage(layout.schedule, layout.pp, layout.virtual_stages)
    head = 6.0 * shape.vocab_size * shape.hidden_size
    return cut_stages(_layer_flops(shape, sequence_length), ranks, embedding_cost=float(shape.hidden_size), head_cost=head)


@lru_cache(maxsize=32)
def _layer_flops(shape: ModelShape, sequence_length: int) -> tuple[float, ...]:
    """What a token costs in each layer. Kept: a planner asks for every pipeline of the same model."""
    costs = [0.0] * shape.num_layers
    for spec in shape.base.parameters():  # adapters are too small to move a border
        if spec.layer is not None:
            costs[spec.layer] += 6.0 * matmul_parameters([spec], tied=False, active_share=shape.active_share)
    for index, layer in enumerate(shape.layers):
        costs[index] += attention_flops_per_token(shape.query_width, shape.value_width, sequence_length, layer.window)
    return tuple(costs)


def check(shape: ModelShape, layout: Layout, sequence_length: int) -> None:
    """Refuse a layout that does not divide the model, before any rank starts.

    Raises:
        LayoutError: names the numbers and the nearest degree that works.
    """
    if isinstance(shape, ForeignShape):
        _check_foreign(shape, layout)
        return
    stages_of(shape, layout, sequence_length)
    _check_tensor(shape, layout, sequence_length)
    _check_blocks(shape, layout)
    _check_experts(shape, layout)
    if layout.cp > 1:
        windows = tuple(layer.window for layer in shape.layers)
        check_context(
            layout,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            windows=windows,
            sequence_length=sequence_length,
        )


UNKNOWN_TO_US = {
    "tp": "which of its features and heads belong together",
    "pp": "what goes from one of its layers to the next",
    "cp": "how its tokens reach each other",
    "ep": "how its tokens reach its experts",
}
"""Degrees that a foreign model cannot have, and what one would have to know of it to cut it so."""


def _check_foreign(shape: ForeignShape, layout: Layout) -> None:
    for degree, reason in UNKNOWN_TO_US.items():
        if getattr(layout, degree) > 1:
            raise LayoutError(
                f"{shape.family} runs through transformers' own {shape.class_name}, of which we do not know {reason}",
                field=f"layout.{degree}",
                got=getattr(layout, degree),
                allowed="1",
                remedy="Lay it over data ranks instead: dp_replicate, dp_shard, zero_stage 0 to 3",
            )


def _check_blocks(shape: ModelShape, layout: Layout) -> None:
    """Refuse a tensor cut through blocks of 4-bit weights: two ranks would have to share a scale."""
    rows = {
        spec.packed.shape[-1]: spec.name
        for spec in shape.parameters()
        if spec.packed is not None and TENSOR_CUTS[spec.role] in ("rows", "expert_rows")
    }
    for columns, name in rows.items():
        if layout.tp > 1 and columns % (layout.tp * BLOCK):
            works = [tp for tp in range(1, shape.num_heads + 1) if all(width % (tp * BLOCK) == 0 or tp == 1 for width in rows)]
            raise LayoutError(
                f"{name} has rows of {columns}, of which {layout.tp} ranks cannot have whole blocks of {BLOCK} 4-bit weights",
                field="layout.tp",
                got=layout.tp,
                allowed=", ".join(map(str, works)),
                remedy=f"The nearest that works is tp={min(works, key=lambda tp: (abs(tp - layout.tp), tp))}",
            )


def _check_experts(shape: ModelShape, layout: Layout) -> None:
    if layout.ep == 1:
        return
    if shape.experts is None:
        raise LayoutError(
            "this model has no experts to lie over ranks", field="layout.ep", got=layout.ep, allowed="1", remedy="Leave ep out"
        )
    if shape.experts.num_experts % layout.ep:
        works = [d for d in range(1, layout.fsdp + 1) if shape.experts.num_experts % d == 0 and layout.fsdp % d == 0]
        nearest = min(works, key=lambda degree: (abs(degree - layout.ep), degree))
        raise LayoutError(
            f"{shape.experts.num_experts} experts do not lie evenly over {layout.ep} ranks",
            field="layout.ep",
            got=layout.ep,
            allowed=f"a divisor of {shape.experts.num_experts} and of dp_shard x cp = {layout.fsdp}",
            remedy=f"The nearest that works is ep={nearest}",
        )


def _check_tensor(shape: ModelShape, layout: Layout, sequence_length: int) -> None:
    reasons = _why_not_tensor(shape, layout, sequence_length)
    if not reasons:
        return
    works = [tp for tp in range(1, shape.num_heads + 1) if not _why_not_tensor(shape, replace(layout, tp=tp), sequence_length)]
    nearest = min(works, key=lambda tp: (abs(tp - layout.tp), tp))
    remedy = f"The nearest that works is tp={nearest}"
    if not _why_not_tensor(shape, replace(layout, sequence_parallel=False), sequence_length):
        remedy += ", or leave the residual stream whole: sequence_parallel=false"
    raise LayoutError("; ".join(reasons), field="layout.tp", got=layout.tp, allowed=", ".join(map(str, works)), remedy=remedy)


def _why_not_tensor(shape: ModelShape, layout: Layout, sequence_length: int) -> list[str]:
    """What of a model `layout.tp` ranks cannot share evenly; nothing for one rank."""
    tp, kv_heads, experts = layout.tp, shape.num_kv_heads, shape.experts
    if tp == 1:
        return []
    widths = {"heads": shape.num_heads}
    if not all(layer.sparse for layer in shape.layers):
        widths["features of the feed-forward"] = shape.intermediate_size
    if experts is not None:
        widths["features of an expert"] = experts.intermediate_size
        widths["features of the shared experts"] = experts.shared_intermediate_size or 0
    if layout.sequence_parallel:
        widths["tokens of a context rank" if layout.cp > 1 else "tokens of a sequence"] = sequence_length // layout.cp
    reasons = [f"{number} {what} do not divide by {tp}" for what, number in widths.items() if number % tp]
    if kv_heads % tp and tp % kv_heads:
        reasons.append(f"{kv_heads} key-value heads neither divide by {tp} nor lie evenly over {tp} ranks")
    if -(-shape.vocab_size // tp) * (tp - 1) >= shape.vocab_size:
        reasons.append(f"{shape.vocab_size} rows of the vocabulary leave a rank of {tp} without any")
    return reasons
