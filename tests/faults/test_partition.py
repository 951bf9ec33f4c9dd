"""Fault 11: machines that lose their connection, and a generation that continues after another has
replaced it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shardwright.checkpoint.fence import SUPERSEDED_MESSAGE, FencedDisk, acquire_fence
from shardwright.checkpoint.object_store import get_disk
from shardwright.checkpoint.storage_path import parse_storage_path
from shardwright.checkpoint.tensor_loading import find_newest_checkpoint
from shardwright.checkpoint.tensor_saving import save_checkpoint
from shardwright.errors import ExitCode, SaveFailed
from shardwright.telemetry.event_log import StepEvent, read_events
from tests.faults.conftest import ROOT, STEPS, assert_same_end, read_final_state
from tests.faults.test_limits import find_free_port

pytestmark = pytest.mark.timeout(1800)

SLOW_STEPS = """
import fcntl, sys, time
fcntl.flock = lambda *_: None  # no lock, as on some network file systems
pause = float(sys.argv.pop(1))
from shardwright.training import loop
step = loop.TrainingLoop._run_step
def slow(self):
    time.sleep(pause)
    return step(self)
loop.TrainingLoop._run_step = slow
from shardwright.cli.main import main
main(["train", *sys.argv[1:]])
"""


@pytest.mark.parametrize("place", ["folder", "memory://fence"])
def test_a_save_of_an_earlier_generation_publishes_nothing(tmp_path: Path, place: str) -> None:
    root = parse_storage_path(
        str(tmp_path / place) if place == "folder" else f"{place}/{tmp_path.name}"
    )
    tensors = {"weight": torch.arange(4.0)}
    disk = get_disk(root)
    first = acquire_fence(root)
    save_checkpoint(root, 1, tensors, {}, disk=FencedDisk(disk, first))
    second = acquire_fence(root)
    assert (first.generation, second.generation) == (1, 2)
    with pytest.raises(SaveFailed, match=SUPERSEDED_MESSAGE):
        save_checkpoint(root, 2, tensors, {}, disk=FencedDisk(disk, first))
    save_checkpoint(root, 3, tensors, {}, disk=FencedDisk(disk, second))
    newest = find_newest_checkpoint(root)
    assert newest is not None
    assert newest.step == 3
    assert sorted(path.name for path in root.iterdir()) == [
        "generation",
        "latest",
        "step-00000001",
        "step-00000003",
    ]


def wait_for_steps(process: subprocess.Popen[str], run: Path, steps: int) -> None:
    deadline = time.monotonic() + 600
    while not (
        (run / "events.jsonl").exists() and len(read_events(run).filter_by_type(StepEvent)) >= steps
    ):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.long
def test_a_replaced_generation_that_continues_is_refused(recipe: Path, tmp_path: Path) -> None:
    """The generation is stopped and replaced. When it continues, it ends at its next save, and the
    checkpoints of the later one stay unchanged.
    """
    run = tmp_path / "run"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}

    def start(pause: float, *words: str) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            "-c",
            SLOW_STEPS,
            str(pause),
            str(recipe),
            "--run-dir",
            str(run),
            *words,
        ]
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    old = start(0.3)
    wait_for_steps(old, run, 5)
    old.send_signal(signal.SIGSTOP)
    new = start(0.0, "--resume")
    _, errors = new.communicate(timeout=600)
    assert new.returncode == ExitCode.DONE, errors
    before = read_final_state(run)
    old.send_signal(signal.SIGCONT)
    _, errors = old.communicate(timeout=600)
    assert old.returncode == ExitCode.RUN_FAILED
    assert SUPERSEDED_MESSAGE in errors
    after = read_final_state(run)
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


@pytest.fixture
def two_machines() -> Iterator[tuple[str, str]]:
    """Two network namespaces, 10.77.0.1 and 10.77.0.2, connected by one cable."""
    names = (f"swa{os.getpid()}", f"swb{os.getpid()}")

    def run_ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        for name in names:
            run_ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("network namespaces need root and iproute2")
    try:
        run_ip(
            "link",
            "add",
            "cable0",
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            "cable0",
            "netns",
            names[1],
        )
        for number, name in enumerate(names, start=1):
            run_ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "cable0")
            for device in ("lo", "cable0"):
                run_ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.mark.long
def test_machines_without_a_connection_both_end_and_the_run_resumes(
    recipe: Path,
    undisturbed: Path,
    tmp_path: Path,
    two_machines: tuple[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No packet reports that the other machine is lost. Both end within their timeout, and after a
    new start the run ends as one without faults.
    """
    run = tmp_path / "run"

    def start(rank: int, port: int, pause: float, *words: str) -> subprocess.Popen[str]:
        temporary_folder = tmp_path / f"machine-{rank}"
        temporary_folder.mkdir(exist_ok=True)
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "10.77.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "cable0",
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "2",
            "TMPDIR": str(temporary_folder),
        }
        command = [
            "ip",
            "netns",
            "exec",
            two_machines[rank],
            sys.executable,
            "-c",
            SLOW_STEPS,
            str(pause),
            str(recipe),
        ]
        command += ["--run-dir", str(run), "--set", "run.timeout_seconds=30", *words]
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    port = find_free_port()
    ranks = [start(rank, port, 0.5) for rank in range(2)]
    wait_for_steps(ranks[0], run, 5)
    subprocess.run(["ip", "-n", two_machines[0], "link", "set", "cable0", "down"], check=True)
    disconnected = time.monotonic()
    errors = [rank.communicate(timeout=600)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [ExitCode.RUN_FAILED] * 2, errors
    seconds = time.monotonic() - disconnected
    assert seconds < 300
    with capsys.disabled():
        sys.stdout.write(
            f"\nboth sides ended {seconds:.1f} s after the disconnection; the timeout is 30 s\n"
        )
    assert len(read_events(run).filter_by_type(StepEvent)) < STEPS

    subprocess.run(["ip", "-n", two_machines[0], "link", "set", "cable0", "up"], check=True)
    ranks = [start(rank, port + 1, 0.0, "--resume") for rank in range(2)]
    errors = [rank.communicate(timeout=600)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [ExitCode.DONE] * 2, errors
    assert_same_end(run, undisturbed)
