"""TrainJobs and JobSets of `launch kubernetes`: rules, pods, rendezvous, wrong input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwright.cli.main import run
from shardwright.errors import ExitCode
from tests.unit.cluster.conftest import run_launch
from tests.unit.cluster.job_set_rules import decide

POD = ("--image", "lab/sw:1", "--volume", "store:/data", "--namespace", "lab")


def write_objects(
    capsys: pytest.CaptureFixture[str], recipe: Path, kind: str, *words: str
) -> list[dict[str, Any]]:
    command = ["kubernetes", str(recipe), "--job-kind", kind, *POD, *words]
    return list(yaml.safe_load_all(run_launch(capsys, *command)))


def find_job_set(objects: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the specification of the JobSet, which in a TrainJob's runtime is a template."""
    spec: dict[str, Any] = objects[0]["spec"]
    return spec if objects[0]["kind"] == "JobSet" else dict(spec["template"]["spec"])


def list_arguments(objects: list[dict[str, Any]]) -> list[str]:
    """Return the arguments of the container, as they are in the pod."""
    if objects[-1]["kind"] == "TrainJob":
        return list(objects[-1]["spec"]["trainer"]["args"])
    job = find_job_set(objects)["replicatedJobs"][0]["template"]["spec"]
    return list(job["template"]["spec"]["containers"][0]["args"])


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
@pytest.mark.parametrize(
    ("exit_codes", "num_restarts", "action"),
    [
        ([0, 0], 0, "complete"),
        ([1, 3], 0, "fail"),  # a failed check
        ([2, 2], 0, "fail"),  # wrong input
        ([4, 4], 0, "free restart"),  # stopped and saved
        ([4, 4], 2, "free restart"),
        ([3, 3], 1, "restart"),
        ([137, 3], 0, "restart"),  # a lost rank or node
        ([137, 3], 2, "fail"),  # elastic.max_restarts: 2
    ],
)
def test_the_rules_distinguish_the_exit_codes(
    recipe: Path,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    exit_codes: list[int],
    num_restarts: int,
    action: str,
) -> None:
    objects = write_objects(capsys, recipe, kind, "--nodes", "2", "--gpus-per-node", "4")
    assert decide(find_job_set(objects), exit_codes, num_restarts) == action


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_without_restarts_a_loss_ends_the_job_and_a_save_does_not(
    recipe: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    words = ("--gpus-per-node", "4", "--set", "elastic.max_restarts=0")
    spec = find_job_set(write_objects(capsys, recipe, kind, *words))
    assert decide(spec, [137]) == "fail"
    assert decide(spec, [4]) == "free restart"


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
@pytest.mark.parametrize("num_gpus", [0, 4])
def test_pods_have_time_to_save_and_the_resources_of_their_ranks(
    recipe: Path, capsys: pytest.CaptureFixture[str], kind: str, num_gpus: int
) -> None:
    words = ["--nodes", "3", "--gpus-per-node", str(num_gpus), "--cores-per-rank", "2"]
    if num_gpus == 0:
        words += ["--ranks-per-node", "4", "--save-seconds", "600"]
    objects = write_objects(
        capsys, recipe, kind, *words, "--env", "HF_HOME=/data/hf", "--working-dir", "/data"
    )
    assert {item["metadata"]["namespace"] for item in objects} == {"lab"}
    job = find_job_set(objects)["replicatedJobs"][0]["template"]["spec"]
    assert job["completions"] == job["parallelism"] == 3
    assert job["completionMode"] == "Indexed"
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never", "podFailurePolicy requires it"
    assert pod["terminationGracePeriodSeconds"] > (600 if num_gpus == 0 else 300)
    container = pod["containers"][0]
    assert container["workingDir"] == "/data"
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }
    trainer = objects[-1]["spec"].get("trainer")
    limits = (trainer["resourcesPerNode"] if trainer else container["resources"])["limits"]
    assert limits == {"cpu": 8} | ({"nvidia.com/gpu": 4} if num_gpus else {})
    variables = {entry["name"]: entry.get("value") for entry in (trainer or container)["env"]}
    assert variables["OMP_NUM_THREADS"] == "2"
    assert variables["HF_HOME"] == "/data/hf"


def test_the_pods_of_a_job_set_find_the_first_one(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--nodes", "2", "--gpus-per-node", "4", "--port", "3333", "--set", "name=Big_Run.1")
    objects = write_objects(capsys, recipe, "jobset", *words)
    assert objects[0]["metadata"]["name"] == "big-run-1"
    arguments = list_arguments(objects)
    assert "--master-addr=big-run-1-node-0-0.big-run-1" in arguments
    assert "--master-port=3333" in arguments
    (number,) = (word for word in arguments if word.startswith("--node-rank="))
    job = find_job_set(objects)["replicatedJobs"][0]["template"]["spec"]
    container = job["template"]["spec"]["containers"][0]
    sources = {entry["name"]: entry["valueFrom"] for entry in container["env"][-1:]}
    assert list(sources) == [number.removeprefix("--node-rank=$(").removesuffix(")")]
    assert "job-completion-index" in str(sources)


def test_the_pods_of_a_train_job_use_the_trainers_rendezvous(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    objects = write_objects(capsys, recipe, "trainjob", "--nodes", "2", "--gpus-per-node", "4")
    runtime, train_job = objects
    assert train_job["spec"]["runtimeRef"] == {
        "apiGroup": "trainer.kubeflow.org",
        "kind": runtime["kind"],
        "name": runtime["metadata"]["name"],
    }
    assert train_job["spec"]["trainer"]["numNodes"] == runtime["spec"]["mlPolicy"]["numNodes"] == 2
    assert train_job["spec"]["trainer"]["numProcPerNode"] == 4
    replicated = find_job_set(objects)["replicatedJobs"][0]
    # The Trainer finds the job and its container by these names.
    assert replicated["template"]["metadata"]["labels"] == {
        "trainer.kubeflow.org/trainjob-ancestor-step": "trainer"
    }
    pod = replicated["template"]["spec"]["template"]["spec"]
    assert replicated["name"] == pod["containers"][0]["name"] == "node"
    for variable, option in (
        ("PET_NODE_RANK", "node-rank"),
        ("PET_MASTER_ADDR", "master-addr"),
        ("PET_MASTER_PORT", "master-port"),
    ):
        assert f"--{option}=$({variable})" in list_arguments(objects)


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_a_single_node_needs_no_rendezvous_and_every_start_resumes(
    recipe: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    arguments = list_arguments(write_objects(capsys, recipe, kind, "--gpus-per-node", "4"))
    assert arguments == ["--num-ranks=4", "--", "train", str(recipe), "--resume-if-begun"]


@pytest.mark.parametrize(
    ("kind", "words", "message"),
    [
        ("cronjob", (), "--job-kind: unknown kind of job (got cronjob;"),
        ("jobset", ("--set", "name=7b"), "name: cannot be the host name of a pod (got 7b;"),
        ("trainjob", ("--set", f"name={'a' * 52}"), "at most 48 characters"),
        ("trainjob", ("--port", "3333"), "the Trainer chooses the port"),
        ("trainjob", ("--env", "PET_NNODES=3"), "refuses a TrainJob with it (got PET_NNODES)"),
    ],
)
def test_a_job_that_a_kind_cannot_express_is_an_error(
    recipe: Path,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    words: tuple[str, ...],
    message: str,
) -> None:
    command = ["launch", "kubernetes", str(recipe), "--gpus-per-node", "4", "--image", "lab/sw:1"]
    assert run([*command, "--job-kind", kind, *words]) == ExitCode.WRONG_INPUT
    assert message in capsys.readouterr().err
