"""The training loop in one process, on a text of a few lines."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from shardwright.config import Recipe
from shardwright.telemetry.events import Step, read_events
from shardwright.train.start import train
from shardwright.train.step import StepTimes
from tests.unit.train.finished import ALPHABET, CONFIG


def test_a_step_lasts_until_its_device_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator the optimizer's kernels still run when the host is back; reading the marks waits for them."""
    lag_seconds = 0.3
    read_marks = StepTimes.seconds

    def wait(times: StepTimes) -> dict[str, float]:
        time.sleep(lag_seconds)
        return read_marks(times)

    monkeypatch.setattr(StepTimes, "seconds", wait)
    (tmp_path / "corpus.txt").write_text(ALPHABET * 20)
    recipe = Recipe.model_validate(
        {
            "model": {"config": CONFIG},
            "tokenizer": {"kind": "character"},
            "data": {"sources": str(tmp_path / "corpus.txt"), "cache_dir": str(tmp_path / "cache")},
            "training": {"sequence_length": 8, "micro_batch_size": 2, "max_steps": 2, "learning_rate": 1e-3},
            "run": {"dir": str(tmp_path / "run"), "device": "cpu"},
        }
    )
    train(recipe)
    steps = read_events(tmp_path / "run").of(Step)
    assert [step.step for step in steps] == [1, 2]
    for step in steps:
        assert step.step_seconds >= lag_seconds
        assert step.tokens_per_second <= step.tokens / lag_seconds
