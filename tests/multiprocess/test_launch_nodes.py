"""`launch` on two nodes, which are network namespaces of this machine. One node fails, returns,
and the run continues.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from shardwright.cli.main import run
from shardwright.telemetry.event_log import (
    CheckpointEvent,
    ResumeEvent,
    read_events,
    select_surviving_steps,
)

pytestmark = pytest.mark.long

HOSTS = ("10.94.7.1", "10.94.7.2")
STEPS = 300


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def nodes() -> Iterator[tuple[str, str]]:
    """Create two namespaces joined by a virtual cable."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    names = (f"shardwright-{os.getpid()}-a", f"shardwright-{os.getpid()}-b")
    try:
        for name in names:
            _ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces cannot be made here: {error.stderr.decode().strip()}")
    try:
        _ip(
            "-n",
            names[0],
            "link",
            "add",
            "wire",
            "type",
            "veth",
            "peer",
            "name",
            "wire",
            "netns",
            names[1],
        )
        for name, host in zip(names, HOSTS, strict=True):
            _ip("-n", name, "address", "add", f"{host}/24", "dev", "wire")
            _ip("-n", name, "link", "set", "wire", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "corpus.txt").write_text(
        "".join(f"{a} + {b} = {a + b}\n" for a in range(40) for b in range(20))
    )
    sizes = {
        "hidden_size": 20,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "head_dim": 6,
        "max_position_embeddings": 32,
    }
    document = {
        "name": "two-nodes",
        "model": {
            "config": {"model_type": "llama", "num_attention_heads": 2, "num_key_value_heads": 1}
            | sizes
        },
        "tokenizer": {"kind": "character"},
        "data": {"sources": str(tmp_path / "corpus.txt"), "cache_dir": str(tmp_path / "cache")},
        "precision": "fp32",
        "training": {
            "sequence_length": 16,
            "global_batch_size": 4,
            "max_steps": STEPS,
            "learning_rate": 1e-2,
        },
        "layout": {"zero_stage": 3},
        "checkpoint": {"every_steps": 10},
        "elastic": {"max_restarts": 2},
        "run": {"device": "cpu", "timeout_seconds": 60.0},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.mark.timeout(1800)
def test_a_run_continues_after_a_node_fails(
    nodes: tuple[str, str], recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    words = [
        "launch",
        str(recipe),
        "--torchrun",
        "--hosts",
        ",".join(HOSTS),
        "--gpus-per-node",
        "1",
        "--interface",
        "wire",
    ]
    assert run([*words, "--run-dir", str(folder), "--json"]) == 0
    commands = json.loads(capsys.readouterr().out)["text"].splitlines()[1::2]

    def start(number: int) -> subprocess.Popen[bytes]:
        environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        words = ["ip", "netns", "exec", nodes[number], "bash", "-c", commands[number]]
        with open(tmp_path / f"node-{number}.log", "ab") as log:
            return subprocess.Popen(words, stdout=log, stderr=log, env=environment)

    def read_saved_step() -> int:
        events = read_events(folder, is_lenient=True) if folder.exists() else None
        return (
            max((event.step for event in events.filter_by_type(CheckpointEvent)), default=0)
            if events
            else 0
        )

    running = [start(0), start(1)]
    try:
        _wait_for(lambda: read_saved_step() >= 20, running)
        _kill_node(nodes[1])
        running[1].wait()
        before = read_saved_step()
        time.sleep(3)
        assert running[0].poll() is None, "the other node waits"
        running[1] = start(1)
        for process in running:
            assert process.wait(900) == 0, (tmp_path / "node-0.log").read_text()[-3000:]
    finally:
        for name, process in zip(nodes, running, strict=True):
            _kill_node(name)
            process.wait()
    events = read_events(folder)
    assert [step.step for step in select_surviving_steps(events)] == list(range(1, STEPS + 1))
    (resumed,) = events.filter_by_type(ResumeEvent)
    assert resumed.step is not None
    # A save in progress when the node failed may complete after `before` was read.
    assert resumed.step in (before, before + 10), "it resumed once, from the last checkpoint"


def _kill_node(node: str) -> None:
    """Kill all processes of a node; torchrun starts its ranks in sessions of their own."""
    listing = subprocess.run(
        ["ip", "netns", "pids", node], check=True, capture_output=True, text=True
    )
    for word in listing.stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(word), signal.SIGKILL)


def _wait_for(
    condition: Callable[[], bool], running: list[subprocess.Popen[bytes]], seconds: float = 600.0
) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not in time"
        assert all(process.poll() is None for process in running), "a node ended"
        time.sleep(0.1)
