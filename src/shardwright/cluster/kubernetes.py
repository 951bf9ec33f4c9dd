"""A recipe as a manifest for Kubernetes: a PyTorchJob, a TrainJob or a JobSet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import yaml

from shardwright.cluster.job import Job
from shardwright.cluster.job_sets import build_job_set, build_train_job
from shardwright.cluster.pods import KubernetesOptions
from shardwright.cluster.pytorch_job import build_pytorch_job
from shardwright.errors import InputError

DEFAULT_JOB_KIND = "pytorchjob"
JOB_KINDS: dict[str, Callable[[Job, KubernetesOptions], list[dict[str, Any]]]] = {
    "pytorchjob": build_pytorch_job,
    "trainjob": build_train_job,
    "jobset": build_job_set,
}
"""Functions that build the objects of a manifest, by the value of `--job-kind`."""


def build_manifest(job: Job, options: KubernetesOptions, job_kind: str = DEFAULT_JOB_KIND) -> str:
    """Return the YAML for `kubectl apply -f`.

    Raises:
        InputError: An unknown kind.
    """
    if job_kind not in JOB_KINDS:
        raise InputError(
            "unknown kind of job", field="--job-kind", got=job_kind, allowed=", ".join(JOB_KINDS)
        )
    heading = (
        f"# shardwright launch --kubernetes: {job.recipe.name}, "
        f"{job.num_nodes} x {job.ranks_per_node} ranks\n"
    )
    objects = JOB_KINDS[job_kind](job, options)
    return heading + "---\n".join(yaml.safe_dump(item, sort_keys=False) for item in objects)
