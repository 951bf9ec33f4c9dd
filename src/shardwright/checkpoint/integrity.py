"""Integrity checks of checkpoints: files, sizes, hashes and headers. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from shardwright.checkpoint.commit import (
    LATEST_NAME,
    StepFolder,
    list_step_folders,
    read_pointer,
    sort_by_trust,
)
from shardwright.checkpoint.disk import hash_file, list_sizes
from shardwright.checkpoint.header import read_header
from shardwright.checkpoint.manifest import (
    MANIFEST_HASH_NAME,
    MANIFEST_NAME,
    Manifest,
    read_manifest,
)
from shardwright.checkpoint.storage_path import (
    CachedFile,
    ReadableFile,
    RemotePath,
    StoragePath,
)
from shardwright.errors import CheckpointError

_SHARD_NAME = re.compile(r"shard-([0-9]{5,9})\.safetensors")
"""Names by `name_shard_file`."""


@dataclass(frozen=True)
class RefusedCheckpoint:
    """Checkpoint that cannot be used, with the reason."""

    path: StoragePath
    reason: str

    @classmethod
    def from_faults(cls, path: StoragePath, faults: list[str]) -> RefusedCheckpoint:
        """Build from a list of faults; the reason names the first three."""
        return cls(
            path, "; ".join(faults[:3]) + (f"; {len(faults) - 3} more" if len(faults) > 3 else "")
        )

    def __str__(self) -> str:
        return f"{self.path.name}: {self.reason}"


@dataclass
class ObjectCache:
    """Bytes of objects that this process has fetched to hash them, up to a number of bytes.

    Without them loading would fetch these objects a second time. Local files are in the page cache.
    """

    free_bytes: int
    blocks: dict[str, list[bytes]] = field(default_factory=dict)
    """Blocks for `CachedFile` by name."""

    def find(self, name: str) -> CachedFile | None:
        """Return an object's bytes as a file; None if they are not in memory."""
        return CachedFile(self.blocks[name]) if name in self.blocks else None


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """Checkpoint whose every byte was verified; `refused` are newer, damaged ones."""

    path: StoragePath
    manifest: Manifest
    refused: tuple[RefusedCheckpoint, ...] = ()
    cache: ObjectCache | None = field(default=None, compare=False, repr=False)
    """Objects in memory that loading need not read again."""

    @property
    def step(self) -> int:
        """Number of optimizer steps finished when it was saved."""
        return self.manifest.step


def find_folder_faults(folder: StoragePath, manifest: Manifest) -> list[str]:
    """Compare names and sizes in a folder with the manifest; return the faults.

    Listings of object stores may lag: objects that seem to be missing or of another size are looked
    up one by one, and surplus ones, which may remain of an interrupted save, are ignored.
    """
    expected = {*manifest.files, MANIFEST_NAME, MANIFEST_HASH_NAME}
    sizes = list_sizes(folder)
    if not isinstance(folder, Path):
        sizes = _look_up_objects(folder, expected, sizes, manifest)
    step_folder = StepFolder.parse(folder)
    if step_folder is not None and step_folder.step != manifest.step:
        return [f"its manifest is of step {manifest.step}"]
    faults = [f"{name} is missing" for name in sorted(expected - set(sizes))]
    faults += [f"{name} is surplus" for name in sorted(set(sizes) - expected)]
    faults += [
        f"{name} is a link or not a regular file"
        for name in sorted(expected & set(sizes))
        if sizes[name] is None
    ]
    for name in sorted(set(manifest.files) & set(sizes)):
        size = sizes[name]
        if size is not None and size != manifest.files[name].size_bytes:
            faults.append(
                f"{name} has {size} bytes, but {manifest.files[name].size_bytes} were written"
            )
    return faults


def _look_up_objects(
    folder: RemotePath, expected: set[str], listed: dict[str, int | None], manifest: Manifest
) -> dict[str, int | None]:
    """Return the sizes of the expected objects that exist, by name."""
    sizes: dict[str, int | None] = {}
    for name in expected:
        size = listed.get(name)
        if size is None or (name in manifest.files and size != manifest.files[name].size_bytes):
            info = (folder / name).read_info()
            if info is None:
                continue
            size = int(info["size"] or 0) if info["type"] == "file" else None
        sizes[name] = size
    return sizes


