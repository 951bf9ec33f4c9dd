"""Options and parts of the pods of a job on Kubernetes, whatever operator starts them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated, Any

from shardwright.cluster.job import Job
from shardwright.cluster.launcher import Image, OptionalText, build_option
from shardwright.errors import InputError

_KUBERNETES_NAME = re.compile(r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")
_GRACE_SECONDS = 30
"""Seconds between the end of the time for a save and Kubernetes killing the pod."""
_SHARED_MEMORY_SIZE = "16Gi"
"""Size of /dev/shm for NCCL and data workers; the default of Kubernetes is 64 MiB."""


@dataclass(frozen=True)
class KubernetesOptions:
    """Kind of the job; namespace, volumes, working directory and image of its pods."""

    job_kind: Annotated[
        OptionalText,
        build_option(
            "--job-kind",
            "Kind of job: pytorchjob (Kubeflow's training operator v1; default), trainjob "
            "(Kubeflow Trainer v2) or jobset.",
            "KIND",
        ),
    ] = None
    namespace: Annotated[OptionalText, build_option("--namespace", "Kubernetes namespace.")] = None
    volume: Annotated[
        list[str] | None,
        build_option(
            "--volume", "Volume claim for shared storage to mount. Repeatable.", "CLAIM:/PATH"
        ),
    ] = None
    """Volume claims; run folder, recipe and data must be on them."""
    working_dir: Annotated[
        OptionalText, build_option("--working-dir", "Working directory of the ranks.")
    ] = None
    image: Image = None

    def __post_init__(self) -> None:
        if not self.image:
            raise InputError(
                "pods need a container image",
                field="--image",
                remedy="Name an image with shardwright, e.g. --image registry/shardwright:1.0",
            )

    def parse_volumes(self) -> list[tuple[str, str]]:
        """Parse the volumes into pairs of claim and mount path.

        Raises:
            InputError: An entry is not CLAIM:/PATH.
        """
        mounts = []
        for volume in self.volume or ():
            claim, colon, path = volume.partition(":")
            if not colon or not _KUBERNETES_NAME.match(claim) or not path.startswith("/"):
                raise InputError(
                    "not a claim with a mount path",
                    field="--volume",
                    got=volume,
                    allowed="CLAIM:/path",
                )
            mounts.append((claim, path))
        return mounts


def list_volume_warnings(job: Job, options: KubernetesOptions) -> list[str]:
    """Return a warning if the run folder is on no volume, so that pods do not share it."""
    run_dir = job.run_folder
    place = PurePosixPath(options.working_dir or "/") / run_dir
    if any(place.is_relative_to(mount) for _, mount in options.parse_volumes()):
        return []
    note = ""
    if not options.working_dir and not run_dir.startswith("/"):
        note = " (relative to the image's working directory: set --working-dir)"
    return [
        f"the run folder {run_dir}{note} is on no --volume: pods would not share it, "
        "and it would be deleted with them"
    ]


def normalise_name(job: Job) -> str:
    """Return the recipe's name in characters that Kubernetes allows, of any length."""
    return re.sub(r"[._]+", "-", job.recipe.name.lower()).strip("-")


def build_metadata(name: str, options: KubernetesOptions) -> dict[str, Any]:
    """Return the metadata of an object in the namespace of the options."""
    return {"name": name, **({"namespace": options.namespace} if options.namespace else {})}


def build_pod_spec(
    job: Job, options: KubernetesOptions, container: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the specification of a pod of one container, with its volumes.

    Kubernetes sends SIGTERM to a pod that it evicts or deletes, and kills it after the time for a
    save.
    """
    memory = {
        "name": "shared-memory",
        "emptyDir": {"medium": "Memory", "sizeLimit": _SHARED_MEMORY_SIZE},
    }
    claims = [
        {"name": f"claim-{n}", "persistentVolumeClaim": {"claimName": claim}}
        for n, (claim, _) in enumerate(options.parse_volumes())
    ]
    return {
        "terminationGracePeriodSeconds": job.save_seconds + _GRACE_SECONDS,
        "containers": [dict(container)],
        "volumes": [memory, *claims],
    }


def build_image(options: KubernetesOptions) -> dict[str, Any]:
    """Return image and working directory of a container."""
    return {
        "image": options.image,
        **({"workingDir": options.working_dir} if options.working_dir else {}),
    }


def build_variables(variables: Mapping[str, str]) -> list[dict[str, str]]:
    """Return environment variables as a container lists them."""
    return [{"name": key, "value": value} for key, value in variables.items()]


def build_resources(job: Job) -> dict[str, Any]:
    """Return the resource limits of a node's container: known GPUs and cores."""
    limits: dict[str, Any] = {}
    if job.has_accelerators:
        limits["nvidia.com/gpu"] = job.ranks_per_node
    if job.cores_per_rank is not None:
        limits["cpu"] = job.cores_per_rank * job.ranks_per_node
    return {"limits": limits} if limits else {}


def build_mounts(options: KubernetesOptions) -> list[dict[str, str]]:
    """Return the mounts of the volumes of `build_pod_spec`."""
    return [
        {"name": "shared-memory", "mountPath": "/dev/shm"},
        *(
            {"name": f"claim-{n}", "mountPath": path}
            for n, (_, path) in enumerate(options.parse_volumes())
        ),
    ]
