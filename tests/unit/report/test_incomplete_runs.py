"""Incomplete, damaged or empty runs: pages with a note; and the summary of a run."""

from __future__ import annotations

import html
import json
from pathlib import Path

import pytest

from shardwright.cli.main import run as shardwright
from shardwright.errors import InputError
from shardwright.report.recorded_run import load_runs, summarise_run
from shardwright.telemetry.event_log import (
    EVENTS_FILE_NAME,
    EvaluationEvent,
    FailureEvent,
    RestartEvent,
    WarningEvent,
)
from shardwright.telemetry.sinks import describe_event
from tests.unit.report.pages import PageParser, render
from tests.unit.report.samples import falling, make_step, write_events, write_run
from tests.unit.telemetry.samples import make_start_event


@pytest.mark.parametrize(
    "events",
    [
        [make_start_event()],
        [make_step(1, 2.0)],
        [make_start_event(), make_step(1, float("nan"))],
        [
            make_start_event(),
            EvaluationEvent(step=0, loss=3.0, perplexity=20.0, tokens=5, seconds=1.0),
        ],
        [WarningEvent(message="alone")],
        [
            make_start_event(),
            make_step(1, 2.0, memory_bytes=(), mfu=None),
            make_step(2, 2.0, memory_bytes=(1,)),
        ],
        [
            make_start_event(world_size=64),
            *(make_step(i, 2.0, memory_bytes=tuple(range(1, 65))) for i in range(1, 30)),
        ],
    ],
    ids=[
        "start only",
        "step only",
        "nan only",
        "evaluation only",
        "warning only",
        "ragged",
        "many ranks",
    ],
)
def test_incomplete_runs_have_a_page(tmp_path: Path, events: list[object]) -> None:
    page = render(write_events(tmp_path / "odd", events))  # type: ignore[arg-type]
    PageParser().feed(page)
    json.dumps(summarise_run(load_runs([tmp_path / "odd"])[0]), allow_nan=False)


@pytest.mark.parametrize("is_restarted", [True, False])
def test_a_restart_replaces_the_failure_that_it_followed(
    tmp_path: Path, is_restarted: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    events = [make_start_event(), make_step(1, 2.0), FailureEvent(rank=0, message="lost a peer")]
    if is_restarted:
        reason = "rank 1 was killed"
        events += [
            RestartEvent(number=1, max_restarts=2, world_size=1, reason=reason),
            make_start_event(),
            make_step(2, 2.0),
        ]
    run = write_events(tmp_path / "run", events)
    page = render(run)
    assert shardwright(["report", str(run)]) == 0
    printed = capsys.readouterr().out
    restart = "restart 1 of at most 2, 1 rank: rank 1 was killed"
    assert (restart in printed, restart in page) == (is_restarted, is_restarted)
    assert ("failed on rank 0: lost a peer" in printed) == (not is_restarted)
    assert ('"notice bad"' in page) == (not is_restarted)


def test_the_launcher_corrects_the_failure_of_the_same_start_only(tmp_path: Path) -> None:
    lost = FailureEvent(rank=0, message="lost a peer")
    cause = FailureEvent(message="rank 1 was killed")
    start = [make_start_event(), make_step(1, 2.0)]
    run = load_runs([write_events(tmp_path / "run", [*start, lost, cause])])[0]
    assert [event.message for event in run.log.filter_by_type(FailureEvent)] == [
        lost.message,
        cause.message,
    ]
    assert list(map(describe_event, run.interruptions)) == ["failed: rank 1 was killed"]
    restart = RestartEvent(number=1, max_restarts=2, world_size=1, reason="rank 2 was killed")
    events = [*start, lost, cause, *start, restart, *start, lost]
    run = load_runs([write_events(tmp_path / "resumed", events)])[0]
    assert list(map(describe_event, run.interruptions)) == [
        "failed: rank 1 was killed",
        "restart 1 of at most 2, 1 rank: rank 2 was killed",
        "failed on rank 0: lost a peer",
    ]


def replace_values(run: Path, **values: object) -> None:
    """Set a value in every event that has the field."""
    lines = [json.loads(line) for line in (run / EVENTS_FILE_NAME).read_text().splitlines()]
    changed = [
        line | {key: value for key, value in values.items() if key in line} for line in lines
    ]
    (run / EVENTS_FILE_NAME).write_text("".join(json.dumps(line) + "\n" for line in changed))


@pytest.mark.parametrize(
    "values",
    [
        {"elapsed_seconds": None},
        {"step": 2**70},
        {"step": "1"},
        {"loss": None},
        {"tokens": True},
        {"recipe": []},
        {"name": 5},
    ],
    ids=str,
)
def test_a_field_of_another_type_counts_as_an_unreadable_line(
    tmp_path: Path, values: dict[str, object]
) -> None:
    run = write_run(tmp_path / "run", 5)
    replace_values(run, **values)
    page = html.unescape(render(run))
    assert "lines of" in page
    json.dumps(summarise_run(load_runs([run])[0]), allow_nan=False)


def test_json_too_deep_to_parse_counts_as_an_unreadable_line(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 5)
    with (run / EVENTS_FILE_NAME).open("a") as file:
        file.write("[" * 100_000 + "\n")
    assert load_runs([run])[0].log.broken_lines


def test_text_that_cannot_be_encoded_is_escaped_in_the_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 5)
    replace_values(run, name="\ud800")
    assert shardwright(["report", str(run), "--out", str(tmp_path / "page.html")]) == 0
    assert "\\ud800" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_unreadable_lines_are_noted(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 5)
    with (run / EVENTS_FILE_NAME).open("a") as file:
        file.write("garbage\n{half a li")
    page = html.unescape(render(run))
    assert "1 lines of" in page
    assert "the last line is incomplete" in page


