"""Chrome traces of several ranks put together into one that Perfetto and chrome://tracing open, on one clock. Imports no torch."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PIDS_PER_RANK = 1000


@dataclass(frozen=True)
class RankTrace:
    """One rank's trace as the profiler wrote it."""

    rank: int
    path: Path
    offset_seconds: float
    """What to add to the rank's wall clock to have rank 0's."""


def merge_traces(traces: Iterable[RankTrace], out: Path) -> int:
    """Write one gzipped trace of all ranks; the number of events in it. One rank's trace is held in memory at a time.

    Processes become `rank 3: ...`, in rank order; flows keep to their rank; instants are rank 0's microseconds since the first
    trace began. The file is there whole or not at all.

    Raises:
        OSError, ValueError: a trace cannot be read, or the result not be written.
    """
    partial = out.with_name(out.name + ".partial")
    count = 0
    first: tuple[int, float] | None = None
    start = 0.0
    try:
        with gzip.open(partial, "wt", encoding="utf-8", compresslevel=4) as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [')
            for trace in traces:
                told = json.loads(trace.path.read_text(encoding="utf-8"))
                base = int(told.get("baseTimeNanoseconds", 0))
                offset = 1e6 * trace.offset_seconds
                if first is None:
                    start = min((event["ts"] for event in told["traceEvents"] if event.get("ph") == "X"), default=0.0)
                    first = base, offset
                # Whole nanoseconds since 1970 do not fit a float: the bases are subtracted first.
                shift = (base - first[0]) / 1000 + (offset - first[1]) - start
                for event in _moved(told["traceEvents"], trace.rank, shift):
                    file.write((",\n" if count else "\n") + json.dumps(event))
                    count += 1
            file.write("\n]}\n")
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)
    return count


def _moved(events: list[dict[str, Any]], rank: int, shift_microseconds: float) -> Iterator[dict[str, Any]]:
    """The events with their processes, flows and instants in the place of the rank."""
    pids: dict[Any, int] = {}
    named: set[int] = set()
    for event in events:
        if "pid" not in event:
            continue
        pid = pids.setdefault(event["pid"], rank * _PIDS_PER_RANK + len(pids))
        moved = event | {"pid": pid}
        if event.get("ph") == "M":
            name = event.get("args", {}).get("name", event["pid"])
            if event.get("name") == "process_name":
                moved["args"] = {"name": f"rank {rank}: {name}"}
                named.add(pid)
            elif event.get("name") == "process_sort_index":
                moved["args"] = {"sort_index": pid}
        if "ts" in event:
            moved["ts"] = event["ts"] + shift_microseconds
        if "id" in event:
            moved["id"] = f"{rank}.{event['id']}"
        yield moved
    for original, pid in pids.items():
        if pid not in named:
            yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": f"rank {rank}: {original}"}}
