"""Lost and hanging ranks over NCCL: who is named, what stays, and the bits of the result.

They are the runs of `tests/faults` on two GPUs; the rehearsal on a CPU runs them over gloo.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.errors import ExitCode
from shardwright.telemetry.event_log import RestartEvent, read_events
from tests.faults.conftest import Run, assert_same_end, recipe, run, run_alone
from tests.faults.test_deaths import make_death
from tests.faults.test_hangs import HANGS, QUICK
from tests.gpu.conftest import CUDA
from tests.gpu.test_layouts_on_nccl import skip_without_gpus

__all__ = ["recipe", "run"]
pytestmark = pytest.mark.timeout(900)
DETERMINISTIC = ["--set", "training.deterministic=true"]
LAYOUTS = ["dp_shard=2,zero_stage=3", "dp_replicate=2", "pp=2", "tp=2"]
WARM = ["--set", "elastic.warm_restarts=true", "--set", "elastic.max_restarts=6"]


@pytest.fixture(scope="module", params=[pytest.param("cpu", marks=pytest.mark.long), CUDA])
def on_device(request: pytest.FixtureRequest) -> list[str]:
    """Return the options for the device under test."""
    if request.param == "cuda":
        skip_without_gpus(2)
    return ["--set", f"run.device={request.param}"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_survivors_abort_their_groups_and_stay(
    recipe: Path, run: Run, tmp_path: Path, on_device: list[str], layout: str
) -> None:
    """A rank is lost in a collective, and one in the update; the result has the bits of a run
    without faults, under `training.deterministic`."""
    words = [*on_device, *DETERMINISTIC, "--layout", layout]
    run_alone(recipe, tmp_path / "undisturbed", *words)
    faults = [make_death(1, 5, "forward"), make_death(0, 8, "optimizer")]
    done = run(*words, *WARM, faults=faults)
    assert done.returncode == ExitCode.DONE, done.stderr
    num_readers = 1 if layout.startswith("dp") else 2
    assert_same_end(
        tmp_path / "run", tmp_path / "undisturbed", tmp_path / "marks", num_readers=num_readers
    )
    restarts = read_events(tmp_path / "run").filter_by_type(RestartEvent)
    assert [restart.surviving_ranks for restart in restarts] == [(0,), (1,)]
    assert all("was killed by SIGKILL" in restart.reason for restart in restarts)


@pytest.mark.parametrize("cause", HANGS)
def test_a_rank_that_hangs_is_named(
    run: Run, tmp_path: Path, on_device: list[str], cause: str
) -> None:
    """On CUDA the hosts run ahead, so NCCL's records must name the rank and its collective."""
    fault = {"rank": 1, "step": 7} | HANGS[cause]
    words = ["--set", "elastic.max_restarts=1", *QUICK, *on_device]
    done = run(*words, "--layout", "dp_shard=2,zero_stage=3", faults=[fault])
    assert done.returncode == ExitCode.DONE, done.stderr
    (restart,) = read_events(tmp_path / "run").filter_by_type(RestartEvent)
    assert "rank 1" in restart.reason
    if "cuda" in on_device[-1]:
        assert "NCCL's records name no rank" not in restart.reason
        (report,) = (tmp_path / "run/hangs").glob("hang-*.txt")
        assert "operations on its device" in report.read_text()
