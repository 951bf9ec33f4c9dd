"""Time that lost ranks cost with each kind of restart: python -m benchmarks.restarts.

Two ranks train a small model on the CPU and save after every `--save-every` steps. One of them gets
SIGKILL every `--interval` seconds. Restarts are cold, warm, or warm from the copies that the ranks
keep of each other's state in memory. Reported are the seconds from the signal to the end of the
next optimizer step, the finished steps that are run again, and the goodput: the share of the time
from the first step to the last one that surviving steps took. `--kills 0` measures the goodput of
an undisturbed run.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.conditions import read_conditions
from shardwright.telemetry.event_log import StepEvent, read_events, select_surviving_steps

RANKS = 2
SETTINGS = {
    "seed": 3,
    "model": {
        "config": {
            "model_type": "llama",
            "hidden_size": 192,
            "intermediate_size": 512,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
        }
    },
    "tokenizer": {"kind": "character"},
    "precision": "fp32",
    "training": {
        "sequence_length": 128,
        "global_batch_size": 8,
        "max_steps": 100_000,
        "learning_rate": 1e-3,
    },
    "run": {"device": "cpu", "timeout_seconds": 300.0},
}
KINDS: dict[str, dict[str, Any]] = {
    "cold": {},
    "warm": {"warm_restarts": True},
    "memory": {"warm_restarts": True, "peer_copies": 1},
}
"""Settings of `elastic` by the name of the kind of restart."""
_POLL_SECONDS = 0.01
_MAX_WAIT_SECONDS = 300.0


@dataclass(frozen=True)
class Measurement:
    """Result of one run."""

    recovery_seconds: list[float]
    """Seconds from each SIGKILL to the end of the next optimizer step."""
    goodput: float
    steps_lost: int
    """Finished steps that were run again after all SIGKILLs."""
    step_seconds: float
    """Median time of a step."""


def measure_restarts(
    num_kills: int, interval_seconds: float, elastic: dict[str, Any], save_every_steps: int
) -> Measurement:
    """Train, kill a rank at each interval, and stop the run after one more interval."""
    folder = Path(tempfile.mkdtemp(prefix="restarts-"))
    try:
        run = folder / "run"
        with (folder / "errors").open("w") as errors:
            launcher = start_run(folder, num_kills, errors, elastic, save_every_steps)
            try:
                recovery_seconds = _kill_ranks(launcher, run, folder, num_kills, interval_seconds)
            finally:
                launcher.send_signal(signal.SIGTERM)
                launcher.wait()
        log = read_events(run)
        steps = log.filter_by_type(StepEvent)
        surviving_seconds = [step.step_seconds for step in select_surviving_steps(log)]
        wall_seconds = steps[-1].time - steps[0].time + steps[0].step_seconds
        return Measurement(
            recovery_seconds,
            sum(surviving_seconds) / wall_seconds,
            _count_lost_steps(steps),
            statistics.median(surviving_seconds),
        )
    finally:
        shutil.rmtree(folder)


def _count_lost_steps(steps: Sequence[StepEvent]) -> int:
    """Count the finished steps that were run again, also from step 0 without a checkpoint."""
    lost = 0
    newest = 0
    for event in steps:
        lost += max(0, newest - event.step + 1)
        newest = event.step
    return lost


def start_run(
    folder: Path,
    num_kills: int,
    errors: object,
    elastic: dict[str, Any],
    save_every_steps: int,
) -> subprocess.Popen[bytes]:
    """Start the command that trains; `errors` is a file for what it writes to standard error."""
    (folder / "corpus.txt").write_text(
        "".join(f"{a} + {b} = {a + b}\n" for a, b in itertools.product(range(200), range(200)))
    )
    data = {"sources": str(folder / "corpus.txt"), "cache_dir": str(folder / "cache")}
    elastic = {"max_restarts": max(1, num_kills)} | elastic
    checkpoint = {"every_steps": save_every_steps, "keep_last": 3, "keep_best": False}
    sections = {"data": data, "elastic": elastic, "checkpoint": checkpoint}
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(SETTINGS | sections))
    temporary = folder / "temporary"
    temporary.mkdir()
    words = [sys.executable, "-m", "shardwright", "train", str(recipe)]
    return subprocess.Popen(
        [*words, "--run-dir", str(folder / "run"), "--nproc", str(RANKS)],
        env=os.environ | {"TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"},
        stderr=errors,  # type: ignore[arg-type]
    )


def _kill_ranks(
    launcher: subprocess.Popen[bytes],
    run: Path,
    folder: Path,
    num_kills: int,
    interval_seconds: float,
) -> list[float]:
    """Kill a rank at each interval; return the seconds to the next step after each."""
    generator = random.Random(0)
    wait_for_step(launcher, run, since_seconds=0.0)
    recovery_seconds = []
    for _ in range(num_kills):
        time.sleep(interval_seconds)
        rank = generator.randrange(RANKS)
        # One folder of the current generation has the process ids of its ranks.
        files = list((folder / "temporary").glob(f"shardwright-*/rank-{rank}.pid"))
        assert len(files) == 1, files
        killed_at = time.time()
        os.kill(int(files[0].read_text()), signal.SIGKILL)
        ended_at = wait_for_step(launcher, run, since_seconds=killed_at)
        recovery_seconds.append(ended_at - killed_at)
    time.sleep(interval_seconds)
    return recovery_seconds


def wait_for_step(launcher: subprocess.Popen[bytes], run: Path, *, since_seconds: float) -> float:
    """Wait for a step of a generation that started after a time; return the time of its end."""
    deadline = time.monotonic() + _MAX_WAIT_SECONDS
    while time.monotonic() < deadline:
        assert launcher.poll() is None, (run.parent / "errors").read_text()[-4000:]
        if (run / "events.jsonl").exists():
            starts = False
            for event in read_events(run, is_lenient=True):
                starts |= event.kind == "run_started" and event.time > since_seconds
                if starts and isinstance(event, StepEvent):
                    return event.time
        time.sleep(_POLL_SECONDS)
    raise TimeoutError("no step followed")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each kind of restart and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--interval", type=float, default=10.0, help="seconds between kills")
    parser.add_argument("--save-every", type=int, default=1, help="steps between checkpoints")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    options = parser.parse_args(arguments)
    load = os.getloadavg()[0]
    rows = []
    for name in options.kinds:
        result = measure_restarts(options.kills, options.interval, KINDS[name], options.save_every)
        seconds = sorted(result.recovery_seconds) or [0.0]
        rows.append(
            f"| {name} | {statistics.median(seconds):.2f} s | {seconds[0]:.2f} to "
            f"{seconds[-1]:.2f} s | {result.steps_lost / max(1, options.kills):.1f} | "
            f"{result.goodput:.0%} | {result.step_seconds * 1000:.0f} ms |"
        )
    sys.stdout.write(
        f"{options.kills} kills, one every {options.interval:g} s; a checkpoint every "
        f"{options.save_every} steps; load average {load:.1f} at the "
        f"beginning, {os.getloadavg()[0]:.1f} at the end; {read_conditions()}\n\n"
        "| restart | SIGKILL to the next step, median | range | steps lost, mean | goodput "
        "| step |\n"
        "|---|---|---|---|---|---|\n" + "\n".join(rows) + "\n"
    )


if __name__ == "__main__":
    main()
