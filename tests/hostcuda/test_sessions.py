"""Sessions of pytest with the test device, which must be loaded before torch is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hostcuda.library import find_obstacle

ROOT = Path(__file__).parents[2]
ON_DEVICE = "tests/hostcuda/on_device"
# Ranks that a launcher starts have no device; `test_runs_over_nccl.py` has it.
OFFLOADING = ("*offload*", "test_host_update.py")
OFFLOADED_LAYOUTS = ("test_offload_layouts.py", "test_offloaded_peak.py", "test_trained_offload.py")
SESSIONS = {
    "offloading": [
        *(
            str(path)
            for glob in OFFLOADING
            for path in sorted((ROOT / ON_DEVICE).glob(glob))
            if path.name not in OFFLOADED_LAYOUTS
        ),
        "-m", "not long",
    ],
    "offloading under every layout": [
        *(f"{ON_DEVICE}/{name}" for name in OFFLOADED_LAYOUTS), "-m", "not long",
    ],
    "everything else": [
        ON_DEVICE, *(f"--ignore-glob={ON_DEVICE}/{glob}" for glob in OFFLOADING),
        "tests/gpu", "--ignore-glob=tests/gpu/*_on_nccl.py", "-m", "not long",
    ],
}  # fmt: skip
LONG_SESSIONS = {
    "all families, optimizers and axes": [f"{ON_DEVICE}/test_rehearsed_step.py", "-m", "long"],
    "other long tests": [
        ON_DEVICE, f"--ignore={ON_DEVICE}/test_rehearsed_step.py", "-m", "long"
    ],
}  # fmt: skip


@pytest.mark.timeout(1200)  # two to seven minutes each, with other tests on two slow cores
@pytest.mark.parametrize("name", SESSIONS)
def test_the_session_passes_on_the_test_device(name: str) -> None:
    run_session(SESSIONS[name], timeout_seconds=1150)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", LONG_SESSIONS)
def test_the_long_session_passes_on_the_test_device(name: str) -> None:
    run_session(LONG_SESSIONS[name], timeout_seconds=3550)


def run_session(arguments: list[str], *, timeout_seconds: float) -> None:
    """Run pytest with the test device."""
    obstacle = find_obstacle()
    if obstacle is not None:
        pytest.skip(obstacle)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.hostcuda.plugin"]
    command += ["-p", "no:cacheprovider", *arguments]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")
    }
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_seconds
    )
    assert result.returncode == 0, result.stdout[-20_000:] + result.stderr[-4000:]
