"""Peer copies: after the loss of a rank training continues from the memory of the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwright.errors import ExitCode
from shardwright.telemetry.event_log import (
    RestartEvent,
    ResumeEvent,
    RunStartedEvent,
    WarningEvent,
    read_events,
)
from tests.faults.conftest import Run, assert_same_end
from tests.faults.test_deaths import make_death

PEER = (
    *("--set", "elastic.peer_copies=1", "--set", "elastic.warm_restarts=true"),
    *("--set", "elastic.max_restarts=6", "--set", "checkpoint.keep_best=false"),
)
ONLY_AT_THE_END = ("--set", "checkpoint.every_steps=null")


def read_resumes(run: Path) -> list[ResumeEvent]:
    return read_events(run).filter_by_type(ResumeEvent)


def read_warnings(run: Path) -> list[str]:
    return [event.message for event in read_events(run).filter_by_type(WarningEvent)]


def test_ranks_continue_from_memory(run: Run, undisturbed: Path, tmp_path: Path) -> None:
    """Ranks die while and after the copy of a step is sent; no checkpoint exists before the last
    step.
    """
    faults = [
        make_death(1, 4, "announce"),
        make_death(0, 6, "send"),
        make_death(1, 8, "optimizer"),
    ]
    done = run(*PEER, *ONLY_AT_THE_END, faults=faults)
    assert done.returncode == ExitCode.DONE, done.stderr
    assert_same_end(tmp_path / "run", undisturbed, tmp_path / "marks")
    resumes = read_resumes(tmp_path / "run")
    assert [(resume.source, resume.path) for resume in resumes] == [("memory", None)] * 3
    # The copies of steps 4 and 6 never arrived.
    assert [(resume.step, resume.steps_lost) for resume in resumes[:2]] == [(3, 1), (5, 1)]
    assert (resumes[2].step, resumes[2].steps_lost) in [(8, 0), (7, 1)]
    assert "resumed at step 3 from copies in memory; finished steps lost: 1" in done.stderr
    (warning,) = read_warnings(tmp_path / "run")
    assert "all ranks are on one node, so the loss of the node is not covered" in warning


def test_without_owner_and_holder_the_checkpoint_is_read(
    run: Run, undisturbed: Path, tmp_path: Path
) -> None:
    """Both ranks die in the same step: one line, and the newest checkpoint."""
    faults = [make_death(0, 7, "optimizer"), make_death(1, 7, "optimizer")]
    done = run(*PEER, faults=faults)
    assert done.returncode == ExitCode.DONE, done.stderr
    assert_same_end(tmp_path / "run", undisturbed, tmp_path / "marks")
    first = read_resumes(tmp_path / "run")[0]
    assert first.source == "checkpoint"
    assert first.step in (4, 6)
    warnings = [text for text in read_warnings(tmp_path / "run") if "newest checkpoint" in text]
    assert warnings == [
        "peer copies: no rank has a complete copy; the run continues from the newest checkpoint"
    ]


@pytest.mark.parametrize(
    ("rank", "place"),
    [
        pytest.param(rank, place, marks=[] if (rank, place) == (0, "kept") else pytest.mark.long)
        for place in ("announce", "send", "kept", "forward", "collective", "save")
        for rank in (0, 1)
    ],
)
def test_deaths_at_every_point_of_a_copy(
    run: Run, undisturbed: Path, tmp_path: Path, rank: int, place: str
) -> None:
    done = run(*PEER, faults=[make_death(rank, 6, place)])
    assert done.returncode == ExitCode.DONE, done.stderr
    assert_same_end(tmp_path / "run", undisturbed, tmp_path / "marks")
    (resume,) = read_resumes(tmp_path / "run")
    assert resume.source == "memory"
    assert resume.steps_lost in (0, 1)


@pytest.mark.long
@pytest.mark.parametrize(
    "layout",
    [
        "dp_shard=4,zero_stage=3",
        "dp_shard=4,zero_stage=2",
        "dp_shard=4,zero_stage=1",
        "dp_replicate=4",
        "dp_replicate=2,dp_shard=2",
        "tp=2,dp_replicate=2",
        "pp=2,dp_shard=2",
        "cp=2,dp_replicate=2",
    ],
)
def test_every_kind_of_layout_continues_from_memory(run: Run, tmp_path: Path, layout: str) -> None:
    words = ["--layout", layout, "--set", "training.gradient_accumulation_steps=null"]
    words += ["--set", "training.micro_batch_size=1", *ONLY_AT_THE_END]
    if layout == "dp_replicate=4":
        # DDP of more than two ranks adds in another order in the first step of a process.
        words += ["--set", "training.deterministic=true"]
    done = run(*words, ranks=4)
    assert done.returncode == ExitCode.DONE, done.stderr
    (tmp_path / "run").rename(tmp_path / "undisturbed")
    faults: list[dict[str, Any]] = [
        make_death(2, 4, "forward"),
        make_death(0, 7, "collective"),
        make_death(3, 9, "send"),
        make_death(1, 10, "announce"),
    ]
    done = run(*words, *PEER, faults=faults, ranks=4)
    assert done.returncode == ExitCode.DONE, done.stderr
    assert_same_end(tmp_path / "run", tmp_path / "undisturbed")
    resumes = read_resumes(tmp_path / "run")
    assert resumes
    assert {resume.source for resume in resumes} == {"memory"}
    assert all(resume.steps_lost in (0, 1) for resume in resumes)


@pytest.mark.long
def test_a_rolled_back_state_is_not_continued_from_memory(run: Run, tmp_path: Path) -> None:
    """A bit flips at step 5: the copies of that state are forgotten, and a checkpoint is read."""
    flip = {"rank": 1, "step": 5, "place": "flip", "signals": list[str]()}
    words = ["--layout", "dp_replicate=2", "--set", "run.replica_check_every_steps=1"]
    done = run(*words, ranks=2)
    assert done.returncode == ExitCode.DONE, done.stderr
    (tmp_path / "run").rename(tmp_path / "undisturbed")
    done = run(*words, *PEER, faults=[flip])
    assert done.returncode == ExitCode.DONE, done.stderr
    assert_same_end(tmp_path / "run", tmp_path / "undisturbed")
    (resume,) = read_resumes(tmp_path / "run")
    assert (resume.source, resume.step) == ("checkpoint", 4)


@pytest.mark.long
def test_fewer_ranks_continue_from_memory(run: Run, tmp_path: Path) -> None:
    """Rank 3 dies again as soon as it is back: two ranks continue with the state of the four.

    The run ends as one of four ranks that was stopped at the same step and resumed by two.
    """
    words = ["--set", "training.gradient_accumulation_steps=null"]
    words += ["--set", "training.micro_batch_size=1", *ONLY_AT_THE_END]
    faults = [make_death(3, 5, "forward"), make_death(3, 5, "optimizer")]
    done = run(*words, *PEER, "--set", "elastic.min_ranks=2", faults=faults, ranks=4)
    assert done.returncode == ExitCode.DONE, done.stderr
    events = read_events(tmp_path / "run")
    starts = events.filter_by_type(RunStartedEvent)
    assert [start.world_size for start in starts] == [4, 4, 2]
    resumes = read_resumes(tmp_path / "run")
    assert [resume.source for resume in resumes] == ["memory", "memory"]
    step = resumes[1].step
    assert step in (4, 5)
    # Rank 1 left: of all others the copy or the state itself is in a process that stayed.
    restart = events.filter_by_type(RestartEvent)[1]
    assert restart.surviving_ranks == (0, 1)
    (tmp_path / "run").rename(tmp_path / "smaller")
    stop: dict[str, Any] = {"rank": 0, "step": step - 1, "place": "interrupt", "signals": []}
    done = run(*words, faults=[stop], ranks=4)
    assert done.returncode == ExitCode.PREEMPTED, done.stderr
    done = run(*words, "--resume", ranks=2)
    assert done.returncode == ExitCode.DONE, done.stderr
    assert [resume.step for resume in read_resumes(tmp_path / "run")] == [step]
    assert_same_end(tmp_path / "smaller", tmp_path / "run")
