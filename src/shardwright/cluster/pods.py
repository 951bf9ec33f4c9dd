"""Options and parts of the pods of a job on Kubernetes, whatever operator starts them."""

from __future__ import annotations

import posixpath
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
_SHARED_MEMORY_PATH = "/dev/shm"
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
        if self.namespace is not None and not _KUBERNETES_NAME.match(self.namespace):
            raise InputError(
                "Kubernetes allows no namespace with this name",
                field="--namespace",
                got=repr(self.namespace),
                allowed="at most 63 of a-z, 0-9 and -, with a letter or digit at both ends",
            )
        if self.working_dir is not None and not self.working_dir.startswith("/"):
            raise InputError(
                "pods start in an absolute path",
                field="--working-dir",
                got=repr(self.working_dir),
                allowed="an absolute path in the pods, e.g. that of a --volume",
            )

    def parse_volumes(self) -> list[tuple[str, str]]:
        """Parse the volumes into pairs of claim and mount path.

        Raises:
            InputError: An entry is not CLAIM:/PATH, or two have the same path.
        """
        mounts: list[tuple[str, str]] = []
        used = {_SHARED_MEMORY_PATH}
        for volume in self.volume or ():
            claim, colon, path = volume.partition(":")
            if not colon or not _KUBERNETES_NAME.match(claim) or not _is_mount_path(path):
                raise InputError(
                    "not a claim with a mount path",
                    field="--volume",
                    got=volume,
                    allowed="CLAIM:/path, without a further colon",
                )
            place = posixpath.normpath(path)
            if place in used:
                raise InputError(
                    "this path has a mount already",
                    field="--volume",
                    got=volume,
                    allowed=f"a different path for each volume, not {_SHARED_MEMORY_PATH}",
                )
            used.add(place)
            mounts.append((claim, path))
        return mounts


def _is_mount_path(path: str) -> bool:
    return path.startswith("/") and ":" not in path


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
    """Return environment variables as a container lists them, each with exactly its value."""
    return [{"name": key, "value": escape_references(value)} for key, value in variables.items()]


def escape_references(text: str) -> str:
    """Return a value or an argument of a container that Kubernetes passes on unchanged.

    It replaces `$(NAME)` by the variable NAME, and `$$` by `$`.

    >>> escape_references("$(HOME) $HOME $$")
    '$$(HOME) $HOME $$$'
    """
    return re.sub(r"\$(?=[$(])", "$$", text)


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
        {"name": "shared-memory", "mountPath": _SHARED_MEMORY_PATH},
        *(
            {"name": f"claim-{n}", "mountPath": path}
            for n, (_, path) in enumerate(options.parse_volumes())
        ),
    ]
