"""Kill sweep: whenever a save is killed, a checkpoint that loads remains."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(1800)
def test_a_save_may_be_killed_before_any_operation() -> None:
    repository = Path(__file__).parents[3]
    completed = subprocess.run(
        [sys.executable, "-m", "tests.unit.checkpoint.kill_sweep"],
        cwd=repository,
        capture_output=True,
        text=True,
        check=False,
        timeout=1500,
    )
    assert completed.returncode == 0, completed.stderr[-4000:]
    sweeps = json.loads(completed.stdout)
    assert len(sweeps) == 5
    for name, sweep in sweeps.items():
        assert sweep["operations"] > 40, name
        assert min(sweep["old"], sweep["new"]) > 0, f"{name}: kills before and after the commit"
