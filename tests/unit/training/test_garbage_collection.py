"""Garbage collection at steps of our choosing; a step leaves no tensors in reference cycles."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from shardwright.config.recipe import RecomputeKind
from shardwright.training import garbage_collection
from shardwright.training.garbage_collection import EVERY_STEPS, GarbageCollection, freeze_imports
from shardwright.training.loop import TrainingLoop
from shardwright.training.run import train
from tests.unit.training.test_loop import build_recipe


class Cycle:
    """Object that refers to itself."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def collectable_imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let collections cover the imports, as in a process of users."""
    monkeypatch.setattr(garbage_collection, "_are_imports_excluded", False)
    gc.unfreeze()
    yield
    freeze_imports()


@pytest.mark.usefixtures("collectable_imports")
def test_imports_stay_excluded_and_a_former_model_is_freed() -> None:
    """In a process that trains several generations, a model of the former one can be freed."""
    freeze_imports()
    # Excluded objects may still be freed when nothing refers to them, as those of a thread are.
    fewest = gc.get_freeze_count() * 0.99
    assert fewest > 0
    model = Cycle()
    former = weakref.ref(model)
    with GarbageCollection():
        assert gc.get_freeze_count() >= fewest
    assert gc.get_freeze_count() >= fewest
    del model
    gc.collect()
    assert former() is None


@pytest.mark.usefixtures("collectable_imports")
def test_cycles_are_freed_at_the_chosen_steps_only() -> None:
    with GarbageCollection() as collection:
        assert not gc.isenabled()
        cycle = weakref.ref(Cycle())
        for step in range(1, EVERY_STEPS):
            collection.collect_if_due(step)
        assert cycle() is not None
        collection.collect_if_due(EVERY_STEPS)
        assert cycle() is None
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_an_error_turns_collection_on_again() -> None:
    with pytest.raises(ValueError, match="failed"), GarbageCollection():
        raise ValueError("failed")
    assert gc.isenabled()


@pytest.mark.parametrize("recompute", get_args(RecomputeKind))
def test_a_step_leaves_no_tensors_in_cycles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recompute: RecomputeKind
) -> None:
    """Otherwise the memory of up to `EVERY_STEPS` steps would pile up."""
    counts: list[int] = []
    run_step = TrainingLoop._run_step

    def count_tensors(loop: TrainingLoop) -> Any:
        counts.append(sum(isinstance(item, torch.Tensor) for item in gc.get_objects()))
        return run_step(loop)

    monkeypatch.setattr(TrainingLoop, "_run_step", count_tensors)
    monkeypatch.setattr(garbage_collection, "EVERY_STEPS", 1000)
    recipe = build_recipe(tmp_path, max_steps=6).model_copy(update={"recompute": recompute})
    train(
        recipe.model_copy(
            update={"evaluation": recipe.evaluation.model_copy(update={"every_steps": None})}
        )
    )
    # The first step creates the moments; the batches that are read ahead vary by a few.
    assert max(counts[2:]) - min(counts[2:]) <= 8, counts
