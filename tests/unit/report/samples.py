"""Run folders made up to test with."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.report.recorded_run import Run
from shardwright.telemetry.event_encoding import encode_event
from shardwright.telemetry.event_log import (
    EVENTS_FILE_NAME,
    CheckpointEvent,
    EvaluationEvent,
    Event,
    EventLog,
    FailureEvent,
    MemoryEvent,
    ResumeEvent,
    RunFinishedEvent,
    SkippedStepEvent,
    StepEvent,
    WarningEvent,
    select_surviving,
)
from tests.unit.telemetry.samples import pipeline_event, ranks_event, start_event, step_event

Loss = Callable[[int], float]


def falling(step: int) -> float:
    """A loss that falls as losses do, from 7 to about 2."""
    return 2.0 + 5.0 * math.exp(-step / 150)


def noisy(sigma: float, seed: int, loss: Loss = falling) -> Loss:
    """The same curve with relative noise of its own at each step."""
    noise = np.random.default_rng(seed).normal(0.0, sigma, 200_001)
    return lambda step: loss(step) * (1 + float(noise[step]))


def one_step(step: int, loss: float, **values: Any) -> StepEvent:
    """A step whose parts and memory are told."""
    defaults: dict[str, Any] = {
        "data_seconds": 0.01,
        "forward_seconds": 0.15,
        "backward_seconds": 0.25,
        "reduction_seconds": 0.05,
        "optimizer_seconds": 0.03,
        "mfu": 0.4,
        "model_flops_per_second": 1e9,
        "memory_bytes": (2**30 + step % 7, 2**29),
        "learning_rate": 1e-3 * min(1.0, step / 50),
    }
    return step_event(step, loss=loss, **(defaults | values))


def measured_memory(step: int) -> MemoryEvent:
    """Of two CUDA ranks, the second the fuller one."""
    mib = 2**20
    return MemoryEvent(
        step=step, weights_bytes=(mib, mib), gradients_bytes=(mib, mib), optimizer_bytes=(2 * mib, 2 * mib),
        peak_bytes=(5 * mib, 7 * mib), reserved_bytes=(6 * mib, 8 * mib), driver_bytes=(mib, mib),
    )  # fmt: skip


def validate(step: int, loss: float, *, tokens: int = 1000) -> EvaluationEvent:
    """An evaluation."""
    return EvaluationEvent(
        step=step, loss=loss, perplexity=math.exp(loss), tokens=tokens, seconds=2.0
    )


def write_events(folder: Path, events: Iterable[Event]) -> Path:
    """The event file of a run, with clocks that run half a second per event; a start begins another
    process.
    """
    folder.mkdir(parents=True, exist_ok=True)
    now = 1.7e9
    elapsed = 0.0
    lines = []
    for event in events:
        if event.kind == "run_started":
            now, elapsed = now + 60, 0.0
        now, elapsed = now + 0.5, elapsed + 0.5
        lines.append(encode_event(dataclasses.replace(event, time=now, elapsed_seconds=elapsed)))
    (folder / EVENTS_FILE_NAME).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def straight_events(
    name: str,
    steps: int,
    loss: Loss,
    *,
    validation: Loss | None = None,
    every: int = 100,
    **start: Any,
) -> list[Event]:
    """A run that went straight through."""
    events: list[Event] = [start_event(name=name, total_steps=steps, **start)]
    for step in range(1, steps + 1):
        events.append(one_step(step, loss(step)))
        if validation is not None and step % every == 0:
            events.append(validate(step, validation(step)))
    events.append(
        RunFinishedEvent(
            step=steps, status="completed", total_seconds=steps * 0.5, total_tokens=steps * 64
        )
    )
    return events


def make_run(name: str, events: Iterable[Event]) -> Run:
    """A run as `load_run` gives it, without the disk."""
    listed = tuple(events)
    return Run(
        Path(name),
        name,
        EventLog(Path(name) / EVENTS_FILE_NAME, listed),
        tuple(select_surviving(listed)),
    )


def write_run(
    folder: Path,
    steps: int,
    loss: Loss = falling,
    *,
    validation: Loss | None = None,
    every: int = 100,
    **start: Any,
) -> Path:
    """The folder of a run that went straight through."""
    return write_events(
        folder,
        straight_events(folder.name, steps, loss, validation=validation, every=every, **start),
    )


def write_eventful_run(folder: Path, **start: Any) -> Path:
    """A run of 300 steps in which all happened that can: failed at 220, resumed from 200, a step
    skipped, a warning.
    """
    recipe = {"name": folder.name, "training": {"max_grad_norm": 1.0}}
    head = start_event(
        name=folder.name,
        total_steps=300,
        recipe=recipe,
        flops_per_token=6e6,
        matmul_flops_per_second=1e10,
        **start,
    )
    events: list[Event] = [head]
    for step in range(1, 221):
        events.append(one_step(step, noisy(0.02, 1)(step)))
        events.append(ranks_event(step, own_seconds=(0.4, 0.3)))
        if step in (2, 3):
            events.append(pipeline_event(step) if step == 3 else measured_memory(step))
        if step % 50 == 0:
            events.append(validate(step, falling(step) * 1.05))
            events.append(
                CheckpointEvent(
                    step=step, path=f"checkpoints/step-{step:08d}", size_bytes=10**8, seconds=0.5
                )
            )
    events += [
        FailureEvent(rank=1, message="killed by <signal> 9"),
        head,
        ResumeEvent(step=200, path="checkpoints/step-00000200"),
    ]
    for step in range(201, 301):
        events.append(one_step(step, math.nan if step == 250 else noisy(0.02, 1)(step)))
        if step == 250:
            events.append(SkippedStepEvent(step=step, reason="gradient norm is nan"))
        if step % 50 == 0:
            events.append(validate(step, falling(step) * 1.05))
    events += [WarningEvent(message='</script><script>alert("x")</script>')]
    events += [
        RunFinishedEvent(
            step=300, status="completed", total_seconds=60.0, total_tokens=300 * 64, final_loss=2.5
        )
    ]
    return write_events(folder, events)