def find_file_faults(
    folder: StoragePath,
    manifest: Manifest,
    names: Iterable[str],
    *,
    on_block: Callable[[int], None] | None = None,
    cache: ObjectCache | None = None,
) -> list[str]:
    """Check hashes of the named files and, if correct, headers; return the faults.

    Args:
        on_block: Receives the bytes of each block.
        cache: Receives the bytes of objects, as far as they fit.
    """
    faults = []
    for name in names:
        size = manifest.files[name].size_bytes
        fits = cache is not None and size <= cache.free_bytes
        blocks: list[bytes] | None = [] if fits and not isinstance(folder, Path) else None
        try:
            _, sha256 = hash_file(folder / name, on_block=on_block, cached_blocks=blocks)
            if cache is not None and blocks is not None:
                cache.blocks[name] = blocks
                cache.free_bytes -= size
            if sha256 != manifest.files[name].sha256:
                faults.append(f"{name} is damaged: its SHA-256 differs from the manifest's")
            elif name.endswith(".safetensors"):
                file = None if cache is None else cache.find(name)
                faults += _find_header_faults(folder / name, manifest, file)
        except CheckpointError as error:
            faults.append(error.problem)
    return faults


def _find_header_faults(
    path: StoragePath, manifest: Manifest, file: ReadableFile | None
) -> list[str]:
    """Compare a file's header with the manifest; return the differences."""
    stored = read_header(path, file)
    expected = {
        part.key: (name, entry.dtype, part.box)
        for name, entry in manifest.tensors.items()
        for part in entry.slices
        if part.file == path.name
    }
    faults = [
        f"{path.name} holds {key!r:.200}, which the manifest does not list"
        for key in sorted(set(stored) - set(expected))
    ]
    for key, (name, dtype, box) in expected.items():
        if key not in stored:
            faults.append(f"{path.name} does not hold {key!r:.200} of tensor {name}")
        elif stored[key].dtype != dtype or stored[key].shape != box.lengths:
            found = f"{stored[key].dtype} {stored[key].shape}"
            faults.append(
                f"{path.name} holds {key!r:.200} as {found}, "
                f"but the manifest lists {dtype} {box.lengths}"
            )
    return faults


def verify_checkpoint(
    folder: StoragePath, *, on_block: Callable[[int], None] | None = None
) -> tuple[Manifest | None, list[str]]:
    """Verify a checkpoint; return its manifest, None if unusable, and all faults."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return None, [error.problem]
    except OSError as error:
        return None, [f"cannot be read: {error.strerror or error}"]
    try:
        faults = find_folder_faults(folder, manifest)
        if not faults:
            faults = find_file_faults(folder, manifest, manifest.files, on_block=on_block)
    except OSError as error:
        faults = [f"cannot be read: {error.strerror or error}"]
    return manifest, faults


def assign_files(manifest: Manifest, rank: int, world_size: int) -> list[str]:
    """Return the files that a rank hashes. Each file is assigned to one rank.

    A rank hashes the file that the same rank wrote: under the same layout it loads from that file
    and has it in memory. If the number of ranks has changed, it hashes the files at the
    corresponding place in the order of ranks, where its contiguous shards are. The first rank
    hashes the other files, of which it reads the values.
    """

    def choose_rank(name: str) -> int:
        match = _SHARD_NAME.fullmatch(name)
        writer = 0 if match is None else int(match[1])
        return writer * world_size // manifest.world_size if writer < manifest.world_size else 0

    return [name for name in sorted(manifest.files) if choose_rank(name) == rank]


def list_candidates(root: StoragePath) -> tuple[list[StoragePath], list[RefusedCheckpoint]]:
    """Return folders in the order to try, and `latest` if its folder does not exist."""
    latest = read_pointer(root, LATEST_NAME)
    folders = sort_by_trust(list_step_folders(root), latest)
    lost = (
        []
        if latest is None or latest in folders
        else [RefusedCheckpoint(latest.path, "latest names it, but the folder does not exist")]
    )
    return [folder.path for folder in folders], lost
