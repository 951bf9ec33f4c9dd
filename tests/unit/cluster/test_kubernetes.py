"""PyTorchJob manifests of `launch`, compared with the schema and classes of the operator."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from shardwright.cli.main import run
from shardwright.errors import ExitCode
from tests.unit.cluster.conftest import run_launch

POD = {
    "type": "object",
    "additionalProperties": False,
    "required": ["replicas", "restartPolicy", "template"],
    "properties": {
        "replicas": {"type": "integer", "minimum": 1},
        "restartPolicy": {"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
        "template": {
            "type": "object",
            "required": ["spec"],
            "properties": {
                "spec": {
                    "type": "object",
                    "required": ["containers"],
                    "properties": {
                        "terminationGracePeriodSeconds": {"type": "integer"},
                        "containers": {
                            "type": "array",
                            "minItems": 1,
                            "items": {
                                "type": "object",
                                "required": ["name", "image", "command", "args"],
                                "properties": {
                                    "name": {"const": "pytorch"},
                                    "command": {"type": "array", "items": {"type": "string"}},
                                    "args": {"type": "array", "items": {"type": "string"}},
                                    "env": {
                                        "type": "array",
                                        "items": {
                                            "type": "object",
                                            "additionalProperties": False,
                                            "required": ["name", "value"],
                                            "properties": {
                                                "name": {"type": "string"},
                                                "value": {"type": "string"},
                                            },
                                        },
                                    },
                                    "ports": {
                                        "type": "array",
                                        "items": {
                                            "properties": {
                                                "name": {"const": "pytorchjob-port"},
                                                "containerPort": {"type": "integer"},
                                            }
                                        },
                                    },
                                    "volumeMounts": {
                                        "type": "array",
                                        "items": {"required": ["name", "mountPath"]},
                                    },
                                },
                            },
                        },
                        "volumes": {"type": "array", "items": {"required": ["name"]}},
                    },
                }
            },
        },
    },
}
PYTORCH_JOB = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "kubeflow.org/v1"},
        "kind": {"const": "PyTorchJob"},
        "metadata": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {
                    "type": "string",
                    "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
                    "maxLength": 63,
                }
            },
        },
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["pytorchReplicaSpecs"],
            "properties": {
                "nprocPerNode": {"type": "string"},
                "runPolicy": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "cleanPodPolicy": {"enum": ["All", "Running", "None"]},
                        "backoffLimit": {"type": "integer"},
                    },
                },
                "pytorchReplicaSpecs": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["Master"],
                    "properties": {"Master": POD, "Worker": POD},
                },
            },
        },
    },
}
"""The part of kubeflow.org_pytorchjobs.yaml (training-operator v1) that `launch` uses."""


@pytest.mark.parametrize("nodes", [1, 3])
def test_the_manifest_matches_the_operators_schema(
    recipe: Path, capsys: pytest.CaptureFixture[str], nodes: int
) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    words = [
        "--kubernetes",
        "--nodes",
        str(nodes),
        "--gpus-per-node",
        "4",
        "--image",
        "lab/sw:1",
        "--volume",
        "store:/data",
    ]
    manifest = yaml.safe_load(run_launch(capsys, str(recipe), *words, "--set", "name=Big_Run.1"))
    jsonschema.validate(manifest, PYTORCH_JOB)
    assert manifest["metadata"]["name"] == "big-run-1"
    replicas = manifest["spec"]["pytorchReplicaSpecs"]
    assert sum(replica["replicas"] for replica in replicas.values()) == nodes
    pod = replicas["Master"]["template"]["spec"]
    container = pod["containers"][0]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert ("--node-rank=$(RANK)" in container["args"]) == (nodes > 1)
    assert container["args"][-1] == "--resume-if-begun"
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }
    shutdown_seconds = {entry["name"]: entry["value"] for entry in container["env"]}[
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    ]
    assert pod["terminationGracePeriodSeconds"] > int(shutdown_seconds), (
        "ranks may save before the pod is killed"
    )


def test_the_operators_own_client_reads_the_manifest_without_loss(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The classes of kubeflow-training and kubernetes have every field; a round trip keeps all."""
    models = pytest.importorskip("kubeflow.training.models")
    from kubernetes.client import ApiClient
    from kubernetes.client import models as common

    for name in vars(models).keys() - vars(common).keys():  # the client looks classes up there
        monkeypatch.setattr(common, name, getattr(models, name), raising=False)

    words = [
        "--kubernetes",
        "--nodes",
        "3",
        "--gpus-per-node",
        "4",
        "--cores-per-rank",
        "2",
        "--image",
        "lab/sw:1",
    ]
    manifest = yaml.safe_load(
        run_launch(capsys, str(recipe), *words, "--volume", "store:/data", "--working-dir", "/data")
    )
    client = ApiClient()
    job = client.deserialize(SimpleNamespace(data=json.dumps(manifest)), "KubeflowOrgV1PyTorchJob")
    serialised = client.sanitize_for_serialization(job)
    # Kubernetes accepts numbers as quantities; the client writes them as text.
    for replica in manifest["spec"]["pytorchReplicaSpecs"].values():
        limits = replica["template"]["spec"]["containers"][0]["resources"]["limits"]
        limits |= {name: str(amount) for name, amount in limits.items()}
    assert serialised == manifest


