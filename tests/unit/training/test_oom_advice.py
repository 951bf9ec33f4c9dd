"""Advice and memory snapshots after running out of memory."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import create_autospec

import pytest
import torch

from shardwright.config import Recipe
from shardwright.errors import OutOfMemory
from shardwright.training import loop
from shardwright.training.checks.run_checks import validate_run
from shardwright.training.oom import save_memory_snapshot, suggest_cheapest_fit
from shardwright.training.run import train
from tests.unit.training.test_loop import build_recipe


def add_cluster(recipe: Recipe, node: str) -> Recipe:
    return Recipe.model_validate(recipe.model_dump() | {"cluster": {"node": node}})


def test_without_a_cluster_the_advice_is_general(tmp_path: Path) -> None:
    advice = suggest_cheapest_fit(validate_run(build_recipe(tmp_path), 1))
    assert "smaller training.micro_batch_size" in advice
    assert "If the recipe names its `cluster`" in advice


def test_the_cheapest_change_is_suggested_with_numbers(tmp_path: Path) -> None:
    advice = suggest_cheapest_fit(
        validate_run(add_cluster(build_recipe(tmp_path, micro_batch_size=4), "1xA100-40GB"), 1)
    )
    assert advice.startswith("The cheapest change that would fit: ")
    assert "GiB instead of" in advice


def test_a_cpu_has_no_snapshot(tmp_path: Path) -> None:
    assert save_memory_snapshot(tmp_path, 0, torch.device("cpu")) is None
    assert list(tmp_path.iterdir()) == []


def test_an_out_of_memory_error_has_the_prediction_and_a_suggestion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_out_of_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(loop, "accumulate_gradients", raise_out_of_memory)
    with pytest.raises(
        OutOfMemory,
        match=r"rank 0 ran out of memory .* The plan predicted .* "
        r"The cheapest change that would fit: ",
    ):
        train(add_cluster(build_recipe(tmp_path), "1xA100-40GB"))


@pytest.mark.parametrize(
    "failure", [None, OSError("disk full"), RuntimeError("CUDA error"), MemoryError()]
)
def test_a_snapshot_is_written_or_its_failure_is_logged(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    failure: Exception | None,
) -> None:
    """Without a GPU: the call fits this version of torch, and its failure is only logged."""
    dump = create_autospec(torch.cuda.memory._dump_snapshot, side_effect=failure)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    path = tmp_path / "memory" / "rank-3.pickle"
    assert save_memory_snapshot(tmp_path, 3, torch.device("cuda", 0)) == (
        path if failure is None else None
    )
    dump.assert_called_once_with(str(path))
    assert path.parent.is_dir()
    assert ("cannot be written" in caplog.text) == (failure is not None)
