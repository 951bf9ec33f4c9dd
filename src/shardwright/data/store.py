"""Tokens on disk: one flat file of ids per side, where each document starts, and what was counted on the way.

<side>.tokens      ids, little-endian uint16 where the vocabulary allows, else uint32
<side>.documents   uint64: index of each document's first token, and the number of tokens at the end
<side>.supervised  uint8, 1 for each token that is learnt; absent where all are
<side>.weights     little-endian float32, what each token's loss weighs; absent where all weigh 1
<side>.json        counts, and the type of the ids
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from shardwright.data.corpus import Read
from shardwright.data.records import MAX_RECORD_BYTES
from shardwright.data.sources import PIECE_CHARACTERS, Broken, Piece
from shardwright.data.supervision import Encoded
from shardwright.data.tokenizer import IdArray, Tokenizer
from shardwright.errors import DataError, TokenizerError

_MIN_BATCH_CHARACTERS = 2 * 1024**2
_WEIGHTS_AT_A_TIME = 1 << 18

Encode = Callable[[Iterable[Piece]], Iterator[tuple[Piece, Encoded | str]]]
"""Records to ids, in order, or why one is set aside."""


@dataclass(frozen=True)
class TokenCounts:
    """What was counted while one side was tokenised. `num_unknown` are tokens that stand for text without ids.

    `source_documents`: documents of each source, in order. The answered documents are those with a prompt (conversations,
    pairs, completions); of their tokens but the first, `num_answered_supervised` are learnt. `num_weighted` learnt tokens have
    another weight than 1. `max_id_place`: file and line of the record with the largest id; empty for plain text.
    """

    num_documents: int
    num_characters: int
    num_tokens: int
    num_unknown: int
    max_id: int
    dtype: str
    source_documents: tuple[int, ...] = ()
    num_answered_tokens: int = 0
    num_answered_supervised: int = 0
    num_weighted: int = 0
    max_id_place: str = ""


@dataclass(frozen=True)
class TokenStore:
    """One side of a corpus, read through memory maps.

    `supervised` holds a 1 for each token that is learnt; None is all. `weights` are those of the tokens' losses; None is 1.
    """

    tokens: npt.NDArray[np.unsignedinteger]
    documents: npt.NDArray[np.uint64]
    counts: TokenCounts
    supervised: npt.NDArray[np.uint8] | None = None
    weights: npt.NDArray[np.float32] | None = None


class _Part(NamedTuple):
    """Ids of a piece, ready to be written."""

    piece: Piece
    ids: IdArray
    supervised: npt.NDArray[np.uint8] | None
    num_characters: int
    border: int | None = None
    """Where a second document begins: the rejected response of a preference."""
    weights: npt.NDArray[np.float32] | None = None


def write_tokens(
    folder: Path,
    side: str,
    pieces: Iterable[Piece],
    tokenizer: Tokenizer,
    on_read: Read,
    encode: Encode | None = None,
) -> tuple[TokenCounts, list[Broken]]:
    """Tokenise `pieces` into `folder`, holding a few megabytes of text at a time.

    Args:
        encode: for pieces that are no plain text; with it every token has a mark that says whether it is learnt.

    Returns what was counted, and the records that could not be encoded.
    """
    dtype = np.dtype("<u2") if tokenizer.vocab_size <= 2**16 else np.dtype("<u4")
    writing = _Writing(tokenizer.unknown_id)
    broken: list[Broken] = []
    with ExitStack() as stack:
        stream = stack.enter_context(open(folder / f"{side}.tokens", "wb"))
        marks = stack.enter_context(open(folder / f"{side}.supervised", "wb")) if encode is not None else None
        weights: BinaryIO | None = None
        for part in _encoded(pieces, tokenizer, encode, on_read, broken):
            if part.weights is not None and weights is None:  # the first that are not all 1
                weights = stack.enter_context(open(folder / f"{side}.weights", "wb"))
                _write_ones(weights, writing.num_tokens)
            if weights is not None:
                own = part.weights if part.weights is not None else np.ones(len(part.ids))
                weights.write(own.astype("<f4").tobytes())
            writing.count(part)
            stream.write(_as_type(part, dtype, tokenizer).tobytes())  # numpy's tofile hides why a disk refuses
            if marks is not None:
                supervised = part.supervised if part.supervised is not None else np.ones(len(part.ids), dtype=np.uint8)
                marks.write(supervised.tobytes())
        for written in filter(None, (stream, marks, weights)):
            written.flush()
            os.fsync(written.fileno())
    counts = writing.counts(dtype.str)
    (folder / f"{side}.documents").write_bytes(np.array([*writing.starts, counts.num_tokens], dtype="<u8").tobytes())
    (folder / f"{side}.json").write_text(json.dumps(asdict(counts)), encoding="utf-8")
    return counts, broken


def _write_ones(stream: BinaryIO, number: int) -> None:
    """`number` weights of 1, a megabyte at a time."""
    for first in range(0, number, _WEIGHTS_AT_A_TIME):
        stream.write(np.ones(min(_WEIGHTS_AT_A_TIME, number - first), dtype="<f4").tobytes())


class _Writing:
    """What is counted on the way."""

    def __init__(self, unknown_id: int | None) -> None:
        self.starts = array("Q")
        self._unknown_id = unknown_id
        self._record = self._max_id = -1
        self._max_id_place = ""
        self._tokens = self._characters = self._unknown = self._answered = self._answered_supervised = self._weighted = 0
        self._by_source: list[int] = []

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return self._tokens

    def count(self, part: _Part) -> None:
        piece, ids = part.piece, part.ids
        if piece.record != self._record:  # the tail of a document that a split cut in two does not begin, but is one here
            self.starts.append(self._tokens)
            self._record = piece.record
            self._by_source += [0] * (piece.source + 1 - len(self._by_source))
            self._by_source[piece.source] += 1
            if part.border is not None:
                self.starts.append(self._tokens + part.border)
                self._by_source[piece.source] += 1
        self._tokens += len(ids)
        self._characters += part.num_characters
        self._unknown += 0 if self._unknown_id is None else int(np.count_nonzero(ids == self._unknown_id))
        if len(ids) and int(ids.max()) > self._max_id:
            self._max_id, self._max_id_place = int(ids.max()), f"{piece.file}:{piece.line}" if piece.file else ""
        if part.supervised is not None and piece.canonical in ("chat", "pair", "completion", "preference"):
            self._answered += len(ids) - 1
            self._answered_supervised += int(np.count_nonzero(part.supervised[1:]))
        if part.weights is not None and part.supervised is not None:
            self._weighted += int(np.count_nonzero((part.weights[1:] != 1) & (part.supervised[1:] != 0)))

    def counts(self, dtype: str) -> TokenCounts:
        return TokenCounts(
            num_documents=len(self.starts),
            num_characters=self._characters,
            num_tokens=self._tokens,
            num_unknown=self._unknown,
            max_id=self._max_id,
            dtype=dtype,
            source_documents=tuple(self._by_source),
            num_answered_tokens=self._answered,
            num_answered_supervised=self._answered_supervised,
            num_weighted=self._weighted,
            max_id_place=self._max_id_place,
        )


def _encoded(
    pieces: Iterable[Piece], tokenizer: Tokenizer, encode: Encode | None, on_read: Read, broken: list[Broken]
) -> Iterator[_Part]:
    """The pieces as ids, in order; text in large batches, records through `encode`. What fails goes to `broken`."""
    num_read = 0
    for plain, group in groupby(pieces, lambda piece: piece.canonical == "text"):
        if plain:
            for batch in _batches(_whole_words(group, tokenizer)):
                for piece, ids in zip(batch, tokenizer.encode_pieces([piece.text for piece in batch]), strict=True):
                    yield _Part(piece, _framed(piece, ids, tokenizer), None, len(piece.text))
                    num_read += len(piece.text)
                on_read(num_read)
            continue
        assert encode is not None, "records without an encoder"
        for piece, outcome in encode(group):
            if isinstance(outcome, str):
                broken.append(Broken(piece.record, piece.file, piece.line, outcome))
            else:
                yield _Part(piece, outcome.ids, outcome.supervised, outcome.num_characters, outcome.border, outcome.weights)
            num_read += len(piece.text)
            on_read(num_read)


def _as_type(part: _Part, dtype: np.dtype[Any], tokenizer: Tokenizer) -> npt.NDArray[Any]:
    """The ids in the type of the file. Ids that were given as such may lie beyond the tokenizer's, and must not wrap around."""
    ids = part.ids
    if len(ids) and int(ids.max()) > np.iinfo(dtype).max:
        raise TokenizerError(
            "the data hold a token id outside the vocabulary",
            field="data.sources",
            got=f"token id {int(ids.max())} in {part.piece.file}:{part.piece.line}",
            allowed=f"ids below {tokenizer.vocab_size}",
            remedy="Name the tokenizer that the ids were made with",
        )
    return ids.astype(dtype)


