"""Index of streamed shards: each shard is tokenised once to learn its number of samples.

The index has a file per shard, which is kept when the shard itself is removed from the cache. So
an index that was interrupted continues where it stopped, and runs with the same settings share it.
"""

from __future__ import annotations

import logging
import random
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardwright.data.data_cache import compute_key
from shardwright.data.sources.source_files import ProgressCallback
from shardwright.data.streaming.shard_cache import Reservation, ShardCache, ShardLease
from shardwright.data.streaming.shard_listing import SourceShard, compute_shard_key
from shardwright.data.streaming.shard_tokens import (
    ShardBuilder,
    ShardDataset,
    ShardEntry,
    describe_settings,
)
from shardwright.errors import DataError

INDEX_VERSION = 1
"""Part of every shard's key; increase it when the same file yields other samples than
before."""

logger = logging.getLogger(__name__)


class OpenShard:
    """Samples of a shard, which stays in the cache until `close`."""

    def __init__(self, dataset: ShardDataset, lease: ShardLease) -> None:
        self.dataset: ShardDataset | None = dataset
        self._lease = lease

    def close(self) -> None:
        """Allow the shard's removal."""
        self.dataset = None  # its memory maps would keep the disk space in use
        self._lease.release()


class ShardIndex:
    """Shards of a recipe with their number of samples; opens them through the cache."""

    def __init__(
        self, cache: ShardCache, shards: Sequence[SourceShard], builder: ShardBuilder
    ) -> None:
        self.cache = cache
        self.shards = tuple(shards)
        self._builder = builder
        self._folder = cache.root / "index"
        settings = [INDEX_VERSION, describe_settings(builder)]
        self._keys = [compute_shard_key(shard, settings) for shard in self.shards]
        self.release_shards: Callable[[], None] = lambda: None
        """Releases the shards that this process has open, if the cache has no space."""

    @property
    def is_complete(self) -> bool:
        """True if every shard has been indexed."""
        return all(self._entry_path(number).is_file() for number in range(len(self.shards)))

    def complete(self, progress: ProgressCallback | None) -> None:
        """Index every shard that is not indexed yet; several processes share the work.

        Raises:
            DataError: a shard cannot be fetched or read, or is larger than the cache.
        """
        total = sum(shard.num_bytes for shard in self.shards)
        missing = [n for n in range(len(self.shards)) if not self._entry_path(n).is_file()]
        done = total - sum(self.shards[number].num_bytes for number in missing)
        if missing and progress is not None:
            progress("indexing", done, total)
        # Every process has its own random order, and waits for shards of other processes at the
        # end only.
        random.Random(secrets.randbits(64)).shuffle(missing)
        for should_wait in (False, True):
            for number in missing:
                if self._entry_path(number).is_file():
                    continue
                if should_wait:
                    self._find_or_build(number).release()
                    if not self._entry_path(number).is_file():  # tokens of an older index
                        raise AssertionError(f"shard {number} was built without an entry")
                else:
                    self.build_ahead(number)
                if self._entry_path(number).is_file():
                    done += self.shards[number].num_bytes
                    if progress is not None:
                        progress("indexing", done, total)

    @cached_property
    def entries(self) -> tuple[ShardEntry, ...]:
        """Entries of all shards, in order; the index must be complete."""
        return tuple(ShardEntry.load(self._entry_path(n)) for n in range(len(self.shards)))

    @cached_property
    def has_weights(self) -> bool:
        """True if any shard has loss weights."""
        return any(entry.counts.num_weighted for entry in self.entries)

    @cached_property
    def content_hash(self) -> str:
        """Hash of all tokens, in order; independent of where the files are."""
        return compute_key([entry.token_hash for entry in self.entries])

    def contains_documents(self, digests: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """Return a mask of the documents, by hash, that are in any shard."""
        found = np.zeros(len(digests), dtype=np.bool_)
        for number in range(len(self.shards)):
            found |= np.isin(digests, np.load(self._digests_path(number), allow_pickle=False))
        return found

    def open(self, number: int) -> OpenShard:
        """Open a shard; fetch and tokenise it if it is not in the cache.

        Raises:
            DataError: the shard cannot be fetched, or has other tokens than when it was indexed.
        """
        lease = self._find_or_build(number)
        return OpenShard(self._builder.open(lease.folder, number), lease)

    def build_ahead(self, number: int) -> bool:
        """Build a shard in the cache unless another process does. Return False if there is no
        space."""
        return self.cache.build_ahead(
            self._keys[number], self._estimate_bytes(number), self._make_build(number)
        )

    def count_build_bytes(self, number: int) -> int:
        """Return the bytes of an indexed shard while it is tokenised."""
        return self.shards[number].fetched_bytes + self.entries[number].num_bytes

    def _find_or_build(self, number: int) -> ShardLease:
        return self.cache.find_or_build(
            self._keys[number],
            self._estimate_bytes(number),
            self._make_build(number),
            self.release_shards,
        )

    def _estimate_bytes(self, number: int) -> int:
        """Return the bytes to reserve: those of the build, or of the fetch before it is known."""
        fetched = self.shards[number].fetched_bytes
        with suppress(OSError):
            return fetched + ShardEntry.load(self._entry_path(number)).num_bytes
        return fetched

    def _make_build(self, number: int) -> Callable[[Path, Reservation], None]:
        shard = self.shards[number]

        def build(folder: Path, reservation: Reservation) -> None:
            entry, digests = self._builder.build(shard, folder, reservation)
            path = self._entry_path(number)
            if not path.is_file():
                self._save(number, entry, digests)
            elif ShardEntry.load(path).token_hash != entry.token_hash:
                raise DataError(
                    "a file gives other tokens than when it was indexed",
                    field=shard.field,
                    got=shard.url,
                    remedy=f"If it is intact, delete {path}; it will be indexed again",
                )

        return build

    def _save(self, number: int, entry: ShardEntry, digests: npt.NDArray[np.uint64]) -> None:
        self._folder.mkdir(exist_ok=True)
        for path, write in (
            (self._digests_path(number), lambda draft: np.save(draft, digests)),
            (self._entry_path(number), entry.save),
        ):
            draft = path.with_name(f"{secrets.token_hex(4)}.partial{path.suffix}")
            write(draft)
            draft.replace(path)

    def _entry_path(self, number: int) -> Path:
        return self._folder / f"{self._keys[number]}.json"

    def _digests_path(self, number: int) -> Path:
        return self._folder / f"{self._keys[number]}.npy"
