"""Run folders: contents that count as checkpoints to resume from."""

from __future__ import annotations

from pathlib import Path

from shardwright.checkpoint.run_folder import RunFolder


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
