"""Layouts: degrees, ranks and process groups, pipeline stages, parameter descriptors. No torch."""

from shardwright.layout.degrees import (
    AXES,
    BATCH_AXES,
    DATA_AXES,
    EXPERT_AXES,
    FSDP_AXES,
    CpMethod,
    Layout,
    resolve_layout,
    select_used_axes,
)
from shardwright.layout.parameter_layout import (
    ZERO_AXES,
    Bounds,
    DimSection,
    ParameterBox,
    ParameterLayout,
    Shard,
    compute_local_boxes,
    compute_local_shape,
)
from shardwright.layout.pipeline_stages import PipelineStage, partition_layers
from shardwright.layout.rank_grid import RankGrid
