"""Scripts of `launch slurm` under a real Slurm, submitted as they are written."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from shardwright.errors import ExitCode
from shardwright.telemetry.event_log import (
    CheckpointEvent,
    ResumeEvent,
    RunStartedEvent,
    read_events,
    select_surviving_steps,
)
from tests.faults.conftest import read_final_state, run_alone
from tests.slurm.slow_rank import PAUSE
from tests.slurm.slurm_cluster import (
    CPU_NODES,
    GPUS_PER_NODE,
    JobState,
    SlurmCluster,
    find_obstacle,
    wait_until,
)

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
NAME = "slurm-test"
STEPS = 160
TWO_NODES = ("--nodes", "2", "--gpus-per-node", "0")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A running Slurm; skipped with the reason where none can run."""
    obstacle = find_obstacle()
    if obstacle is not None:
        pytest.skip(obstacle)
    slurm = SlurmCluster(tmp_path_factory.mktemp("slurm"))
    try:
        try:
            slurm.start()
        except RuntimeError as error:
            pytest.skip(str(error))
        yield slurm
    finally:
        slurm.stop()


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    (folder / "corpus.txt").write_text(
        "".join(f"{a} + {b} = {a + b}\n" for a in range(40) for b in range(20))
    )
    sizes = {"hidden_size": 20, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 6}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "attention_dropout": 0.1}
    document: dict[str, Any] = {
        "name": NAME,
        "model": {"config": {"model_type": "llama", "max_position_embeddings": 32} | sizes | heads},
        "tokenizer": {"kind": "character"},
        "data": {"sources": str(folder / "corpus.txt"), "cache_dir": str(folder / "cache")},
        "precision": "fp32",
        "training": {
            "sequence_length": 16,
            "global_batch_size": 4,
            "max_steps": STEPS,
            "learning_rate": 1e-2,
        },
        "layout": {"zero_stage": 3},
        "checkpoint": {"every_steps": 10},
        "elastic": {"max_restarts": 1},
        "run": {"timeout_seconds": 60.0},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.fixture(scope="module")
def undisturbed(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Return the weights and moments at the end of a run on this machine without Slurm."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    run_alone(recipe, folder, "--set", "run.device=cpu")
    return read_final_state(folder, STEPS)


@dataclass
class Submitter:
    """Submits jobs of one test from its folder."""

    cluster: SlurmCluster
    recipe: Path
    folder: Path
    pause_seconds: float = 0.0

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables of the submitting shell, in which `shardwright` is a command."""
        programs = Path(sys.executable).parent
        if self.pause_seconds:
            programs = self.folder / "bin"
            programs.mkdir(exist_ok=True)
            program = programs / "shardwright"
            program.write_text(f'#!/bin/sh\nexec {sys.executable} -m tests.slurm.slow_rank "$@"\n')
            program.chmod(0o755)
        return {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
            PAUSE: str(self.pause_seconds),
        }

    @property
    def run(self) -> Path:
        return self.folder / "runs" / NAME

    def submit(self, *words: str) -> str:
        """Submit with `launch slurm`; return the job's number."""
        command = [sys.executable, "-m", "shardwright", "launch", "slurm", str(self.recipe), *words]
        reply = self.cluster.run(
            *command, "--submit", environment=self.environment, cwd=self.folder
        )
        return reply.removeprefix("submitted: ").strip()

    def finish(self, job: str, seconds: float = 300) -> JobState:
        """Wait for a job's end."""
        return self.cluster.wait_for_job(job, seconds)

    def read_log(self, job: str) -> str:
        """Read the log at the place that the script names."""
        return (self.folder / f"{NAME}-{job}.log").read_text()

    def count_steps(self) -> int:
        """Count the steps of the newest saved checkpoint."""
        if not (self.run / "events.jsonl").exists():
            return 0
        events = read_events(self.run, is_lenient=True).filter_by_type(CheckpointEvent)
        return max((event.step for event in events), default=0)

    def wait_for_checkpoint(self, job: str, steps: int = 10) -> None:
        """Wait until a checkpoint of that many steps or more exists."""
        wait_until(lambda: self.count_steps() >= steps, 120, lambda: self.read_log(job))

    def assert_same_end(self, expected: dict[str, torch.Tensor]) -> None:
        """Assert that every step was taken once and that the run ended with the same bits."""
        steps = [step.step for step in select_surviving_steps(read_events(self.run))]
        assert steps == list(range(1, STEPS + 1))
        tensors = read_final_state(self.run, STEPS)
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())


@pytest.fixture
def submitter(cluster: SlurmCluster, recipe: Path, tmp_path: Path) -> Submitter:
    return Submitter(cluster, recipe, tmp_path)


@pytest.fixture
def slow_submitter(cluster: SlurmCluster, recipe: Path, tmp_path: Path) -> Submitter:
    return Submitter(cluster, recipe, tmp_path, pause_seconds=0.1)


def test_two_nodes_train_to_the_same_bits(
    submitter: Submitter, undisturbed: dict[str, torch.Tensor]
) -> None:
    job = submitter.submit(*TWO_NODES)
    state = submitter.finish(job)
    log = submitter.read_log(job)
    assert (state.state, state.exit_code) == ("COMPLETED", ExitCode.DONE), log
    assert f"step {STEPS}" in log or f"{STEPS}/{STEPS}" in log
    shown = submitter.cluster.run("scontrol", "show", "job", job)
    assert "NodeList=cpu[0-1]" in shown
    submitter.assert_same_end(undisturbed)


def test_a_job_on_gpu_nodes_gets_their_gpus(
    submitter: Submitter, undisturbed: dict[str, torch.Tensor]
) -> None:
    words = ("--nodes", "2", "--gpus-per-node", "1", "--partition", "gpu")
    job = submitter.submit(*words)
    state = submitter.finish(job)
    assert state.state == "COMPLETED", submitter.read_log(job)
    shown = submitter.cluster.run("scontrol", "show", "job", "-d", job)
    assert "NodeList=gpu[0-1]" in shown
    assert "TresPerNode=gres:gpu:1" in shown
    submitter.assert_same_end(undisturbed)
    too_many = ("--nodes", "1", "--gpus-per-node", str(GPUS_PER_NODE + 1), "--partition", "gpu")
    with pytest.raises(RuntimeError, match="sbatch failed"):
        submitter.submit(*too_many, "--set", "training.global_batch_size=6")


def test_the_signal_before_the_time_limit_saves_and_requeues(
    slow_submitter: Submitter, undisturbed: dict[str, torch.Tensor]
) -> None:
    slow_submitter.pause_seconds = 0.5
    job = slow_submitter.submit(*TWO_NODES, "--time", "2", "--save-seconds", "60")
    state = slow_submitter.finish(job, 600)
    log = slow_submitter.read_log(job)
    assert (state.state, state.exit_code) == ("COMPLETED", ExitCode.DONE), log
    assert state.restarts >= 1
    saves = (slow_submitter.folder / f"{NAME}-{job}.saves").read_text().splitlines()
    assert len(saves) == state.restarts, "every restart followed a save"
    events = read_events(slow_submitter.run)
    resumes = [event.step for event in events.filter_by_type(ResumeEvent)]
    assert len(resumes) == state.restarts
    assert all(step is not None and step % 10 for step in resumes), "saved on the signal"
    slow_submitter.assert_same_end(undisturbed)


@pytest.mark.parametrize("lost", CPU_NODES)
def test_a_killed_node_restarts_the_job(
    slow_submitter: Submitter, undisturbed: dict[str, torch.Tensor], lost: str
) -> None:
    cluster = slow_submitter.cluster
    job = slow_submitter.submit(*TWO_NODES)
    slow_submitter.wait_for_checkpoint(job)
    cluster.kill_node(lost)
    try:
        wait_until(lambda: cluster.read_job(job).restarts == 1, 180)
    finally:
        cluster.start_daemon(lost)
    state = slow_submitter.finish(job)
    assert (state.state, state.restarts) == ("COMPLETED", 1), slow_submitter.read_log(job)
    slow_submitter.assert_same_end(undisturbed)


WARM = (
    *("--set", "elastic.warm_restarts=true", "--set", "elastic.peer_copies=1"),
    *("--set", "elastic.node_wait_seconds=1", "--set", "elastic.max_restarts=3"),
)


def test_a_spare_node_takes_the_rank_of_a_killed_one(
    submitter: Submitter, undisturbed: dict[str, torch.Tensor]
) -> None:
    """The job is not requeued, and the run continues from memory."""
    words = ("--nodes", "3", "--gpus-per-node", "0", "--partition", "all")
    job = submitter.submit(*words, *WARM, "--set", "elastic.spare_nodes=1")
    submitter.wait_for_checkpoint(job)
    submitter.cluster.kill_node("cpu1")
    try:
        state = submitter.finish(job)
    finally:
        submitter.cluster.start_daemon("cpu1")
    assert (state.state, state.restarts) == ("COMPLETED", 0), submitter.read_log(job)
    (resume,) = read_events(submitter.run).filter_by_type(ResumeEvent)
    assert (resume.source, resume.steps_lost in (0, 1)) == ("memory", True)
    submitter.assert_same_end(undisturbed)


def test_a_job_continues_on_the_nodes_that_are_left(submitter: Submitter) -> None:
    words = (*TWO_NODES, *WARM, "--set", "elastic.min_ranks=1")
    job = submitter.submit(*words)
    submitter.wait_for_checkpoint(job)
    submitter.cluster.kill_node("cpu1")
    try:
        state = submitter.finish(job)
    finally:
        submitter.cluster.start_daemon("cpu1")
    assert (state.state, state.restarts) == ("COMPLETED", 0), submitter.read_log(job)
    events = read_events(submitter.run)
    assert [start.world_size for start in events.filter_by_type(RunStartedEvent)] == [2, 1]
    assert [resume.source for resume in events.filter_by_type(ResumeEvent)] == ["memory"]
    steps = [step.step for step in select_surviving_steps(events)]
    assert steps == list(range(1, STEPS + 1))


def test_a_job_ends_after_its_last_restart(slow_submitter: Submitter) -> None:
    cluster = slow_submitter.cluster
    job = slow_submitter.submit(*TWO_NODES, "--set", "elastic.max_restarts=0")
    slow_submitter.wait_for_checkpoint(job)
    cluster.kill_node("cpu1")
    try:
        # Slurm requeues by itself; the script refuses to start again.
        wait_until(lambda: cluster.read_job(job).restarts == 1, 180)
    finally:
        cluster.start_daemon("cpu1")
    state = slow_submitter.finish(job)
    assert (state.state, state.exit_code) == ("FAILED", ExitCode.RUN_FAILED)
    assert "a rank or node was lost 1 times; elastic.max_restarts is 0" in slow_submitter.read_log(
        job
    )


def test_a_killed_rank_restarts_the_job_within_its_bound(slow_submitter: Submitter) -> None:
    cluster = slow_submitter.cluster
    job = slow_submitter.submit(*TWO_NODES)
    for restarts in (0, 1):
        wait_until(
            lambda restarts=restarts: (
                cluster.read_job(job) == JobState("RUNNING", 0, restarts, "None")
            ),
            60,
        )
        slow_submitter.wait_for_checkpoint(job, 10 + 20 * restarts)
        cluster.kill_rank(job, 1)
        wait_until(lambda: cluster.read_job(job).state != "RUNNING", 180)
        cluster.start_soon(job)
    state = slow_submitter.finish(job)
    assert (state.state, state.restarts) == ("FAILED", 1)
    assert state.exit_code == ExitCode.RUN_FAILED, "not the number of the signal"


def test_exit_codes_reach_slurm(slow_submitter: Submitter) -> None:
    cluster = slow_submitter.cluster
    slow_submitter.pause_seconds = 0.6
    absent = slow_submitter.submit(*TWO_NODES, "--set", "data.sources=absent.txt")
    state = slow_submitter.finish(absent)
    assert (state.state, state.exit_code) == ("FAILED", ExitCode.WRONG_INPUT)
    assert "absent.txt" in slow_submitter.read_log(absent)
    first = slow_submitter.submit(*TWO_NODES, "--sbatch=--no-requeue")
    slow_submitter.wait_for_checkpoint(first)
    second = slow_submitter.submit(*TWO_NODES)  # in the folder of the first
    state = slow_submitter.finish(second)
    assert (state.exit_code, state.restarts) == (ExitCode.WRONG_INPUT, 0)
    assert "this folder already has a run" in slow_submitter.read_log(second)
    cluster.run("scancel", "--signal=TERM", first)
    state = slow_submitter.finish(first)
    assert (state.exit_code, state.restarts) == (ExitCode.PREEMPTED, 0)
    assert "disabled" in slow_submitter.read_log(first), "what scontrol requeue says"


def test_plain_srun_starts_ranks(
    submitter: Submitter, undisturbed: dict[str, torch.Tensor]
) -> None:
    command = ["srun", "--nodes=2", "--ntasks=2", "shardwright", "train", str(submitter.recipe)]
    words = ["--set", "run.device=cpu"]
    submitter.cluster.run(*command, *words, environment=submitter.environment, cwd=submitter.folder)
    submitter.assert_same_end(undisturbed)


def test_a_job_array_sweeps_one_key(
    submitter: Submitter, undisturbed: dict[str, torch.Tensor]
) -> None:
    rates = ("1e-2", "1e-3")
    job = submitter.submit(*TWO_NODES, "--sweep", f"training.learning_rate={','.join(rates)}")
    for number, rate in enumerate(rates):
        state = submitter.finish(f"{job}_{number}")
        log = (submitter.folder / f"{NAME}-{job}_{number}.log").read_text()
        assert state.state == "COMPLETED", log
        run = submitter.run / f"training.learning_rate={rate}"
        weights = read_final_state(run, STEPS)
        is_equal = all(
            torch.equal(weights[name], expected) for name, expected in undisturbed.items()
        )
        assert is_equal == (rate == "1e-2")
