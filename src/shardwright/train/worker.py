"""One rank of a run, started by `launch_ranks`: `python -m shardwright.train.worker RECIPE`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from shardwright.errors import ExitCode
from shardwright.train.outcome import launcher_process, note_outcome, note_process
from shardwright.train.ranks import find_ranks
from shardwright.train.signals import listening_for_stop, stop_without_parent


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--allow-drift", action="append", default=[])
    parser.add_argument("--restart", help="reason for the restart of the ranks")
    return parser


def main() -> int:
    """Train as one rank and write its outcome for the launcher, which reports it."""
    ranks = find_ranks()
    assert ranks is not None, "this module is started by launch_ranks"
    failure: BaseException | None = None
    with listening_for_stop() as stop:
        stop_without_parent(stop, launcher_process())
        if note_process(ranks.rank):
            stop.cause = signal.SIGTERM
        try:
            from shardwright.config import load_recipe
            from shardwright.train.start import train_rank

            options = _parser().parse_args()
            recipe = load_recipe(options.recipe)
            train_rank(
                recipe,
                ranks,
                stop,
                resume=options.resume,
                allow_drift=options.allow_drift,
                restart=options.restart,
            )
        except BaseException as error:
            failure = error
    code = note_outcome(ranks.rank, failure)
    # For the launcher a stopped rank succeeded; any other exit status ends all ranks.
    return ExitCode.DONE if code == ExitCode.PREEMPTED else code


if __name__ == "__main__":
    # Threads of the process group may still wait for lost peers; exit without waiting for them.
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
