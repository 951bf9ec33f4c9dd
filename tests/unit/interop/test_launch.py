"""What `launch` writes: scripts that shellcheck passes and bash runs, a manifest of the operator's
form, commands by node.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from shardwright.cli.main import run
from shardwright.errors import ExitCode


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    told: dict[str, Any] = {
        "name": "small",
        "model": {"config": {"model_type": "llama"}},
        "data": {"sources": "corpus.txt"},
        "training": {
            "sequence_length": 8,
            "max_steps": 3,
            "learning_rate": 1e-3,
            "micro_batch_size": 1,
        },
        "elastic": {"max_restarts": 2},
    }
    path = tmp_path / "a recipe.yaml"
    path.write_text(yaml.safe_dump(told))
    return path


ONLY_WITH_FLAGS = (
    "applies to --torchrun only and has no effect with --slurm",
    "this launcher has no scheduler",
)
"""Messages about options that a subcommand does not have."""


def launched(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(["launch", *words]) == ExitCode.DONE, capsys.readouterr().err
    return capsys.readouterr().out


SLURM = (
    "--nodes",
    "2",
    "--gpus-per-node",
    "4",
    "--time",
    "04:00:00",
    "--account",
    "lab",
    "--cores-per-rank",
    "8",
)


@pytest.mark.parametrize(
    "extra",
    [
        (),
        ("--image", "lab/sw:1"),
        ("--env", "WORDS=two words", "--interface", "ib0", "--port", "29501"),
    ],
)
def test_the_script_passes_shellcheck(
    recipe: Path, capsys: pytest.CaptureFixture[str], extra: tuple[str, ...]
) -> None:
    shellcheck = shutil.which(
        "shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    )
    if shellcheck is None:
        pytest.skip("shellcheck is not installed (the `dev` extra has it)")
    text = launched(capsys, "slurm", str(recipe), *SLURM, *extra)
    done = subprocess.run(
        [shellcheck, "-"], input=text, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_slurm_is_told_all_it_needs(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = launched(
        capsys, "slurm", str(recipe), *SLURM, "--sbatch=--qos=high", "--save-seconds", "600"
    ).splitlines()
    directives = {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")}
    assert directives >= {
        "--nodes=2",
        "--ntasks-per-node=4",
        "--gpus-per-node=4",
        "--cpus-per-task=8",
        "--time=04:00:00",
    }
    assert directives >= {
        "--account=lab",
        "--qos=high",
        "--signal=TERM@600",
        "--requeue",
        "--open-mode=append",
    }


FAKES = {
    "srun": 'printf "%s\\n" "$*" >> srun.log\n'
    '[ "$MASTER_ADDR" = first ] || exit 99\nexit "$(cat status)"',
    "scontrol": 'if [ "$1" = show ]; then printf "first\\nsecond\\n"; '
    'else printf "%s\\n" "$*" >> scontrol.log; fi',
}
"""Slurm's commands as the script sees them."""


