"""Run folders: contents that count as checkpoints to resume from."""

from __future__ import annotations

from pathlib import Path

from shardwright.checkpoint.run_folder import RunFolder
from shardwright.telemetry.event_log import CheckpointEvent, Event, ResumeEvent
from tests.unit.report.samples import write_events
from tests.unit.telemetry.samples import make_start_event, make_step_event


def make_save(step: int) -> CheckpointEvent:
    return CheckpointEvent(step=step, path=f"checkpoints/{step}", size_bytes=1, seconds=1.0)


def find_saved_step(folder: Path, *events: Event) -> int | None:
    save = RunFolder(write_events(folder, events)).find_last_save()
    return None if save is None else save.step


def test_a_run_that_failed_in_its_first_save_has_no_checkpoint(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert not folder.has_checkpoints
    for leftover in (".saving-0123456789abcdef", ".removing-step-00000002", ".pointer-latest"):
        (tmp_path / "checkpoints" / leftover).mkdir(parents=True)
    assert not folder.has_checkpoints


def test_a_damaged_checkpoint_or_a_lone_pointer_counts(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    (tmp_path / "checkpoints" / "step-00000002").mkdir(parents=True)
    assert folder.has_checkpoints
    (tmp_path / "checkpoints" / "step-00000002").rmdir()
    (tmp_path / "checkpoints" / "latest").write_text("step-00000002")
    assert folder.has_checkpoints


def test_the_last_save_is_that_of_the_current_steps(tmp_path: Path) -> None:
    assert RunFolder(tmp_path / "absent").find_last_save() is None
    assert RunFolder(tmp_path).find_last_save() is None, "no events"
    start = make_start_event()
    first = [start, make_step_event(1), make_step_event(2)]
    assert find_saved_step(tmp_path, *first) is None
    saved = [*first, make_save(2), make_step_event(3), make_save(3)]
    assert find_saved_step(tmp_path, *saved) == 3
    assert find_saved_step(tmp_path, *saved, start) == 3, "a start that reached no step"
    resumed = [*saved, start, ResumeEvent(step=2, path="checkpoints/2"), make_step_event(3)]
    assert find_saved_step(tmp_path, *resumed) == 2
    assert find_saved_step(tmp_path, *saved, start, make_step_event(1)) is None, (
        "trained again from step 0"
    )
