"""Manifest of a checkpoint: its files and the slices of its tensors, as JSON. No torch.

    {"format": "shardwright-checkpoint", "format_version": 1, "step": 100, "world_size": 4,
     "written_by": "...",
     "files":   {"shard-00000.safetensors": {"size_bytes": 8264, "sha256": "..."},
                 "values.json": {...}},
     "tensors": {"model.norm.weight": {"dtype": "F32", "shape": [64],
                 "slices": [{"file": "shard-00000.safetensors", "key": "model.norm.weight",
                             "offsets": [0], "lengths": [64]}]}}}

A manifest may come from an untrusted source: everything is checked before any file is opened.
File names contain no folders, so that none leads outside the checkpoint. `manifest.sha256`
holds the manifest's own hash in the format of `sha256sum -c`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from shardwright.checkpoint.boxes import Box, find_cover_fault
from shardwright.checkpoint.disk import read_small_file
from shardwright.checkpoint.storage_path import StoragePath
from shardwright.errors import CheckpointError

FORMAT = "shardwright-checkpoint"
FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
MANIFEST_HASH_NAME = "manifest.sha256"
VALUES_NAME = "values.json"
MAX_MANIFEST_BYTES = 256 * 1024**2
MAX_VALUES_BYTES = 64 * 1024**2

DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2,
    "BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
"""Bytes per element of the supported dtypes, by safetensors' names."""

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
"""Escape of half a surrogate pair; json.loads accepts one without its partner."""
_SHA256 = re.compile(r"[0-9a-f]{64}")


