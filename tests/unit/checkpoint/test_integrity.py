"""Damaged, unknown and malicious checkpoints are refused with a reason; loading falls back to the
newest whole one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.checkpoint.integrity import assign_files, verify_checkpoint
from shardwright.checkpoint.manifest import (
    MANIFEST_HASH_NAME,
    MANIFEST_NAME,
    Manifest,
    StoredFile,
    parse_manifest,
    read_manifest,
)
from shardwright.checkpoint.tensor_loading import find_newest_checkpoint, load_checkpoint
from shardwright.errors import CheckpointError
from tests.unit.checkpoint.conftest import make_tensors

SHARD = "shard-00000.safetensors"


def test_a_rank_hashes_the_file_that_it_wrote() -> None:
    """Then a resumed run under the same layout fetches each object once from an object store."""
    sizes = {
        SHARD: 10,
        "shard-00001.safetensors": 11,
        "shard-00002.safetensors": 40,
        "values.json": 3,
    }
    files = {name: StoredFile(size, "") for name, size in sizes.items()}
    manifest = Manifest(1, 3, files, {})
    assigned = [assign_files(manifest, rank, 3) for rank in range(3)]
    assert assigned == [[SHARD, "values.json"], *([name] for name in list(sizes)[1:3])]


def test_other_numbers_of_ranks_hash_the_files_that_they_load() -> None:
    """With contiguous shards, two ranks of four load from two files each."""
    shards = [f"shard-{rank:05d}.safetensors" for rank in range(4)]
    strange = "shard-99999.safetensors"
    files = {name: StoredFile(10, "") for name in [*shards, "values.json", strange]}
    manifest = Manifest(1, 4, files, {})
    assigned = [assign_files(manifest, rank, 2) for rank in range(2)]
    assert assigned == [[*shards[:2], strange, "values.json"], shards[2:]]
    assigned = [assign_files(manifest, rank, 8) for rank in range(8)]
    assert [names[0] for names in assigned[::2]] == shards


def rewrite_manifest(folder: Path, change: Callable[[Any], Any]) -> None:
    """Change the manifest and write the matching hash, as an attacker would."""
    manifest = json.loads((folder / MANIFEST_NAME).read_bytes())
    write_manifest(folder, json.dumps(change(manifest) or manifest).encode())


def write_manifest(folder: Path, text: bytes) -> None:
    (folder / MANIFEST_NAME).write_bytes(text)
    (folder / MANIFEST_HASH_NAME).write_text(
        f"{hashlib.sha256(text).hexdigest()}  {MANIFEST_NAME}\n"
    )


def rewrite_shard(folder: Path, data: bytes) -> None:
    """Change the shard and update its hash in the manifest."""
    (folder / SHARD).write_bytes(data)
    entry = {"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    rewrite_manifest(folder, lambda manifest: manifest["files"].update({SHARD: entry}))


def flip_bit(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda f: flip_bit(f / SHARD, -1), f"{SHARD} is damaged"),
        (lambda f: flip_bit(f / SHARD, 20), f"{SHARD} is damaged"),
        (lambda f: flip_bit(f / "values.json", 3), "values.json is damaged"),
        (lambda f: flip_bit(f / MANIFEST_NAME, 60), "manifest.json is damaged"),
        (lambda f: flip_bit(f / MANIFEST_HASH_NAME, 0), "manifest.json is damaged"),
        (lambda f: os.truncate(f / SHARD, 100), f"{SHARD} has 100 bytes"),
        (
            lambda f: (f / SHARD).write_bytes(bytes((f / SHARD).stat().st_size)),
            f"{SHARD} is damaged",
        ),
        (lambda f: (f / SHARD).unlink(), f"{SHARD} is missing"),
        (lambda f: (f / MANIFEST_NAME).unlink(), "no manifest"),
        (lambda f: (f / MANIFEST_HASH_NAME).unlink(), "manifest.sha256 cannot be opened"),
        (lambda f: (f / "extra.bin").write_bytes(b"x"), "extra.bin is surplus"),
        (
            lambda f: f.rename(f.with_name("elsewhere")),
            "latest names it, but the folder does not exist",
        ),
    ],
)
def test_damage_is_reported_and_the_previous_checkpoint_is_used(
    root: Path, damage: Callable[[Path], Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    damage(root / "step-00000030")
    with caplog.at_level(logging.WARNING):
        newest = find_newest_checkpoint(root)
    assert newest is not None
    assert newest.step == 20
    assert reason in newest.refused[0].reason
    (message,) = caplog.messages
    assert "falling back" in message
    assert reason in message


def test_a_damaged_checkpoint_is_not_loaded(root: Path) -> None:
    flip_bit(root / "step-00000030" / SHARD, -1)
    tensors = {name: torch.zeros_like(tensor) for name, tensor in make_tensors().items()}
    with pytest.raises(CheckpointError, match="is damaged"):
        load_checkpoint(root / "step-00000030", tensors)
    assert not any(tensor.any() for tensor in tensors.values())


def test_a_checkpoint_under_another_name_is_refused(root: Path) -> None:
    (root / "step-00000030").rename(root / "step-00000031")
    (root / "latest").unlink()
    newest = find_newest_checkpoint(root)
    assert newest is not None
    assert newest.step == 20
    assert newest.refused[0].reason == "its manifest is of step 30"


def test_no_whole_checkpoint_is_reported(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    for folder in root.glob("step-*"):
        (folder / SHARD).unlink()
    assert find_newest_checkpoint(root) is None
    assert "no checkpoint" in caplog.text
    assert find_newest_checkpoint(root / "nowhere") is None


def set_in(*place: Any, value: Any) -> Callable[[Any], None]:
    """Return a function that sets a value inside the manifest."""

    def change(manifest: Any) -> None:
        target = manifest
        for key in place[:-1]:
            target = target[key]
        target[place[-1]] = value

    return change


EMBEDDING = ("tensors", "model.embedding")
ENTRY = {"size_bytes": 1, "sha256": "0" * 64}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (set_in("format", value="other"), "is not a shardwright-checkpoint"),
        (set_in("format_version", value=2), "format version 2.*newer shardwright"),
        (set_in("format_version", value=True), "True as format_version"),
        (set_in("step", value=-1), "-1 as step"),
        (set_in("files", "../step-00000020/values.json", value=ENTRY), "only names of files"),
        (set_in("files", "/etc/passwd", value=ENTRY), "only names of files"),
        (set_in("files", "..", value=ENTRY), "only names of files"),
        (set_in("files", "a/b", value=ENTRY), "only names of files"),
        (set_in("files", "a\x00b", value=ENTRY), "only names of files"),
        (set_in("files", ".hidden", value=ENTRY), "only names of files"),
        (set_in("files", "manifest.json", value=ENTRY), "only names of files"),
        (set_in(*EMBEDDING, "slices", 0, "file", value="/etc/passwd"), "not one of its files"),
        (set_in(*EMBEDDING, "slices", 0, "file", value="values.json"), "not one of its files"),
        (set_in(*EMBEDDING, "slices", value=[]), "slices hold 0 of 60"),
        (
            lambda m: m["tensors"]["model.embedding"]["slices"].append(
                m["tensors"]["model.embedding"]["slices"][0]
            ),
            "overlap",
        ),
        (set_in(*EMBEDDING, "slices", 0, "offsets", value=[1, 0]), "outside the shape"),
        (set_in(*EMBEDDING, "slices", 0, "lengths", value=[11, 5]), "slices hold 55 of 60"),
        (set_in(*EMBEDDING, "shape", value=[2**63, 5]), "as shape"),
        (set_in(*EMBEDDING, "shape", value=[12, 5, 0]), "number of dimensions"),
        (set_in(*EMBEDDING, "dtype", value="O"), "unknown dtype"),
        (set_in(*EMBEDDING, "more", value=1), "unknown keys"),
        (lambda m: m["tensors"].update(copy=m["tensors"]["model.embedding"]), "twice"),
        (lambda m: m["files"].pop("values.json"), "does not list values.json"),
        (lambda m: m.pop("tensors"), "missing or unknown keys"),
        (lambda m: [m], "no JSON object"),
    ],
)
def test_hostile_manifests_are_refused(
    root: Path, change: Callable[[Any], Any], reason: str
) -> None:
    folder = root / "step-00000030"
    manifest = json.loads((folder / MANIFEST_NAME).read_bytes())
    changed = change(manifest)
    write_manifest(folder, json.dumps(changed if isinstance(changed, list) else manifest).encode())
    with pytest.raises(CheckpointError, match=reason):
        read_manifest(folder)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"[" * 200_000, "not valid JSON"),
        (b'{"a": 1, "a": 2}', "twice"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"9" * 10_000, "not valid JSON"),
        (b"", "not valid JSON"),
    ],
)
def test_text_that_is_not_a_manifest_is_refused(root: Path, text: bytes, reason: str) -> None:
    write_manifest(root / "step-00000030", text)
    with pytest.raises(CheckpointError, match=reason):
        read_manifest(root / "step-00000030")


@pytest.mark.parametrize("name", [SHARD, "values.json", MANIFEST_NAME])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_links_pipes_and_folders_are_refused(root: Path, name: str, kind: str) -> None:
    path = root / "step-00000030" / name
    outside = root / "outside"
    path.rename(outside)
    if kind == "link":
        path.symlink_to(outside)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    _, faults = verify_checkpoint(root / "step-00000030")
    assert any(
        "symbolic link" in f or "not a regular file" in f or "no manifest" in f for f in faults
    )
    newest = find_newest_checkpoint(root)
    assert newest is not None
    assert newest.step == 20


def test_a_linked_folder_is_not_a_checkpoint(root: Path) -> None:
    (root / "step-00000030").rename(root / "elsewhere")
    (root / "step-00000030").symlink_to(root / "elsewhere")
    newest = find_newest_checkpoint(root)
    assert newest is not None
    assert newest.step == 20


@pytest.mark.parametrize(
    "pointer",
    ["../outside", "/etc", "step-00000099", "", "step-00000020/../step-00000010", "\udcff"],
)
def test_a_wrong_pointer_is_not_followed(root: Path, pointer: str) -> None:
    (root / "latest").write_bytes(pointer.encode("utf-8", errors="surrogateescape"))
    newest = find_newest_checkpoint(root)
    assert newest is not None
    assert newest.step == 30


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (struct.pack("<Q", 2**63) + b"{}", "header of 9223372036854775808 bytes"),
        (struct.pack("<Q", 100_000_001) + b"{}", "header of 100000001 bytes"),
        (b"\x01", "header of 0 bytes"),
        (struct.pack("<Q", 2) + b"[]", "not a JSON object"),
        (struct.pack("<Q", 2) + b"{}", "does not hold"),
        (struct.pack("<Q", 2) + b"{}data", "its header describes"),
    ],
)
def test_hostile_headers_are_refused(root: Path, header: bytes, reason: str) -> None:
    rewrite_shard(root / "step-00000030", header)
    _, faults = verify_checkpoint(root / "step-00000030")
    assert reason in faults[0]


def make_header_entry(
    name: str, start: int, stop: int, shape: list[int] | None = None, dtype: str = "F32"
) -> dict[str, Any]:
    return {
        name: {
            "dtype": dtype,
            "shape": shape or [(stop - start) // 4],
            "data_offsets": [start, stop],
        }
    }


@pytest.mark.parametrize(
    ("entries", "num_bytes", "reason"),
    [
        (
            make_header_entry("a", 0, 8) | make_header_entry("b", 4, 12),
            12,
            "overlap or leave a gap",
        ),
        (
            make_header_entry("a", 0, 8) | make_header_entry("b", 12, 16),
            16,
            "overlap or leave a gap",
        ),
        (make_header_entry("a", 8, 0), 0, "malformed|does not match"),
        (make_header_entry("a", 0, 8, [3]), 8, "has 8 bytes"),
        (make_header_entry("a", 0, 8, [2**61, 2**61]), 8, "has 8 bytes"),
        (make_header_entry("a", 0, 8, dtype="F999"), 8, "unknown dtype"),
        ({"a": 5}, 0, "malformed"),
    ],
)
def test_hostile_header_entries_are_refused(
    root: Path, entries: dict[str, Any], num_bytes: int, reason: str
) -> None:
    text = json.dumps(entries).encode()
    rewrite_shard(root / "step-00000030", struct.pack("<Q", len(text)) + text + bytes(num_bytes))
    manifest, faults = verify_checkpoint(root / "step-00000030")
    assert manifest is not None
    assert any(part in faults[0] for part in reason.split("|")), faults


def mutate(text: bytes, source: random.Random) -> bytes:
    """Delete, double or replace random bytes, often by values that break parsers."""
    data = bytearray(text)
    for _ in range(source.randint(1, 4)):
        start = source.randrange(len(data) + 1)
        stop = min(len(data), start + source.randint(0, 12))
        replacements = [
            b"",
            b"-1",
            b"1e400",
            b"null",
            b"[]",
            b"{}",
            b'"',
            b"\\u0000",
            b"../",
            b"18446744073709551616",
            b"\xff",
            data[:stop],
        ]
        data[start:stop] = source.choice(
            [*replacements, bytes(source.randrange(256) for _ in range(3)), data[start:stop] * 2]
        )
    return bytes(data)


def fuzz(root: Path, rounds: int) -> int:
    """Verify mutated manifests and headers with matching hashes: refused or harmless, and fast.

    Returns the number of refused ones.
    """
    folder = root / "step-00000030"
    source = random.Random(4)
    manifest_text = (folder / MANIFEST_NAME).read_bytes()
    shard = (folder / SHARD).read_bytes()
    before = {
        path: path.stat().st_mtime_ns
        for path in root.parent.rglob("*")
        if folder not in path.parents
    }
    header_bytes = 8 + struct.unpack("<Q", shard[:8])[0]
    refused = 0
    for round_number in range(rounds):
        write_manifest(folder, manifest_text)
        (folder / SHARD).write_bytes(shard)
        if round_number % 2:
            rewrite_shard(folder, mutate(shard[:header_bytes], source) + shard[header_bytes:])
        else:
            write_manifest(folder, mutate(manifest_text, source))
        start_seconds = time.monotonic()
        manifest, faults = verify_checkpoint(folder)
        if not faults:
            assert manifest is not None
            for entry in manifest.tensors.values():
                assert {part.file for part in entry.slices} <= {SHARD}
        refused += bool(faults)
        assert time.monotonic() - start_seconds < 60
    assert refused > rounds * 0.7
    assert before == {path: path.stat().st_mtime_ns for path in before}
    return refused


def test_fuzzed_manifests_and_headers(root: Path) -> None:
    fuzz(root, 300)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_many_fuzzed_manifests_and_headers(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused = fuzz(root, 10_000)
    with capsys.disabled():
        sys.stdout.write(
            f"\n10000 fuzzed manifests and headers: {refused} refused, the others harmless\n"
        )


def test_a_manifest_survives_a_round_trip(root: Path) -> None:
    manifest = read_manifest(root / "step-00000030")
    assert parse_manifest(manifest.to_json(), root) == manifest
