"""A run of 2,000 steps with saves and evaluations: its memory and file descriptors stay flat."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import NamedTuple

import pytest

from shardwright.errors import ExitCode
from shardwright.telemetry.event_log import StepEvent, read_events

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc"),
]

STEPS = 2000
SAMPLE_SECONDS = 0.5
MAX_GROWTH_BYTES = 8 * 1024**2
"""Growth of a process over 1,000 steps; a leak of one gradient (20 kB) per step would be 20 MB."""


class Usage(NamedTuple):
    """Private memory and open files of one process when a step had ended."""

    step: int
    anonymous_bytes: int
    num_files: int


def test_two_thousand_steps_need_no_more_memory_or_files_at_the_end(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    changes = (
        f"training.max_steps={STEPS}",
        "training.learning_rate=1e-3",
        "checkpoint.every_steps=20",
        "data.validation_fraction=0.1",
        "data.validation_split=tail",
        "evaluation.every_steps=50",
    )
    command = [sys.executable, "-m", "shardwright", "train", str(recipe), "--nproc", "2"]
    command += ["--run-dir", str(folder)]
    for change in changes:
        command += ["--set", change]
    usages: dict[int, list[Usage]] = defaultdict(list)
    with (
        open(tmp_path / "log", "wb") as log,
        subprocess.Popen(
            command, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"}
        ) as process,
    ):
        while process.poll() is None:
            step = count_steps(folder)
            for pid in (process.pid, *list_children(process.pid)):
                usage = read_usage(pid, step)
                if usage is not None:
                    usages[pid].append(usage)
            time.sleep(SAMPLE_SECONDS)
    assert process.returncode == ExitCode.DONE, (tmp_path / "log").read_text()[-3000:]
    lasting = {
        pid: samples
        for pid, samples in usages.items()
        if samples[0].step < STEPS * 0.4 and samples[-1].step > STEPS * 0.9
    }
    assert len(lasting) >= 3, "the launcher and two ranks"
    for samples in lasting.values():
        early = [usage for usage in samples if STEPS * 0.3 <= usage.step < STEPS * 0.5]
        late = [usage for usage in samples if STEPS * 0.8 <= usage.step < STEPS]
        assert len(early) > 5
        assert len(late) > 5
        growth = median(usage.anonymous_bytes for usage in late) - median(
            usage.anonymous_bytes for usage in early
        )
        with capsys.disabled():
            sys.stdout.write(
                f"\n{growth / 2**20:+.2f} MiB of {early[0].anonymous_bytes / 2**20:.0f}, "
                f"{max(usage.num_files for usage in early)} files early, "
                f"{max(usage.num_files for usage in late)} late\n"
            )
        assert growth < MAX_GROWTH_BYTES
        assert median(usage.num_files for usage in late) <= median(
            usage.num_files for usage in early
        )
        # A save in progress has a few files open, whenever it is sampled.
        assert max(usage.num_files for usage in late) <= max(usage.num_files for usage in early) + 4


def count_steps(folder: Path) -> int:
    """Return the last step in the event log."""
    if not (folder / "events.jsonl").exists():
        return 0
    events = read_events(folder, is_lenient=True).filter_by_type(StepEvent)
    return max((event.step or 0 for event in events), default=0)


def list_children(pid: int) -> list[int]:
    """List the descendants of a process."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(word) for word in task.read_text().split()]
        except OSError:
            continue
        for child in children:
            found += [child, *list_children(child)]
    return found


def read_usage(pid: int, step: int) -> Usage | None:
    """Read the usage of a process; None if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        num_files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except OSError:
        return None
    kibibytes = [int(line.split()[1]) for line in lines if line.startswith("RssAnon:")]
    return Usage(step, 1024 * kibibytes[0], num_files) if kibibytes else None
