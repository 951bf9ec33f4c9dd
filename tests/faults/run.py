"""Run `shardwright train` with `tests.faults.worker` as ranks: python -m tests.faults.run RECIPE
and the verb's options.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from shardwright.cli.main import main
from shardwright.launch.launcher import launch_ranks
from shardwright.launch.rank_processes import RankProcesses
from shardwright.launch.stop_signals import StopRequest
from shardwright.training import run


def launch_ranks_with_faults(
    num_ranks: int,
    module: str,
    arguments: Sequence[str],
    stop: StopRequest | None = None,
    hang_reports: Path | None = None,
    *,
    pool: RankProcesses | None = None,
) -> None:
    """Launch the same ranks with faults."""
    assert module == "shardwright.training.worker"
    launch_ranks(num_ranks, "tests.faults.worker", arguments, stop, hang_reports, pool=pool)


if __name__ == "__main__":
    run.launch_ranks = launch_ranks_with_faults
    main(["train", *sys.argv[1:]])
