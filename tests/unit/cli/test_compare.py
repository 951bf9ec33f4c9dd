"""`shardwright compare`: exit codes and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from shardwright.cli.compare import compare_command
from shardwright.errors import ExitCode, InputError
from tests.unit.report.samples import falling, write_run


def test_runs_that_agree_exit_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare_command(write_run(tmp_path / "a", 50), write_run(tmp_path / "b", 50))
    assert "within the tolerance" in capsys.readouterr().out


def test_a_run_that_diverges_exits_with_1_and_names_the_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "a", 500, lambda step: falling(step) * (1.05 if step > 300 else 1.0))
    reference = write_run(tmp_path / "b", 500)
    with pytest.raises(typer.Exit) as raised:
        compare_command(run, reference, as_json=True)
    assert raised.value.exit_code == ExitCode.CHECK_FAILED
    captured = capsys.readouterr()
    output = json.loads(captured.out)
    assert output["agrees"] is False
    assert output["schema_version"] == 1
    assert output["left"]["first_step"] <= 300 < output["left"]["last_step"]
    assert "EXCEEDS the tolerance: training loss" in captured.err


def test_a_wider_tolerance_accepts_the_difference(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", 50, lambda step: 1.01 * falling(step))
    compare_command(run, write_run(tmp_path / "b", 50), tolerance=0.02)


def test_runs_that_cannot_be_compared_are_wrong_input(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="global_batch_tokens"):
        compare_command(
            write_run(tmp_path / "a", 5, global_batch_tokens=1), write_run(tmp_path / "b", 5)
        )


def test_a_folder_without_events_is_not_a_run_without_a_start(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(InputError, match=r"REFERENCE: no events to read: No such file") as caught:
        compare_command(write_run(tmp_path / "a", 5), tmp_path / "model")
    assert caught.value.got == str(tmp_path / "model" / "events.jsonl")
