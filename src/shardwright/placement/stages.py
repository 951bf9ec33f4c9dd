"""Pipeline stages of a model under a layout, with balanced FLOPs. No torch."""

from __future__ import annotations

from functools import lru_cache

from shardwright.architecture import ModelShape
from shardwright.architecture.flop_count import (
    count_attention_flops_per_token,
    count_matmul_parameters,
)
from shardwright.layout import Layout, PipelineStage, partition_layers
from shardwright.schedule import assign_stages


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
