"""One rank of a run, started by `launch_ranks`: `python -m shardwright.training.worker RECIPE`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from shardwright.errors import ExitCode
from shardwright.launch.elastic import Restart
from shardwright.launch.nodes import POOL_OPTION
from shardwright.launch.rank_environment import RankEnvironment, detect_rank_environment
from shardwright.launch.rank_outcome import get_launcher_pid, write_outcome, write_pid
from shardwright.launch.stop_signals import listen_for_stop, stop_when_parent_exits

PRELOADED_MODULES = (
    "torch",
    "torch._dynamo",  # imported by the first optimizer
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.nn.parallel",
    "transformers",
    "shardwright.training.rank_run",
)
"""Modules that a process imports before it gets a rank."""


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--allow-drift", action="append", default=[])
    parser.add_argument("--restart", help="restart of the ranks, as JSON")
    parser.add_argument("--trial", action="store_true", help="only time steps; save nothing")
    return parser


def main() -> int:
    """Train as one rank and write its outcome for the launcher, which reports it.

    With `POOL_OPTION` this process waits for its rank, and may train further generations.
    """
    if sys.argv[1:] == [POOL_OPTION]:
        from shardwright.launch.rank_service import serve_generations

        for module in PRELOADED_MODULES:
            import_module(module)
        import_module("shardwright.training.garbage_collection").freeze_imports()
        return serve_generations(train_generation)
    rank = _get_rank_environment().rank
    code = write_outcome(rank, train_generation(sys.argv[1:]))
    # For the launcher a stopped rank succeeded; any other exit status ends all ranks.
    return ExitCode.DONE if code == ExitCode.PREEMPTED else code


def train_generation(arguments: Sequence[str]) -> BaseException | None:
    """Train as the rank that the environment names; return the error that ended it."""
    ranks = _get_rank_environment()
    with listen_for_stop() as stop, stop_when_parent_exits(stop, get_launcher_pid()):
        if number := write_pid(ranks.rank):
            stop.record(number)
        try:
            from shardwright.config import load_recipe
            from shardwright.training.rank_run import train_rank

            options = _build_parser().parse_args(arguments)
            recipe = load_recipe(options.recipe)
            train_rank(
                recipe,
                ranks,
                stop,
                resume=options.resume,
                allow_drift=options.allow_drift,
                restart=None if options.restart is None else Restart.from_json(options.restart),
                is_trial=options.trial,
            )
        except BaseException as error:
            return error
    return None


def _get_rank_environment() -> RankEnvironment:
    ranks = detect_rank_environment()
    assert ranks is not None, "this module is started by launch_ranks"
    return ranks


if __name__ == "__main__":
    # Threads of the process group may still wait for lost peers; exit without waiting for them.
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
