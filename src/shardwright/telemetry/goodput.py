"""Goodput of a run: wall time of steps that contribute to the weights, and of the rest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from shardwright.telemetry.event_log import (
    CheckpointEvent,
    EvaluationEvent,
    Event,
    RunFinishedEvent,
    RunStartedEvent,
    SkippedStepEvent,
    StepEvent,
    select_surviving_steps,
)


@dataclass(frozen=True)
class Goodput:
    """Division of a run's wall time, over all its processes and the gaps between them."""

    total_seconds: float
    """Seconds from the start of each process to its last event, summed over processes."""
    useful_seconds: float
    """Seconds of steps that contribute to the weights."""
    lost_seconds: dict[str, float] = field(default_factory=dict)
    """Other seconds by category: set-up, evaluations, checkpoints (while training waited),
    skipped steps, withdrawn steps (repeated after a resume), between steps, down (no process
    ran, before the run was completed)."""

    @property
    def wall_seconds(self) -> float:
        """Seconds from the first start to the last event, without those between the completion
        of the run and its continuation for more steps."""
        return self.total_seconds + self.lost_seconds.get("down", 0.0)

    @property
    def share(self) -> float:
        """Useful fraction of the wall time, 0 to 1."""
        return self.useful_seconds / self.wall_seconds if self.wall_seconds > 0 else 0.0


def measure_goodput(events: Iterable[Event]) -> Goodput:
    """Divide the wall time of a run into useful and lost seconds, across restarts."""
    all_events = list(events)
    skipped = {event.step for event in all_events if isinstance(event, SkippedStepEvent)}
    surviving_ids = {id(step) for step in select_surviving_steps(all_events)}
    lost = dict.fromkeys(
        (
            "set-up",
            "evaluations",
            "checkpoints",
            "skipped steps",
            "withdrawn steps",
            "between steps",
            "down",
        ),
        0.0,
    )
    total = useful = 0.0
    previous_process: list[Event] = []
    for process in _group_by_process(all_events):
        seconds, set_up_seconds = _measure_process(process)
        total += seconds
        lost["set-up"] += set_up_seconds
        if previous_process and not _is_completed(previous_process):
            lost["down"] += max(
                0.0, process[0].time - process[0].elapsed_seconds - previous_process[-1].time
            )
        previous_process = process
        for event in process:
            if isinstance(event, EvaluationEvent):
                lost["evaluations"] += event.seconds
            elif isinstance(event, CheckpointEvent):
                lost["checkpoints"] += (
                    event.seconds if event.stall_seconds is None else event.stall_seconds
                )
            elif isinstance(event, StepEvent):
                if id(event) not in surviving_ids:
                    lost["withdrawn steps"] += event.step_seconds
                elif event.step in skipped:
                    lost["skipped steps"] += event.step_seconds
                else:
                    useful += event.step_seconds
    lost["between steps"] = max(
        0.0, total - useful - sum(seconds for name, seconds in lost.items() if name != "down")
    )
    return Goodput(total, useful, {name: seconds for name, seconds in lost.items() if seconds > 0})


def _group_by_process(events: list[Event]) -> list[list[Event]]:
    """Group events by the process that wrote them.

    Each process starts its clock at 0 and writes one `RunStartedEvent`, after warnings at most.
    """
    processes: list[list[Event]] = []
    for event in events:
        if (
            not processes
            or event.elapsed_seconds < processes[-1][-1].elapsed_seconds
            or (isinstance(event, RunStartedEvent) and _is_started(processes[-1]))
        ):
            processes.append([])
        processes[-1].append(event)
    return processes


def _is_started(process: list[Event]) -> bool:
    return any(isinstance(event, RunStartedEvent) for event in process)


def _is_completed(process: list[Event]) -> bool:
    return any(
        isinstance(event, RunFinishedEvent) and event.status == "completed" for event in process
    )


def _measure_process(process: list[Event]) -> tuple[float, float]:
    """Return the seconds of a process, and those before its first step (all if none)."""
    reported_seconds = max(
        (event.total_seconds for event in process if isinstance(event, RunFinishedEvent)),
        default=0.0,
    )
    seconds = max(reported_seconds, process[-1].elapsed_seconds)
    # Before the event file was opened.
    seconds_before_file = seconds - process[-1].elapsed_seconds
    first = next((event for event in process if isinstance(event, StepEvent)), None)
    if first is None:
        return seconds, seconds if _is_started(process) else 0.0
    return seconds, min(
        seconds, seconds_before_file + max(0.0, first.elapsed_seconds - first.step_seconds)
    )
