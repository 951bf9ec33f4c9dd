"""Accelerators, links and clusters, with catalogue figures and rates measured on a machine."""

from shardwright.hardware.catalog_loading import (
    find_accelerator,
    find_link,
    find_node,
    list_accelerators,
    list_links,
    parse_cluster,
)
from shardwright.hardware.cluster_spec import Accelerator, Cluster, Link, Node
from shardwright.hardware.collective_rate import CollectiveRate
from shardwright.hardware.measured_profile import (
    AttentionRate,
    ElementwiseRate,
    MatmulRate,
    MeasuredProfile,
    ScaledProductRate,
    TierRates,
    load_profile,
    save_profile,
)
