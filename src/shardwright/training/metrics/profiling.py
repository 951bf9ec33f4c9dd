"""Profiles of chosen steps, merged over all ranks into one trace on a common clock.

profile/step-00000010.json.gz   step 10, for https://ui.perfetto.dev or chrome://tracing
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from shardwright.parallel.clock_sync import SharedClock
from shardwright.parallel.mesh import wait_for_gloo_threads
from shardwright.telemetry.event_logger import EventLogger
from shardwright.telemetry.trace import RankTrace, merge_traces
from shardwright.training.rank_sync import RankSync

logger = logging.getLogger(__name__)


class StepProfiler:
    """Profiler of the steps in `run.profile_steps`, which are numbered from 1, as in events.

    A profiled step is slower than others. The run folder must be reachable from all ranks: each
    writes its part there.
    """

    def __init__(
        self, folder: Path, steps: Collection[int], device: torch.device, rank: int
    ) -> None:
        self._folder = folder
        self._steps = frozenset(steps)
        self._rank = rank
        self._activities = [
            ProfilerActivity.CPU,
            *([ProfilerActivity.CUDA] if device.type == "cuda" else []),
        ]

    def is_due(self, step: int) -> bool:
        """Return True if this step is profiled."""
        return step in self._steps

    @contextmanager
    def profile_step(self, step: int) -> Iterator[None]:
        """Profile the step that runs in the block, and write its trace to the run folder."""
        if not self.is_due(step):
            yield
            return
        # Without `acc_events` torch 2.11 warns that a second cycle would clear the events.
        with profile(activities=self._activities, acc_events=True) as recorded:
            yield
            # A thread that records the end of an operation after the profiler has stopped writes
            # to freed memory.
            wait_for_gloo_threads()
        try:
            self._get_part_path(step, self._rank).parent.mkdir(parents=True, exist_ok=True)
            recorded.export_chrome_trace(str(self._get_part_path(step, self._rank)))
        except (OSError, RuntimeError) as error:
            logger.warning(
                "step %d: the profile of rank %d cannot be written: %s", step, self._rank, error
            )

    def merge_profiles(
        self, step: int, rank_sync: RankSync, clock: SharedClock, event_logger: EventLogger
    ) -> None:
        """Merge the ranks' traces on rank 0. Collective, called after the step."""
        rows = rank_sync.gather(
            [clock.wall_offset_seconds, clock.error_seconds]
        )  # all ranks have written by now
        if self._rank != 0:
            return
        traces = [
            RankTrace(rank, self._get_part_path(step, rank), offset)
            for rank, (offset, _) in enumerate(rows)
        ]
        present = [trace for trace in traces if trace.path.is_file()]
        if len(present) < len(traces):
            missing = ", ".join(str(trace.rank) for trace in traces if trace not in present)
            logger.warning(
                "step %d: the profiles of ranks %s are missing from %s", step, missing, self._folder
            )
        out = self._folder / f"step-{step:08d}.json.gz"
        try:
            merge_traces(present, out)
        except (OSError, ValueError, KeyError) as error:
            logger.warning(
                "step %d: cannot merge the profiles, those of single ranks remain: %s", step, error
            )
            return
        for trace in present:
            trace.path.unlink(missing_ok=True)
        error_seconds = max(error for _, error in rows)
        path = f"{self._folder.name}/{out.name}"
        event_logger.log(
            "profile", step=step, path=path, ranks=len(present), clock_error_seconds=error_seconds
        )

    def _get_part_path(self, step: int, rank: int) -> Path:
        return self._folder / f"step-{step:08d}.rank-{rank}.json"
