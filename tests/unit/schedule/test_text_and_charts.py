"""Schedules as text, and complete charts in terminal and SVG."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.errors import ScheduleError
from shardwright.schedule import (
    PIPELINE_SCHEDULES,
    ActionTimes,
    build_schedule,
    parse_schedule,
    read_schedule,
    simulate,
    write_schedule,
)
from shardwright.schedule.svg_chart import draw_svg
from shardwright.schedule.terminal_chart import draw_terminal


@given(st.sampled_from(sorted(PIPELINE_SCHEDULES)), st.integers(1, 4), st.integers(1, 3))
def test_a_schedule_survives_a_round_trip_through_text(name: str, p: int, rounds: int) -> None:
    schedule = build_schedule(name, p, 2 * p * rounds)
    assert parse_schedule(write_schedule(schedule), "again").rows == schedule.rows


def test_idle_cells_comments_and_pairs_are_read() -> None:
    schedule = parse_schedule("# own\n0F0, , (0F1;0B0)OVERLAP_F_B,0I1,0W1  # rank 0\n\n", "own")
    assert write_schedule(schedule) == "0F0,0F1,0B0,0I1,0W1\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,1X0", "line 2, cell 2 of bad is not an action (got '1X0'"),
        ("0F0,F0", "line 1, cell 2 of bad is not an action"),
        ("0F0,1RECV_B0", "is communication, which follows"),
        ("\n# nothing\n", "bad contains no action"),
    ],
)
def test_invalid_cells_are_refused_with_their_place(text: str, message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        parse_schedule(text, "bad")
    assert message in str(caught.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for path, message in (
        (tmp_path / "none", "No such file"),
        (tmp_path / "binary", "not UTF-8 text"),
    ):
        with pytest.raises(ScheduleError, match=message):
            read_schedule(path)


@pytest.mark.parametrize("name", PIPELINE_SCHEDULES)
def test_the_terminal_chart_has_every_action_at_its_time(name: str) -> None:
    timeline = simulate(
        build_schedule(name, 2, 4),
        ActionTimes.uniform(2 * (1 + (PIPELINE_SCHEDULES[name].stage_assignment != "straight"))),
    )
    lines = draw_terminal(timeline, 400).plain.splitlines()
    for rank, row in enumerate(timeline.schedule.rows):
        assert re.findall(r"[FBIW]\d+", lines[rank]) == [f"{a.kind}{a.micro_batch}" for a in row]
        first = lines[rank].index("F") - len("rank 0 ")
        assert first == 2 * timeline.starts[rank][0]


def test_the_terminal_chart_wraps_at_its_width() -> None:
    chart = draw_terminal(simulate(build_schedule("1f1b", 3, 24), ActionTimes.uniform(3)), 60).plain
    bands = [line for line in chart.splitlines() if line.startswith("rank")]
    assert len(bands) > 3
    assert max(map(len, bands)) <= 60


@pytest.mark.parametrize("name", PIPELINE_SCHEDULES)
def test_the_svg_is_well_formed_with_title_and_tooltips(name: str) -> None:
    schedule = build_schedule(name, 2, 4)
    drawing = ElementTree.fromstring(
        draw_svg(simulate(schedule, ActionTimes.uniform(schedule.num_stages, 0.3, 0.4, 0.5, 0.1)))
    )
    namespace = "{http://www.w3.org/2000/svg}"
    assert drawing.findtext(f"{namespace}title") == str(schedule)
    assert "utilis" in "".join(drawing.itertext())
    tooltips = [
        e.text.split(":")[0]
        for e in drawing.iter(f"{namespace}title")
        if ": " in e.text and " to " in e.text
    ]
    assert sorted(tooltips) == sorted(str(a) for row in schedule.rows for a in row)
    assert "prefers-color-scheme" in drawing.findtext(f"{namespace}style")
