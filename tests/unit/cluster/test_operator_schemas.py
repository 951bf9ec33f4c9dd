"""Manifests against the operators' own CRD files, offline.

The files are not part of this repository. Set SHARDWRIGHT_CRDS to a folder that has them, such as
manifests/base/crds of a checkout of Kubeflow's training operator.
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
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recipe: Path, nodes: int
) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = load_schema(PYTORCH_JOBS, "v1")
    command = ["launch", str(recipe), "--kubernetes", "--nodes", str(nodes), "--image", "lab/sw:1"]
    options = ["--gpus-per-node", "4", "--cores-per-rank", "2", "--volume", "store:/data"]
    assert run([*command, *options, "--namespace", "team"]) == ExitCode.DONE
    manifest = yaml.safe_load(capsys.readouterr().out)
    jsonschema.validate(manifest, schema)
    template = manifest["spec"]["pytorchReplicaSpecs"]["Master"]["template"]
    for broken, name, value in (
        (manifest["spec"], "nodes", 3),
        (template["spec"], "graceSeconds", 3),
        (template["spec"]["containers"][0], "image", 3),
    ):
        saved = broken.get(name)
        broken[name] = value
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(manifest, schema)
        broken.pop(name) if saved is None else broken.update({name: saved})
