"""Containers of a JobSet as processes of this machine, with a substitute for its controller.

Each container runs the command that `launch` wrote, with Kubernetes' variables replaced. Pods are
stopped and killed; the controller's decision after each end is that of the manifest's rules.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwright.cli.main import run
from shardwright.errors import ExitCode
from shardwright.telemetry.event_log import CheckpointEvent, read_events
from tests.faults.conftest import assert_same_end
from tests.slurm.slow_rank import PAUSE
from tests.unit.cluster.job_set_rules import decide

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]


@dataclass
class Pods:
    """Pods of one JobSet, and what its controller remembers."""

    spec: dict[str, Any]
    folder: Path
    num_counted_restarts: int = 0
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self) -> None:
        """Start the container of every node, in a session of its own."""
        job = self.spec["replicatedJobs"][0]["template"]["spec"]
        container = job["template"]["spec"]["containers"][0]
        port = _find_free_port()
        self.processes = []
        for number in range(job["completions"]):
            variables = {
                entry["name"]: entry.get("value", str(number)) for entry in container["env"]
            }
            words = [_expand(word, variables, port) for word in container["args"]]
            program = [sys.executable, "-m", "tests.faults.slow_node_ranks", *words]
            environment = os.environ | variables | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
            with open(self.folder / f"pod-{number}.log", "ab") as log:
                self.processes.append(
                    subprocess.Popen(
                        program,
                        env=environment | {PAUSE: "0.4"},
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )

    def finish(self) -> str:
        """Wait for the ends of all pods; return the controller's decision."""
        codes = [process.wait(300) for process in self.processes]
        # Kubernetes reports a container that a signal killed with 128 and its number.
        codes = [128 - code if code < 0 else code for code in codes]
        action = decide(self.spec, codes, self.num_counted_restarts)
        self.num_counted_restarts += action == "restart"
        return action

    def kill(self) -> None:
        """Kill all processes of all pods."""
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _expand(word: str, variables: dict[str, str], port: int) -> str:
    """Replace `$(NAME)` as Kubernetes does, and the address of the first pod by this machine."""
    for name, value in variables.items():
        word = word.replace(f"$({name})", value)
    if word.startswith("--master-addr="):
        return "--master-addr=127.0.0.1"
    return f"--master-port={port}" if word.startswith("--master-port=") else word


def _find_free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _count_saved_steps(folder: Path) -> int:
    if not (folder / "events.jsonl").exists():
        return 0
    events = read_events(folder, is_lenient=True).filter_by_type(CheckpointEvent)
    return max((event.step for event in events), default=0)


def _wait_for_saved_steps(folder: Path, steps: int, pods: Pods) -> None:
    end = time.monotonic() + 240
    while _count_saved_steps(folder) < steps:
        assert time.monotonic() < end, "not in time"
        assert all(process.poll() is None for process in pods.processes), "a pod ended"
        time.sleep(0.05)


def test_pods_are_stopped_killed_and_restarted_to_the_same_end(
    recipe: Path, undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    words = ["launch", "kubernetes", str(recipe), "--job-kind", "jobset", "--image", "lab/sw:1"]
    words += ["--nodes", "2", "--gpus-per-node", "0", "--run-dir", str(folder)]
    assert run([*words, "--set", "name=pods", "--set", "elastic.max_restarts=1"]) == ExitCode.DONE
    pods = Pods(yaml.safe_load(capsys.readouterr().out)["spec"], tmp_path)
    try:
        pods.start()
        _wait_for_saved_steps(folder, 2, pods)
        pods.processes[1].send_signal(signal.SIGTERM)  # one node is drained
        assert pods.finish() == "free restart", (tmp_path / "pod-0.log").read_text()[-3000:]
        saved = _count_saved_steps(folder)

        pods.start()
        _wait_for_saved_steps(folder, saved + 2, pods)
        os.killpg(pods.processes[0].pid, signal.SIGKILL)  # the node of rank 0 is lost
        assert pods.finish() == "restart"

        pods.start()
        assert pods.finish() == "complete", (tmp_path / "pod-0.log").read_text()[-3000:]
    finally:
        pods.kill()
    assert_same_end(folder, undisturbed)

    pods.spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]["args"][
        -1:
    ] = []  # without --resume-if-begun the run folder is in use: wrong input
    try:
        pods.start()
        assert pods.finish() == "fail"
    finally:
        pods.kill()
