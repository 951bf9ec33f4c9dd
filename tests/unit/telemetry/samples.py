"""Sample events for tests."""

from __future__ import annotations

from typing import Any

from shardwright.telemetry.event_log import PipelineEvent, RanksEvent, RunStartedEvent, StepEvent


def make_step_event(step: int, loss: float = 2.5, **values: Any) -> StepEvent:
    """Make a step of 64 tokens in half a second, on two ranks."""
    defaults: dict[str, Any] = {
        "gradient_norm": 1.25,
        "learning_rate": 1e-3,
        "tokens": 64,
        "supervised_tokens": 60,
        "samples_seen": 4 * step,
        "step_seconds": 0.5,
        "tokens_per_second": 128.0,
        "memory_bytes": (100, 200),
    }
    return StepEvent(step=step, loss=loss, **(defaults | values))


def make_start_event(**values: Any) -> RunStartedEvent:
    """Make the start of a run of ten such steps."""
    defaults: dict[str, Any] = {
        "name": "tiny",
        "recipe": {"seed": 0},
        "plan": {},
        "layout": "dp_shard=2,zero_stage=3",
        "world_size": 2,
        "total_steps": 10,
        "global_batch_tokens": 64,
        "data_hash": "abc",
        "num_parameters": 1000,
        "versions": {"torch": "2"},
        "host": "here",
        "devices": ("cpu", "cpu"),
    }
    return RunStartedEvent(**(defaults | values))


def make_ranks_event(
    step: int, own_seconds: tuple[float, ...] = (0.4, 0.3), **values: Any
) -> RanksEvent:
    """Make the times of a step in which all ranks wait for the slowest."""
    count = len(own_seconds)
    slowest = max(own_seconds)
    waits = tuple(slowest - own + 0.05 for own in own_seconds)
    even = {
        f"{part}_seconds": (0.01,) * count
        for part in ("data", "forward", "backward", "reduction", "optimizer", "checkpoint")
    }
    defaults: dict[str, Any] = even | {
        "wait_seconds": {"data": waits},
        "step_seconds": (slowest + 0.05,) * count,
    }
    return RanksEvent(step=step, own_seconds=own_seconds, **(defaults | values))


def make_pipeline_event(step: int) -> PipelineEvent:
    """Make a 1F1B step of two ranks and two micro-batches, with slow backwards on rank 1."""
    return PipelineEvent(
        step=step,
        schedule="1F1B",
        ranks=(0, 1),
        num_micro_batches=2,
        rank_of_stage=(0, 1),
        actions=(("0F0", "0F1", "0B0", "0B1"), ("1F0", "1B0", "1F1", "1B1")),
        begins=((0.0, 0.1, 0.5, 0.9), (0.1, 0.2, 0.5, 0.6)),
        ends=((0.1, 0.2, 0.7, 1.1), (0.2, 0.45, 0.6, 0.85)),
        clock_error_seconds=1e-5,
    )
