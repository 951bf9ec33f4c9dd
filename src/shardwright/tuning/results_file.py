"""File of trials: one JSON object per line, appended as trials end, so that a search can resume.

The first line identifies the search: a hash of the recipe, the cluster and the versions. Results
of another search are never used.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwright.errors import InputError
from shardwright.tuning.halving import Trial
from shardwright.tuning.measurement import TrialOutcome

SCHEMA_VERSION = 1
RESULTS_FILE_NAME = "trials.jsonl"


@dataclass(frozen=True)
class SearchIdentity:
    """Everything that decides whether two measurements can be compared."""

    recipe: dict[str, Any]
    """The whole recipe, without `name` and the run folder."""
    cluster: str
    num_ranks: int
    device: str
    versions: dict[str, str]

    def compute_hashes(self) -> dict[str, str]:
        """Return a hash of each part."""
        return {
            name: hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
            for name, value in (
                ("recipe", self.recipe),
                ("cluster", self.cluster),
                ("number of ranks", self.num_ranks),
                ("device", self.device),
                ("versions", self.versions),
            )
        }


@dataclass
class ResultsFile:
    """Open file of trials; locked against a second search in the same folder."""

    path: Path
    known: dict[tuple[str, int], TrialOutcome] = field(default_factory=dict)
    """Outcomes of earlier searches, by candidate and number of measured steps."""
    _descriptor: int = -1

    @classmethod
    def open(cls, folder: Path, identity: SearchIdentity, *, resume: bool) -> ResultsFile:
        """Open the file in `folder`, which is created.

        Raises:
            InputError: results exist and `resume` is False, or the other way round; they belong to
                another search; another process writes them; the folder cannot be written.
        """
        path = folder / RESULTS_FILE_NAME
        hashes = identity.compute_hashes()
        if resume and not path.is_file():
            raise InputError(
                "there are no results to resume",
                field="--resume",
                got=str(path),
                remedy="Start without --resume",
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise InputError(
                f"cannot be written: {error.strerror}", field="--dir", got=str(folder)
            ) from error
        results = cls(path, {}, descriptor)
        try:
            results._lock()
            results._read(hashes, resume=resume)
            if os.fstat(descriptor).st_size == 0:
                header = {
                    "schema_version": SCHEMA_VERSION,
                    "hashes": hashes,
                    "search": vars(identity),
                }
                results._write(header)
        except BaseException:
            results.close()
            raise
        return results

    def append(self, trial: Trial) -> None:
        """Append a trial; it is on disk when this returns."""
        self._write(
            {"key": trial.key, "num_steps": trial.num_steps, "outcome": trial.outcome.as_dict()}
        )

    def close(self) -> None:
        """Close the file and release its lock."""
        os.close(self._descriptor)

    def __enter__(self) -> ResultsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, content: Mapping[str, Any]) -> None:
        os.write(self._descriptor, (json.dumps(content) + "\n").encode())
        os.fsync(self._descriptor)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                "another process is tuning in this folder",
                field="--dir",
                got=str(self.path.parent),
                remedy="Wait for it to end, or name another folder",
            ) from None

    def _read(self, hashes: Mapping[str, str], *, resume: bool) -> None:
        """Read earlier trials; remove a line that a killed process did not finish."""
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        lines = whole.decode(errors="replace").splitlines()
        if len(whole) < len(data):
            os.ftruncate(self._descriptor, len(whole))
        if not lines:
            return
        if not resume:
            raise InputError(
                "this folder already has results of tuning",
                field="--dir",
                got=str(self.path.parent),
                remedy="Continue (--resume), name another folder, or remove it",
            )
        try:
            header, *trials = (json.loads(line) for line in lines)
            version = header["schema_version"]
            found = header["hashes"]
            if version == SCHEMA_VERSION:
                self.known = {
                    (trial["key"], trial["num_steps"]): TrialOutcome.from_dict(trial["outcome"])
                    for trial in trials
                }
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(
                f"not a file of trials: {type(error).__name__}: {error}",
                field="--resume",
                got=str(self.path),
                remedy="Remove it, or name another folder (--dir)",
            ) from error
        changed = [name for name in hashes if found.get(name) != hashes[name]]
        if version != SCHEMA_VERSION:
            changed = ["format of the file"]
        if changed:
            raise InputError(
                f"the results are from another search: they differ in {', '.join(changed)}",
                field="--resume",
                got=str(self.path),
                remedy="Start in another folder (--dir)",
            )
