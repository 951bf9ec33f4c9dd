"""A recipe as a manifest for Kubernetes: a PyTorchJob, a TrainJob or a JobSet."""

from __future__ import annotations

import re
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


_NOT_TEXT_IN_GO = re.compile(
    r"[-+]?[0-9_.]+([eE][-+]?[0-9_]+)?|[-+]?0[xXoObB][0-9a-fA-F_]+|[-+]?\.(inf|nan)"
    r"|y|n|yes|no|on|off|true|false|null|~",
    re.IGNORECASE,
)
"""Plain scalars that go-yaml, which kubectl uses, may read as something else than text."""


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
    return heading + "---\n".join(
        yaml.dump(item, Dumper=_ManifestDumper, sort_keys=False) for item in objects
    )


class _ManifestDumper(yaml.SafeDumper):
    """Dumper that quotes each text that kubectl would read as a number or a truth value.

    kubectl reads `1e3` as a number and `y` as true, which PyYAML writes without quotes; an
    environment variable with another type than text is refused.
    """


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "'" if _NOT_TEXT_IN_GO.fullmatch(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_ManifestDumper.add_representer(str, _represent_text)


LAUNCHER = Launcher(
    "a PyTorchJob, TrainJob or JobSet for Kubernetes",
    KubernetesOptions,
    build_manifest,
    list_warnings=list_volume_warnings,
    submit_command=("kubectl", "apply", "-f", "-"),
)
