"""Merging of traces of several ranks."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from shardwright.telemetry.trace import RankTrace, merge_traces


def write_trace(path: Path, base_nanoseconds: int, *events: dict[str, Any]) -> Path:
    process_name = {
        "ph": "M",
        "name": "process_name",
        "pid": 77,
        "tid": 0,
        "args": {"name": "python"},
    }
    path.write_text(
        json.dumps(
            {"baseTimeNanoseconds": base_nanoseconds, "traceEvents": [process_name, *events]}
        )
    )
    return path


def test_merged_ranks_share_a_clock_with_separate_processes_and_flows(tmp_path: Path) -> None:
    """Rank 1's clock is 2 s behind and its trace starts 1 s later, so its 500 us are 3,000,500 us.

    Rank 0's first event, at 100 us, is the origin.
    """
    event = {"ph": "X", "pid": 77, "tid": 1, "name": "work", "dur": 5}
    first = write_trace(
        tmp_path / "0", 10**9, event | {"ts": 100}, {"ph": "s", "id": 4, "pid": 77, "ts": 101}
    )
    second = write_trace(
        tmp_path / "1",
        2 * 10**9,
        event | {"ts": 500},
        {"ph": "f", "id": 4, "pid": "Spans", "ts": 501},
    )
    traces = [RankTrace(0, first, 0.0), RankTrace(1, second, 2.0)]
    out = tmp_path / "all.json.gz"
    count = merge_traces(traces, out)
    with gzip.open(out) as file:
        events = json.load(file)["traceEvents"]
    assert len(events) == count == 7
    work = [event for event in events if event.get("name") == "work"]
    assert [event["ts"] for event in work] == pytest.approx([0, 3_000_400])
    assert len({event["pid"] for event in work}) == 2
    flows = [event["id"] for event in events if event["ph"] in "sf"]
    assert flows == ["0.4", "1.4"]
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {"rank 0: python", "rank 1: python", "rank 1: Spans"}
    assert list(tmp_path.glob("*.partial")) == []


def test_a_broken_trace_leaves_no_partial_file(tmp_path: Path) -> None:
    (tmp_path / "0").write_text("{half")
    with pytest.raises(ValueError, match="Expecting"):
        merge_traces([RankTrace(0, tmp_path / "0", 0.0)], tmp_path / "all.json.gz")
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
