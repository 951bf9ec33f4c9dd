"""One rank of a run with a limit on its memory: `python -m tests.multiprocess.limited_rank RECIPE`.

A limit that the launcher sets would not reach ranks that tests/forked.py forks.
"""

from __future__ import annotations

import os
import re
import resource
import sys
from pathlib import Path

LIMIT_BYTES = 390 * 2**20
"""Memory that the rank may use beyond what it has when it starts."""


def limit_memory() -> None:
    """Limit the private memory of this process."""
    found = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    limit = int(found[1]) * 1024 + LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


if __name__ == "__main__":
    from shardwright.training.worker import main

    limit_memory()
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
