"""A recipe as a PyTorchJob of Kubeflow's training operator (kubeflow.org/v1)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import yaml

from shardwright.errors import InputError
from shardwright.interop.job import Job
from shardwright.interop.torchrun import torchrun_words

_NAME = re.compile(r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")
_PORT = 23456
_GRACE_SECONDS = 30
"""Between the last moment at which torchrun kills ranks and that at which Kubernetes kills the pod."""


@dataclass(frozen=True)
class KubernetesOptions:
    """Where pods come from and what they see."""

    image: str
    namespace: str | None = None
    volumes: tuple[str, ...] = ()
    """Claims of shared storage as `CLAIM:/path`; run folder, recipe and data must lie on them."""
    working_dir: str | None = None
    shared_memory: str = "16Gi"
    """Size of /dev/shm, which NCCL and data workers use; Kubernetes' own default is 64 MiB."""

    def mounts(self) -> list[tuple[str, str]]:
        """Claim and path of each volume."""
        found = []
        for volume in self.volumes:
            claim, colon, path = volume.partition(":")
            if not colon or not _NAME.match(claim) or not path.startswith("/"):
                raise InputError("not a claim and where to mount it", field="--volume", got=volume, allowed="CLAIM:/path")
            found.append((claim, path))
        return found


def unshared(job: Job, options: KubernetesOptions) -> list[str]:
    """A warning where the run folder lies on none of the volumes: pods would not share it, and it would end with them."""
    run_dir = job.run_dir or job.recipe.run.dir or f"runs/{job.recipe.name}"
    place = PurePosixPath(options.working_dir or "/") / run_dir
    if any(place.is_relative_to(mount) for _, mount in options.mounts()):
        return []
    begins = "" if options.working_dir or run_dir.startswith("/") else " (relative to where the image starts: say --working-dir)"
    return [f"the run folder {run_dir}{begins} is on no --volume: pods would not share it, and it would end with them"]


def manifest(job: Job, options: KubernetesOptions) -> str:
    """The YAML that `kubectl apply -f` takes."""
    heading = f"# shardwright launch --kubernetes: {job.recipe.name}, {job.num_nodes} x {job.ranks_per_node} ranks\n"
    return heading + yaml.safe_dump(pytorch_job(job, options), sort_keys=False)


def pytorch_job(job: Job, options: KubernetesOptions) -> dict[str, Any]:
    """The manifest as a mapping: one pod is one node, and the first is the master.

    A container that ends otherwise than well is started again in its pod (OnFailure), and so are those of its peers, which lose
    their links; all go on from the newest whole checkpoint. The operator gives up after `backoffLimit` restarts of containers.
    """
    name = re.sub(r"[._]+", "-", job.recipe.name.lower()).strip("-")[:63].rstrip("-")
    replica = {"restartPolicy": "OnFailure", "template": _pod(job, options)}
    replicas = {"Master": {"replicas": 1, **replica}}
    if job.num_nodes > 1:
        # Two pods from one template: written out, since YAML would otherwise point from one to the other.
        replicas["Worker"] = {"replicas": job.num_nodes - 1, "restartPolicy": "OnFailure", "template": _pod(job, options)}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": name, **({"namespace": options.namespace} if options.namespace else {})},
        "spec": {
            "nprocPerNode": str(job.ranks_per_node),
            "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": job.max_restarts * job.num_nodes},
            "pytorchReplicaSpecs": replicas,
        },
    }


def _pod(job: Job, options: KubernetesOptions) -> dict[str, Any]:
    mounts = options.mounts()
    memory = {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": options.shared_memory}}
    claims = [{"name": f"claim-{n}", "persistentVolumeClaim": {"claimName": claim}} for n, (claim, _) in enumerate(mounts)]
    return {
        "spec": {
            "terminationGracePeriodSeconds": job.save_seconds + _GRACE_SECONDS,
            "containers": [_container(job, options, [path for _, path in mounts])],
            "volumes": [memory, *claims],
        }
    }


def _container(job: Job, options: KubernetesOptions, paths: list[str]) -> dict[str, Any]:
    """The operator looks for a container and a port by these names, and sets RANK (of the pod), MASTER_ADDR and MASTER_PORT."""
    port = job.port or _PORT
    variables = job.variables() | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(job.save_seconds)}
    shown = [{"name": key, "value": value} for key, value in variables.items()]
    shared = {"name": "shared-memory", "mountPath": "/dev/shm"}
    limits: dict[str, Any] = {}
    if job.on_accelerators:
        limits["nvidia.com/gpu"] = job.ranks_per_node
    if job.cores_per_rank is not None:
        limits["cpu"] = job.cores_per_rank * job.ranks_per_node
    words = ["--node-rank=$(RANK)", "--master-addr=$(MASTER_ADDR)", "--master-port=$(MASTER_PORT)"] if job.num_nodes > 1 else []
    return {
        "name": "pytorch",
        "image": options.image,
        **({"workingDir": options.working_dir} if options.working_dir else {}),
        "command": ["torchrun"],
        # A single pod meets itself; of several, each is told its place by the operator's variables.
        "args": [f"--nnodes={job.num_nodes}", *(words or ["--standalone"]), *torchrun_words(job)],
        "ports": [{"name": "pytorchjob-port", "containerPort": port}],
        "env": shown,
        **({"resources": {"limits": limits}} if limits else {}),
        "volumeMounts": [shared, *({"name": f"claim-{n}", "mountPath": path} for n, path in enumerate(paths))],
    }
