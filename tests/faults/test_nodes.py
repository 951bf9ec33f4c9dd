"""Several nodes that keep their processes: loss of a node, spare nodes, nodes that come back.

Each node is a network namespace with a host name of its own; see `tests/network_hosts.py`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from shardwright.errors import ExitCode
from shardwright.telemetry.event_log import (
    ReshardEvent,
    RestartEvent,
    ResumeEvent,
    RunStartedEvent,
    StepEvent,
    WarningEvent,
    read_events,
    select_surviving_steps,
)
from tests.faults.conftest import ROOT, assert_same_end, run_alone
from tests.faults.worker import MARKS, PLAN
from tests.network_hosts import NetworkHosts, find_obstacle

HUB = "n0"
ADDRESSES = {name: f"10.95.4.{number}" for number, name in enumerate(("n0", "n1", "n2"), start=1)}
SLOW = {"rank": 0, "step": 0, "place": "slow", "signals": list[str]()}
WITHOUT_SAVES = ("--set", "checkpoint.every_steps=null", "--set", "checkpoint.keep_best=false")
"""No checkpoint is written before the end, so the state can only come from memory."""
WORDS = (
    *("--layout", "dp_shard=4,zero_stage=3", "--set", "training.micro_batch_size=1"),
    *("--set", "training.gradient_accumulation_steps=null", *WITHOUT_SAVES),
)
PEER = (
    *("--set", "elastic.peer_copies=1", "--set", "elastic.warm_restarts=true"),
    *("--set", "elastic.max_restarts=3"),
)

# In `make test`, tests/unit/launch/test_rank_processes.py has losses of nodes without training.
pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


@dataclass
class Job:
    """Processes of one run, one per node; each is started by its own command."""

    hosts: NetworkHosts
    recipe: Path
    folder: Path
    words: tuple[str, ...] = ()
    num_nodes: int = 2
    ranks_per_node: int = 2
    pause_seconds: float = 0.4
    """Pause before each step."""
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def run(self) -> Path:
        """Run folder, which all nodes share."""
        return self.folder / "run"

    def start(self, *names: str) -> None:
        """Start the command of these nodes."""
        marks = self.folder / "marks"
        marks.mkdir(exist_ok=True)
        for name in names:
            if name in self.processes:  # lost, or ended
                self.processes[name].wait(60)
            place = {"RANK": name[1:], "WORLD_SIZE": str(self.num_nodes), "LOCAL_RANK": "0"}
            address = {"MASTER_ADDR": HUB, "MASTER_PORT": "29511", "LOCAL_WORLD_SIZE": "1"}
            address["SHARDWRIGHT_NODE_TOKEN"] = "secret"
            temporary = self.folder / f"temporary-{name}"
            temporary.mkdir(exist_ok=True)
            words = [sys.executable, "-m", "tests.faults.run", str(self.recipe), *self.words]
            words += ["--run-dir", str(self.run), "--nproc", str(self.ranks_per_node)]
            with open(self.folder / f"{name}.log", "ab") as log:
                self.processes[name] = subprocess.Popen(
                    self.hosts.build_command(name, *words, "--resume-if-begun"),
                    env=os.environ
                    | place
                    | address
                    | {
                        "OMP_NUM_THREADS": "1",
                        "TMPDIR": str(temporary),
                        PLAN: json.dumps([SLOW | {"seconds": self.pause_seconds}]),
                        MARKS: str(marks),
                    },
                    stdout=log,
                    stderr=log,
                    cwd=ROOT,
                )

    def wait_for(self, condition: Callable[[], bool], seconds: float = 90.0) -> None:
        """Wait for a condition while the launcher runs."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, self.read_logs()
            assert self.processes[HUB].poll() is None, self.read_logs()
            time.sleep(0.02)

    def wait_for_step(self, step: int, num_starts: int = 1) -> None:
        """Wait until a step of the n-th generation has ended."""

        def has_ended() -> bool:
            if not (self.run / "events.jsonl").exists():
                return False
            events = read_events(self.run, is_lenient=True)
            starts = [event.time for event in events.filter_by_type(RunStartedEvent)]
            return len(starts) >= num_starts and any(
                event.step >= step and event.time > starts[num_starts - 1]
                for event in events.filter_by_type(StepEvent)
            )

        self.wait_for(has_ended)

    def wait(self, name: str = HUB) -> int:
        """Wait for the end of a node's command; return its exit code."""
        return self.processes[name].wait(120)

    def read_logs(self) -> str:
        return "\n".join(
            f"{log.name}: {log.read_text()[-4000:]}" for log in sorted(self.folder.glob("n*.log"))
        )


@pytest.fixture
def job(recipe: Path, tmp_path: Path) -> Iterator[Job]:
    """A job on three hosts, of which nothing is left at the end."""
    obstacle = find_obstacle()
    if obstacle is not None:
        pytest.skip(obstacle)
    hosts = NetworkHosts(tmp_path, ADDRESSES, HUB)
    job = Job(hosts, recipe, tmp_path)
    try:
        try:
            hosts.create()
        except RuntimeError as error:
            pytest.skip(str(error))
        yield job
    finally:
        hosts.delete()
        for process in job.processes.values():
            process.wait()


