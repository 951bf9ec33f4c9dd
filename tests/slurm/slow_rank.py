"""`shardwright` with a pause before each step, so that a tiny run lasts long enough to be stopped:
python -m tests.slurm.slow_rank and the words of the command line.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from shardwright.cli.main import main

PAUSE = "SHARDWRIGHT_TEST_PAUSE"


def install_pause(seconds: float) -> None:
    """Sleep before the samples of each step are read."""
    from shardwright.training import loop

    original: Callable[..., Any] = loop.read_step_micro_batches

    def read_later(*arguments: Any, **options: Any) -> Any:
        time.sleep(seconds)
        return original(*arguments, **options)

    loop.read_step_micro_batches = read_later


if __name__ == "__main__":
    install_pause(float(os.environ[PAUSE]))
    main(sys.argv[1:])
