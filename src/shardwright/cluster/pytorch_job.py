"""A recipe as a PyTorchJob of Kubeflow's training operator (kubeflow.org/v1)."""

from __future__ import annotations

from typing import Any

from shardwright.cluster.job import Job
from shardwright.cluster.pods import (
    KubernetesOptions,
    build_image,
    build_metadata,
    build_mounts,
    build_pod_spec,
    build_resources,
    build_variables,
    escape_references,
    normalise_name,
)
from shardwright.cluster.torchrun import build_torchrun_arguments
from shardwright.errors import InputError

_DEFAULT_PORT = 23456
_OPERATOR_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that the operator sets, from which the pods find each other."""


def build_pytorch_job(job: Job, options: KubernetesOptions) -> list[dict[str, Any]]:
    """Return the manifest as a mapping: one pod per node; the first is the master.

    A container that fails restarts in its pod (OnFailure). Its peers lose their connections,
    fail and restart as well; all resume from the newest complete checkpoint. The operator gives
    up after `backoffLimit` container restarts. It does not distinguish the ranks' exit codes,
    which torchrun replaces by 1.

    Raises:
        InputError: `--env` sets a variable of the operator.
    """
    for variable in _OPERATOR_VARIABLES:
        if variable in job.environment:
            raise InputError(
                "the training operator sets this variable",
                field="--env",
                got=variable,
                remedy="Remove it",
            )
    replicas = {"Master": _build_replica(job, options, 1)}
    if job.num_nodes > 1:
        # Built twice: YAML would otherwise write an alias instead of the second template.
        replicas["Worker"] = _build_replica(job, options, job.num_nodes - 1)
    return [
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": build_metadata(normalise_name(job)[:63].rstrip("-"), options),
            "spec": {
                "nprocPerNode": str(job.ranks_per_node),
                "runPolicy": {
                    "cleanPodPolicy": "Running",
                    "backoffLimit": job.max_restarts * job.num_nodes,
                },
                "pytorchReplicaSpecs": replicas,
            },
        }
    ]


def _build_replica(job: Job, options: KubernetesOptions, num_pods: int) -> dict[str, Any]:
    pod = build_pod_spec(job, options, _build_container(job, options))
    return {"replicas": num_pods, "restartPolicy": "OnFailure", "template": {"spec": pod}}


def _build_container(job: Job, options: KubernetesOptions) -> dict[str, Any]:
    """Return the container specification.

    The operator requires these names of container and port. It sets RANK (of the pod),
    MASTER_ADDR and MASTER_PORT.
    """
    variables = job.build_environment() | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(job.save_seconds)}
    resources = build_resources(job)
    rendezvous = (
        ["--node-rank=$(RANK)", "--master-addr=$(MASTER_ADDR)", "--master-port=$(MASTER_PORT)"]
        if job.num_nodes > 1
        else []
    )
    return {
        "name": "pytorch",
        **build_image(options),
        "command": ["torchrun"],
        # A single pod needs no rendezvous; several find each other by the operator's variables.
        "args": [
            f"--nnodes={job.num_nodes}",
            *(rendezvous or ["--standalone"]),
            *map(escape_references, build_torchrun_arguments(job)),
        ],
        "ports": [{"name": "pytorchjob-port", "containerPort": job.port or _DEFAULT_PORT}],
        "env": build_variables(variables),
        **({"resources": resources} if resources else {}),
        "volumeMounts": build_mounts(options),
    }
