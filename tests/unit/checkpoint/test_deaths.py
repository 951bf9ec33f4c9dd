"""Whatever kills a save, and whenever, a checkpoint that loads is there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(1800)
def test_a_save_may_die_before_any_operation() -> None:
    repository = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.checkpoint.deaths"],
        cwd=repository,
        capture_output=True,
        text=True,
        check=False,
        timeout=1500,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    sweeps = json.loads(done.stdout)
    assert len(sweeps) == 5
    for name, sweep in sweeps.items():
        assert sweep["operations"] > 40, name
        assert min(sweep["old"], sweep["new"]) > 0, f"{name}: deaths before and after the commit"
