"""Manifests against the operators' own CRD files, offline.

The files are not part of this repository: they are large, and change with the operators. Set
SHARDWRIGHT_CRDS to a folder that has them: kubeflow.org_pytorchjobs.yaml is in manifests/base/crds
of Kubeflow's training operator (v1), trainer.kubeflow.org_trainjobs.yaml and
trainer.kubeflow.org_trainingruntimes.yaml in manifests/base/crds of Kubeflow's Trainer (v2),
jobset.x-k8s.io_jobsets.yaml in config/components/crd/bases of JobSet.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwright.cli.main import run
from shardwright.errors import ExitCode

PYTORCH_JOBS = "kubeflow.org_pytorchjobs.yaml"
TRAIN_JOBS = "trainer.kubeflow.org_trainjobs.yaml"
TRAINING_RUNTIMES = "trainer.kubeflow.org_trainingruntimes.yaml"
JOB_SETS = "jobset.x-k8s.io_jobsets.yaml"


def load_schema(file_name: str, version: str) -> dict[str, Any]:
    """Return a CRD's schema in which every field that it does not list is an error."""
    folder = os.environ.get("SHARDWRIGHT_CRDS")
    if not folder or not (Path(folder) / file_name).is_file():
        pytest.skip(f"needs {file_name}: set SHARDWRIGHT_CRDS to the folder of the operator's CRDs")
    definition = yaml.safe_load((Path(folder) / file_name).read_text(encoding="utf-8"))
    schema = next(
        entry["schema"]["openAPIV3Schema"]
        for entry in definition["spec"]["versions"]
        if entry["name"] == version
    )
    refuse_unknown_fields(schema)
    schema["properties"]["metadata"] = {"type": "object"}  # checked by the API server itself
    return dict(schema)


def refuse_unknown_fields(schema: Any) -> None:
    """Add `additionalProperties: false` and integers or strings where Kubernetes allows both."""
    if isinstance(schema, list):
        for item in schema:
            refuse_unknown_fields(item)
    elif isinstance(schema, dict):
        is_open = schema.get("x-kubernetes-preserve-unknown-fields")
        if "properties" in schema and schema.get("type") == "object" and not is_open:
            schema.setdefault("additionalProperties", False)
        if schema.pop("x-kubernetes-int-or-string", False):
            schema.pop("type", None)
        for value in schema.values():
            refuse_unknown_fields(value)


@pytest.mark.parametrize("nodes", [1, 3])
def test_the_manifest_is_valid_under_the_operators_crd(
    capsys: pytest.CaptureFixture[str], recipe: Path, nodes: int
) -> None:
    schema = load_schema(PYTORCH_JOBS, "v1")
    (manifest,) = write_manifest(capsys, recipe, "pytorchjob", nodes)
    template = manifest["spec"]["pytorchReplicaSpecs"]["Master"]["template"]
    assert_exactly_valid(
        manifest,
        schema,
        (manifest["spec"], "nodes", 3),
        (template["spec"], "graceSeconds", 3),
        (template["spec"]["containers"][0], "image", 3),
    )


@pytest.mark.parametrize("nodes", [1, 3])
def test_the_job_set_is_valid_under_the_operators_crd(
    capsys: pytest.CaptureFixture[str], recipe: Path, nodes: int
) -> None:
    schema = load_schema(JOB_SETS, "v1alpha2")
    (manifest,) = write_manifest(capsys, recipe, "jobset", nodes)
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert_exactly_valid(
        manifest,
        schema,
        (manifest["spec"]["failurePolicy"], "restartStrategy", "Sometimes"),
        (manifest["spec"]["failurePolicy"]["rules"][0], "action", "Restart"),
        (job["podFailurePolicy"]["rules"][0], "onExitCode", {}),
        (job["template"]["spec"]["containers"][0], "image", 3),
    )


@pytest.mark.parametrize("nodes", [1, 3])
def test_the_train_job_is_valid_under_the_trainers_crds(
    capsys: pytest.CaptureFixture[str], recipe: Path, nodes: int
) -> None:
    runtime_schema = load_schema(TRAINING_RUNTIMES, "v1alpha1")
    job_schema = load_schema(TRAIN_JOBS, "v1alpha1")
    runtime, train_job = write_manifest(capsys, recipe, "trainjob", nodes)
    job_set = runtime["spec"]["template"]["spec"]
    assert_exactly_valid(
        runtime,
        runtime_schema,
        (runtime["spec"]["mlPolicy"], "numNodes", "three"),
        (job_set["failurePolicy"], "maxRestarts", "two"),
        (job_set["replicatedJobs"][0]["template"]["spec"], "backoff", 0),
    )
    assert_exactly_valid(
        train_job,
        job_schema,
        (train_job["spec"], "failurePolicy", {}),
        (train_job["spec"]["trainer"], "numProcPerNode", "auto"),
        (train_job["spec"]["runtimeRef"], "name", None),
    )


def write_manifest(
    capsys: pytest.CaptureFixture[str], recipe: Path, kind: str, nodes: int
) -> list[dict[str, Any]]:
    command = ["launch", "kubernetes", str(recipe), "--nodes", str(nodes), "--job-kind", kind]
    options = ["--gpus-per-node", "4", "--cores-per-rank", "2", "--volume", "store:/data"]
    options += ["--image", "lab/sw:1", "--working-dir", "/data", "--env", "HF_HOME=/data/hf"]
    assert run([*command, *options, "--namespace", "team"]) == ExitCode.DONE
    return list(yaml.safe_load_all(capsys.readouterr().out))


def assert_exactly_valid(
    manifest: dict[str, Any], schema: dict[str, Any], *changes: tuple[dict[str, Any], str, Any]
) -> None:
    """Assert that the manifest is valid, and invalid after each change of one field."""
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(manifest, schema)
    for broken, name, value in changes:
        saved = broken.get(name)
        broken[name] = value
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(manifest, schema)
        broken.pop(name) if saved is None else broken.update({name: saved})
