"""`shardwright train` whose ranks are `tests.faults.worker`: python -m tests.faults.run RECIPE and
the verb's options.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from shardwright.cli.main import main
from shardwright.launch.launcher import launch_ranks
from shardwright.launch.stop_signals import StopRequest
from shardwright.train import run


def launch_armed(
    num_ranks: int,
    module: str,
    arguments: Sequence[str],
    stop: StopRequest | None = None,
    hangs: Path | None = None,
) -> None:
    """The same ranks, armed."""
    assert module == "shardwright.train.worker"
    launch_ranks(num_ranks, "tests.faults.worker", arguments, stop, hangs)


if __name__ == "__main__":
    run.launch_ranks = launch_armed
    main(["train", *sys.argv[1:]])