@pytest.mark.parametrize(
    ("words", "is_shared"),
    [
        ((), False),
        (("--working-dir", "/data"), True),
        (("--run-dir", "/data/runs/a"), True),
        (("--run-dir", "/tmp/a"), False),
    ],
)
def test_a_run_folder_that_pods_do_not_share_gives_a_warning(
    recipe: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], is_shared: bool
) -> None:
    common = [
        "--kubernetes",
        "--gpus-per-node",
        "4",
        "--image",
        "lab/sw:1",
        "--volume",
        "store:/data",
    ]
    assert run(["launch", str(recipe), *common, *words]) == ExitCode.DONE
    assert ("is on no --volume" in capsys.readouterr().err) == (not is_shared)


_COMMON = ("--kubernetes", "--gpus-per-node", "4", "--image", "lab/sw:1")


@pytest.mark.parametrize("value", ["1e3", "y", "N", "0o17", "1_000", ".5", "yes", "12", "~"])
def test_values_that_kubectl_would_not_read_as_text_are_quoted(
    recipe: Path, capsys: pytest.CaptureFixture[str], value: str
) -> None:
    """go-yaml reads `1e3` and `y` as a number and a truth value, PyYAML as text."""
    text = run_launch(capsys, str(recipe), *_COMMON, "--env", f"FLAG={value}")
    assert f"value: '{value}'" in text


@pytest.mark.parametrize("job_kind", ["pytorchjob", "trainjob", "jobset"])
def test_values_are_not_expanded_by_kubernetes(
    recipe: Path, capsys: pytest.CaptureFixture[str], job_kind: str
) -> None:
    words = ["--env", "A=$(HOME) $HOME $$", "--run-dir", "/data/$(USER)", "--job-kind", job_kind]
    text = run_launch(capsys, str(recipe), *_COMMON, *words, "--nodes", "2")
    assert "value: $$(HOME) $HOME $$$\n" in text
    assert "- /data/$$(USER)\n" in text
    assert "$$(RANK)" not in text
    assert "$$(PET" not in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--namespace", "My NS"], "--namespace: Kubernetes allows no namespace"),
        (["--working-dir", "data"], "--working-dir: pods start in an absolute path"),
        (["--volume", "a:/data", "--volume", "b:/data/"], "this path has a mount already"),
        (["--volume", "a:/dev/shm"], "this path has a mount already"),
        (["--volume", "a:/data:ro"], "without a further colon"),
        (["--env", "MASTER_ADDR=x"], "the training operator sets this variable"),
    ],
)
def test_values_that_kubernetes_would_refuse_later_are_errors(
    recipe: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert run(["launch", str(recipe), *_COMMON, *words]) == ExitCode.WRONG_INPUT
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
