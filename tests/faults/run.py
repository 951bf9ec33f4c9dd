"""`shardwright train` whose ranks are `tests.faults.worker`: python -m tests.faults.run RECIPE and the verb's options."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from shardwright.cli.main import main
from shardwright.train import start
from shardwright.train.launch import launch_ranks
from shardwright.train.signals import StopRequest


def launch_armed(
    num_ranks: int, module: str, arguments: Sequence[str], stop: StopRequest | None = None, hangs: Path | None = None
) -> None:
    """The same ranks, armed."""
    assert module == "shardwright.train.worker"
    launch_ranks(num_ranks, "tests.faults.worker", arguments, stop, hangs)


if __name__ == "__main__":
    start.launch_ranks = launch_armed
    main(["train", *sys.argv[1:]])
