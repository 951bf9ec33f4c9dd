"""Events to test with."""

from __future__ import annotations

from typing import Any

from shardwright.telemetry.events import RunStarted, Step


def step_event(step: int, loss: float = 2.5, **values: Any) -> Step:
    """A step of 64 tokens in half a second, on two ranks."""
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
    return Step(step=step, loss=loss, **(defaults | values))


def start_event(**values: Any) -> RunStarted:
    """A run of ten such steps."""
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
    return RunStarted(**(defaults | values))
