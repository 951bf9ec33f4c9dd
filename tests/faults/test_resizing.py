"""Runs that continue with fewer ranks, and later with as many as at first again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.checkpoint.tensor_loading import open_checkpoint, read_tensor
from shardwright.errors import ExitCode
from shardwright.report.recorded_run import load_run, summarise_run
from shardwright.report.terminal_summary import describe_run
from shardwright.telemetry.event_log import (
    ReshardEvent,
    RestartEvent,
    ResumeEvent,
    RunStartedEvent,
    read_events,
    select_surviving_steps,
)
from tests.faults.conftest import STEPS, Run, list_used_samples
from tests.faults.test_deaths import make_death

BATCH = 6
"""Sequences of a step, which three, two and one rank can share."""
RESIZED = (
    *("--set", f"training.global_batch_size={BATCH}", "--set", "training.micro_batch_size=1"),
    *("--set", "training.gradient_accumulation_steps=null"),
    *("--set", "elastic.max_restarts=4", "--set", "elastic.grow_after_steps=2"),
)
FROM_MEMORY = (
    *("--set", "elastic.warm_restarts=true", "--set", "elastic.peer_copies=1"),
    *("--set", "checkpoint.keep_best=false"),
)


def make_probes(*steps: int) -> list[dict[str, Any]]:
    """Let all ranks save their state after these steps, and when they continue from them."""
    return [
        {"rank": rank, "step": step, "place": place, "signals": []}
        for rank in range(3)
        for step in steps
        for place in ("finished", "restored")
    ]


def assert_same_state(marks: Path, event: ReshardEvent) -> None:
    """Assert that the ranks continued with the state, bit for bit, that the former ones had."""
    name = f"step-{event.step:08d}"
    restored = open_checkpoint(marks / f"restored-by-{event.world_size}" / name)
    finished = open_checkpoint(marks / f"finished-by-{event.former_world_size}" / name)
    assert restored.manifest.tensors.keys() == finished.manifest.tensors.keys()
    assert any(name.startswith("optimizer.") for name in restored.manifest.tensors)
    for name in restored.manifest.tensors:
        assert torch.equal(read_tensor(restored, name), read_tensor(finished, name)), name


def assert_all_samples_used(run: Path, marks: Path) -> None:
    """Assert that every surviving step used its own samples, and they are all."""
    for step in range(1, STEPS + 1):
        assert set(list_used_samples(marks, step)) == set(range(BATCH * (step - 1), BATCH * step))
    steps = select_surviving_steps(read_events(run))
    assert [step.samples_seen for step in steps] == [BATCH * each for each in range(1, STEPS + 1)]


def test_ranks_shrink_and_grow_from_memory(run: Run, tmp_path: Path) -> None:
    """Rank 2 of three dies again as soon as it is back: two ranks continue. Two steps later the
    third one is back. The planner chooses each layout; nothing is saved before the end.

    Deterministic, because step 5 may run twice, and DDP of three ranks adds in another order in the
    first step of a process.
    """
    words = ["--set", "model.config.vocab_size=32", "--set", "layout.auto=true"]
    words += ["--set", "cluster=3xcpu", "--set", "elastic.min_ranks=2"]
    words += ["--set", "training.deterministic=true"]
    faults = [make_death(2, 5, "forward"), make_death(2, 5, "optimizer"), *make_probes(4, 5, 6, 7)]
    done = run(*RESIZED, *FROM_MEMORY, *words, faults=faults, ranks=3)
    assert done.returncode == ExitCode.DONE, done.stderr
    folder = tmp_path / "run"
    events = read_events(folder)
    assert [start.world_size for start in events.filter_by_type(RunStartedEvent)] == [3, 3, 2, 3]
    assert [restart.world_size for restart in events.filter_by_type(RestartEvent)] == [3, 2]
    resumes = events.filter_by_type(ResumeEvent)
    assert [resume.source for resume in resumes] == ["memory"] * 3
    assert resumes[2].steps_lost == 0
    smaller, larger = events.filter_by_type(ReshardEvent)
    assert (smaller.former_world_size, smaller.world_size) == (3, 2)
    assert (larger.former_world_size, larger.world_size) == (2, 3)
    assert (smaller.step, larger.step) == (resumes[1].step, resumes[1].step + 2)
    assert larger.to_layout == smaller.from_layout != smaller.to_layout == larger.from_layout
    for event in (smaller, larger):
        assert_same_state(tmp_path / "marks", event)
    assert_all_samples_used(folder, tmp_path / "marks")
    assert f"resharded at step {smaller.step} from 3 ranks to 2: " in done.stderr
    recorded = load_run(folder)
    assert "2 layout changes" in "\n".join(describe_run(recorded, summarise_run(recorded)))


@pytest.mark.long
@pytest.mark.parametrize("mode", ["cold", "warm", "copies"])
def test_one_rank_continues_and_grows_from_its_checkpoint(
    run: Run, tmp_path: Path, mode: str
) -> None:
    """Without copies in memory, and always after a single rank, the larger generation reads the
    checkpoint that the smaller one saves when it leaves. An attempt to grow that fails is
    followed by one after twice as many steps.
    """
    words = ["--set", "elastic.min_ranks=1", "--set", "checkpoint.every_steps=null"]
    if mode == "warm":
        words += ["--set", "elastic.warm_restarts=true"]
    if mode == "copies":
        words += FROM_MEMORY
    faults = [
        make_death(1, 1, "forward"),
        make_death(1, 1, "optimizer"),
        make_death(1, 2, "forward"),
        make_death(1, 3, "forward"),
        *make_probes(2, 3, 6, 7, 8),
    ]
    done = run(*RESIZED, *words, faults=faults)
    assert done.returncode == ExitCode.DONE, done.stderr
    folder = tmp_path / "run"
    events = read_events(folder)
    sizes = [start.world_size for start in events.filter_by_type(RunStartedEvent)]
    assert sizes == ([2, 2] if mode == "copies" else [2]) + [1, 2, 1, 2]
    growths = [
        event for event in events.filter_by_type(ReshardEvent) if event.former_world_size == 1
    ]
    assert [event.source for event in growths] == ["checkpoint"] * 2
    assert growths[1].step == growths[0].step + 4
    for event in growths:
        assert_same_state(tmp_path / "marks", event)
    assert_all_samples_used(folder, tmp_path / "marks")
    assert [restart.is_warm for restart in events.filter_by_type(RestartEvent)] == (
        [mode != "cold"] * (len(sizes) - 3)
    )
