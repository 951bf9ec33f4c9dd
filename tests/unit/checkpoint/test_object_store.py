"""Checkpoints behind an fsspec URL: the same guarantees as on a disk, where a store allows them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from shardwright.checkpoint import storage_path
from shardwright.checkpoint.background_save import BackgroundSaver
from shardwright.checkpoint.box_reading import BoxRead, load_group
from shardwright.checkpoint.commit import (
    RetentionPolicy,
    has_saved,
    list_step_folders,
    read_pointer,
)
from shardwright.checkpoint.fence import acquire_fence
from shardwright.checkpoint.integrity import verify_checkpoint
from shardwright.checkpoint.local_tensors import ParameterShard
from shardwright.checkpoint.object_store import OBJECT_STORE_DISK, ObjectStoreDisk
from shardwright.checkpoint.storage_path import CachedFile, RemotePath, parse_storage_path
from shardwright.checkpoint.tensor_loading import find_newest_checkpoint, load_checkpoint
from shardwright.checkpoint.tensor_saving import save_checkpoint
from shardwright.cli.main import run
from shardwright.config.recipe_loading import validate_recipe
from shardwright.errors import ArchitectureError, CheckpointError, SaveFailed
from shardwright.layout import ParameterBox
from shardwright.store_requests import read_range
from shardwright.training.run import train
from tests.unit.checkpoint.conftest import make_tensors
from tests.unit.checkpoint.sample_values import make_run_values

URL = "memory://bucket/run"


@pytest.fixture
def root() -> Iterator[RemotePath]:
    """Return the root of an empty bucket."""
    fsspec.filesystem("memory").store.clear()
    path = parse_storage_path(URL)
    assert isinstance(path, RemotePath)
    yield path
    fsspec.filesystem("memory").store.clear()


def list_names(root: RemotePath) -> list[str]:
    return sorted(root.list_sizes())


def load_newest(root: RemotePath) -> tuple[int, dict[str, torch.Tensor]]:
    newest = find_newest_checkpoint(URL)
    assert newest is not None
    tensors = {name: torch.zeros_like(tensor) for name, tensor in make_tensors().items()}
    assert load_checkpoint(newest, tensors) == {"step": newest.step}
    return newest.step, tensors


def save(step: int, **options: Any) -> None:
    save_checkpoint(URL, step, make_tensors(), {"step": step}, **options)


def test_saves_are_retained_pruned_and_read_back(root: RemotePath) -> None:
    for step in (1, 2, 3, 4, 5):
        save(step, retention=RetentionPolicy(1, every_steps=2), is_best=step == 1)
    assert list_names(root) == [
        "best",
        "latest",
        "step-00000001",
        "step-00000002",
        "step-00000004",
        "step-00000005",
    ]
    step, tensors = load_newest(root)
    assert step == 5
    assert all(torch.equal(tensors[name], tensor) for name, tensor in make_tensors().items())
    save(5, retention=RetentionPolicy(1))
    assert list_names(root)[-1] == "step-00000005.1"
    assert verify_checkpoint(root / "step-00000005.1")[1] == []


@pytest.mark.parametrize(("second_row", "num_requests"), [(20, 1), (700, 2)])
@pytest.mark.usefixtures("root")
def test_neighbouring_slices_are_one_request(
    monkeypatch: pytest.MonkeyPatch, second_row: int, num_requests: int
) -> None:
    """A request reads gaps of at most 64 KiB."""
    saved = {
        "matrix": torch.arange(60_000, dtype=torch.float32).view(1000, 60),
        "bias": torch.tensor(0.1, dtype=torch.float64),
    }
    save_checkpoint(URL, 1, saved, {})
    newest = find_newest_checkpoint(URL)
    assert newest is not None
    requests = list[str]()

    def read_counted(file_system: Any, path: str, *arguments: Any) -> bytes:
        requests.append(path)
        return read_range(file_system, path, *arguments)

    monkeypatch.setattr(storage_path, "read_range", read_counted)
    rows = torch.zeros(20, 30)
    boxes = tuple(
        ParameterBox(((local, 10), (0, 30)), ((row, 10), (25, 30)))
        for local, row in ((0, 0), (10, second_row))
    )
    bias = torch.zeros((), dtype=torch.float64)
    load_checkpoint(newest, {"matrix": ParameterShard(rows, (1000, 60), boxes), "bias": bias})
    expected = saved["matrix"][:, 25:55]
    assert torch.equal(rows, torch.cat([expected[:10], expected[second_row : second_row + 10]]))
    assert torch.equal(bias, saved["bias"])
    num_reads = sum(path.endswith(".safetensors") for path in requests)
    assert num_reads == 2 + num_requests, "length of the header, header, slices"


def test_a_tensor_may_begin_at_any_byte_of_a_request() -> None:
    data_N = torch.arange(12, dtype=torch.uint8)
    target = torch.zeros(2)
    file = CachedFile([bytes(data_N)])
    load_group([BoxRead(file, 1, 1, (1,), data_N[:1]), BoxRead(file, 3, 8, (1,), target)])
    assert torch.equal(target, data_N[3:11].clone().view(torch.float32))


def test_damage_is_found_and_the_previous_checkpoint_is_used(root: RemotePath) -> None:
    for step in (1, 2, 3):
        save(step)
    shard = root / "step-00000003" / "shard-00000.safetensors"
    data = bytearray(shard.file_system.cat_file(shard.path))
    data[-1] ^= 1
    shard.file_system.pipe_file(shard.path, bytes(data))
    (manifest,) = [root / "step-00000002" / "manifest.json"]
    OBJECT_STORE_DISK.remove(manifest)
    assert load_newest(root)[0] == 1
    assert "SHA-256" in str(verify_checkpoint(root / "step-00000003")[1])


class KillingStoreDisk(ObjectStoreDisk):
    """Raises an error that the save does not catch before the n-th operation."""

    def __init__(self, kill_at: int) -> None:
        super().__init__()
        self.num_operations_left = kill_at

    def _count(self) -> None:
        self.num_operations_left -= 1
        if self.num_operations_left == 0:
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


def test_after_a_killed_save_a_whole_checkpoint_remains_and_the_next_save_cleans_up(
    root: RemotePath,
) -> None:
    kill_at = 0
    newest = set()
    while True:
        kill_at += 1
        root.file_system.store.clear()
        save(1, is_best=True)
        save(2)
        try:
            save(3, retention=RetentionPolicy(1), disk=KillingStoreDisk(kill_at))
        except KeyboardInterrupt:
            newest.add(load_newest(root)[0])
        else:
            break
        assert list_step_folders(root)[0].step == 1
        save(4, retention=RetentionPolicy(1))
        assert list_names(root) == ["best", "latest", "step-00000001", "step-00000004"], kill_at
    assert newest == {2, 3}
    assert kill_at > 15


def test_a_store_that_refuses_writes_fails_the_save(root: RemotePath) -> None:
    class RefusingDisk(ObjectStoreDisk):
        def sync(self, descriptor: int) -> None:
            raise OSError("the bucket is read-only")

    save(1)
    with pytest.raises(SaveFailed, match="the bucket is read-only"):
        save(2, disk=RefusingDisk())
    assert list_names(root) == ["latest", "step-00000001"]


def test_background_saves_reach_the_store(root: RemotePath) -> None:
    saver = BackgroundSaver()
    saver.save(URL, 7, make_tensors(), {"step": 7})
    saver.close()
    assert load_newest(root)[0] == 7
    pointer = read_pointer(root, "latest")
    assert pointer is not None
    assert pointer.step == 7


def test_the_checkpoint_verbs_read_the_store(
    root: RemotePath, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2):
        save_checkpoint(URL, step, make_tensors(), make_run_values(step))
    for verb in ("list", "verify", "inspect"):
        assert run(["checkpoint", verb, URL, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["schema_version"] == 1
    assert run(["checkpoint", "verify", f"{URL}/step-00000002"]) == 0
    values = root / "step-00000002" / "values.json"
    values.file_system.pipe_file(values.path, b"{}")
    assert run(["checkpoint", "verify", URL]) == 1
    capsys.readouterr()
    for url, problem in (
        ("memory://elsewhere", "no such folder or bucket"),
        ("nosuchscheme://x", "this location cannot be used"),
    ):
        assert run(["checkpoint", "verify", url]) == 2
        assert capsys.readouterr().err.startswith(f"error: PATH: {problem}")


def test_a_store_that_does_not_answer_is_not_an_empty_store(
    root: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise PermissionError("403")

    save(1)
    monkeypatch.setattr(MemoryFileSystem, "info", refuse)
    for look in (has_saved, list_step_folders, acquire_fence):
        with pytest.raises(PermissionError, match="403"):
            look(root)
    with pytest.raises(CheckpointError, match=r"403.*It may be intact"):
        find_newest_checkpoint(root)


def test_a_store_is_tried_before_training(
    root: RemotePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = validate_recipe(
        {
            "model": {"config": {"model_type": "llama"}},
            "data": {"sources": "absent.txt"},
            "training": {
                "sequence_length": 8,
                "max_steps": 3,
                "learning_rate": 1e-3,
                "micro_batch_size": 1,
            },
            "run": {"dir": str(tmp_path / "run"), "device": "cpu"},
            "checkpoint": {"dir": URL},
        }
    )

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError("403")

    for method, problem in (("open", "cannot be written"), ("info", "cannot be read")):
        with monkeypatch.context() as patches:
            patches.setattr(MemoryFileSystem, method, refuse)
            with pytest.raises(CheckpointError, match=problem) as raised:
                train(recipe)
        assert raised.value.field == "checkpoint.dir"
    with pytest.raises(ArchitectureError, match="hidden_size"):  # the next check
        train(recipe)
    assert not root.file_system.store, "the check leaves no object"


def test_changes_by_other_processes_are_seen_through_a_cache(
    root: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    list_folder = MemoryFileSystem.ls
    listings: dict[str, Any] = {}

    def list_with_cache(store: Any, path: str, detail: bool = True, **options: Any) -> Any:
        if path not in listings:
            listings[path] = list_folder(store, path, detail=True)
        return listings[path]

    def look_up(store: Any, path: str, **options: Any) -> Any:
        parent = path.rpartition("/")[0] or "/"
        for entry in list_with_cache(store, parent):
            if entry["name"] == path:
                return entry
        raise FileNotFoundError(path)

    save(1)
    data = root.file_system.cat_file(f"{root.path}/latest")
    monkeypatch.setattr(MemoryFileSystem, "ls", list_with_cache)
    monkeypatch.setattr(MemoryFileSystem, "info", look_up)
    monkeypatch.setattr(MemoryFileSystem, "invalidate_cache", lambda *_: listings.clear())
    other = root / "best"
    assert not other.is_file()
    other.file_system.store["/bucket/run/best"] = MemoryFile(
        other.file_system, "/bucket/run/best", data
    )
    assert other.is_file()
    assert "best" in list_names(root)


def test_wrong_urls_are_wrong_input() -> None:
    for url in ("nosuch://bucket/x", "s4://a"):
        with pytest.raises(CheckpointError, match="cannot be used"):
            parse_storage_path(url)
