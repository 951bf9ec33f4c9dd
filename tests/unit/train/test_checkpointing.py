"""The update of the next step waits for the copy that a save in the background makes of the
state.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.checkpoint.background_save import BackgroundSaver, HostBuffer
from shardwright.checkpoint.tensor_loading import open_checkpoint, read_tensor
from shardwright.config import Recipe
from shardwright.telemetry.event_log import CheckpointEvent, WarningEvent, read_events
from shardwright.train.run import train
from tests.unit.train.finished import ALPHABET, CONFIG

STEPS = 4


def recipe_in(folder: Path, run: str, *, asynchronous: bool) -> Recipe:
    """A run that keeps a checkpoint of every step."""
    (folder / "corpus.txt").write_text(ALPHABET * 20)
    return Recipe.model_validate(
        {
            "model": {"config": CONFIG},
            "tokenizer": {"kind": "character"},
            "data": {"sources": str(folder / "corpus.txt"), "cache_dir": str(folder / "cache")},
            "precision": "fp32",
            "training": {
                "sequence_length": 8,
                "micro_batch_size": 2,
                "max_steps": STEPS,
                "learning_rate": 1e-2,
            },
            "checkpoint": {"every_steps": 1, "keep_last": STEPS, "asynchronous": asynchronous},
            "run": {"dir": str(folder / run), "device": "cpu"},
        }
    )


def states_of(run: Path) -> list[dict[str, torch.Tensor]]:
    """Every tensor of every step's checkpoint."""
    found = [
        open_checkpoint(run / "checkpoints" / f"step-{step:08d}") for step in range(1, STEPS + 1)
    ]
    return [
        {name: read_tensor(checkpoint, name) for name in checkpoint.manifest.tensors}
        for checkpoint in found
    ]


def test_what_is_copied_late_is_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each copy is held back until somebody waits for it, or for as long as a step that waits for
    nobody never takes.
    """
    train(recipe_in(tmp_path, "waited", asynchronous=False))
    awaited = threading.Event()
    await_copy = BackgroundSaver.wait_for_copy
    wait = BackgroundSaver.wait
    take = HostBuffer.copy_tensors

    def late(copy: HostBuffer, *arguments: Any, **options: Any) -> list[torch.Tensor]:
        awaited.wait(10)
        awaited.clear()
        return take(copy, *arguments, **options)

    def telling(method: Any) -> Any:
        def told(saver: BackgroundSaver) -> Any:
            if not saver._copy_finished.is_set():
                awaited.set()
            return method(saver)

        return told

    monkeypatch.setattr(HostBuffer, "copy_tensors", late)
    monkeypatch.setattr(BackgroundSaver, "wait_for_copy", telling(await_copy))
    monkeypatch.setattr(BackgroundSaver, "wait", telling(wait))
    train(recipe_in(tmp_path, "run", asynchronous=True))
    events = read_events(tmp_path / "run")
    assert [event.step for event in events.filter_by_type(CheckpointEvent)] == list(
        range(1, STEPS + 1)
    ), events.filter_by_type(WarningEvent)
    for ours, theirs in zip(
        states_of(tmp_path / "run"), states_of(tmp_path / "waited"), strict=True
    ):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