@pytest.fixture(scope="session")
def undisturbed_four(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run of four ranks on one machine without faults."""
    folder = tmp_path_factory.mktemp("undisturbed-four") / "run"
    run_alone(recipe, folder, *WORDS, "--nproc", "4", is_forked=True)
    return folder


def read(run: Path, kind: type[Any]) -> list[Any]:
    return read_events(run).filter_by_type(kind)


def test_a_node_that_comes_back_takes_its_rank_again(job: Job, undisturbed: Path) -> None:
    """One rank on each node. The same command is started once more, as by a supervisor."""
    job.words = (*WITHOUT_SAVES, *PEER)
    job.ranks_per_node = 1
    job.start("n0", "n1")
    job.wait_for_step(4)
    job.hosts.kill("n1")
    job.start("n1")
    assert job.wait() == ExitCode.DONE, job.read_logs()
    assert job.wait("n1") == ExitCode.DONE
    assert_same_end(job.run, undisturbed)
    (resume,) = read(job.run, ResumeEvent)
    assert (resume.source, resume.path) == ("memory", None)
    assert resume.steps_lost in (0, 1)


def test_a_spare_node_takes_the_ranks_of_a_lost_one(job: Job, undisturbed_four: Path) -> None:
    job.words = (*WORDS, *PEER, "--set", "elastic.spare_nodes=1")
    job.num_nodes = 3
    job.start("n0", "n1", "n2")
    job.wait_for_step(4)
    job.hosts.kill("n1")
    assert job.wait() == ExitCode.DONE, job.read_logs()
    assert job.wait("n2") == ExitCode.DONE
    assert_same_end(job.run, undisturbed_four)
    (resume,) = read(job.run, ResumeEvent)
    assert (resume.source, resume.path) == ("memory", None)
    assert resume.steps_lost in (0, 1)
    (restart,) = read(job.run, RestartEvent)
    assert restart.surviving_ranks == (0, 1)
    assert not restart.stuck_ranks
    assert restart.reason == "rank 2: node n1 was lost, with the rank's process"
    assert not [event for event in read(job.run, WarningEvent) if "on one node" in event.message]


def test_nodes_lost_for_good_leave_fewer_ranks_that_grow_again(job: Job) -> None:
    """Two ranks continue from the memory of their node; later the node is back, and four do."""
    job.words = (
        *WORDS[2:],
        *PEER,
        *("--set", "elastic.min_ranks=2", "--set", "elastic.grow_after_steps=2"),
        *("--set", "elastic.node_wait_seconds=1", "--set", "training.global_batch_size=4"),
        *("--set", "training.micro_batch_size=null", "--set", "training.max_steps=40"),
    )
    job.pause_seconds = 1.0  # a busy machine takes long to start a node
    job.start("n0", "n1")
    job.wait_for_step(3)
    job.hosts.kill("n1")
    job.wait_for_step(4, num_starts=2)
    job.start("n1")
    assert job.wait() == ExitCode.DONE, job.read_logs()
    starts = [start.world_size for start in read(job.run, RunStartedEvent)]
    assert (starts[0], starts[1], starts[-1]) == (4, 2, 4)
    resumes = read(job.run, ResumeEvent)
    assert {resume.source for resume in resumes} == {"memory"}
    changes = [(event.former_world_size, event.world_size) for event in read(job.run, ReshardEvent)]
    assert changes == [(4, 2), (2, 4)]
    steps = [step.samples_seen for step in select_surviving_steps(read_events(job.run))]
    assert steps == [4 * step for step in range(1, 41)]


def test_a_node_without_network_is_lost_on_both_sides(job: Job, undisturbed_four: Path) -> None:
    """No connection is closed. The launcher gives the node up, and its processes end."""
    job.words = (*WORDS, *PEER, "--set", "elastic.spare_nodes=1")
    job.num_nodes = 3
    job.start("n0", "n1", "n2")
    job.wait_for_step(4)
    job.hosts.disconnect("n1")
    assert job.wait() == ExitCode.DONE, job.read_logs()
    assert job.wait("n1") == ExitCode.RUN_FAILED
    assert "the launcher on node 0 was lost" in job.read_logs()
    assert_same_end(job.run, undisturbed_four)
    assert [resume.source for resume in read(job.run, ResumeEvent)] == ["memory"]


def test_a_stop_signal_to_any_node_saves_on_all(job: Job, undisturbed_four: Path) -> None:
    job.words = (*WORDS, *PEER)
    job.start("n0", "n1")
    job.wait_for_step(4)
    job.processes["n1"].send_signal(signal.SIGTERM)
    assert job.wait() == ExitCode.PREEMPTED, job.read_logs()
    assert job.wait("n1") == ExitCode.PREEMPTED
    job.start("n0", "n1")
    assert (job.wait(), job.wait("n1")) == (ExitCode.DONE, ExitCode.DONE), job.read_logs()
    assert_same_end(job.run, undisturbed_four)
