"""Stack dumps of other processes are complete, even if a rank takes long to write them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shardwright.watchdog.monitor import read_heartbeats
from shardwright.watchdog.stack_dump import dump_stacks, read_process_state

_THREADS = 40
_DEPTH = 60
_RANK = f"""
import pathlib, sys, threading
from shardwright.watchdog.heartbeat import HeartbeatWriter
heartbeat = HeartbeatWriter(pathlib.Path(sys.argv[1]), int(sys.argv[2]), 2)
up, never = threading.Barrier({_THREADS} + 1), threading.Event()
def recurse(levels):
    if levels == 1:
        up.wait()
        never.wait()
    else:
        recurse(levels - 1)
for _ in range({_THREADS}):
    threading.Thread(target=recurse, args=({_DEPTH},), daemon=True).start()
up.wait()
print("up", flush=True)
never.wait()
"""


@pytest.mark.skipif(
    not Path("/proc/self/task").is_dir(), reason="the process's threads are read from /proc"
)
def test_stacks_of_running_and_stopped_ranks_are_complete(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, str(tmp_path), str(rank)], stdout=subprocess.PIPE
        )
        for rank in range(2)
    ]
    try:
        for process in ranks:
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
        ranks[1].send_signal(signal.SIGSTOP)
        os.waitpid(ranks[1].pid, os.WUNTRACED)
        views = read_heartbeats(tmp_path)
        states = {view.rank: read_process_state(view.pid) for view in views}
        assert states[1] == "T"
        stacks = dump_stacks(tmp_path, views, states)
        assert {rank: text.count("in recurse") for rank, text in stacks.items()} == dict.fromkeys(
            range(2), _THREADS * _DEPTH
        )
        assert all(text.rstrip().endswith("in <module>") for text in stacks.values())
        assert ranks[0].poll() is None
        os.waitpid(ranks[1].pid, os.WUNTRACED)
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def test_a_rank_that_has_exited_does_not_block(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _RANK, str(tmp_path), "0"], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.kill()
    process.communicate()
    views = read_heartbeats(tmp_path)
    assert dump_stacks(tmp_path, views, {0: read_process_state(process.pid)}) == {0: ""}