def open_tokens(folder: Path, side: str) -> TokenStore:
    """What `write_tokens` wrote.

    Raises:
        DataError: the files are not of the size that was written; a disk was full or a machine lost power.
    """
    content = json.loads((folder / f"{side}.json").read_text(encoding="utf-8"))
    counts = TokenCounts(**content | {"source_documents": tuple(content["source_documents"])})
    marks, weighing = folder / f"{side}.supervised", folder / f"{side}.weights"
    dtype = np.dtype(counts.dtype)
    for path, num_bytes in (
        (folder / f"{side}.tokens", counts.num_tokens * dtype.itemsize),
        (folder / f"{side}.documents", (counts.num_documents + 1) * 8),
        *([(marks, counts.num_tokens)] if marks.is_file() else []),
        *([(weighing, 4 * counts.num_tokens)] if counts.num_weighted or weighing.is_file() else []),
    ):
        num_found = path.stat().st_size if path.is_file() else 0
        if num_found != num_bytes:
            raise DataError(
                "a file of the data cache is damaged",
                field=str(path),
                got=f"{num_found} bytes",
                allowed=f"{num_bytes} bytes",
                remedy=f"Delete {folder}; it is made again",
            )
    tokens: npt.NDArray[np.unsignedinteger]
    if counts.num_tokens:
        tokens = np.memmap(folder / f"{side}.tokens", dtype=dtype, mode="r")
    else:
        tokens = np.zeros(0, dtype=dtype)
    supervised = np.memmap(marks, dtype=np.uint8, mode="r") if marks.is_file() and counts.num_tokens else None
    weights = np.memmap(weighing, dtype="<f4", mode="r") if weighing.is_file() and counts.num_tokens else None
    return TokenStore(tokens, np.fromfile(folder / f"{side}.documents", dtype="<u8"), counts, supervised, weights)


