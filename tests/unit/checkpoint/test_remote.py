"""Checkpoints behind an fsspec URL: the same promises as on a disk where an object store can give
them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest
import torch

from shardwright.checkpoint.background_save import BackgroundSaver
from shardwright.checkpoint.commit import RetentionPolicy, list_step_folders, read_pointer
from shardwright.checkpoint.integrity import verify_checkpoint
from shardwright.checkpoint.object_store import OBJECT_STORE_DISK, ObjectStoreDisk
from shardwright.checkpoint.storage_path import RemotePath, parse_storage_path
from shardwright.checkpoint.tensor_loading import find_newest_checkpoint, load_checkpoint
from shardwright.checkpoint.tensor_saving import save_checkpoint
from shardwright.cli.main import run
from shardwright.errors import CheckpointError, SaveFailed
from tests.unit.checkpoint.conftest import some_tensors
from tests.unit.checkpoint.some_values import run_values

URL = "memory://bucket/run"


@pytest.fixture
def root() -> Iterator[RemotePath]:
    """Nothing is in the bucket."""
    fsspec.filesystem("memory").store.clear()
    place = parse_storage_path(URL)
    assert isinstance(place, RemotePath)
    yield place
    fsspec.filesystem("memory").store.clear()


def names(root: RemotePath) -> list[str]:
    return sorted(root.list_sizes())


def loaded(root: RemotePath) -> tuple[int, dict[str, torch.Tensor]]:
    found = find_newest_checkpoint(URL)
    assert found is not None
    tensors = {name: torch.zeros_like(tensor) for name, tensor in some_tensors().items()}
    assert load_checkpoint(found, tensors) == {"step": found.step}
    return found.step, tensors


def save(step: int, **options: Any) -> None:
    save_checkpoint(URL, step, some_tensors(), {"step": step}, **options)


def test_saves_are_kept_pruned_and_read_back(root: RemotePath) -> None:
    for step in (1, 2, 3, 4, 5):
        save(step, retention=RetentionPolicy(1, every_steps=2), is_best=step == 1)
    assert names(root) == [
        "best",
        "latest",
        "step-00000001",
        "step-00000002",
        "step-00000004",
        "step-00000005",
    ]
    step, tensors = loaded(root)
    assert step == 5
    assert all(torch.equal(tensors[name], tensor) for name, tensor in some_tensors().items())
    save(5, retention=RetentionPolicy(1))
    assert names(root)[-1] == "step-00000005.1"
    assert verify_checkpoint(root / "step-00000005.1")[1] == []


def test_damage_is_found_and_the_one_before_is_taken(root: RemotePath) -> None:
    for step in (1, 2, 3):
        save(step)
    shard = root / "step-00000003" / "shard-00000.safetensors"
    data = bytearray(shard.file_system.cat_file(shard.path))
    data[-1] ^= 1
    shard.file_system.pipe_file(shard.path, bytes(data))
    (manifest,) = [root / "step-00000002" / "manifest.json"]
    OBJECT_STORE_DISK.remove(manifest)
    assert loaded(root)[0] == 1
    assert "SHA-256" in str(verify_checkpoint(root / "step-00000003")[1])


class Dying(ObjectStoreDisk):
    """Dies before the n-th operation: an error that nothing of the save catches."""

    def __init__(self, death: int) -> None:
        super().__init__()
        self.left = death

    def _count(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt

    def make_folder(self, path: RemotePath) -> None:
        self._count()
        super().make_folder(path)

    def create(self, path: RemotePath) -> int:
        self._count()
        return super().create(path)

    def write(self, descriptor: int, data: memoryview) -> None:
        self._count()
        super().write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        self._count()
        super().sync(descriptor)

    def remove(self, path: RemotePath) -> None:
        self._count()
        super().remove(path)


def test_wherever_a_save_dies_a_whole_checkpoint_is_found_and_the_next_save_clears_up(
    root: RemotePath,
) -> None:
    death = 0
    found = set()
    while True:
        death += 1
        root.file_system.store.clear()
        save(1, is_best=True)
        save(2)
        try:
            save(3, retention=RetentionPolicy(1), disk=Dying(death))
        except KeyboardInterrupt:
            found.add(loaded(root)[0])
        else:
            break
        assert list_step_folders(root)[0].step == 1
        save(4, retention=RetentionPolicy(1))
        assert names(root) == ["best", "latest", "step-00000001", "step-00000004"], death
    assert found == {2, 3}
    assert death > 15


def test_a_store_that_refuses_is_a_failed_save(root: RemotePath) -> None:
    class Refusing(ObjectStoreDisk):
        def sync(self, descriptor: int) -> None:
            raise OSError("the bucket is read-only")

    save(1)
    with pytest.raises(SaveFailed, match="the bucket is read-only"):
        save(2, disk=Refusing())
    assert names(root) == ["latest", "step-00000001"]


def test_it_is_written_in_the_background(root: RemotePath) -> None:
    saver = BackgroundSaver()
    saver.save(URL, 7, some_tensors(), {"step": 7})
    saver.close()
    assert loaded(root)[0] == 7
    pointer = read_pointer(root, "latest")
    assert pointer is not None
    assert pointer.step == 7


def test_the_verb_reads_it(root: RemotePath, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2):
        save_checkpoint(URL, step, some_tensors(), run_values(step))
    for verb in ("list", "verify", "inspect"):
        assert run(["checkpoint", verb, URL, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["schema_version"] == 1
    assert run(["checkpoint", "verify", f"{URL}/step-00000002"]) == 0
    values = root / "step-00000002" / "values.json"
    values.file_system.pipe_file(values.path, b"{}")
    assert run(["checkpoint", "verify", URL]) == 1
    assert run(["checkpoint", "verify", "memory://elsewhere"]) == 2


def test_wrong_urls_are_wrong_input() -> None:
    for url in ("nosuch://bucket/x", "s4://a"):
        with pytest.raises(CheckpointError, match="cannot be used"):
            parse_storage_path(url)