def run_script(folder: Path, text: str, status: int, restarts: int = 0) -> tuple[int, list[str]]:
    """The script under `FAKES`, where srun ends with `status`; returns its exit code and what it
    asked scontrol for.
    """
    for name, body in FAKES.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    (folder / "status").write_text(str(status))
    (folder / "scontrol.log").unlink(missing_ok=True)
    told = {
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "PATH": f"{folder}:{os.environ['PATH']}",
    }
    told |= {"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}
    done = subprocess.run(
        ["bash", "-c", text],
        cwd=folder,
        env=told,
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    log = folder / "scontrol.log"
    return done.returncode, log.read_text().splitlines() if log.exists() else []


def test_the_script_goes_back_into_the_queue_when_it_should(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = launched(capsys, "slurm", str(recipe), *SLURM)
    requeue = ["requeue 77"]
    assert run_script(tmp_path, text, 0) == (0, [])
    assert run_script(tmp_path, text, ExitCode.WRONG_INPUT) == (ExitCode.WRONG_INPUT, [])
    assert run_script(tmp_path, text, ExitCode.PREEMPTED) == (ExitCode.PREEMPTED, requeue)
    assert "--resume-if-begun" not in (tmp_path / "srun.log").read_text(), (
        "a new job refuses a run folder that is in use"
    )
    assert run_script(tmp_path, text, ExitCode.PREEMPTED, restarts=1) == (
        ExitCode.PREEMPTED,
        requeue,
    )
    assert (tmp_path / "srun.log").read_text().splitlines()[-1].endswith("--resume-if-begun")
    losses = [run_script(tmp_path, text, status)[1] for status in (ExitCode.RUN_FAILED, 137, 143)]
    assert losses == [requeue, requeue, []], "elastic.max_restarts is 2"


def test_a_recipe_without_restarts_is_not_tried_again(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = launched(capsys, "slurm", str(recipe), *SLURM, "--set", "elastic.max_restarts=0")
    assert run_script(tmp_path, text, ExitCode.RUN_FAILED) == (ExitCode.RUN_FAILED, [])


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
"""What we write of kubeflow.org_pytorchjobs.yaml (training-operator v1), and nothing that it does
not have.
"""


@pytest.mark.parametrize("nodes", [1, 3])
def test_the_manifest_is_of_the_operators_form(
    recipe: Path, capsys: pytest.CaptureFixture[str], nodes: int
) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    words = [
        "--nodes",
        str(nodes),
        "--gpus-per-node",
        "4",
        "--image",
        "lab/sw:1",
        "--volume",
        "store:/data",
    ]
    told = yaml.safe_load(
        launched(capsys, "kubernetes", str(recipe), *words, "--set", "name=Big_Run.1")
    )
    jsonschema.validate(told, PYTORCH_JOB)
    assert told["metadata"]["name"] == "big-run-1"
    replicas = told["spec"]["pytorchReplicaSpecs"]
    assert sum(replica["replicas"] for replica in replicas.values()) == nodes
    pod = replicas["Master"]["template"]["spec"]
    container = pod["containers"][0]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert ("--node-rank=$(RANK)" in container["args"]) == (nodes > 1)
    assert container["args"][-1] == "--resume-if-begun"
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }
    grace = {entry["name"]: entry["value"] for entry in container["env"]}[
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    ]
    assert pod["terminationGracePeriodSeconds"] > int(grace), (
        "ranks may save before the pod is killed"
    )


def test_the_manifest_is_one_to_the_operators_own_client(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read into the classes of kubeflow-training and kubernetes, which know every field, and back:
    nothing is lost or changed.
    """
    models = pytest.importorskip("kubeflow.training.models")
    from kubernetes.client import ApiClient
    from kubernetes.client import models as common

    for name in vars(models).keys() - vars(common).keys():  # where the client looks classes up
        monkeypatch.setattr(common, name, getattr(models, name), raising=False)

    words = [
        "--nodes",
        "3",
        "--gpus-per-node",
        "4",
        "--cores-per-rank",
        "2",
        "--image",
        "lab/sw:1",
    ]
    told = yaml.safe_load(
        launched(
            capsys,
            "kubernetes",
            str(recipe),
            *words,
            "--volume",
            "store:/data",
            "--working-dir",
            "/data",
        )
    )
    client = ApiClient()
    read = client.deserialize(SimpleNamespace(data=json.dumps(told)), "KubeflowOrgV1PyTorchJob")
    back = client.sanitize_for_serialization(read)
    for replica in told["spec"][
        "pytorchReplicaSpecs"
    ].values():  # quantities may be numbers to Kubernetes, and are text to the client
        limits = replica["template"]["spec"]["containers"][0]["resources"]["limits"]
        limits |= {name: str(amount) for name, amount in limits.items()}
    assert back == told


@pytest.mark.parametrize(
    ("words", "shared"),
    [
        ((), False),
        (("--working-dir", "/data"), True),
        (("--run-dir", "/data/runs/a"), True),
        (("--run-dir", "/tmp/a"), False),
    ],
)
def test_a_run_folder_that_pods_would_not_share_is_told(
    recipe: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], shared: bool
) -> None:
    common = [
        "--gpus-per-node",
        "4",
        "--image",
        "lab/sw:1",
        "--volume",
        "store:/data",
    ]
    assert run(["launch", "kubernetes", str(recipe), *common, *words]) == ExitCode.DONE
    assert ("is on no --volume" in capsys.readouterr().err) == (not shared)


def test_a_name_that_is_no_utf8_is_written_with_its_own_bytes(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.txt"
    words = ["--gpus-per-node", "4", "--env", "FOLDER=/data/\udcff"]
    assert run(["launch", "torchrun", str(recipe), *words, "--out", str(out)]) == ExitCode.DONE
    assert b"/data/\xff" in out.read_bytes()


def test_each_node_has_its_torchrun_command(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--hosts",
        "10.0.0.1,10.0.0.2",
        "--gpus-per-node",
        "4",
        "--env",
        "WORDS=two words",
        "--json",
    ]
    told = json.loads(launched(capsys, "torchrun", str(recipe), *words))
    first, second = told["text"].splitlines()[1::2]
    assert told["world_size"] == 8
    assert "--local-addr=10.0.0.1" in first
    assert "is_host=1" in first
    assert "--local-addr=10.0.0.2" in second
    assert "is_host=0" in second
    for command in (first, second):
        shown = subprocess.run(
            ["bash", "-c", command.replace("torchrun", "printenv WORDS; printf '%s\\n'", 1)],
            capture_output=True,
            text=True,
            check=True,
        )
        assert shown.stdout.splitlines()[0] == "two words"
        assert str(recipe) in shown.stdout.splitlines()
        assert "--rdzv-endpoint=10.0.0.1:29500" in shown.stdout.splitlines()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "one of --slurm, --kubernetes and --torchrun"),
        (["--slurm", "--torchrun"], "one of --slurm, --kubernetes and --torchrun"),
        (["--slurm"], "--gpus-per-node"),
        (["--slurm", "--gpus-per-node", "2", "--time", "soon"], "not a time limit"),
        (["--slurm", "--gpus-per-node", "2", "--time", "30\n"], "not a time limit"),
        (
            ["--slurm", "--gpus-per-node", "2", "--partition", "a\nrm -rf /"],
            "--partition: not a single word",
        ),
        (["--torchrun", "--gpus-per-node", "2", "--hosts", ",,,"], "--hosts: not a node address"),
        (
            ["--torchrun", "--gpus-per-node", "2", "--hosts", "a b,c;d"],
            "--hosts: not a node address (got 'a b'",
        ),
        (["--kubernetes", "--gpus-per-node", "2", "--image", ""], "pods need a container image"),
        (
            ["--slurm", "--gpus-per-node", "2", "--hosts", "a"],
            "applies to --torchrun only and has no effect with --slurm",
        ),
        (["--slurm", "--gpus-per-node", "2", "--layout", "tp=3"], "does not divide 2 ranks"),
        (["--slurm", "--gpus-per-node", "2", "--sbatch", "qos=high"], "not an sbatch option"),
        (["--slurm", "--gpus-per-node", "2", "--env", "1=2"], "NAME=VALUE"),
        (
            ["--slurm", "--gpus-per-node", "2", "--ib-hca", "mlx5", "--no-infiniband"],
            "InfiniBand is disabled",
        ),
        (["--kubernetes", "--gpus-per-node", "2"], "--image"),
        (["--kubernetes", "--gpus-per-node", "2", "--image", "i", "--volume", "x"], "CLAIM:/path"),
        (["--torchrun", "--nodes", "2", "--gpus-per-node", "2"], "--hosts node1,node2"),
        (["--torchrun", "--gpus-per-node", "2", "--submit"], "this launcher has no scheduler"),
    ],
)
def test_wrong_input_is_told(
    recipe: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    """In the former spelling, which has the options of all launchers; and in the new one."""
    assert run(["launch", str(recipe), *words]) == ExitCode.WRONG_INPUT
    assert message in capsys.readouterr().err
    launchers = [word for word in words if word in ("--slurm", "--kubernetes", "--torchrun")]
    if len(launchers) == 1 and message not in ONLY_WITH_FLAGS:
        words = [launchers[0][2:], str(recipe), *(word for word in words if word not in launchers)]
        assert run(["launch", *words]) == ExitCode.WRONG_INPUT
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("launcher", "words"),
    [
        ("slurm", SLURM),
        ("kubernetes", ("--gpus-per-node", "4", "--image", "lab/sw:1", "--namespace", "lab")),
        ("torchrun", ("--gpus-per-node", "4", "--hosts", "one,two", "--json")),
    ],
)
def test_the_former_spelling_writes_the_same(
    recipe: Path, capsys: pytest.CaptureFixture[str], launcher: str, words: tuple[str, ...]
) -> None:
    assert run(["launch", launcher, str(recipe), *words]) == ExitCode.DONE
    subcommand = capsys.readouterr()
    for former in (
        [str(recipe), f"--{launcher}", *words],
        [*words, f"--{launcher}", str(recipe)],
    ):
        assert run(["launch", *former]) == ExitCode.DONE
        output = capsys.readouterr()
        assert output.out == subcommand.out
        note, _, notes = output.err.partition("\n")
        assert note.endswith(f"is now spelled `shardwright launch {launcher} RECIPE`")
        assert notes == subcommand.err


def test_a_subcommand_has_only_its_own_options(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for launcher, other_option in (
        ("slurm", ["--hosts", "a"]),
        ("kubernetes", ["--partition", "long"]),
        ("torchrun", ["--submit"]),
    ):
        words = ["launch", launcher, str(recipe), "--gpus-per-node", "2"]
        assert run([*words, *other_option]) == ExitCode.WRONG_INPUT
        assert f"No such option: {other_option[0]}" in capsys.readouterr().err
        run(["launch", launcher, "--help"])
        assert other_option[0] not in capsys.readouterr().out.split()


def test_submitting_hands_the_script_over(
    recipe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["launch", "slurm", str(recipe), "--gpus-per-node", "2", "--submit"]
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert run(words) == ExitCode.WRONG_INPUT
    assert "sbatch is not installed" in capsys.readouterr().err
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(f'#!/bin/bash\ncat > "{tmp_path}/given"\necho 4711\n')
    sbatch.chmod(0o755)
    assert run(words) == ExitCode.DONE
    assert capsys.readouterr().out == "submitted: 4711\n"
    assert (tmp_path / "given").read_text().startswith("#!/bin/bash\n#")
    sbatch.write_text("#!/bin/bash\necho 'no such account' >&2\nexit 1\n")
    assert run(words) == ExitCode.RUN_FAILED
    assert "sbatch failed: no such account" in capsys.readouterr().err
