"""`shardwright report`: the page, the summary, and one JSON object."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.cli.report import report_command
from shardwright.errors import InputError
from shardwright.telemetry.event_log import StepEvent
from tests.unit.report.samples import (
    falling,
    make_complete_run_events,
    write_eventful_run,
    write_events,
    write_run,
)


def test_the_page_goes_into_the_run_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_eventful_run(tmp_path / "run")
    report_command([run])
    assert (run / "report.html").read_text().startswith("<!doctype html>")
    output = capsys.readouterr().out
    for words in (
        "run  (completed)",
        "300 of 300",
        "best validation",
        "1 skipped step",
        "on rank 1",
        "report.html",
    ):
        assert words in output


def test_rewards_of_preference_tuning_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = [
        replace(event, reward_margin=0.5, reward_accuracy=0.75)
        if isinstance(event, StepEvent)
        else event
        for event in make_complete_run_events("dpo", 30, falling)
    ]
    run = write_events(tmp_path / "dpo", events)
    report_command([run])
    output = capsys.readouterr().out
    assert "  reward margin   0.5000  " in output
    assert "  reward accuracy 0.7500  " in output
    page = (run / "report.html").read_text()
    assert "Reward margin" in page
    assert "Reward accuracy" in page
    plain = write_run(tmp_path / "plain", 30)
    report_command([plain])
    assert "reward margin" not in capsys.readouterr().out
    assert "Reward margin" not in (plain / "report.html").read_text()


def test_json_is_one_object_and_text_goes_to_standard_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [write_run(tmp_path / name, 30) for name in ("a", "b")]
    report_command(runs, as_json=True)
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert result["schema_version"] == 1
    assert result["page"] is None
    assert [run["steps"] for run in result["runs"]] == [30, 30]
    assert "a  (completed)" in captured.err
    assert list(tmp_path.glob("**/*.html")) == []


def test_several_runs_are_written_to_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [write_run(tmp_path / name, 30) for name in ("a", "b")]
    report_command(runs, out=tmp_path / "both.html", as_json=True)
    assert "<h1>2 runs</h1>" in (tmp_path / "both.html").read_text()
    assert json.loads(capsys.readouterr().out)["page"] == str(tmp_path / "both.html")


def test_a_page_that_cannot_be_written_is_wrong_input(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 3)
    with pytest.raises(InputError, match="cannot be written"):
        report_command([run], out=tmp_path / "absent" / "page.html")
    (tmp_path / "page.html.partial").mkdir()  # can be neither written nor removed as a file
    with pytest.raises(InputError, match="cannot be written"):
        report_command([run], out=tmp_path / "page.html")


@pytest.mark.parametrize("content", [None, "", "garbage\n"], ids=["no file", "empty", "garbage"])
def test_a_folder_without_events_is_wrong_input(tmp_path: Path, content: str | None) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    if content is not None:
        (folder / "events.jsonl").write_text(content)
    with pytest.raises(InputError, match=f"{folder}.*events.jsonl"):
        report_command([write_run(tmp_path / "run", 3), folder])
    assert list(tmp_path.glob("**/*.html")) == []
