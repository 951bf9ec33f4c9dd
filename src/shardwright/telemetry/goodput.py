"""Where the wall time of a run went: in steps that are in the weights, and in everything else, by name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from shardwright.telemetry.events import Checkpoint, Evaluation, Event, RunFinished, RunStarted, SkippedStep, Step, surviving_steps


@dataclass(frozen=True)
class Goodput:
    """Seconds of all processes of a run, and between them."""

    total_seconds: float
    """From each process's start to its last event, added up."""
    useful_seconds: float
    """Of steps that are in the weights."""
    lost_seconds: dict[str, float] = field(default_factory=dict)
    """The rest of the wall time by what it went into: set-up, evaluations, checkpoints (that training stood still for), skipped
    steps, withdrawn steps (a resume did them again), between steps, down (no process ran)."""

    @property
    def wall_seconds(self) -> float:
        """From the first start to the last event."""
        return self.total_seconds + self.lost_seconds.get("down", 0.0)

    @property
    def share(self) -> float:
        """Useful part of the wall time, 0 to 1."""
        return self.useful_seconds / self.wall_seconds if self.wall_seconds > 0 else 0.0


def measure_goodput(events: Iterable[Event]) -> Goodput:
    """Useful time against wall time, across restarts."""
    listed = list(events)
    skipped = {event.step for event in listed if isinstance(event, SkippedStep)}
    kept = {id(step) for step in surviving_steps(listed)}
    lost = dict.fromkeys(("set-up", "evaluations", "checkpoints", "skipped steps", "withdrawn steps", "between steps", "down"), 0.0)
    total = useful = 0.0
    before: list[Event] = []
    for process in _processes(listed):
        seconds, set_up = _length(process)
        total += seconds
        lost["set-up"] += set_up
        if before:
            lost["down"] += max(0.0, process[0].time - process[0].elapsed_seconds - before[-1].time)
        before = process
        for event in process:
            if isinstance(event, Evaluation):
                lost["evaluations"] += event.seconds
            elif isinstance(event, Checkpoint):
                lost["checkpoints"] += event.seconds if event.stall_seconds is None else event.stall_seconds
            elif isinstance(event, Step):
                if id(event) not in kept:
                    lost["withdrawn steps"] += event.step_seconds
                elif event.step in skipped:
                    lost["skipped steps"] += event.step_seconds
                else:
                    useful += event.step_seconds
    lost["between steps"] = max(0.0, total - useful - sum(seconds for name, seconds in lost.items() if name != "down"))
    return Goodput(total, useful, {name: seconds for name, seconds in lost.items() if seconds > 0})


def _processes(events: list[Event]) -> list[list[Event]]:
    """Events by the process that wrote them: its clock begins anew."""
    found: list[list[Event]] = []
    for event in events:
        if not found or event.elapsed_seconds < found[-1][-1].elapsed_seconds:
            found.append([])
        found[-1].append(event)
    return found


def _length(process: list[Event]) -> tuple[float, float]:
    """Seconds of a process, and of them those before its first step began (all of them where none did)."""
    told = max((event.total_seconds for event in process if isinstance(event, RunFinished)), default=0.0)
    seconds = max(told, process[-1].elapsed_seconds)
    unseen = seconds - process[-1].elapsed_seconds  # before the event file was opened
    first = next((event for event in process if isinstance(event, Step)), None)
    if first is None:
        return seconds, seconds if any(isinstance(event, RunStarted) for event in process) else 0.0
    return seconds, min(seconds, unseen + max(0.0, first.elapsed_seconds - first.step_seconds))
