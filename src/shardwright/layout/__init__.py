"""Layouts: degrees, who sits where, and what each parameter's gradient owes to whom. No torch."""

from shardwright.layout.degrees import AXES, Layout, resolve_layout
from shardwright.layout.parameters import ParameterLayout, Shard
from shardwright.layout.placement import DATA_AXES, check_supported, local_slice, place_parameter
from shardwright.layout.ranks import RankGrid

__all__ = [
    "AXES",
    "DATA_AXES",
    "Layout",
    "ParameterLayout",
    "RankGrid",
    "Shard",
    "check_supported",
    "local_slice",
    "place_parameter",
    "resolve_layout",
]
