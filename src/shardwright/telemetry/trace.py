"""Merging of the ranks' Chrome traces on one clock, for Perfetto or chrome://tracing.

Imports no torch.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PROCESS_IDS_PER_RANK = 1000


@dataclass(frozen=True)
class RankTrace:
    """Trace file of one rank, as the profiler wrote it."""

    rank: int
    path: Path
    offset_seconds: float
    """Seconds to add to the rank's wall clock to get rank 0's."""


def merge_traces(traces: Iterable[RankTrace], output_path: Path) -> int:
    """Write one gzipped trace of all ranks and return its number of events.

    Processes are renamed to `rank 3: ...`, in rank order; flow ids are made unique per rank;
    times are microseconds since the start of the first trace, on rank 0's clock. Keeps one
    trace in memory at a time. The file is written completely or not at all.

    Raises:
        OSError, ValueError: a trace cannot be read, or the result cannot be written.
    """
    partial = output_path.with_name(output_path.name + ".partial")
    num_events = 0
    first: tuple[int, float] | None = None
    start = 0.0
    try:
        with gzip.open(partial, "wt", encoding="utf-8", compresslevel=4) as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [')
            for trace in traces:
                content = json.loads(trace.path.read_text(encoding="utf-8"))
                base = int(content.get("baseTimeNanoseconds", 0))
                offset = 1e6 * trace.offset_seconds
                if first is None:
                    start = min(
                        (event["ts"] for event in content["traceEvents"] if event.get("ph") == "X"),
                        default=0.0,
                    )
                    first = base, offset
                # Subtract the bases first: a float cannot represent nanoseconds since 1970.
                shift = (base - first[0]) / 1000 + (offset - first[1]) - start
                for event in _shift_events(content["traceEvents"], trace.rank, shift):
                    file.write((",\n" if num_events else "\n") + json.dumps(event))
                    num_events += 1
            file.write("\n]}\n")
        partial.replace(output_path)
    finally:
        partial.unlink(missing_ok=True)
    return num_events


def _shift_events(
    events: list[dict[str, Any]], rank: int, shift_microseconds: float
) -> Iterator[dict[str, Any]]:
    """Yield the events with the rank's process ids and flow ids, and with shifted times."""
    pids: dict[Any, int] = {}
    named: set[int] = set()
    for event in events:
        if "pid" not in event:
            continue
        pid = pids.setdefault(event["pid"], rank * _PROCESS_IDS_PER_RANK + len(pids))
        shifted = event | {"pid": pid}
        if event.get("ph") == "M":
            name = event.get("args", {}).get("name", event["pid"])
            if event.get("name") == "process_name":
                shifted["args"] = {"name": f"rank {rank}: {name}"}
                named.add(pid)
            elif event.get("name") == "process_sort_index":
                shifted["args"] = {"sort_index": pid}
        if "ts" in event:
            shifted["ts"] = event["ts"] + shift_microseconds
        if "id" in event:
            shifted["id"] = f"{rank}.{event['id']}"
        yield shifted
    for original, pid in pids.items():
        if pid not in named:
            yield {
                "ph": "M",
                "name": "process_name",
                "pid": pid,
                "tid": 0,
                "args": {"name": f"rank {rank}: {original}"},
            }
