"""Tokens of one shard: fetched, tokenised and packed into a folder of the cache."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwright.config.recipe import Recipe
from shardwright.data.corpus import (
    SKIPPED,
    TRAIN,
    Corpus,
    RecordScan,
    RecordStatistics,
    scan_records,
)
from shardwright.data.data_checks import check_token_files
from shardwright.data.dataset import WindowDataset
from shardwright.data.dataset_assembly import PackingKind
from shardwright.data.packed_dataset import PackedDataset, Packing, pack_documents
from shardwright.data.records.chat_template import ChatTemplate
from shardwright.data.records.preference_pairs import pack_pairs
from shardwright.data.records.supervision import RecordEncoder
from shardwright.data.sample_order import mix_bits
from shardwright.data.sources.source_reader import BrokenRecord
from shardwright.data.streaming.shard_cache import Reservation
from shardwright.data.streaming.shard_listing import SourceShard
from shardwright.data.tokens.encoding_workers import encode_in_order
from shardwright.data.tokens.token_store import TokenCounts, TokenStore, open_tokens, write_tokens
from shardwright.data.tokens.tokenizer import Tokenizer

_SIDE = "train"
_PACKING_FILE = "packing.npz"
_HASHED_SUFFIXES = (".tokens", ".documents", ".supervised", ".weights")
_BLOCK_BYTES = 1 << 20
_NPZ_HEADER_BYTES = 4096

ShardDataset = WindowDataset | PackedDataset


@dataclass(frozen=True)
class ShardEntry:
    """Counts of one shard in the index. `token_hash` changes if any token changes."""

    num_samples: int
    num_supervised: int
    num_used_positions: int
    is_uneven: bool
    num_bytes: int
    token_hash: str
    counts: TokenCounts
    statistics: RecordStatistics
    lengths: tuple[int, ...]
    """Number of documents of at most 2^i tokens (and more than 2^(i - 1)), for i from 0."""
    num_split: int = 0
    num_dropped: int = 0
    num_unsupervised: int = 0

    def save(self, path: Path) -> None:
        """Write the entry as JSON."""
        content = asdict(self)
        content["statistics"] = self.statistics._asdict()
        content["statistics"]["broken"] = [item._asdict() for item in self.statistics.broken]
        path.write_text(json.dumps(content), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> ShardEntry:
        """Read an entry written by `save`."""
        content = json.loads(path.read_text(encoding="utf-8"))
        counts = content["counts"]
        statistics = content["statistics"]
        broken = tuple(BrokenRecord(**item) for item in statistics["broken"])
        return cls(
            **content
            | {
                "counts": TokenCounts(
                    **counts | {"source_documents": tuple(counts["source_documents"])}
                ),
                "statistics": RecordStatistics(**statistics | {"broken": broken}),
                "lengths": tuple(content["lengths"]),
            }
        )


@dataclass(frozen=True)
class ShardBuilder:
    """Settings that turn a shard into samples."""

    recipe: Recipe
    tokenizer: Tokenizer
    template: ChatTemplate | None
    has_records: bool
    packing: PackingKind

    def build(
        self, shard: SourceShard, folder: Path, reservation: Reservation
    ) -> tuple[ShardEntry, npt.NDArray[np.uint64]]:
        """Fetch and tokenise a shard into `folder`.

        Returns:
            The shard's entry, and the hashes of its documents.

        Raises:
            DataError: the file cannot be fetched or read, or does not fit into the cache.
        """
        file = shard.fetch(folder)
        check_token_files([file], self.tokenizer)
        scan = scan_records([file], lambda num_characters: None)
        counts, broken = self._write_tokens(scan, folder, reservation, shard.fetched_bytes)
        shutil.rmtree(folder / "fetched", ignore_errors=True)
        store = open_tokens(folder, _SIDE)
        num_token_bytes = _count_bytes(folder)
        packing = self._pack(store)
        if packing is not None:
            num_packing_bytes = 8 * (
                2 * len(packing.piece_starts_P) + len(packing.row_starts_R1) + 4
            )
            reservation.grow_to(num_token_bytes + num_packing_bytes + _NPZ_HEADER_BYTES)
            packing.save(folder / _PACKING_FILE)
        dataset = self.open(folder, 0)
        lengths = np.diff(store.documents.astype(np.int64))
        bins = np.ceil(np.log2(np.maximum(lengths, 1))).astype(int)
        entry = ShardEntry(
            num_samples=len(dataset),
            num_supervised=dataset.num_supervised,
            num_used_positions=len(dataset) * dataset.sequence_length
            if packing is None
            else int(packing.piece_lengths_P.sum()),
            is_uneven=len(dataset) > 0 and dataset.is_uneven,
            num_bytes=_count_bytes(folder),
            token_hash=_hash_tokens(folder),
            counts=counts,
            statistics=scan.statistics.add_broken(broken),
            lengths=tuple(np.bincount(bins).tolist()),
            num_split=0 if packing is None else packing.num_split,
            num_dropped=0 if packing is None else packing.num_dropped,
            num_unsupervised=0 if packing is None else packing.num_unsupervised,
        )
        return entry, scan.digests[scan.num_characters > 0]

    def _write_tokens(
        self, scan: RecordScan, folder: Path, reservation: Reservation, fetched_bytes: int
    ) -> tuple[TokenCounts, list[BrokenRecord]]:
        data = self.recipe.data
        encode = None
        if self.has_records:
            encoder = RecordEncoder(
                self.tokenizer, self.template, data.supervise, data.max_record_characters
            )
            encode = partial(encode_in_order, encoder, num_workers=data.num_workers)
        sides = np.where(scan.num_characters > 0, TRAIN, SKIPPED).astype(np.uint8)
        corpus = Corpus(scan, None, sides, None, None)
        return write_tokens(
            folder,
            _SIDE,
            corpus.iterate_pieces("train"),
            self.tokenizer,
            lambda num_characters: None,
            encode,
            lambda num_bytes: reservation.grow_to(fetched_bytes + num_bytes),
        )

    def _pack(self, store: TokenStore) -> Packing | None:
        """Return the rows of a shard; None for windows, which need none."""
        if self.packing == "windows":
            return None
        length = self.recipe.training.sequence_length
        overlong = self.recipe.data.overlong
        if self.packing == "pairs":
            assert store.supervised_mask is not None, "pairs come from records, which have a mask"
            return pack_pairs(
                store.tokens, store.documents, length, store.supervised_mask, overlong
            ).packing
        return pack_documents(
            store.documents,
            length,
            supervised_mask=store.supervised_mask,
            overlong=overlong,
            is_unpacked=self.packing == "none",
        )

    def open(self, folder: Path, number: int) -> ShardDataset:
        """Open the samples of shard `number`, which may be none."""
        store = open_tokens(folder, _SIDE)
        length = self.recipe.training.sequence_length
        if self.packing == "windows":
            return WindowDataset(
                store.tokens, length, seed=mix_bits(self.recipe.seed) ^ mix_bits(number)
            )
        packing = Packing.load(folder / _PACKING_FILE)
        is_unpacked = self.packing == "none"
        return PackedDataset(
            store.tokens, packing, length, store.supervised_mask, store.weights, is_unpacked
        )


def compute_padding_fraction(entries: Sequence[ShardEntry], sequence_length: int) -> float:
    """Return the fraction of positions of all samples that are padding."""
    num_positions = sequence_length * sum(entry.num_samples for entry in entries)
    return 1.0 - sum(entry.num_used_positions for entry in entries) / max(1, num_positions)


def _hash_tokens(folder: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for suffix in _HASHED_SUFFIXES:
        path = folder / f"{_SIDE}{suffix}"
        if not path.is_file():
            continue
        digest.update(f"{suffix} {path.stat().st_size} ".encode())
        with open(path, "rb") as stream:
            while block := stream.read(_BLOCK_BYTES):
                digest.update(block)
    return digest.hexdigest()


def _count_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def describe_settings(builder: ShardBuilder) -> list[Any]:
    """Return everything but the file itself that the samples of a shard depend on."""
    recipe = builder.recipe
    template = builder.template
    rendering: list[Any] = []
    if builder.has_records:
        rendering = [
            recipe.data.supervise,
            template and template.cache_key,
            recipe.data.max_record_characters,
        ]
    return [
        builder.tokenizer.content_hash,
        builder.tokenizer.vocab_size,
        builder.packing,
        recipe.training.sequence_length,
        recipe.data.overlong,
        *rendering,
    ]
