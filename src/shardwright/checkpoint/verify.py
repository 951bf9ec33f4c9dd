"""Whether a checkpoint is whole: every file there, of its size and hash, its header in agreement with the manifest. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from shardwright.checkpoint.commit import LATEST, StepFolder, in_order_of_trust, read_pointer
from shardwright.checkpoint.disk import hash_file, sizes_in
from shardwright.checkpoint.header import read_header
from shardwright.checkpoint.manifest import MANIFEST_HASH_NAME, MANIFEST_NAME, Manifest, read_manifest
from shardwright.checkpoint.place import Place
from shardwright.errors import CheckpointError


@dataclass(frozen=True)
class Refused:
    """A checkpoint that cannot be taken, and why."""

    path: Place
    reason: str

    @classmethod
    def because(cls, path: Place, faults: list[str]) -> Refused:
        """With the first few of its faults."""
        return cls(path, "; ".join(faults[:3]) + (f"; {len(faults) - 3} more" if len(faults) > 3 else ""))

    def __str__(self) -> str:
        return f"{self.path.name}: {self.reason}"


@dataclass(frozen=True)
class WholeCheckpoint:
    """A checkpoint whose every byte was found to be what was written; `refused` are newer ones that were not."""

    path: Place
    manifest: Manifest
    refused: tuple[Refused, ...] = ()

    @property
    def step(self) -> int:
        """Optimizer steps done when it was saved."""
        return self.manifest.step


def faults_of_folder(folder: Place, manifest: Manifest) -> list[str]:
    """What a folder's own name and those in it have that its manifest does not say, or lack; nothing is opened."""
    wanted = {*manifest.files, MANIFEST_NAME, MANIFEST_HASH_NAME}
    there = sizes_in(folder)
    named = StepFolder.of(folder)
    if named is not None and named.step != manifest.step:
        return [f"its manifest is of step {manifest.step}"]
    faults = [f"{name} is missing" for name in sorted(wanted - set(there))]
    faults += [f"{name} is surplus" for name in sorted(set(there) - wanted)]
    faults += [f"{name} is a link or no regular file" for name in sorted(wanted & set(there)) if there[name] is None]
    for name in sorted(set(manifest.files) & set(there)):
        size = there[name]
        if size is not None and size != manifest.files[name].size_bytes:
            faults.append(f"{name} has {size} bytes, {manifest.files[name].size_bytes} were written")
    return faults


def faults_of_files(
    folder: Place, manifest: Manifest, names: Iterable[str], *, on_block: Callable[[int], None] | None = None
) -> list[str]:
    """What is wrong with the bytes of some of a checkpoint's files: hash first, and only if it is right the header."""
    faults = []
    for name in names:
        try:
            _, sha256 = hash_file(folder / name, on_block=on_block)
            if sha256 != manifest.files[name].sha256:
                faults.append(f"{name} is damaged: its SHA-256 is not the one that was written")
            elif name.endswith(".safetensors"):
                faults += _faults_of_header(folder / name, manifest)
        except CheckpointError as error:
            faults.append(error.problem)
    return faults


def _faults_of_header(path: Place, manifest: Manifest) -> list[str]:
    """Where a file's header and the manifest disagree."""
    stored = read_header(path)
    wanted = {
        part.key: (name, entry.dtype, part.box)
        for name, entry in manifest.tensors.items()
        for part in entry.slices
        if part.file == path.name
    }
    faults = [f"{path.name} holds {key!r:.200}, which the manifest does not list" for key in sorted(set(stored) - set(wanted))]
    for key, (name, dtype, box) in wanted.items():
        if key not in stored:
            faults.append(f"{path.name} does not hold {key!r:.200} of tensor {name}")
        elif stored[key].dtype != dtype or stored[key].shape != box.lengths:
            here = f"{stored[key].dtype} {stored[key].shape}"
            faults.append(f"{path.name} holds {key!r:.200} as {here}, the manifest says {dtype} {box.lengths}")
    return faults


def verify_checkpoint(folder: Place, *, on_block: Callable[[int], None] | None = None) -> tuple[Manifest | None, list[str]]:
    """The manifest (None if it cannot be taken) and everything that is wrong; no fault means that the checkpoint is whole."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return None, [error.problem]
    try:
        faults = faults_of_folder(folder, manifest)
    except OSError as error:
        faults = [f"cannot be read: {error.strerror}"]
    if not faults:
        faults = faults_of_files(folder, manifest, manifest.files, on_block=on_block)
    return manifest, faults


def share_of_files(manifest: Manifest, rank: int, world_size: int) -> list[str]:
    """The files that a rank hashes, so that each is hashed once and all ranks hash about as many bytes."""
    loads = [0] * world_size
    mine = []
    for name, file in sorted(manifest.files.items(), key=lambda item: (-item[1].size_bytes, item[0])):
        taker = loads.index(min(loads))
        loads[taker] += file.size_bytes
        if taker == rank:
            mine.append(name)
    return mine


def candidates(root: Place) -> tuple[list[Place], list[Refused]]:
    """Folders in the order in which to try them, and what is lost already: a folder that `latest` names and that is gone."""
    folders, latest = in_order_of_trust(root), read_pointer(root, LATEST)
    lost = [] if latest is None or latest in folders else [Refused(latest.path, "latest names it, but there is no such folder")]
    return [folder.path for folder in folders], lost


def newest_whole(root: Place) -> tuple[WholeCheckpoint | None, list[Refused]]:
    """The newest whole checkpoint of a root, in one process, and those that were tried before it and refused."""
    paths, refused = candidates(root)
    for path in paths:
        manifest, faults = verify_checkpoint(path)
        if manifest is not None and not faults:
            return WholeCheckpoint(path, manifest, tuple(refused)), refused
        refused.append(Refused.because(path, faults))
    return None, refused
