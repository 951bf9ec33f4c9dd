"""Layouts: degrees, who sits where, and what each parameter's gradient owes to whom. No torch."""

from shardwright.layout.degrees import AXES, Layout, resolve_layout
from shardwright.layout.parameters import ParameterLayout, Shard
from shardwright.layout.ranks import RankGrid

__all__ = ["AXES", "Layout", "ParameterLayout", "RankGrid", "Shard", "resolve_layout"]
