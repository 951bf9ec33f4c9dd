"""A recipe as a JobSet (jobset.x-k8s.io), alone or started by a TrainJob of Kubeflow's Trainer.

The container of a node starts its ranks with `shardwright.launch.node_ranks`, which ends with
their exit code. So the rules of Job and JobSet distinguish what the Slurm script does: exit codes
1 and 2 end the job, exit code 4 (the ranks saved) restarts it without counting, everything else
restarts it at most `elastic.max_restarts` times. A restart creates the pods of all nodes again,
after the former ones have ended.
"""

from __future__ import annotations

import re
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
from shardwright.errors import ExitCode, InputError

_NODE = "node"
"""Name of the replicated job and of its container; the Trainer requires it of both."""
_DEFAULT_PORT = 29500
_DNS_LABEL = re.compile(r"^[a-z]([-a-z0-9]*[a-z0-9])?$")
_MAX_NAME_LENGTH = 63
_INDEX_FIELD = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_NUMBER_VARIABLE = "SHARDWRIGHT_NODE_RANK"
_TRAINER = "trainer.kubeflow.org"
_TRAINER_VARIABLES = (
    "PET_NNODES",
    "PET_NPROC_PER_NODE",
    "PET_NODE_RANK",
    "PET_MASTER_ADDR",
    "PET_MASTER_PORT",
)
"""Variables that the Trainer sets, and refuses in a TrainJob."""


def build_job_set(job: Job, options: KubernetesOptions) -> list[dict[str, Any]]:
    """Return the manifest: a JobSet of one indexed Job, whose pods are the nodes.

    Raises:
        InputError: the recipe's name cannot be that of the pods.
    """
    name = _check_name(job)
    return [
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": build_metadata(name, options),
            "spec": _build_job_set_spec(job, options, _build_container(job, options, name)),
        }
    ]


def build_train_job(job: Job, options: KubernetesOptions) -> list[dict[str, Any]]:
    """Return two manifests: a TrainingRuntime with the rules and the pods, and the TrainJob.

    A TrainJob itself has no rules for failures; they belong to its runtime. The runtimes that the
    Trainer installs have none, so this one is written with the job, under the same name.

    Raises:
        InputError: the recipe's name cannot be that of the pods, a port that the Trainer chooses
            itself, or a variable that it sets itself.
    """
    name = _check_name(job)
    if job.port is not None:
        raise InputError(
            "the Trainer chooses the port of the rendezvous",
            field="--port",
            got=job.port,
            remedy="Remove it, or write --job-kind jobset",
        )
    for variable in _TRAINER_VARIABLES:
        if variable in job.environment:
            raise InputError(
                "the Trainer sets this variable and refuses a TrainJob with it",
                field="--env",
                got=variable,
                remedy="Remove it",
            )
    resources = build_resources(job)
    container = {"name": _NODE, **build_image(options), "volumeMounts": build_mounts(options)}
    runtime = {
        "apiVersion": f"{_TRAINER}/v1alpha1",
        "kind": "TrainingRuntime",
        # With this label the Trainer's client lists it as a runtime of PyTorch.
        "metadata": build_metadata(name, options) | {"labels": {f"{_TRAINER}/framework": "torch"}},
        "spec": {
            "mlPolicy": {"numNodes": job.num_nodes, "torch": {}},
            "template": {
                "spec": _build_job_set_spec(
                    job, options, container, {f"{_TRAINER}/trainjob-ancestor-step": "trainer"}
                )
            },
        },
    }
    train_job = {
        "apiVersion": f"{_TRAINER}/v1alpha1",
        "kind": "TrainJob",
        "metadata": build_metadata(name, options),
        "spec": {
            "runtimeRef": {"apiGroup": _TRAINER, "kind": "TrainingRuntime", "name": name},
            "trainer": {
                "numNodes": job.num_nodes,
                "numProcPerNode": job.ranks_per_node,
                "image": options.image,
                "command": _build_command(),
                "args": _build_arguments(
                    job, "$(PET_NODE_RANK)", "$(PET_MASTER_ADDR)", "$(PET_MASTER_PORT)"
                ),
                "env": build_variables(job.build_environment()),
                **({"resourcesPerNode": resources} if resources else {}),
            },
        },
    }
    return [runtime, train_job]


