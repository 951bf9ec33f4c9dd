"""What is said and kept when memory does not suffice."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import create_autospec

import pytest
import torch

from shardwright.config import Recipe
from shardwright.errors import OutOfMemory
from shardwright.train import loop
from shardwright.train.oom import save_memory_snapshot, suggest_cheapest_fit
from shardwright.train.run import train
from shardwright.train.run_checks import validate_run
from tests.unit.train.test_loop import recipe_in


def with_cluster(recipe: Recipe, node: str) -> Recipe:
    return Recipe.model_validate(recipe.model_dump() | {"cluster": {"node": node}})


def test_without_a_cluster_what_helps_in_general(tmp_path: Path) -> None:
    told = suggest_cheapest_fit(validate_run(recipe_in(tmp_path), 1))
    assert "smaller training.micro_batch_size" in told
    assert "If the recipe names its `cluster`" in told


def test_the_cheapest_change_with_its_numbers(tmp_path: Path) -> None:
    told = suggest_cheapest_fit(
        validate_run(with_cluster(recipe_in(tmp_path, micro_batch_size=4), "1xA100-40GB"), 1)
    )
    assert told.startswith("The cheapest change that would fit: ")
    assert "GiB instead of" in told


def test_a_cpu_keeps_no_snapshot(tmp_path: Path) -> None:
    assert save_memory_snapshot(tmp_path, 0, torch.device("cpu")) is None
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_has_no_room_says_what_was_predicted_and_what_would_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(loop, "accumulate_gradients", full)
    with pytest.raises(
        OutOfMemory,
        match=r"rank 0 ran out of memory .* The plan predicted .* The cheapest change that would fit: ",
    ):
        train(with_cluster(recipe_in(tmp_path), "1xA100-40GB"))


@pytest.mark.parametrize(
    "failure", [None, OSError("no room"), RuntimeError("CUDA error"), MemoryError()]
)
def test_what_lay_in_a_gpu_is_written_or_left_with_a_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    failure: Exception | None,
) -> None:
    """Without a GPU: that torch is called as this version of it wants to be, and that its failure
    is not the story.
    """
    dump = create_autospec(torch.cuda.memory._dump_snapshot, side_effect=failure)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    path = tmp_path / "memory" / "rank-3.pickle"
    assert save_memory_snapshot(tmp_path, 3, torch.device("cuda", 0)) == (
        path if failure is None else None
    )
    dump.assert_called_once_with(str(path))
    assert path.parent.is_dir()
    assert ("cannot be written" in caplog.text) == (failure is not None)
