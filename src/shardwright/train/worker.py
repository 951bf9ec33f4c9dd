"""One rank of a run that `launch_ranks` started: `python -m shardwright.train.worker RECIPE` and the options of `_parser`."""

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
    parser.add_argument("--restart", help="why the ranks were started again")
    return parser


def main() -> int:
    """Train as one rank; how it ended is left for the launcher, which tells it once."""
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

            given = _parser().parse_args()
            recipe = load_recipe(given.recipe)
            train_rank(recipe, ranks, stop, resume=given.resume, allow_drift=given.allow_drift, restart=given.restart)
        except BaseException as error:
            failure = error
    code = note_outcome(ranks.rank, failure)
    # To the launcher a rank that was asked to stop ended well; anything else takes all ranks down.
    return ExitCode.DONE if code == ExitCode.PREEMPTED else code


if __name__ == "__main__":
    # The process group's threads may still wait for peers that are gone; leaving must not wait for them.
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
