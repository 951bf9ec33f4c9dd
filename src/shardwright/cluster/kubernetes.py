"""A recipe as a manifest for Kubernetes: a PyTorchJob, a TrainJob or a JobSet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import yaml

from shardwright.cluster.job import Job
from shardwright.cluster.job_sets import build_job_set, build_train_job
from shardwright.cluster.launcher import Launcher
from shardwright.cluster.pods import KubernetesOptions, list_volume_warnings
from shardwright.cluster.pytorch_job import build_pytorch_job
from shardwright.errors import InputError

_DEFAULT_JOB_KIND = "pytorchjob"
_JOB_KINDS: dict[str, Callable[[Job, KubernetesOptions], list[dict[str, Any]]]] = {
    "pytorchjob": build_pytorch_job,
    "trainjob": build_train_job,
    "jobset": build_job_set,
}
"""Functions that build the objects of a manifest, by the value of `--job-kind`."""


def build_manifest(job: Job, options: KubernetesOptions) -> str:
    """Return the YAML for `kubectl apply -f`.

    Raises:
        InputError: An unknown kind.
    """
    job_kind = options.job_kind or _DEFAULT_JOB_KIND
    if job_kind not in _JOB_KINDS:
        raise InputError(
            "unknown kind of job", field="--job-kind", got=job_kind, allowed=", ".join(_JOB_KINDS)
        )
    heading = (
        f"# shardwright launch kubernetes: {job.recipe.name}, "
        f"{job.num_nodes} x {job.ranks_per_node} ranks\n"
    )
    objects = _JOB_KINDS[job_kind](job, options)
    return heading + "---\n".join(yaml.safe_dump(item, sort_keys=False) for item in objects)


LAUNCHER = Launcher(
    "a PyTorchJob, TrainJob or JobSet that starts a recipe on Kubernetes",
    KubernetesOptions,
    build_manifest,
    list_warnings=list_volume_warnings,
    submit_command=("kubectl", "apply", "-f", "-"),
)
