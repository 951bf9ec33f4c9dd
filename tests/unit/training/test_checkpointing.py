"""The update of the next step waits until a background save has copied the state."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.checkpoint.background_save import BackgroundSaver
from shardwright.checkpoint.host_buffer import HostBuffer
from shardwright.checkpoint.local_tensors import HostCopy
from shardwright.checkpoint.tensor_loading import open_checkpoint, read_tensor
from shardwright.config import Recipe
from shardwright.telemetry.event_log import CheckpointEvent, WarningEvent, read_events
from shardwright.training.run import train
from tests.unit.training.finished import ALPHABET, CONFIG

STEPS = 4


def build_recipe(folder: Path, run: str, *, asynchronous: bool) -> Recipe:
    """Build a recipe that saves a checkpoint at every step and deletes none."""
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


def read_states(run: Path) -> list[dict[str, torch.Tensor]]:
    """Read every tensor of every step's checkpoint."""
    checkpoints = [
        open_checkpoint(run / "checkpoints" / f"step-{step:08d}") for step in range(1, STEPS + 1)
    ]
    return [
        {name: read_tensor(checkpoint, name) for name in checkpoint.manifest.tensors}
        for checkpoint in checkpoints
    ]


def test_a_delayed_copy_has_the_values_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each copy is delayed until another thread waits for it, or much longer than a step takes."""
    train(build_recipe(tmp_path, "synchronous", asynchronous=False))
    awaited = threading.Event()
    await_copy = BackgroundSaver.wait_for_copy
    wait = BackgroundSaver.wait
    copy_tensors = HostBuffer.copy_tensors

    def copy_late(copy: HostBuffer, *arguments: Any, **options: Any) -> list[HostCopy]:
        awaited.wait(10)
        awaited.clear()
        return copy_tensors(copy, *arguments, **options)

    def signal_wait(method: Any) -> Any:
        def wait_and_signal(saver: BackgroundSaver) -> Any:
            if not saver._copy_finished.is_set():
                awaited.set()
            return method(saver)

        return wait_and_signal

    monkeypatch.setattr(HostBuffer, "copy_tensors", copy_late)
    monkeypatch.setattr(BackgroundSaver, "wait_for_copy", signal_wait(await_copy))
    monkeypatch.setattr(BackgroundSaver, "wait", signal_wait(wait))
    train(build_recipe(tmp_path, "run", asynchronous=True))
    events = read_events(tmp_path / "run")
    assert [event.step for event in events.filter_by_type(CheckpointEvent)] == list(
        range(1, STEPS + 1)
    ), events.filter_by_type(WarningEvent)
    for asynchronous, synchronous in zip(
        read_states(tmp_path / "run"), read_states(tmp_path / "synchronous"), strict=True
    ):
        assert asynchronous.keys() == synchronous.keys()
        assert all(torch.equal(tensor, synchronous[name]) for name, tensor in asynchronous.items())
