"""Layouts: degrees, ranks and process groups, pipeline stages, parameter descriptors. No torch."""

from shardwright.layout.axes import BATCH_AXES, DATA_AXES, in_use
from shardwright.layout.degrees import AXES, EXPERT_AXES, FSDP_AXES, CpMethod, Layout, resolve_layout
from shardwright.layout.parameters import Bounds, Held, ParameterLayout, Section, Shard, held, local_shape
from shardwright.layout.ranks import RankGrid
from shardwright.layout.stages import Stage, cut_stages

__all__ = [
    "AXES",
    "BATCH_AXES",
    "DATA_AXES",
    "EXPERT_AXES",
    "FSDP_AXES",
    "Bounds",
    "CpMethod",
    "Held",
    "Layout",
    "ParameterLayout",
    "RankGrid",
    "Section",
    "Shard",
    "Stage",
    "cut_stages",
    "held",
    "in_use",
    "local_shape",
    "resolve_layout",
]
