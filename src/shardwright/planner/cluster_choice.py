"""Choice of the cluster that a recipe is planned for."""

from __future__ import annotations

from pathlib import Path

from shardwright.config.recipe import Recipe
from shardwright.errors import InputError
from shardwright.hardware import Cluster
from shardwright.hardware.catalog_loading import parse_cluster
from shardwright.hardware.host_cpu import guess_host
from shardwright.hardware.measured_profile import load_profile


def choose_cluster(
    recipe: Recipe,
    cluster: Cluster | str | None,
    *,
    num_nodes: int = 1,
    link: str | None = None,
    profile: str | Path | None = None,
) -> Cluster:
    """Build the cluster that `plan` predicts for; see there.

    Raises:
        InputError: unknown devices or link, or neither a cluster nor one in the recipe.
    """
    if isinstance(cluster, Cluster):
        return cluster
    section = recipe.cluster
    if cluster is None and section is not None:
        cluster = section.node
        link = link or section.link
        profile = profile or section.profile
    if cluster is None:
        raise InputError(
            "missing cluster",
            field="cluster",
            allowed="the devices of a node, e.g. 8xH100-80GB",
            remedy="Give it, or set `cluster` in the recipe",
        )
    if not isinstance(cluster, str):
        raise InputError(
            "not the name of devices",
            field="cluster",
            got=repr(cluster),
            allowed="e.g. 8xH100-80GB, or a Cluster",
        )
    return load_cluster(cluster, num_nodes=num_nodes, link=link, profile=profile)


def load_cluster(
    node: str, *, num_nodes: int = 1, link: str | None = None, profile: str | Path | None = None
) -> Cluster:
    """Build a cluster of nodes such as `8xH100-80GB`, with the rates in the file `profile`, or
    those guessed for CPU ranks of this machine.

    Raises:
        InputError: unknown devices or link, or a file without rates.
    """
    measured = None if profile is None else load_profile(Path(profile))
    return guess_host(parse_cluster(node, num_nodes=num_nodes, link=link, profile=measured), node)
