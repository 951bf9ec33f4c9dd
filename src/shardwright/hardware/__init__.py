"""Accelerators, links and clusters, with catalogue figures and rates measured on a machine."""

from shardwright.hardware.cluster import Accelerator, Cluster, Link, Node
from shardwright.hardware.load import (
    accelerators,
    find_accelerator,
    find_link,
    find_node,
    links,
    parse_cluster,
)
from shardwright.hardware.profile import (
    AttentionRate,
    CollectiveRate,
    ElementwiseRate,
    MatmulRate,
    MeasuredProfile,
    load_profile,
    save_profile,
)

__all__ = [
    "Accelerator",
    "AttentionRate",
    "Cluster",
    "CollectiveRate",
    "ElementwiseRate",
    "Link",
    "MatmulRate",
    "MeasuredProfile",
    "Node",
    "accelerators",
    "find_accelerator",
    "find_link",
    "find_node",
    "links",
    "load_profile",
    "parse_cluster",
    "save_profile",
]
