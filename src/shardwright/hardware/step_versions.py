"""Versions of software and CPU that decide whether a measured step time still holds. No torch."""

from __future__ import annotations

from contextlib import suppress
from importlib import metadata

from shardwright.hardware.cluster_spec import Cluster
from shardwright.hardware.host_cpu import read_processor_name
from shardwright.version import __version__


def describe_step_versions(cluster: Cluster) -> dict[str, str]:
    """Return the versions that decide whether a step time measured on a cluster still holds.

    A cluster's name has its devices. `cpu` names none, so the CPU of this machine is added.
    """
    versions = {"shardwright": __version__}
    with suppress(metadata.PackageNotFoundError):  # torch without a record of its installation
        versions["torch"] = metadata.version("torch")
    processor = None if cluster.num_host_cores is None else read_processor_name()
    return versions if processor is None else versions | {"CPU": processor}