def _framed(piece: Piece, ids: npt.NDArray[np.uint32], tokenizer: Tokenizer) -> npt.NDArray[np.uint32]:
    prefix = tokenizer.prefix_ids if piece.begins else ()
    suffix = tokenizer.suffix_ids if piece.ends else ()
    if not prefix and not suffix:
        return ids
    return np.concatenate([np.array(prefix, dtype=np.uint32), ids, np.array(suffix, dtype=np.uint32)])


def _whole_words(pieces: Iterable[Piece], tokenizer: Tokenizer) -> Iterator[Piece]:
    """Joins pieces of a document where the tokenizer would not give the same ids apart: reading in pieces changes nothing."""
    held: Piece | None = None
    parts: list[str] = []
    for piece in pieces:
        if held is not None:
            if not piece.begins and not tokenizer.may_cut(parts[-1], piece.text):
                parts.append(piece.text)
                _check_length(sum(map(len, parts)), tokenizer)
                held = held._replace(ends=piece.ends)
                continue
            yield held._replace(text="".join(parts))
        held, parts = piece, [piece.text]
    if held is not None:
        yield held._replace(text="".join(parts))


def _check_length(num_characters: int, tokenizer: Tokenizer) -> None:
    """Refuse to hold a whole corpus for a tokenizer that can only be given all of a document at once."""
    if num_characters > MAX_RECORD_BYTES:
        raise DataError(
            "a document is too long for this tokenizer, which does not split text into words before it merges",
            field="data.sources",
            got=f"{num_characters:,} characters and more in a {tokenizer.kind} tokenizer",
            allowed=f"{MAX_RECORD_BYTES:,} characters",
            remedy="Divide the text into several files, or into records of JSON lines",
        )


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Enough text at a time to keep every core busy."""
    enough = max(_MIN_BATCH_CHARACTERS, PIECE_CHARACTERS * (os.cpu_count() or 1))
    batch: list[Piece] = []
    num_characters = 0
    for piece in pieces:
        batch.append(piece)
        num_characters += len(piece.text)
        if num_characters >= enough:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch
