"""Placement: what each rank has of a model under a layout. No torch."""

from shardwright.placement.low_precision import (
    check_low_precision,
    compute_token_multiple,
    describe_bits,
    has_micro_batch_scales,
    has_whole_block_shards,
    select_scaled_weights,
)
from shardwright.placement.model_placement import Placement, partition_stages, place_model
from shardwright.placement.parameter_layouts import (
    EXPERT_PARALLEL_STYLES,
    TENSOR_PARALLEL_STYLES,
    TensorParallelStyle,
    build_parameter_layouts,
)
