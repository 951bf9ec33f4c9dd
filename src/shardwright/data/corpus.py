"""Split of the sources into training and validation documents without overlap.

A first pass over the sources scans every record (its length, a hash of its text, whether it can
be read) and assigns it to a side; later passes read the text of one side. The scan keeps 18
bytes per record, never the text.

Two documents are equal if their text is. Under a split by `documents`, copies are on the same
side. Under `tail`, and with separate validation sources, validation documents that are also in
the training data are dropped and counted.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from shardwright.config.data import DataSection
from shardwright.data.sources.source_reader import BrokenRecord, SourceFile, TextPiece, read_files
from shardwright.errors import DataError
from shardwright.units import format_items

Side = Literal["train", "validation"]
SKIPPED, TRAIN, VALIDATION, DUPLICATE = range(4)
_SIDE_CODES: dict[Side, int] = {"train": TRAIN, "validation": VALIDATION}
MAX_BROKEN_LISTED = 200
"""Maximum number of broken records listed with file and line; further ones are only counted."""

ReadCallback = Callable[[int], None]
"""Callback that receives the number of characters read so far."""


class RecordStatistics(NamedTuple):
    """Counts of records and broken records. Empty files are not broken: they lose no text."""

    num_records: int
    num_broken: int
    num_empty_files: int
    broken: tuple[BrokenRecord, ...]

    @property
    def broken_fraction(self) -> float:
        """Fraction of records that could not be read."""
        return self.num_broken / max(1, self.num_records)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> RecordStatistics:
        """Rebuild the statistics from the fields that a cache has saved as JSON."""
        broken = tuple(BrokenRecord(**item) for item in fields["broken"])
        return cls(**{**fields, "broken": broken})

    def add_broken(self, broken: Sequence[BrokenRecord]) -> RecordStatistics:
        """Return a copy that includes records that turned out broken when they were encoded."""
        listed = (self.broken + tuple(broken))[:MAX_BROKEN_LISTED]
        return self._replace(num_broken=self.num_broken + len(broken), broken=listed)

    def check(self, max_broken_fraction: float, field: str) -> None:
        """Check that no more records are broken than the recipe allows.

        Raises:
            DataError: too many are broken; names the first few.
        """
        if self.broken_fraction <= max_broken_fraction:
            return
        first = "; ".join(f"{item.file}:{item.line} {item.reason}" for item in self.broken[:4])
        is_other_json = self.num_broken == self.num_records > 1 and self.broken[
            0
        ].reason.startswith("not JSON")
        more = f"; and {self.num_broken - 4} more" if self.num_broken > 4 else ""
        if self.broken[0].reason.startswith("no field"):
            remedy = (
                "A source contains records of one kind: set its `text_field`, or `records` and "
                "`columns`, and list records of another kind as a separate source"
            )
        else:
            remedy = "Correct the records, or raise data.max_broken_fraction to skip them"
            if is_other_json:
                remedy = (
                    "JSON lines have one record per line; name other JSON files .json. " + remedy
                )
        raise DataError(
            f"too many records cannot be read: {first}{more}",
            field=field,
            got=f"{self.num_broken} of {self.num_records} broken, {self.broken_fraction:.1%}",
            allowed=f"{max_broken_fraction:.1%}, data.max_broken_fraction",
            remedy=remedy,
        )


@dataclass(frozen=True)
class RecordScan:
    """Result of the first pass over a list of files, one array element per record.

    `characters` is 0 for a skipped record. `is_indivisible` is True for records other than plain
    text, which a split must not divide.
    """

    files: tuple[SourceFile, ...]
    digests: npt.NDArray[np.uint64]
    num_characters: npt.NDArray[np.int64]
    statistics: RecordStatistics
    is_indivisible: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Corpus:
    """Records of training and validation sources with the side of each.

    `boundary`: under `tail`, the record that lies on both sides and how many of its characters are
    in the training data.
    """

    training: RecordScan
    validation: RecordScan | None
    training_sides: npt.NDArray[np.uint8]
    validation_sides: npt.NDArray[np.uint8] | None
    boundary: tuple[int, int] | None

    @property
    def num_duplicates_dropped(self) -> int:
        """Number of validation documents dropped because they are also in the training data."""
        sides = self.training_sides if self.validation_sides is None else self.validation_sides
        return int(np.count_nonzero(sides == DUPLICATE))

    def count_characters(self, side: Side) -> int:
        """Return the number of characters on a side."""
        if (
            side == "validation"
            and self.validation is not None
            and self.validation_sides is not None
        ):
            return int(self.validation.num_characters[self.validation_sides == VALIDATION].sum())
        total = int(self.training.num_characters[self.training_sides == _SIDE_CODES[side]].sum())
        if self.boundary is not None:
            record, head = self.boundary
            if side == "train":
                total += head
            elif self.training_sides[record] == VALIDATION:
                total -= head
        return total

    def iterate_pieces(self, side: Side) -> Iterator[TextPiece]:
        """Yield the text of one side, in the order of the sources."""
        if side == "validation" and self.validation is not None:
            assert self.validation_sides is not None
            yield from _select_pieces(self.validation, self.validation_sides, VALIDATION)
        elif self.boundary is None:
            yield from _select_pieces(self.training, self.training_sides, _SIDE_CODES[side])
        else:
            yield from self._iterate_boundary_pieces(side)

    def _iterate_boundary_pieces(self, side: Side) -> Iterator[TextPiece]:
        assert self.boundary is not None
        split_record, head = self.boundary
        is_selected = self.training_sides == _SIDE_CODES[side]
        if side == "train":
            is_selected[split_record] = True
        num_seen = 0
        for piece in _select_pieces(self.training, is_selected, True):
            if piece.record != split_record:
                yield piece
                continue
            first = num_seen
            num_seen += len(piece.text)
            if side == "train" and first < head:
                yield piece._replace(text=piece.text[: head - first], is_document_end=False)
            elif side == "validation" and num_seen > head:
                yield piece._replace(
                    text=piece.text[max(0, head - first) :], is_document_start=False
                )


def _select_pieces(
    scan: RecordScan, sides: npt.NDArray[np.generic], side: int
) -> Iterator[TextPiece]:
    for item in read_files(scan.files):
        if item.record >= len(sides):
            raise DataError(
                "the sources changed while they were read",
                got=f"record {item.record + 1} of {len(sides)}",
            )
        if isinstance(item, TextPiece) and sides[item.record] == side:
            yield item


def scan_records(files: Sequence[SourceFile], on_read: ReadCallback) -> RecordScan:
    """Scan every record of `files`: the first pass."""
    digests = array("Q")
    characters = array("q")
    indivisible = array("b")
    broken: list[BrokenRecord] = []
    num_broken = num_empty = num_read = length = 0
    digest = hashlib.blake2b(digest_size=8)
    for item in read_files(files):
        if isinstance(item, BrokenRecord):
            if item.harmless:
                num_empty += 1
            else:
                num_broken += 1
                if len(broken) < MAX_BROKEN_LISTED:
                    broken.append(item)
            digest = hashlib.blake2b(digest_size=8)
            length = 0
            digests.append(0)
            characters.append(0)
            indivisible.append(0)
            continue
        digest.update(item.text.encode("utf-8"))
        length += len(item.text)
        if item.is_document_end:
            digests.append(int.from_bytes(digest.digest(), "little"))
            characters.append(length)
            indivisible.append(item.canonical != "text")
            num_read += length
            on_read(num_read)
            digest = hashlib.blake2b(digest_size=8)
            length = 0
    return RecordScan(
        tuple(files),
        np.frombuffer(digests, dtype=np.uint64),
        np.frombuffer(characters, dtype=np.int64),
        RecordStatistics(len(characters) - num_empty, num_broken, num_empty, tuple(broken)),
        np.frombuffer(indivisible, dtype=np.bool_),
    )


def split_corpus(
    training: RecordScan, validation: RecordScan | None, section: DataSection
) -> Corpus:
    """Assign every record to a side.

    Raises:
        DataError: nothing to train on, or a split that leaves a side empty.
    """
    sides = np.where(training.num_characters > 0, TRAIN, SKIPPED).astype(np.uint8)
    if not np.any(sides == TRAIN):
        raise DataError(
            "the training sources contain no text",
            field="data.sources",
            got=f"files: {len(training.files)}, empty files: "
            f"{training.statistics.num_empty_files}, broken records: "
            f"{training.statistics.num_broken}",
        )
    if validation is not None:
        held_out = np.where(validation.num_characters > 0, VALIDATION, SKIPPED).astype(np.uint8)
        held_out[
            (held_out == VALIDATION) & np.isin(validation.digests, training.digests[sides == TRAIN])
        ] = DUPLICATE
        if not np.any(held_out == VALIDATION):
            num_dropped = int(np.count_nonzero(held_out == DUPLICATE))
            raise DataError(
                "the training sources contain all text of the validation sources",
                field="data.validation",
                got=f"{validation.statistics.num_records} records, "
                f"{validation.statistics.num_broken} of them broken and "
                f"{num_dropped} also in data.sources",
                remedy="Use other text, or remove data.validation and set data.validation_fraction",
            )
        return Corpus(training, validation, sides, held_out, None)
    if section.validation_fraction == 0.0:
        return Corpus(training, None, sides, None, None)
    if section.validation_split == "documents":
        return Corpus(
            training,
            None,
            _split_by_documents(training.digests, sides, section.validation_fraction),
            None,
            None,
        )
    return _split_by_tail(training, sides, section.validation_fraction)


def _split_by_documents(
    digests: npt.NDArray[np.uint64], sides: npt.NDArray[np.uint8], fraction: float
) -> npt.NDArray[np.uint8]:
    """Hold out documents whose hash is in the lowest `fraction` of all possible hashes.

    The side of a document does not depend on the rest of the corpus, so it stays the same as a
    corpus grows. If a side would be empty (few documents), it gets the document with the
    nearest hash.
    """
    present = digests[sides == TRAIN]
    distinct = np.unique(present)
    if len(distinct) < 2:
        raise DataError(
            "a split by documents needs at least two different documents",
            field="data.validation_split",
            got=f"{format_items(len(present), 'document')}, {len(distinct)} different",
            remedy="Set data.validation_split: tail, which holds out the last characters",
        )
    threshold = np.uint64(min(int(fraction * 2.0**64), 2**64 - 1))
    threshold = np.clip(threshold, distinct[0], distinct[-2])
    result = sides.copy()
    result[(sides == TRAIN) & (digests <= threshold)] = VALIDATION
    return result


def _split_by_tail(training: RecordScan, sides: npt.NDArray[np.uint8], fraction: float) -> Corpus:
    """Hold out the last characters of the sources; split the document at the boundary."""
    ends = np.cumsum(training.num_characters)
    total = int(ends[-1])
    boundary = int(total * (1.0 - fraction))
    if not 0 < boundary < total:
        raise DataError(
            "the split leaves one side empty",
            field="data.validation_fraction",
            got=fraction,
            allowed=f"a fraction of {total} characters that leaves both sides at least one",
        )
    result = sides.copy()
    # First record that reaches beyond the boundary.
    boundary_record = int(np.searchsorted(ends, boundary, side="right"))
    result[boundary_record:][result[boundary_record:] == TRAIN] = VALIDATION
    head = boundary - int(ends[boundary_record] - training.num_characters[boundary_record])
    if training.is_indivisible[boundary_record]:
        head = 0  # the whole record is held out
    if not head and not np.any(result == TRAIN):
        raise DataError(
            "the split leaves nothing to train on",
            field="data.validation_fraction",
            got=fraction,
            remedy="Reduce the fraction: the first record exceeds the training share",
        )
    train_digests = training.digests[(result == TRAIN)]
    if head:
        train_digests = np.append(train_digests, training.digests[boundary_record])
    repeats = (result == VALIDATION) & np.isin(training.digests, train_digests)
    if head:
        # By design the split document is on both sides, unless training has a whole copy.
        repeats[boundary_record] = bool(
            np.isin(training.digests[boundary_record], training.digests[result == TRAIN])
        )
    result[repeats] = DUPLICATE
    if not np.any(result == VALIDATION):
        raise DataError(
            "every document in the validation split is also in the training data",
            field="data.validation_split",
            got=f"{int(np.count_nonzero(repeats))} documents, all copies of earlier documents",
            remedy="Set data.validation_split: documents, which keeps copies on one side",
        )
    return Corpus(training, None, result, None, (boundary_record, head) if head else None)
