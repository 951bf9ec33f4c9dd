"""Placement of a model under a layout, computed once for planner, engine and verifier. No torch.

The rules that a layout must satisfy for a model are below: sizes that divide, supported degrees.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from shardwright.architecture import HFShape, ModelShape
from shardwright.architecture.flop_count import (
    count_attention_flops_per_token,
    count_matmul_parameters,
)
from shardwright.architecture.nf4_layout import BLOCK_ELEMENTS
from shardwright.errors import LayoutError
from shardwright.layout import Layout, ParameterLayout, PipelineStage, partition_layers
from shardwright.layout.context_method import ContextChoice, check_context_parallel
from shardwright.placement.parameter_layouts import (
    TENSOR_PARALLEL_STYLES,
    build_parameter_layouts,
)
from shardwright.schedule import assign_stages


@dataclass(frozen=True)
class Placement:
    """A model under a layout that supports it."""

    shape: ModelShape
    layout: Layout
    stages: tuple[PipelineStage, ...] | None
    """Pipeline stages in the order in which tokens pass them; None without a pipeline."""
    context: ContextChoice | None
    """Method of context parallelism; None if one rank has whole rows."""

    @cached_property
    def parameters(self) -> dict[str, ParameterLayout]:
        """Descriptor of every parameter of the whole model, by name."""
        return build_parameter_layouts(self.shape, self.layout, self.stages)


def place_model(shape: ModelShape, layout: Layout, sequence_length: int) -> Placement:
    """Place a model under a layout, for rows of `sequence_length` tokens.

    Raises:
        LayoutError: the layout does not divide the model; names the numbers and the nearest
            degree that works.
        ScheduleError: an unknown schedule, or unsupported virtual stages.
    """
    if isinstance(shape, HFShape):
        _check_hf_degrees(shape, layout)
        return Placement(shape, layout, None, None)
    stages = partition_stages(shape, layout, sequence_length)
    _check_tensor_parallel(shape, layout, sequence_length)
    _check_quantised_blocks(shape, layout)
    _check_expert_parallel(shape, layout)
    context = None
    if layout.cp > 1:
        context = check_context_parallel(layout, shape, sequence_length)
    return Placement(shape, layout, stages, context)


def partition_stages(
    shape: ModelShape, layout: Layout, sequence_length: int
) -> tuple[PipelineStage, ...] | None:
    """Partition a layout's pipeline into stages; None without a pipeline.

    Layers are weighted by their FLOPs per token, the head by those of its product, the
    embedding by the elements that it moves.

    Raises:
        LayoutError: fewer layers than stages.
        ScheduleError: an unknown schedule, or unsupported virtual stages.
    """
    if layout.pp == 1:
        return None
    ranks = assign_stages(layout.schedule, layout.pp, layout.virtual_stages)
    head_flops = 6.0 * shape.vocab_size * shape.hidden_size
    return partition_layers(
        _compute_layer_flops(shape, sequence_length),
        ranks,
        embedding_cost=float(shape.hidden_size),
        head_cost=head_flops,
    )


@lru_cache(maxsize=32)
def _compute_layer_flops(shape: ModelShape, sequence_length: int) -> tuple[float, ...]:
    """Compute the FLOPs per token of each layer.

    Cached, because the planner asks for every pipeline of the same model.
    """
    costs = [0.0] * shape.num_layers
    for (
        spec
    ) in shape.base_shape.list_parameters():  # adapters are too small to change the partition
        if spec.layer is not None:
            costs[spec.layer] += 6.0 * count_matmul_parameters(
                [spec], is_tied=False, active_share=shape.active_share
            )
    for index, layer in enumerate(shape.layers):
        costs[index] += count_attention_flops_per_token(
            shape.query_width, shape.value_width, sequence_length, layer.window
        )
    return tuple(costs)


UNSUPPORTED_HF_DEGREES = {
    "tp": "which of its features and heads belong together",
    "pp": "what goes from one of its layers to the next",
    "cp": "how its tokens reach each other",
    "ep": "how its tokens reach its experts",
}
"""Degrees that models run by transformers do not support, and the missing knowledge of the
model."""


def _check_hf_degrees(shape: HFShape, layout: Layout) -> None:
    """Check that a layout has only the degrees that models run by transformers support.

    Raises:
        LayoutError: names the degree and what is not known of the model.
    """
    for degree, reason in UNSUPPORTED_HF_DEGREES.items():
        if getattr(layout, degree) > 1:
            raise LayoutError(
                f"{shape.family} runs through transformers' own {shape.class_name}; "
                f"shardwright does not know {reason}",
                field=f"layout.{degree}",
                got=getattr(layout, degree),
                allowed="1",
                remedy="Use data parallelism instead: dp_replicate, dp_shard, zero_stage 0 to 3",
            )


def _check_quantised_blocks(shape: ModelShape, layout: Layout) -> None:
    """Check that tensor parallelism does not split blocks of 4-bit weights that share a scale."""
    rows = {
        spec.packed_matrix.shape[-1]: spec.name
        for spec in shape.list_parameters()
        if spec.packed_matrix is not None
        and TENSOR_PARALLEL_STYLES[spec.role] in ("rows", "expert_rows")
    }
    for columns, name in rows.items():
        if layout.tp > 1 and columns % (layout.tp * BLOCK_ELEMENTS):
            valid_degrees = [
                tp
                for tp in range(1, shape.num_heads + 1)
                if all(width % (tp * BLOCK_ELEMENTS) == 0 or tp == 1 for width in rows)
            ]
            nearest = min(valid_degrees, key=lambda tp: (abs(tp - layout.tp), tp))
            raise LayoutError(
                f"{name} has rows of {columns} weights, which {layout.tp} ranks cannot shard "
                f"into whole blocks of {BLOCK_ELEMENTS} 4-bit weights",
                field="layout.tp",
                got=layout.tp,
                allowed=", ".join(map(str, valid_degrees)),
                remedy=f"The nearest that works is tp={nearest}",
            )


def _check_expert_parallel(shape: ModelShape, layout: Layout) -> None:
    if layout.ep == 1:
        return
    if shape.experts is None:
        raise LayoutError(
            "this model has no experts to shard",
            field="layout.ep",
            got=layout.ep,
            allowed="1",
            remedy="Remove ep",
        )
    if shape.experts.num_experts % layout.ep:
        valid_degrees = [
            d
            for d in range(1, layout.fsdp + 1)
            if shape.experts.num_experts % d == 0 and layout.fsdp % d == 0
        ]
        nearest = min(valid_degrees, key=lambda degree: (abs(degree - layout.ep), degree))
        raise LayoutError(
            f"{shape.experts.num_experts} experts do not divide evenly over {layout.ep} ranks",
            field="layout.ep",
            got=layout.ep,
            allowed=f"a divisor of {shape.experts.num_experts} and of dp_shard x cp = "
            f"{layout.fsdp}",
            remedy=f"The nearest that works is ep={nearest}",
        )


def _check_tensor_parallel(shape: ModelShape, layout: Layout, sequence_length: int) -> None:
    problems = _list_tensor_parallel_problems(shape, layout, sequence_length)
    if not problems:
        return
    valid_degrees = [
        tp
        for tp in range(1, shape.num_heads + 1)
        if not _list_tensor_parallel_problems(shape, replace(layout, tp=tp), sequence_length)
    ]
    nearest = min(valid_degrees, key=lambda tp: (abs(tp - layout.tp), tp))
    remedy = f"The nearest that works is tp={nearest}"
    if not _list_tensor_parallel_problems(
        shape, replace(layout, sequence_parallel=False), sequence_length
    ):
        remedy += ", or replicate the residual stream: sequence_parallel=false"
    raise LayoutError(
        "; ".join(problems),
        field="layout.tp",
        got=layout.tp,
        allowed=", ".join(map(str, valid_degrees)),
        remedy=remedy,
    )


def _list_tensor_parallel_problems(
    shape: ModelShape, layout: Layout, sequence_length: int
) -> list[str]:
    """List the model's sizes that `layout.tp` ranks cannot share evenly; none for one rank."""
    tp = layout.tp
    kv_heads = shape.num_kv_heads
    experts = shape.experts
    if tp == 1:
        return []
    widths = {"heads": shape.num_heads}
    if not all(layer.sparse for layer in shape.layers):
        widths["features of the feed-forward"] = shape.intermediate_size
    if experts is not None:
        widths["features of an expert"] = experts.intermediate_size
        widths["features of the shared experts"] = experts.shared_intermediate_size or 0
    if layout.sequence_parallel:
        widths["tokens of a context rank" if layout.cp > 1 else "tokens of a sequence"] = (
            sequence_length // layout.cp
        )
    problems = [
        f"{number} {noun} are not divisible by {tp}"
        for noun, number in widths.items()
        if number % tp
    ]
    if kv_heads % tp and tp % kv_heads:
        problems.append(
            f"{kv_heads} key-value heads can neither be split evenly over {tp} ranks nor be shared "
            "evenly by them"
        )
    if -(-shape.vocab_size // tp) * (tp - 1) >= shape.vocab_size:
        problems.append(f"{shape.vocab_size} vocabulary rows leave one of {tp} ranks without a row")
    return problems
