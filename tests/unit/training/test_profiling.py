"""Memory and profile events of a run in one process."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from shardwright.config import Recipe
from shardwright.telemetry.event_log import (
    MemoryEvent,
    ProfileEvent,
    RanksEvent,
    StepEvent,
    read_events,
)
from shardwright.training.run import train
from tests.unit.training.test_loop import build_recipe


def test_memory_and_profile_of_the_configured_steps(tmp_path: Path) -> None:
    recipe = build_recipe(tmp_path, max_steps=3)
    train(
        Recipe.model_validate(
            recipe.model_dump() | {"run": recipe.run.model_dump() | {"profile_steps": [2]}}
        )
    )
    log = read_events(tmp_path / "run")
    (memory,) = log.filter_by_type(MemoryEvent)
    assert memory.step == 2
    # AdamW keeps two moments of every weight, and a step count per parameter.
    assert memory.weights_bytes == memory.gradients_bytes
    assert 2 * memory.weights_bytes[0] <= memory.optimizer_bytes[0] < 2.1 * memory.weights_bytes[0]
    (profile,) = log.filter_by_type(ProfileEvent)
    assert (profile.step, profile.ranks) == (2, 1)
    summary = f"{Path(profile.path).name.removesuffix('.json.gz')}.rank-0.txt"
    written = {path.name for path in (tmp_path / "run" / "profile").iterdir()}
    assert written == {Path(profile.path).name, summary}
    text = (tmp_path / "run" / "profile" / summary).read_text()
    assert profile.summary
    assert text.startswith(profile.summary)
    assert "of it without an operator; " in profile.summary
    phases = [line.split("  ")[0] for line in text.splitlines()[3:]]
    expected = ["forward", "backward", "reduction", "gradient norm", "update", "other"]
    assert phases[: phases.index("")] == expected
    with gzip.open(tmp_path / "run" / profile.path) as file:
        events = json.load(file)["traceEvents"]
    spans = [event for event in events if event.get("ph") == "X"]
    assert any("backward" in event["name"].lower() for event in spans)
    assert min(event["ts"] for event in spans) == 0
    step = next(step for step in log.filter_by_type(StepEvent) if step.step == 2)
    assert max(event["ts"] + event.get("dur", 0) for event in spans) < 2e6 * (step.step_seconds + 5)
    # For one rank on a CPU the `step` event contains everything.
    assert log.filter_by_type(RanksEvent) == []
