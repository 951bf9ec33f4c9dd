"""A recipe as a PyTorchJob of Kubeflow's training operator (kubeflow.org/v1)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import yaml

from shardwright.cluster.job import Job
from shardwright.cluster.torchrun import build_torchrun_arguments
from shardwright.errors import InputError

_KUBERNETES_NAME = re.compile(r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")
_DEFAULT_PORT = 23456
_GRACE_SECONDS = 30
"""Seconds between torchrun killing the ranks and Kubernetes killing the pod."""


@dataclass(frozen=True)
class KubernetesOptions:
    """Image, namespace, volumes, working directory and shared memory of the pods."""

    image: str
    namespace: str | None = None
    volumes: tuple[str, ...] = ()
    """Volume claims as `CLAIM:/path`; run folder, recipe and data must be on them."""
    working_dir: str | None = None
    shared_memory_size: str = "16Gi"
    """Size of /dev/shm for NCCL and data workers; the default of Kubernetes is 64 MiB."""

    def parse_volumes(self) -> list[tuple[str, str]]:
        """Parse the volumes into pairs of claim and mount path."""
        mounts = []
        for volume in self.volumes:
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


def build_manifest(job: Job, options: KubernetesOptions) -> str:
    """Return the YAML for `kubectl apply -f`."""
    heading = (
        f"# shardwright launch --kubernetes: {job.recipe.name}, "
        f"{job.num_nodes} x {job.ranks_per_node} ranks\n"
    )
    return heading + yaml.safe_dump(build_pytorch_job(job, options), sort_keys=False)


def build_pytorch_job(job: Job, options: KubernetesOptions) -> dict[str, Any]:
    """Return the manifest as a mapping: one pod per node; the first is the master.

    A container that fails restarts in its pod (OnFailure). Its peers lose their connections,
    fail and restart as well; all resume from the newest complete checkpoint. The operator gives
    up after `backoffLimit` container restarts.
    """
    name = re.sub(r"[._]+", "-", job.recipe.name.lower()).strip("-")[:63].rstrip("-")
    replica = {"restartPolicy": "OnFailure", "template": _build_pod(job, options)}
    replicas = {"Master": {"replicas": 1, **replica}}
    if job.num_nodes > 1:
        # Built twice: YAML would otherwise write an alias instead of the second template.
        replicas["Worker"] = {
            "replicas": job.num_nodes - 1,
            "restartPolicy": "OnFailure",
            "template": _build_pod(job, options),
        }
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {
            "name": name,
            **({"namespace": options.namespace} if options.namespace else {}),
        },
        "spec": {
            "nprocPerNode": str(job.ranks_per_node),
            "runPolicy": {
                "cleanPodPolicy": "Running",
                "backoffLimit": job.max_restarts * job.num_nodes,
            },
            "pytorchReplicaSpecs": replicas,
        },
    }


def _build_pod(job: Job, options: KubernetesOptions) -> dict[str, Any]:
    mounts = options.parse_volumes()
    memory = {
        "name": "shared-memory",
        "emptyDir": {"medium": "Memory", "sizeLimit": options.shared_memory_size},
    }
    claims = [
        {"name": f"claim-{n}", "persistentVolumeClaim": {"claimName": claim}}
        for n, (claim, _) in enumerate(mounts)
    ]
    return {
        "spec": {
            "terminationGracePeriodSeconds": job.save_seconds + _GRACE_SECONDS,
            "containers": [_build_container(job, options, [path for _, path in mounts])],
            "volumes": [memory, *claims],
        }
    }


def _build_container(
    job: Job, options: KubernetesOptions, mount_paths: list[str]
) -> dict[str, Any]:
    """Return the container specification.

    The operator requires these names of container and port. It sets RANK (of the pod),
    MASTER_ADDR and MASTER_PORT.
    """
    port = job.port or _DEFAULT_PORT
    variables = job.build_environment() | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(job.save_seconds)}
    env = [{"name": key, "value": value} for key, value in variables.items()]
    memory_mount = {"name": "shared-memory", "mountPath": "/dev/shm"}
    limits: dict[str, Any] = {}
    if job.has_accelerators:
        limits["nvidia.com/gpu"] = job.ranks_per_node
    if job.cores_per_rank is not None:
        limits["cpu"] = job.cores_per_rank * job.ranks_per_node
    rendezvous = (
        ["--node-rank=$(RANK)", "--master-addr=$(MASTER_ADDR)", "--master-port=$(MASTER_PORT)"]
        if job.num_nodes > 1
        else []
    )
    return {
        "name": "pytorch",
        "image": options.image,
        **({"workingDir": options.working_dir} if options.working_dir else {}),
        "command": ["torchrun"],
        # A single pod needs no rendezvous; several find each other by the operator's variables.
        "args": [
            f"--nnodes={job.num_nodes}",
            *(rendezvous or ["--standalone"]),
            *build_torchrun_arguments(job),
        ],
        "ports": [{"name": "pytorchjob-port", "containerPort": port}],
        "env": env,
        **({"resources": {"limits": limits}} if limits else {}),
        "volumeMounts": [
            memory_mount,
            *({"name": f"claim-{n}", "mountPath": path} for n, path in enumerate(mount_paths)),
        ],
    }
