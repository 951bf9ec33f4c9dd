"""Saving and loading in one process: retention, refused values, restored tensors and values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from shardwright.checkpoint.commit import RetentionPolicy, prune_checkpoints, remove_checkpoints
from shardwright.checkpoint.drift import find_differences
from shardwright.checkpoint.local_tensors import DTYPE_NAMES
from shardwright.checkpoint.tensor_loading import (
    find_newest_checkpoint,
    load_checkpoint,
    read_values,
)
from shardwright.checkpoint.tensor_saving import save_checkpoint
from shardwright.errors import CheckpointError, SaveFailed


def list_names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def save(root: Path, step: int, **options: Any) -> None:
    save_checkpoint(root, step, {"x": torch.full((3,), float(step))}, {"step": step}, **options)


def test_every_dtype_is_restored_and_read_by_safetensors(tmp_path: Path) -> None:
    bytes_8 = torch.arange(64, dtype=torch.uint8)
    tensors = {
        str(dtype): (bytes_8 % 2).bool() if dtype == torch.bool else bytes_8.view(dtype)
        for dtype in DTYPE_NAMES
    }
    tensors |= {
        "transposed": torch.randn(5, 7).t(),
        "strided": torch.randn(40, 9)[::3, ::2],
        "scalar": torch.tensor(1.5),
    }
    path = save_checkpoint(tmp_path, 1, tensors, {}).path
    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    assert load_checkpoint(path, loaded) == {}
    by_safetensors = safetensors.torch.load_file(path / "shard-00000.safetensors")
    for name, tensor in tensors.items():
        expected = tensor.contiguous().view(-1).view(torch.uint8)
        assert torch.equal(loaded[name].contiguous().view(-1).view(torch.uint8), expected), name
        assert torch.equal(
            by_safetensors[name].contiguous().view(-1).view(torch.uint8), expected
        ), name


def test_loading_into_parameters_and_views_fills_them_in_place(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, {"w": torch.arange(6.0).view(2, 3)}, {}).path
    parameter = torch.nn.Parameter(torch.zeros(4, 6))
    load_checkpoint(path, {"w": parameter[::2, 1:4]})
    assert parameter[::2, 1:4].flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert parameter.sum() == 15


def test_the_newest_and_the_best_are_retained(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(tmp_path, step, retention=RetentionPolicy(2), is_best=step == 2)
    assert list_names(tmp_path) == [
        "best",
        "latest",
        "step-00000002",
        "step-00000004",
        "step-00000005",
    ]
    save(tmp_path, 6, retention=RetentionPolicy(2), is_best=True)
    assert list_names(tmp_path) == ["best", "latest", "step-00000005", "step-00000006"]
    assert (tmp_path / "best").read_text() == "step-00000006\n"


def test_none_is_removed_without_a_retention_policy(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    assert len(list_names(tmp_path)) == 4
    assert [path.name for path in prune_checkpoints(tmp_path, RetentionPolicy(1))] == [
        "step-00000001",
        "step-00000002",
    ]
    with pytest.raises(CheckpointError, match="keep_last"):
        prune_checkpoints(tmp_path, RetentionPolicy(0))


def test_after_a_rollback_later_checkpoints_are_pruned(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step)
    remove_checkpoints(tmp_path, [tmp_path / "step-00000020"])
    (tmp_path / "latest").write_text("step-00000010\n")
    newest = find_newest_checkpoint(tmp_path)
    assert newest is not None
    assert newest.step == 10
    save(tmp_path, 15, retention=RetentionPolicy(2))
    assert list_names(tmp_path) == ["latest", "step-00000010", "step-00000015"]


def test_a_step_saved_again_replaces_the_earlier_one(tmp_path: Path) -> None:
    for value in (1, 2, 3):
        save_checkpoint(tmp_path, 7, {"x": torch.tensor(value)}, {}, retention=RetentionPolicy(2))
    assert list_names(tmp_path) == ["latest", "step-00000007.2"]
    tensors = {"x": torch.tensor(0)}
    newest = find_newest_checkpoint(tmp_path)
    assert newest is not None
    load_checkpoint(newest, tensors)
    assert tensors["x"] == 3


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (float("inf"), "values.deep[1].x"),
        ({1: 2}, "values.deep[1].x"),
        (torch.zeros(1), "values.deep[1].x"),
        (Path("a"), "values.deep[1].x"),
    ],
)
def test_values_outside_json_are_refused_with_their_place(
    tmp_path: Path, value: object, place: str
) -> None:
    with pytest.raises(SaveFailed, match="rank 0: values") as caught:
        save_checkpoint(tmp_path / "root", 1, {}, {"deep": [0, {"x": value}]})
    assert place in str(caught.value)
    assert not (tmp_path / "root").exists()


def test_values_are_restored_equal(tmp_path: Path) -> None:
    values = {
        "f": 0.1 + 0.2,
        "big": 2**200,
        "none": None,
        "text": "zażółć\n",
        "list": [True, {"a": []}],
        "small": 5e-324,
    }
    save_checkpoint(tmp_path, 1, {}, values)
    newest = find_newest_checkpoint(tmp_path)
    assert newest is not None
    assert read_values(newest) == values
    assert json.loads((newest.path / "values.json").read_text()) == values


def test_a_root_that_cannot_be_created_fails_the_save(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SaveFailed, match="nothing was written"):
        save(tmp_path / "file" / "root", 1)


def test_drift_is_listed_field_by_field() -> None:
    saved = {"seed": 1, "model": {"width": 4, "bias": True}, "order": [1, 2], "gone": 0}
    current = {"seed": 1, "model": {"width": 8, "bias": 1}, "order": (1, 2), "new": None}
    assert [str(difference) for difference in find_differences(saved, current)] == [
        "gone: saved 0, now absent",
        "model.bias: saved True, now 1",
        "model.width: saved 4, now 8",
        "new: saved absent, now None",
    ]


def test_every_nth_step_is_never_pruned(tmp_path: Path) -> None:
    for step in range(1, 8):
        save(tmp_path, step, retention=RetentionPolicy(2, every_steps=3))
    assert list_names(tmp_path) == ["latest", "step-00000003", "step-00000006", "step-00000007"]
