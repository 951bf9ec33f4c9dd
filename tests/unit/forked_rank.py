"""Print facts about the parent process: python -m tests.unit.forked_rank LAUNCHER END."""

from __future__ import annotations

import os
import signal
import sys

launcher, end = sys.argv[1:]
print(  # noqa: T201
    os.getppid() == int(launcher),
    os.getsid(0) == os.getpid(),
    hasattr(os, "changed"),
    flush=True,
)
if end == "killed" and os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
