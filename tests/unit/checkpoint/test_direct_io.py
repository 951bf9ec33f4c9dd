"""Writing large files past the page cache: same bytes and hashes, with and without O_DIRECT."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.checkpoint import direct_io
from shardwright.checkpoint.direct_io import DirectFile, create_hashed_file
from shardwright.checkpoint.disk import LOCAL_DISK, HashedFile
from shardwright.checkpoint.tensor_loading import open_checkpoint, read_tensor
from shardwright.checkpoint.tensor_saving import save_checkpoint

BLOCK = 4096


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use blocks of one page, and treat every file as large."""
    monkeypatch.setattr(direct_io, "_BLOCK_PART_BYTES", BLOCK)
    monkeypatch.setattr(direct_io, "_free_blocks", [])
    monkeypatch.setattr(direct_io, "LARGE_BYTES", 1)


@pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 5 * BLOCK + 77])
@pytest.mark.parametrize("piece_size", [1000, BLOCK, 3 * BLOCK])
def test_bytes_and_hash_are_those_of_the_input(tmp_path: Path, size: int, piece_size: int) -> None:
    data = os.urandom(size)
    buffer = bytearray(piece_size)
    with DirectFile(tmp_path / "file", LOCAL_DISK) as file:
        for start in range(0, size, piece_size):
            part = data[start : start + piece_size]
            buffer[: len(part)] = part
            file.write(memoryview(buffer)[: len(part)])
            buffer[:] = bytes(piece_size)  # the caller's memory may change at once
        sha256 = file.finish()
    assert (tmp_path / "file").read_bytes() == data
    assert (file.size_bytes, sha256) == (size, hashlib.sha256(data).hexdigest())


def test_after_an_alignment_error_the_rest_goes_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    direct_writes = []

    def write_aligned_only(descriptor: int, data: Any) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0):
            direct_writes.append(len(data))
            if len(direct_writes) == 2:
                raise OSError(errno.EINVAL, "not aligned")
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", write_aligned_only)
    data = os.urandom(4 * BLOCK + 5)
    with DirectFile(tmp_path / "file", LOCAL_DISK) as file:
        file.write(memoryview(data))
        file.finish()
    assert (tmp_path / "file").read_bytes() == data
    assert len(direct_writes) in (0, 2)  # none if the file system has no O_DIRECT


def test_other_errors_are_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_no_space(descriptor: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with DirectFile(tmp_path / "file", LOCAL_DISK) as file:
        monkeypatch.setattr(os, "write", raise_no_space)
        with pytest.raises(OSError, match="No space left"):
            file.write(memoryview(bytes(9 * BLOCK)))
    with DirectFile(tmp_path / "other", LOCAL_DISK) as file:
        file.write(memoryview(bytes(BLOCK)))
        with pytest.raises(OSError, match="No space left"):
            file.finish()


def test_a_checkpoint_of_large_files_reads_back(tmp_path: Path) -> None:
    tensors = {
        "wide": torch.randn(77, 123),
        "odd": torch.randn(3001).to(torch.bfloat16),
        "none": torch.zeros(0, 4),
    }
    saved = save_checkpoint(tmp_path, 1, tensors, {})
    opened = open_checkpoint(saved.path)
    assert all(torch.equal(read_tensor(opened, name), tensor) for name, tensor in tensors.items())


def test_small_files_go_through_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_io, "LARGE_BYTES", 1000)
    for size, kind in ((999, HashedFile), (1000, DirectFile)):
        with create_hashed_file(tmp_path / str(size), LOCAL_DISK, size) as file:
            assert type(file) is kind