def test_events_of_a_newer_version_are_shown_as_far_as_known(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 5)
    newer = (
        (run / EVENTS_FILE_NAME).read_text().replace('"schema_version": 1', '"schema_version": 7')
    )
    (run / EVENTS_FILE_NAME).write_text(newer + '{"schema_version": 7, "kind": "unheard_of"}\n')
    page = html.unescape(render(run))
    assert "a newer shardwright (schema 7; this version reads 1)" in page
    assert "1 events of unknown kind `unheard_of`" in page
    assert 'id="loss"' in page


@pytest.mark.parametrize(
    "content", [None, "", "garbage\n", "{half a li"], ids=["no file", "empty", "garbage", "torn"]
)
def test_a_folder_without_events_has_a_page_with_a_note(
    tmp_path: Path, content: str | None
) -> None:
    if content is not None:
        (tmp_path / EVENTS_FILE_NAME).write_text(content)
    page = render(tmp_path)
    PageParser().feed(page)
    assert "there are no events to show yet" in page or "has no readable events yet" in page
    json.dumps(summarise_run(load_runs([tmp_path])[0]), allow_nan=False)
    assert render(tmp_path, write_run(tmp_path / "whole", 3))  # next to a run with events


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no events to read"):
        load_runs([tmp_path / "mistyped"])


def test_the_summary_has_the_numbers_of_the_run(eventful: Path) -> None:
    summary = summarise_run(load_runs([eventful])[0])
    assert summary["status"] == "completed"
    assert (summary["steps"], summary["total_steps"]) == (300, 300)
    assert (summary["resumes"], summary["skipped_steps"], summary["withdrawn_steps"]) == (1, 1, 20)
    assert summary["best_validation_step"] == 300
    assert summary["best_validation_loss"] == pytest.approx(falling(300) * 1.05)
    assert summary["training_loss"] == pytest.approx(falling(300), rel=0.05)
    assert summary["peak_memory_bytes"] == [2**30 + 6, 2**29]
    assert summary["part_seconds"]["backward"] == 0.25
    assert summary["failures"] == [{"rank": 1, "message": "killed by <signal> 9"}]
    assert 0 < summary["useful_share"] <= 1
