"""Which documents are learnt from and which are held out, such that nothing held out is ever learnt from.

A first pass over the sources weighs every record (its length, a hash of its text, whether it can be read at all) and says
on which side it falls; later passes read the text of one side. Per record 18 bytes are held, never the text.

Two documents are the same when their text is. A duplicate follows its original to its side of a split by `documents`; under
`tail`, and with validation sources of their own, held-out documents that are also learnt from are dropped and counted.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from shardwright.config.data import DataSection
from shardwright.data.sources import Broken, Piece, SourceFile, read_files
from shardwright.errors import DataError

Side = Literal["train", "validation"]
SET_ASIDE, TRAIN, VALIDATION, DUPLICATE = range(4)
_CODE: dict[Side, int] = {"train": TRAIN, "validation": VALIDATION}
NUM_BROKEN_KEPT = 200
"""Broken records that are kept by file and line; beyond these they are counted only."""

Read = Callable[[int], None]
"""Told the characters read so far."""


class Records(NamedTuple):
    """How many records there are and which could not be read. Empty files are counted apart: nothing is lost with them."""

    num_records: int
    num_broken: int
    num_empty_files: int
    broken: tuple[Broken, ...]

    @property
    def broken_fraction(self) -> float:
        """Share of records that could not be read."""
        return self.num_broken / max(1, self.num_records)

    def with_broken(self, more: Sequence[Broken]) -> Records:
        """These with records that were found broken later, when they were encoded."""
        kept = (self.broken + tuple(more))[:NUM_BROKEN_KEPT]
        return self._replace(num_broken=self.num_broken + len(more), broken=kept)

    def check(self, max_broken_fraction: float, field: str) -> None:
        """Raises DataError when more records are broken than the recipe allows; names the first few."""
        if self.broken_fraction <= max_broken_fraction:
            return
        first = "; ".join(f"{item.file}:{item.line} {item.reason}" for item in self.broken[:4])
        lines = self.num_broken == self.num_records > 1 and self.broken[0].reason.startswith("not JSON")
        more = f"; and {self.num_broken - 4} more" if self.num_broken > 4 else ""
        raise DataError(
            f"too many records cannot be read: {first}{more}",
            field=field,
            got=f"{self.num_broken} of {self.num_records} broken, {self.broken_fraction:.1%}",
            allowed=f"{max_broken_fraction:.1%}, data.max_broken_fraction",
            remedy="A source holds records of one kind: say in its text_field, or its `records` and `columns`, which columns hold "
            "what, and give records of another kind a source of their own"
            if self.broken[0].reason.startswith("no field")
            else ("One line of JSON lines is one record; name files of another form .json. " if lines else "")
            + "Mend them, or raise data.max_broken_fraction to set them aside",
        )


@dataclass(frozen=True)
class Weighed:
    """What the first pass learns of one list of files. `characters` is 0 for a record that is set aside.

    `indivisible`: whether a record is no plain text, which a split must not cut in two.
    """

    files: tuple[SourceFile, ...]
    digests: npt.NDArray[np.uint64]
    characters: npt.NDArray[np.int64]
    records: Records
    indivisible: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Corpus:
    """Records of training and validation sources with the side of each.

    `cut`: under `tail`, the record that lies on both sides and how many of its characters are learnt from.
    """

    training: Weighed
    validation: Weighed | None
    training_sides: npt.NDArray[np.uint8]
    validation_sides: npt.NDArray[np.uint8] | None
    cut: tuple[int, int] | None

    @property
    def num_duplicates_dropped(self) -> int:
        """Held-out documents dropped because they are learnt from."""
        sides = self.training_sides if self.validation_sides is None else self.validation_sides
        return int(np.count_nonzero(sides == DUPLICATE))

    def characters(self, side: Side) -> int:
        """Characters on a side."""
        if side == "validation" and self.validation is not None and self.validation_sides is not None:
            return int(self.validation.characters[self.validation_sides == VALIDATION].sum())
        total = int(self.training.characters[self.training_sides == _CODE[side]].sum())
        if self.cut is not None:
            record, head = self.cut
            if side == "train":
                total += head
            elif self.training_sides[record] == VALIDATION:
                total -= head
        return total

    def pieces(self, side: Side) -> Iterator[Piece]:
        """The text of one side, in the order of the sources."""
        if side == "validation" and self.validation is not None:
            assert self.validation_sides is not None
            yield from _select(self.validation, self.validation_sides, VALIDATION)
        elif self.cut is None:
            yield from _select(self.training, self.training_sides, _CODE[side])
        else:
            yield from self._pieces_of_cut(side)

    def _pieces_of_cut(self, side: Side) -> Iterator[Piece]:
        assert self.cut is not None
        cut_record, head = self.cut
        wanted = self.training_sides == _CODE[side]
        if side == "train":
            wanted[cut_record] = True
        seen = 0
        for piece in _select(self.training, wanted, True):
            if piece.record != cut_record:
                yield piece
                continue
            first, seen = seen, seen + len(piece.text)
            if side == "train" and first < head:
                yield piece._replace(text=piece.text[: head - first], ends=False)
            elif side == "validation" and seen > head:
                yield piece._replace(text=piece.text[max(0, head - first) :], begins=False)


def _select(weighed: Weighed, sides: npt.NDArray[np.generic], wanted: int) -> Iterator[Piece]:
    for item in read_files(weighed.files):
        if item.record >= len(sides):
            raise DataError("the sources changed while they were read", got=f"a record {item.record + 1} of {len(sides)}")
        if isinstance(item, Piece) and sides[item.record] == wanted:
            yield item


def weigh(files: Sequence[SourceFile], on_read: Read) -> Weighed:
    """The first pass over `files`."""
    digests, characters, indivisible = array("Q"), array("q"), array("b")
    broken: list[Broken] = []
    num_broken = num_empty = num_read = 0
    digest, length = hashlib.blake2b(digest_size=8), 0
    for item in read_files(files):
        if isinstance(item, Broken):
            if item.harmless:
                num_empty += 1
            else:
                num_broken += 1
                if len(broken) < NUM_BROKEN_KEPT:
                    broken.append(item)
            digest, length = hashlib.blake2b(digest_size=8), 0
            digests.append(0)
            characters.append(0)
            indivisible.append(0)
            continue
        digest.update(item.text.encode("utf-8"))
        length += len(item.text)
        if item.ends:
            digests.append(int.from_bytes(digest.digest(), "little"))
            characters.append(length)
            indivisible.append(item.canonical != "text")
            num_read += length
            on_read(num_read)
            digest, length = hashlib.blake2b(digest_size=8), 0
    return Weighed(
        tuple(files),
        np.frombuffer(digests, dtype=np.uint64),
        np.frombuffer(characters, dtype=np.int64),
        Records(len(characters) - num_empty, num_broken, num_empty, tuple(broken)),
        np.frombuffer(indivisible, dtype=np.bool_),
    )


def divide(training: Weighed, validation: Weighed | None, section: DataSection) -> Corpus:
    """Decide the side of every record.

    Raises:
        DataError: nothing to learn from, or a split that leaves a side empty.
    """
    sides = np.where(training.characters > 0, TRAIN, SET_ASIDE).astype(np.uint8)
    if not np.any(sides == TRAIN):
        raise DataError(
            "the training sources hold no text",
            field="data.sources",
            got=f"{len(training.files)} files, {training.records.num_empty_files} of them empty, and "
            f"{training.records.num_broken} broken records",
        )
    if validation is not None:
        held_out = np.where(validation.characters > 0, VALIDATION, SET_ASIDE).astype(np.uint8)
        held_out[(held_out == VALIDATION) & np.isin(validation.digests, training.digests[sides == TRAIN])] = DUPLICATE
        if not np.any(held_out == VALIDATION):
            num_dropped = int(np.count_nonzero(held_out == DUPLICATE))
            raise DataError(
                "the validation sources hold no text that is not also learnt from",
                field="data.validation",
                got=f"{validation.records.num_records} records, {validation.records.num_broken} of them broken and "
                f"{num_dropped} also in data.sources",
                remedy="Give other text, or leave data.validation out and set data.validation_fraction",
            )
        return Corpus(training, validation, sides, held_out, None)
    if section.validation_fraction == 0.0:
        return Corpus(training, None, sides, None, None)
    if section.validation_split == "documents":
        return Corpus(training, None, _by_documents(training.digests, sides, section.validation_fraction), None, None)
    return _by_tail(training, sides, section.validation_fraction)


def _by_documents(digests: npt.NDArray[np.uint64], sides: npt.NDArray[np.uint8], fraction: float) -> npt.NDArray[np.uint8]:
    """A document is held out when its hash lies in the lowest `fraction` of hashes, whatever else the corpus holds.

    So documents keep their sides as a corpus grows. On corpora of a few documents a side may come out empty: then it gets
    the one document whose hash is nearest.
    """
    present = digests[sides == TRAIN]
    distinct = np.unique(present)
    if len(distinct) < 2:
        raise DataError(
            "a split by documents needs at least two different documents",
            field="data.validation_split",
            got=f"{len(present)} documents, {len(distinct)} different",
            remedy="Set data.validation_split: tail, which holds out the last characters",
        )
    threshold = np.uint64(min(int(fraction * 2.0**64), 2**64 - 1))
    threshold = np.clip(threshold, distinct[0], distinct[-2])
    result = sides.copy()
    result[(sides == TRAIN) & (digests <= threshold)] = VALIDATION
    return result


def _by_tail(training: Weighed, sides: npt.NDArray[np.uint8], fraction: float) -> Corpus:
    """The last characters of the sources are held out; the document in which the boundary lies is cut in two."""
    ends = np.cumsum(training.characters)
    total = int(ends[-1])
    boundary = int(total * (1.0 - fraction))
    if not 0 < boundary < total:
        raise DataError(
            "the split leaves one side empty",
            field="data.validation_fraction",
            got=fraction,
            allowed=f"shares of {total} characters",
        )
    result = sides.copy()
    at = int(np.searchsorted(ends, boundary, side="right"))  # first record that reaches beyond the boundary
    result[at:][result[at:] == TRAIN] = VALIDATION
    head = boundary - int(ends[at] - training.characters[at])
    if training.indivisible[at]:
        head = 0  # held out whole
    if not head and not np.any(result == TRAIN):
        raise DataError(
            "the split leaves nothing to learn from",
            field="data.validation_fraction",
            got=fraction,
            remedy="Hold out less: the first record is larger than what remains",
        )
    learnt = training.digests[(result == TRAIN)]
    if head:
        learnt = np.append(learnt, training.digests[at])
    repeats = (result == VALIDATION) & np.isin(training.digests, learnt)
    if head:
        # The cut document is on both sides by design, unless a whole copy of it is learnt from.
        repeats[at] = bool(np.isin(training.digests[at], training.digests[result == TRAIN]))
    result[repeats] = DUPLICATE
    if not np.any(result == VALIDATION):
        raise DataError(
            "everything in the tail is also learnt from",
            field="data.validation_split",
            got=f"{int(np.count_nonzero(repeats))} documents, all copies of documents before them",
            remedy="Set data.validation_split: documents, which keeps copies on one side",
        )
    return Corpus(training, None, result, None, (at, head) if head else None)
