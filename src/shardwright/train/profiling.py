"""Profiles of chosen steps: each rank's own, and all of them on one clock as one trace in the run folder.

profile/step-00000010.json.gz     step 10 of all ranks, for https://ui.perfetto.dev or chrome://tracing
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from shardwright.telemetry.speaker import Speaker
from shardwright.telemetry.trace import RankTrace, merge_traces
from shardwright.train.clocks import SharedClock
from shardwright.train.meeting import Meeting

logger = logging.getLogger(__name__)


class ProfiledSteps:
    """Profiles the steps that a recipe names (`run.profile_steps`); a step counts as its event does, from 1.

    A profiled step is slower than others. Parts are written where all ranks can reach them: the run folder.
    """

    def __init__(self, folder: Path, steps: Collection[int], device: torch.device, rank: int) -> None:
        self._folder, self._steps, self._rank = folder, frozenset(steps), rank
        self._activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]

    def due(self, step: int) -> bool:
        """Whether this step is one of them."""
        return step in self._steps

    @contextmanager
    def profiling(self, step: int) -> Iterator[None]:
        """Bracket a step; its trace lies in the run folder afterwards."""
        if not self.due(step):
            yield
            return
        with profile(activities=self._activities) as recorded:
            yield
        try:
            self._part(step, self._rank).parent.mkdir(parents=True, exist_ok=True)
            recorded.export_chrome_trace(str(self._part(step, self._rank)))
        except (OSError, RuntimeError) as error:
            logger.warning("step %d: the profile of rank %d cannot be written: %s", step, self._rank, error)

    def gather(self, step: int, meeting: Meeting, clock: SharedClock, speaker: Speaker) -> None:
        """Put the ranks' traces together, on rank 0. Every rank calls this after the step."""
        rows = meeting.gather([clock.wall_offset_seconds, clock.error_seconds])  # everybody has written by now
        if self._rank != 0:
            return
        traces = [RankTrace(rank, self._part(step, rank), offset) for rank, (offset, _) in enumerate(rows)]
        found = [trace for trace in traces if trace.path.is_file()]
        if len(found) < len(traces):
            lacking = ", ".join(str(trace.rank) for trace in traces if trace not in found)
            logger.warning("step %d: no profile of ranks %s has come to %s", step, lacking, self._folder)
        out = self._folder / f"step-{step:08d}.json.gz"
        try:
            merge_traces(found, out)
        except (OSError, ValueError, KeyError) as error:
            logger.warning("step %d: the profiles cannot be put together, the ranks' own stay: %s", step, error)
            return
        for trace in found:
            trace.path.unlink(missing_ok=True)
        error_seconds = max(error for _, error in rows)
        path = f"{self._folder.name}/{out.name}"
        speaker.write("profile", step=step, path=path, ranks=len(found), clock_error_seconds=error_seconds)

    def _part(self, step: int, rank: int) -> Path:
        return self._folder / f"step-{step:08d}.rank-{rank}.json"
