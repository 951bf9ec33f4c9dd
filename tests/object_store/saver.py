"""A program that saves step 3 in a fork for every line on its standard input, to be killed there.

It prints the fork's process number, then how the fork ended. Only forks open clients, since these
do not survive a fork.
"""

from __future__ import annotations

import os
import sys

from shardwright.checkpoint.commit import RetentionPolicy
from shardwright.checkpoint.tensor_saving import save_checkpoint
from tests.unit.checkpoint.conftest import make_tensors


def report(content: object) -> None:
    sys.stdout.write(f"{content}\n")
    sys.stdout.flush()


def main() -> None:
    """Serve until the input ends."""
    for url in sys.stdin:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                retention = RetentionPolicy(1)
                save_checkpoint(url.strip(), 3, make_tensors(), {"step": 3}, retention=retention)
                code = 0
            finally:
                os._exit(code)
        report(child)
        _, status = os.waitpid(child, 0)
        report("killed" if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))


if __name__ == "__main__":
    main()
