"""Sample run folders for tests."""

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
from tests.unit.telemetry.samples import (
    make_pipeline_event,
    make_ranks_event,
    make_start_event,
    make_step_event,
)

Loss = Callable[[int], float]


def falling(step: int) -> float:
    """Return a loss that falls from 7 to about 2."""
    return 2.0 + 5.0 * math.exp(-step / 150)


def make_noisy_loss(sigma: float, seed: int, loss: Loss = falling) -> Loss:
    """Return the curve `loss` with independent relative noise at each step."""
    noise = np.random.default_rng(seed).normal(0.0, sigma, 200_001)
    return lambda step: loss(step) * (1 + float(noise[step]))


def make_step(step: int, loss: float, **values: Any) -> StepEvent:
    """Make a step event with times by part and memory."""
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
    return make_step_event(step, loss=loss, **(defaults | values))


def make_memory_event(step: int) -> MemoryEvent:
    """Make the memory of two CUDA ranks; the second uses more."""
    mib = 2**20
    return MemoryEvent(
        step=step,
        weights_bytes=(mib, mib),
        gradients_bytes=(mib, mib),
        optimizer_bytes=(2 * mib, 2 * mib),
        peak_bytes=(5 * mib, 7 * mib),
        reserved_bytes=(6 * mib, 8 * mib),
        driver_bytes=(mib, mib),
    )


def make_evaluation(step: int, loss: float, *, tokens: int = 1000) -> EvaluationEvent:
    """Make an evaluation event."""
    return EvaluationEvent(
        step=step, loss=loss, perplexity=math.exp(loss), tokens=tokens, seconds=2.0
    )


def write_events(folder: Path, events: Iterable[Event]) -> Path:
    """Write the event file of a run: half a second per event, another process at each start."""
    folder.mkdir(parents=True, exist_ok=True)
    now = 1.7e9
    elapsed = 0.0
    lines = []
    for event in events:
        if event.kind == "run_started":
            now += 60
            elapsed = 0.0
        now += 0.5
        elapsed += 0.5
        lines.append(encode_event(dataclasses.replace(event, time=now, elapsed_seconds=elapsed)))
    (folder / EVENTS_FILE_NAME).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def make_complete_run_events(
    name: str,
    steps: int,
    loss: Loss,
    *,
    validation: Loss | None = None,
    every: int = 100,
    **start: Any,
) -> list[Event]:
    """Make the events of a run without interruptions."""
    events: list[Event] = [make_start_event(name=name, total_steps=steps, **start)]
    for step in range(1, steps + 1):
        events.append(make_step(step, loss(step)))
        if validation is not None and step % every == 0:
            events.append(make_evaluation(step, validation(step)))
    events.append(
        RunFinishedEvent(
            step=steps, status="completed", total_seconds=steps * 0.5, total_tokens=steps * 64
        )
    )
    return events


def make_run(name: str, events: Iterable[Event]) -> Run:
    """Make a run like one that `load_run` returns, without files."""
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
    """Write the folder of a run without interruptions."""
    return write_events(
        folder,
        make_complete_run_events(
            folder.name, steps, loss, validation=validation, every=every, **start
        ),
    )


def write_eventful_run(folder: Path, **start: Any) -> Path:
    """Write a run of 300 steps with every kind of event.

    It fails at step 220, resumes from step 200, skips a step and logs a warning.
    """
    recipe = {"name": folder.name, "training": {"max_grad_norm": 1.0}}
    head = make_start_event(
        name=folder.name,
        total_steps=300,
        recipe=recipe,
        flops_per_token=6e6,
        matmul_flops_per_second=1e10,
        **start,
    )
    events: list[Event] = [head]
    for step in range(1, 221):
        events.append(make_step(step, make_noisy_loss(0.02, 1)(step)))
        events.append(make_ranks_event(step, own_seconds=(0.4, 0.3)))
        if step in (2, 3):
            events.append(make_pipeline_event(step) if step == 3 else make_memory_event(step))
        if step % 50 == 0:
            events.append(make_evaluation(step, falling(step) * 1.05))
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
        events.append(make_step(step, math.nan if step == 250 else make_noisy_loss(0.02, 1)(step)))
        if step == 250:
            events.append(SkippedStepEvent(step=step, reason="gradient norm is nan"))
        if step % 50 == 0:
            events.append(make_evaluation(step, falling(step) * 1.05))
    events += [WarningEvent(message='</script><script>alert("x")</script>')]
    events += [
        RunFinishedEvent(
            step=300, status="completed", total_seconds=60.0, total_tokens=300 * 64, final_loss=2.5
        )
    ]
    return write_events(folder, events)
