"""Headers of safetensors files, written and read without torch and the safetensors library.

A file has 8 bytes of header length (little endian), the header as JSON, and the tensors' bytes
without gaps. We pad the header so that the data starts at a multiple of 64 bytes.

Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import struct
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from shardwright.checkpoint.disk import convert_read_errors, open_regular_file
from shardwright.checkpoint.manifest import DTYPE_BYTES, parse_json
from shardwright.checkpoint.storage_path import ReadableFile, StoragePath
from shardwright.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors library."""
_ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class HeaderEntry:
    """Entry of a header; `start_byte` is the byte offset of its data in the file."""

    dtype: str
    shape: tuple[int, ...]
    start_byte: int
    num_bytes: int


def build_header(tensors: list[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """Build the header of a file that stores tensors (key, dtype, shape) in this order."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for key, dtype, shape in tensors:
        size = DTYPE_BYTES[dtype] * math.prod(shape)
        entries[key] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [position, position + size],
        }
        position += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT_BYTES)
    return struct.pack("<Q", len(text)) + text


def read_header(path: StoragePath, file: ReadableFile | None = None) -> dict[str, HeaderEntry]:
    """Read a file's header and check it.

    Checks: bounded sizes, known dtypes, data without gaps or overlaps up to the end of the file.

    Args:
        path: The file, for messages; it is opened unless `file` is given.
        file: The open file, which stays open.

    Raises:
        CheckpointError: the header is invalid; the message names the file and the fault.
    """
    opened: AbstractContextManager[ReadableFile] = (
        open_regular_file(path) if file is None else nullcontext(file)
    )
    with opened as file, convert_read_errors(path):
        prefix = file.read(0, 8)
        header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= header_bytes <= min(MAX_HEADER_BYTES, file.size_bytes - 8):
            raise CheckpointError(
                f"{path.name} has a header of {header_bytes} bytes in a file of {file.size_bytes}",
                field=str(path.parent),
                allowed=f"at most {MAX_HEADER_BYTES} and inside the file",
            )
        text = file.read(8, header_bytes)
    return parse_header(text, file.size_bytes, path)


def parse_header(text: bytes, file_bytes: int, path: StoragePath) -> dict[str, HeaderEntry]:
    """Parse and check the JSON of a header; see `read_header`."""

    def build_error(problem: str) -> CheckpointError:
        return CheckpointError(f"{path.name}: {problem}", field=str(path.parent))

    entries = parse_json(text, path)
    if not isinstance(entries, dict):
        raise build_error("the header is not a JSON object")
    data_start = 8 + len(text)
    tensors: dict[str, HeaderEntry] = {}
    for key, entry in entries.items():
        if key == "__metadata__":
            continue
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise build_error(f"the header's entry {key!r:.80} is malformed")
        dtype = entry["dtype"]
        shape = entry["shape"]
        offsets = entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
            raise build_error(f"{key!r:.80} has an unknown dtype {dtype!r:.40}")
        if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
            raise build_error(f"{key!r:.80} has a malformed shape or data_offsets")
        if offsets[1] - offsets[0] != DTYPE_BYTES[dtype] * math.prod(shape):
            raise build_error(
                f"{key!r:.80} has {offsets[1] - offsets[0]} "
                "bytes, which does not match its shape and dtype"
            )
        tensors[key] = HeaderEntry(
            dtype, tuple(shape), data_start + offsets[0], offsets[1] - offsets[0]
        )
    position = data_start
    for key, stored in sorted(
        tensors.items(), key=lambda item: (item[1].start_byte, item[1].num_bytes)
    ):
        if stored.start_byte != position:
            raise build_error(f"the data of {key!r:.80} overlap or leave a gap")
        position += stored.num_bytes
    if position != file_bytes:
        raise build_error(f"has {file_bytes} bytes, but its header describes {position}")
    return tensors


def _are_counts(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= 64
        and all(type(item) is int and 0 <= item < 2**62 for item in value)
    )
