"""Uploads to file systems other than S3 publish whole objects or nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from shardwright.checkpoint import object_upload
from shardwright.checkpoint.disk import write_file
from shardwright.checkpoint.object_store import ObjectStoreDisk
from shardwright.checkpoint.storage_path import RemotePath


class BufferedFile(AbstractBufferedFile):
    """File of a store that publishes its parts when it is closed, like those of gcsfs."""

    def _initiate_upload(self) -> None:
        self.parts: list[bytes] = []

    def _upload_chunk(self, final: bool = False) -> bool:
        if self.fs.is_refusing:
            raise ConnectionResetError("reset")
        self.parts.append(self.buffer.getvalue())
        if final:
            self.fs.num_published += 1
            self.fs.objects[self.path] = b"".join(self.parts)
        return True


class BufferedStore(AbstractFileSystem):
    """Store whose files are published by `close`, whatever was written."""

    protocol = "buffered"
    objects: ClassVar[dict[str, bytes]] = {}
    is_refusing = False
    num_published = 0

    def _open(self, path: str, mode: str = "rb", block_size: Any = None, **_: Any) -> BufferedFile:
        return BufferedFile(self, path, mode, block_size=block_size)

    def rm_file(self, path: str) -> None:
        del self.objects[path]

    def list_objects(self) -> list[str]:
        return list(self.objects)


@pytest.fixture(params=["memory", "buffered", "in place"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RemotePath]:
    """Return a path in a store in memory, one that publishes on close, and one of plain files."""
    fsspec.filesystem("memory").store.clear()
    BufferedStore.objects.clear()
    if request.param == "memory":
        yield RemotePath("/bucket/shard", fsspec.filesystem("memory"))
    elif request.param == "buffered":
        yield RemotePath("bucket/shard", BufferedStore(skip_instance_cache=True))
    else:
        yield RemotePath("shard", DirFileSystem(str(tmp_path), LocalFileSystem()))
    fsspec.filesystem("memory").store.clear()


def list_objects(path: RemotePath) -> list[str]:
    file_system = path.file_system
    if isinstance(file_system, MemoryFileSystem):
        return list(file_system.store)
    if isinstance(file_system, BufferedStore):
        return file_system.list_objects()
    return list(file_system.find(""))


def test_an_abandoned_upload_leaves_no_object(
    path: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_upload, "BLOCK_BYTES", 8)
    disk = ObjectStoreDisk()
    descriptor = disk.create(path)
    disk.write(descriptor, memoryview(b"0123456789" * 3))
    disk.close(descriptor)
    gc.collect()
    assert list_objects(path) == []
    assert getattr(path.file_system, "num_published", 0) == 0, "not for a moment"
    disk.close(disk.create(path))
    assert list_objects(path) == []


def test_a_whole_upload_is_published(path: RemotePath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_upload, "BLOCK_BYTES", 8)
    write_file(path, b"0123456789" * 3, ObjectStoreDisk())
    assert len(list_objects(path)) == 1
    file_system = path.file_system
    content = (
        file_system.objects[path.path]
        if isinstance(file_system, BufferedStore)
        else file_system.cat_file(path.path)
    )
    assert content == b"0123456789" * 3


def test_a_refused_part_fails_the_upload_and_leaves_no_object(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(object_upload, "BLOCK_BYTES", 8)
    BufferedStore.objects.clear()
    store = BufferedStore(skip_instance_cache=True)
    path = RemotePath("bucket/shard", store)
    store.is_refusing = True
    with pytest.raises(ConnectionResetError):
        write_file(path, b"0123456789" * 3, ObjectStoreDisk())
    store.is_refusing = False
    gc.collect()
    assert store.list_objects() == []


def test_parts_grow_so_that_large_objects_have_few(path: RemotePath) -> None:
    upload = object_upload.ObjectUpload(path)
    sizes = []
    for number in (0, 999, 1000, 9999):
        upload._num_parts = number
        sizes.append(upload._compute_part_bytes() // object_upload.BLOCK_BYTES)
    assert sizes == [1, 1, 2, 512]