def _check_name(job: Job) -> str:
    """Return the name of the job; the names of its pods are longer and must be host names."""
    name = normalise_name(job)
    suffix = f"-{_NODE}-0-{job.num_nodes - 1}-abcde"
    max_length = _MAX_NAME_LENGTH - len(suffix)
    if not _DNS_LABEL.fullmatch(name) or len(name) > max_length:
        raise InputError(
            "cannot be the host name of a pod",
            field="name",
            got=job.recipe.name,
            allowed=f"letters, digits, `-`, `_` and `.`, a letter first, at most {max_length} "
            "characters",
            remedy="Set another name, e.g. --set name=my-run",
        )
    return name


def _build_job_set_spec(
    job: Job,
    options: KubernetesOptions,
    container: dict[str, Any],
    labels: dict[str, str] | None = None,
) -> dict[str, Any]:
    ends = [int(ExitCode.CHECK_FAILED), int(ExitCode.WRONG_INPUT)]
    saved = [int(ExitCode.PREEMPTED)]
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All"},
        "failurePolicy": {
            "maxRestarts": job.max_restarts,
            # The former pods end, and leave the run folder, before new ones start.
            "restartStrategy": "BlockingRecreate",
            "rules": [
                # First, so that an operator that does not know the patterns ends the job.
                _match_exit_codes("retry_would_fail", "FailJobSet", ends),
                _match_exit_codes("saved", "RestartJobSetAndIgnoreMaxRestarts", saved),
            ],
        },
        "replicatedJobs": [
            {
                "name": _NODE,
                "replicas": 1,
                "template": {
                    **({"metadata": {"labels": labels}} if labels else {}),
                    "spec": {
                        "completionMode": "Indexed",
                        "completions": job.num_nodes,
                        "parallelism": job.num_nodes,
                        # Any other failure ends the Job; the JobSet counts and restarts it.
                        "backoffLimit": 0,
                        "podFailurePolicy": {
                            "rules": [_fail_job_after(ends), _fail_job_after(saved)]
                        },
                        "template": {
                            "spec": {
                                "restartPolicy": "Never",
                                **build_pod_spec(job, options, container),
                            }
                        },
                    },
                },
            }
        ],
    }


def _fail_job_after(codes: list[int]) -> dict[str, Any]:
    """Return the rule that fails the Job with a separate reason after these exit codes."""
    return {
        "action": "FailJob",
        "onExitCodes": {"containerName": _NODE, "operator": "In", "values": codes},
    }


def _match_exit_codes(name: str, action: str, codes: list[int]) -> dict[str, Any]:
    """Return the JobSet's rule for a Job that `_fail_job_after` ended with one of these codes.

    The JobSet sees the exit code only in the message of the Job's failure.
    """
    return {
        "name": name,
        "action": action,
        "onJobFailureReasons": ["PodFailurePolicy"],
        "onJobFailureMessagePatterns": [f"exit code {code} " for code in codes],
    }


def _build_container(job: Job, options: KubernetesOptions, name: str) -> dict[str, Any]:
    resources = build_resources(job)
    port = job.port or _DEFAULT_PORT
    number = {"name": _NUMBER_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": _INDEX_FIELD}}}
    return {
        "name": _NODE,
        **build_image(options),
        "command": _build_command(),
        "args": _build_arguments(
            job, f"$({_NUMBER_VARIABLE})", f"{name}-{_NODE}-0-0.{name}", str(port)
        ),
        "ports": [{"containerPort": port}],
        "env": [*build_variables(job.build_environment()), number],
        **({"resources": resources} if resources else {}),
        "volumeMounts": build_mounts(options),
    }


def _build_command() -> list[str]:
    return ["python", "-m", "shardwright.launch.node_ranks"]


def _build_arguments(job: Job, number: str, address: str, port: str) -> list[str]:
    """Return the arguments of `node_ranks`; every start resumes a run that has begun."""
    rendezvous = [
        f"--num-nodes={job.num_nodes}",
        f"--node-rank={number}",
        f"--master-addr={address}",
        f"--master-port={port}",
    ]
    return [
        f"--num-ranks={job.ranks_per_node}",
        # The ranks of a single pod find each other on its own address.
        *(rendezvous if job.num_nodes > 1 else []),
        "--",
        *map(escape_references, job.build_train_arguments()),
        "--resume-if-begun",
    ]
