"""Ctrl-C reaches workers through their parent only."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import json, signal
from multiprocessing import get_context
from shardwright.worker_processes import block_interrupts

def is_blocked(pipe=None):
    blocked = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    return blocked if pipe is None else pipe.send(blocked)

if __name__ == "__main__":
    found = []
    for method in ("spawn", "forkserver"):
        ours, theirs = get_context(method).Pipe()  # unlike a queue, it starts no tracker
        process = get_context(method).Process(target=is_blocked, args=(theirs,))
        with block_interrupts():
            process.start()
        found += [ours.recv(), is_blocked()]
        process.join()
    print(json.dumps(found))
"""


def test_only_workers_block_the_signal(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    # In a process that has not started multiprocessing's tracker, which unblocks the signal.
    printed = subprocess.check_output([sys.executable, str(script)], text=True, timeout=60)
    assert json.loads(printed) == [True, False, True, False]