def name_shard_file(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"shard-{rank:05d}.safetensors"


@dataclass(frozen=True)
class StoredFile:
    """Size in bytes and SHA-256 of one file."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class StoredSlice:
    """One box of a tensor, with its file and its key in that file's header."""

    file: str
    key: str
    box: Box


@dataclass(frozen=True)
class TensorEntry:
    """Dtype (safetensors' name) and global shape of a tensor, and its slices."""

    dtype: str
    shape: tuple[int, ...]
    slices: tuple[StoredSlice, ...]

    @property
    def num_elements(self) -> int:
        """Number of elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Size of the whole tensor in bytes."""
        return DTYPE_BYTES[self.dtype] * self.num_elements


@dataclass(frozen=True)
class Manifest:
    """Contents of a checkpoint: step, files and tensors."""

    step: int
    world_size: int
    files: Mapping[str, StoredFile]
    tensors: Mapping[str, TensorEntry]
    written_by: str = ""
    format_version: int = FORMAT_VERSION

    @property
    def num_bytes(self) -> int:
        """Bytes of all files except the manifest itself."""
        return sum(file.size_bytes for file in self.files.values())

    def to_json(self) -> bytes:
        """Return the bytes of `manifest.json`."""
        tensors = {
            name: {
                "dtype": entry.dtype,
                "shape": entry.shape,
                "slices": [
                    {
                        "file": s.file,
                        "key": s.key,
                        "offsets": s.box.offsets,
                        "lengths": s.box.lengths,
                    }
                    for s in entry.slices
                ],
            }
            for name, entry in self.tensors.items()
        }
        files = {
            name: {"size_bytes": file.size_bytes, "sha256": file.sha256}
            for name, file in self.files.items()
        }
        content = {
            "format": FORMAT,
            "format_version": self.format_version,
            "step": self.step,
            "world_size": self.world_size,
            "written_by": self.written_by,
            "files": files,
            "tensors": tensors,
        }
        return json.dumps(content, separators=(",", ":")).encode() + b"\n"


def read_manifest(folder: StoragePath) -> Manifest:
    """Read the manifest of a checkpoint folder; its hash is verified before it is parsed.

    Raises:
        CheckpointError: the manifest is missing, damaged, invalid, of another program or of a
            newer format.
    """
    return parse_manifest(read_manifest_text(folder), folder)


def read_manifest_text(folder: StoragePath) -> bytes:
    """Read the bytes of the manifest and verify their hash.

    Raises:
        CheckpointError: the manifest is missing, too large, a link, or damaged.
    """
    try:
        text = read_small_file(folder / MANIFEST_NAME, MAX_MANIFEST_BYTES)
    except CheckpointError:
        if (folder / MANIFEST_NAME).is_file():
            raise
        raise CheckpointError(
            "no manifest: not a checkpoint, or an unfinished save", field=str(folder)
        ) from None
    expected = read_small_file(folder / MANIFEST_HASH_NAME, 200).split()[:1]
    if expected != [hashlib.sha256(text).hexdigest().encode()]:
        raise CheckpointError(
            f"{MANIFEST_NAME} is damaged: its hash differs from {MANIFEST_HASH_NAME}",
            field=str(folder),
        )
    return text


def parse_manifest(text: bytes, folder: StoragePath) -> Manifest:
    """Parse and check the bytes of a manifest; `folder` is for messages.

    Raises:
        CheckpointError: the manifest is invalid; the message names the fault.
    """
    reader = _ManifestReader(folder)
    top = reader.read_mapping(parse_json(text, folder / MANIFEST_NAME), "the manifest")
    if top.get("format") != FORMAT:
        reader.raise_error(f"is not a {FORMAT} manifest")
    version = reader.read_count(top.get("format_version"), "format_version")
    if version > FORMAT_VERSION:
        reader.raise_error(
            f"has format version {version}; this shardwright "
            f"reads up to {FORMAT_VERSION}. Use a newer shardwright"
        )
    if version != FORMAT_VERSION:
        reader.raise_error(f"has format version {version}, which does not exist")
    reader.check_keys(
        top,
        {"format", "format_version", "step", "world_size", "written_by", "files", "tensors"},
        "the manifest",
    )
    files = {
        name: reader.read_file(name, entry)
        for name, entry in reader.read_mapping(top["files"], "files").items()
    }
    if VALUES_NAME not in files:
        reader.raise_error(f"does not list {VALUES_NAME}")
    tensors = {
        name: reader.read_tensor(name, entry, files)
        for name, entry in reader.read_mapping(top["tensors"], "tensors").items()
    }
    reader.check_slices_unique(tensors)
    return Manifest(
        step=reader.read_count(top["step"], "step"),
        world_size=reader.read_count(top["world_size"], "world_size"),
        files=files,
        tensors=tensors,
        written_by=reader.read_text(top["written_by"], "written_by"),
    )


class _ManifestReader:
    """Reader of the parts of one manifest; every error names the folder."""

    def __init__(self, folder: StoragePath) -> None:
        self.folder = folder

    def raise_error(self, problem: str) -> NoReturn:
        raise CheckpointError(f"{MANIFEST_NAME} {problem}", field=str(self.folder))

    def read_mapping(self, value: object, subject: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            self.raise_error(f"has no JSON object as {subject:.200}")
        return value

    def check_keys(self, value: dict[str, Any], expected: set[str], subject: str) -> None:
        if set(value) != expected:
            names = ", ".join(sorted(set(value) ^ expected))
            self.raise_error(f"has missing or unknown keys in {subject:.200}: {names:.200}")

    def read_count(self, value: object, subject: str) -> int:
        if type(value) is not int or not 0 <= value < 2**62:
            self.raise_error(
                f"has {value!r:.60} as {subject:.200}; expected a whole number of at least 0"
            )
        return value

    def read_counts(self, value: object, subject: str) -> tuple[int, ...]:
        if not isinstance(value, list) or len(value) > 64:
            self.raise_error(f"has no list of numbers as {subject:.200}")
        return tuple(self.read_count(item, subject) for item in value)

    def read_text(self, value: object, subject: str) -> str:
        if not isinstance(value, str):
            self.raise_error(f"has {value!r:.60} as {subject:.200}; expected text")
        return value

    def read_file(self, name: str, value: object) -> StoredFile:
        if (
            not _FILE_NAME.fullmatch(name)
            or len(name) > 200
            or name in (MANIFEST_NAME, MANIFEST_HASH_NAME)
        ):
            self.raise_error(
                f"names a file {name!r:.200}; only names of files in the folder itself are allowed"
            )
        entry = self.read_mapping(value, f"file {name}")
        self.check_keys(entry, {"size_bytes", "sha256"}, f"file {name}")
        sha256 = self.read_text(entry["sha256"], f"sha256 of {name}")
        if not _SHA256.fullmatch(sha256):
            self.raise_error(f"has an invalid sha256 {sha256!r:.80} of {name}")
        return StoredFile(self.read_count(entry["size_bytes"], f"size of {name}"), sha256)

    def read_tensor(self, name: str, value: object, files: Mapping[str, StoredFile]) -> TensorEntry:
        entry = self.read_mapping(value, f"tensor {name}")
        self.check_keys(entry, {"dtype", "shape", "slices"}, f"tensor {name}")
        dtype = self.read_text(entry["dtype"], f"dtype of {name}")
        if dtype not in DTYPE_BYTES:
            self.raise_error(f"has an unknown dtype {dtype!r:.40} in tensor {name:.200}")
        if not isinstance(entry["slices"], list):
            self.raise_error(f"has no list of slices in tensor {name:.200}")
        shape = self.read_counts(entry["shape"], f"shape of {name}")
        slices = []
        for item in entry["slices"]:
            part = self.read_mapping(item, f"slice of {name}")
            self.check_keys(part, {"file", "key", "offsets", "lengths"}, f"slice of {name}")
            file = self.read_text(part["file"], f"file of {name}")
            if file not in files or not file.endswith(".safetensors"):
                self.raise_error(
                    f"assigns tensor {name:.200} to {file!r:.200}, which is not one of its files"
                )
            box = Box(
                self.read_counts(part["offsets"], f"offsets of {name}"),
                self.read_counts(part["lengths"], f"lengths of {name}"),
            )
            if not len(box.offsets) == len(box.lengths) == len(shape):
                self.raise_error(
                    f"has a slice of tensor {name:.200} with another number of dimensions"
                )
            slices.append(StoredSlice(file, self.read_text(part["key"], f"key of {name}"), box))
        if fault := find_cover_fault(shape, [part.box for part in slices]):
            self.raise_error(f"is invalid for tensor {name:.200}: {fault}")
        return TensorEntry(dtype, shape, tuple(slices))

    def check_slices_unique(self, tensors: Mapping[str, TensorEntry]) -> None:
        seen: set[tuple[str, str]] = set()
        for name, entry in tensors.items():
            for part in entry.slices:
                if (part.file, part.key) in seen:
                    self.raise_error(
                        f"uses {part.key!r:.200} of {part.file} "
                        f"twice, the second time for tensor {name:.200}"
                    )
                seen.add((part.file, part.key))


def parse_json(text: bytes, path: StoragePath) -> Any:
    """Parse UTF-8 JSON without duplicate keys, lone surrogates, NaN and infinite numbers.

    `path` is for messages.

    Raises:
        CheckpointError: not such JSON.
    """

    def check_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise ValueError("a key appears twice in one object")
        return result

    def reject_constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not JSON")

    def parse_finite(number: str) -> float:
        value = float(number)
        return value if math.isfinite(value) else reject_constant(number)

    try:
        value = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=check_unique,
            parse_constant=reject_constant,
            parse_float=parse_finite,
        )
        if _SURROGATE.search(text):
            # Raises UnicodeEncodeError for a lone surrogate.
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        return value
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path.name} is not valid JSON: {error!s:.200}", field=str(path.parent)
        ) from error


def encode_values(values: Mapping[str, Any]) -> bytes:
    """Encode values as JSON that reads back equal.

    Raises:
        CheckpointError: JSON would change or cannot represent a value; the message names its
            location.
    """
    _require_json(values, "values")
    text = json.dumps(values, allow_nan=False, indent=1).encode() + b"\n"
    if len(text) > MAX_VALUES_BYTES:
        raise CheckpointError(
            "too large", field="values", got=len(text), allowed=f"{MAX_VALUES_BYTES} bytes of JSON"
        )
    return text


def _require_json(value: object, location: str) -> None:
    if value is None or isinstance(value, bool | int | str):
        return
    if isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            raise CheckpointError(
                "JSON cannot represent this number",
                field=location,
                got=value,
                remedy="Use None instead",
            )
        return
    if isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _require_json(item, f"{location}[{index}]")
        return
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise CheckpointError("keys must be text", field=location, got=repr(key))
            _require_json(item, f"{location}.{key}")
        return
    raise CheckpointError(
        "not a JSON value",
        field=location,
        got=type(value).__name__,
        remedy="Pass tensors as tensors, not as values",
    )
