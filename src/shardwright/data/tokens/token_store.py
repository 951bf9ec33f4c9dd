"""Tokens on disk: per side a flat file of ids, the starts of documents, masks and counts.

<side>.tokens      ids, little-endian uint16 if the vocabulary size is at most 2^16, else uint32
<side>.documents   uint64: index of each document's first token, then the number of tokens
<side>.supervised  uint8, 1 for each supervised token; absent if all are
<side>.weights     little-endian float32, loss weight of each token; absent if all are 1
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

from shardwright.data.corpus import ReadCallback
from shardwright.data.records.record_files import MAX_RECORD_BYTES
from shardwright.data.records.supervision import EncodedRecord
from shardwright.data.sources.source_reader import PIECE_NUM_CHARACTERS, BrokenRecord, TextPiece
from shardwright.data.tokens.tokenizer import IdArray, Tokenizer
from shardwright.errors import DataError, TokenizerError

_MIN_BATCH_NUM_CHARACTERS = 2 * 1024**2
_WEIGHTS_PER_WRITE = 1 << 18

EncodeRecords = Callable[[Iterable[TextPiece]], Iterator[tuple[TextPiece, EncodedRecord | str]]]
"""Function that encodes records in order; yields the reason instead of ids for a skipped
record."""


@dataclass(frozen=True)
class TokenCounts:
    """Counts of one side. `num_unknown` is the number of unknown-token ids.

    `source_documents` are the documents of each source, in order. Answered documents are those
    with a prompt (conversations, pairs, completions, preferences): `num_answered_tokens` counts
    their tokens except the first of each record, and `num_answered_supervised` the supervised
    ones among them. `num_weighted` supervised tokens have a loss weight other than 1.
    `max_id_place` is file and line of the record with the largest id; empty for plain text.
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

    `supervised_mask` is 1 for each supervised token; None means all are. `weights` are the loss
    weights of the tokens; None means 1.
    """

    tokens: npt.NDArray[np.unsignedinteger]
    documents: npt.NDArray[np.uint64]
    counts: TokenCounts
    supervised_mask: npt.NDArray[np.uint8] | None = None
    weights: npt.NDArray[np.float32] | None = None


class _EncodedPart(NamedTuple):
    """Encoded piece, ready to be written."""

    piece: TextPiece
    ids: IdArray
    supervised_mask: npt.NDArray[np.uint8] | None
    num_characters: int
    second_document_start: int | None = None
    """Index of the first id of a second document: the rejected response of a preference."""
    weights: npt.NDArray[np.float32] | None = None


def write_tokens(
    folder: Path,
    side: str,
    pieces: Iterable[TextPiece],
    tokenizer: Tokenizer,
    on_read: ReadCallback,
    encode_records: EncodeRecords | None = None,
    reserve_bytes: Callable[[int], None] = lambda num_bytes: None,
) -> tuple[TokenCounts, list[BrokenRecord]]:
    """Tokenise `pieces` into `folder`, a few megabytes of text at a time.

    Args:
        reserve_bytes: called with the bytes of all files before each write.
        encode_records: encodes pieces other than plain text; with it the supervised mask is
            written.

    Returns:
        The counts, and the records that could not be encoded.
    """
    dtype = np.dtype("<u2") if tokenizer.vocab_size <= 2**16 else np.dtype("<u4")
    counter = _TokenCounter(tokenizer.unknown_id)
    broken: list[BrokenRecord] = []
    with ExitStack() as stack:
        token_file = stack.enter_context(open(folder / f"{side}.tokens", "wb"))
        mask_file = (
            stack.enter_context(open(folder / f"{side}.supervised", "wb"))
            if encode_records is not None
            else None
        )
        weight_file: BinaryIO | None = None
        for part in _encode_parts(pieces, tokenizer, encode_records, on_read, broken):
            has_weights = weight_file is not None or part.weights is not None
            bytes_per_token = dtype.itemsize + (mask_file is not None) + 4 * has_weights
            num_tokens = counter.num_tokens + len(part.ids)
            reserve_bytes(bytes_per_token * num_tokens + 8 * (len(counter.starts) + 3))
            # The first part with weights other than 1.
            if part.weights is not None and weight_file is None:
                weight_file = stack.enter_context(open(folder / f"{side}.weights", "wb"))
                _write_ones(weight_file, counter.num_tokens)
            if weight_file is not None:
                part_weights = part.weights if part.weights is not None else np.ones(len(part.ids))
                weight_file.write(part_weights.astype("<f4").tobytes())
            counter.add(part)
            # numpy's tofile hides the cause of disk errors.
            token_file.write(_convert_ids(part, dtype, tokenizer).tobytes())
            if mask_file is not None:
                supervised = (
                    part.supervised_mask
                    if part.supervised_mask is not None
                    else np.ones(len(part.ids), dtype=np.uint8)
                )
                mask_file.write(supervised.tobytes())
        for output in filter(None, (token_file, mask_file, weight_file)):
            output.flush()
            os.fsync(output.fileno())
    counts = counter.build_counts(dtype.str)
    (folder / f"{side}.documents").write_bytes(
        np.array([*counter.starts, counts.num_tokens], dtype="<u8").tobytes()
    )
    (folder / f"{side}.json").write_text(json.dumps(asdict(counts)), encoding="utf-8")
    return counts, broken


def _write_ones(stream: BinaryIO, number: int) -> None:
    """Write `number` weights of 1, a megabyte at a time."""
    for first in range(0, number, _WEIGHTS_PER_WRITE):
        stream.write(np.ones(min(_WEIGHTS_PER_WRITE, number - first), dtype="<f4").tobytes())


class _TokenCounter:
    """Accumulates the counts of one side while its tokens are written."""

    def __init__(self, unknown_id: int | None) -> None:
        self.starts = array("Q")
        self._unknown_id = unknown_id
        self._record = self._max_id = -1
        self._max_id_place = ""
        self._num_tokens = self._num_characters = self._num_unknown = self._num_response_tokens = (
            self._num_response_supervised
        ) = self._num_weighted = 0
        self._documents_by_source: list[int] = []

    @property
    def num_tokens(self) -> int:
        """Number of tokens so far."""
        return self._num_tokens

    def add(self, part: _EncodedPart) -> None:
        piece = part.piece
        ids = part.ids
        # Not `piece.begins`: the validation part of a split document counts as a document.
        if piece.record != self._record:
            self.starts.append(self._num_tokens)
            self._record = piece.record
            self._documents_by_source += [0] * (
                piece.source_index + 1 - len(self._documents_by_source)
            )
            self._documents_by_source[piece.source_index] += 1
            if part.second_document_start is not None:
                self.starts.append(self._num_tokens + part.second_document_start)
                self._documents_by_source[piece.source_index] += 1
        self._num_tokens += len(ids)
        self._num_characters += part.num_characters
        self._num_unknown += (
            0 if self._unknown_id is None else int(np.count_nonzero(ids == self._unknown_id))
        )
        if len(ids) and int(ids.max()) > self._max_id:
            self._max_id = int(ids.max())
            self._max_id_place = f"{piece.file}:{piece.line}" if piece.file else ""
        if part.supervised_mask is not None and piece.canonical in (
            "chat",
            "pair",
            "completion",
            "preference",
        ):
            self._num_response_tokens += len(ids) - 1
            self._num_response_supervised += int(np.count_nonzero(part.supervised_mask[1:]))
        if part.weights is not None and part.supervised_mask is not None:
            self._num_weighted += int(
                np.count_nonzero((part.weights[1:] != 1) & (part.supervised_mask[1:] != 0))
            )

    def build_counts(self, dtype: str) -> TokenCounts:
        return TokenCounts(
            num_documents=len(self.starts),
            num_characters=self._num_characters,
            num_tokens=self._num_tokens,
            num_unknown=self._num_unknown,
            max_id=self._max_id,
            dtype=dtype,
            source_documents=tuple(self._documents_by_source),
            num_answered_tokens=self._num_response_tokens,
            num_answered_supervised=self._num_response_supervised,
            num_weighted=self._num_weighted,
            max_id_place=self._max_id_place,
        )


def _encode_parts(
    pieces: Iterable[TextPiece],
    tokenizer: Tokenizer,
    encode_records: EncodeRecords | None,
    on_read: ReadCallback,
    broken: list[BrokenRecord],
) -> Iterator[_EncodedPart]:
    """Yield the encoded pieces in order: text in large batches, records by `encode_records`.

    Records that cannot be encoded are appended to `broken`.
    """
    num_read = 0
    for is_text, group in groupby(pieces, lambda piece: piece.canonical == "text"):
        if is_text:
            for batch in _batch_pieces(_join_words(group, tokenizer)):
                for piece, ids in zip(
                    batch, tokenizer.encode_pieces([piece.text for piece in batch]), strict=True
                ):
                    yield _EncodedPart(
                        piece, _add_frame(piece, ids, tokenizer), None, len(piece.text)
                    )
                    num_read += len(piece.text)
                on_read(num_read)
            continue
        assert encode_records is not None, "records without an encoder"
        for piece, outcome in encode_records(group):
            if isinstance(outcome, str):
                broken.append(BrokenRecord(piece.record, piece.file, piece.line, outcome))
            else:
                yield _EncodedPart(
                    piece,
                    outcome.ids,
                    outcome.supervised_mask,
                    outcome.num_characters,
                    outcome.second_document_start,
                    outcome.weights,
                )
            num_read += len(piece.text)
            on_read(num_read)


def _convert_ids(
    part: _EncodedPart, dtype: np.dtype[Any], tokenizer: Tokenizer
) -> npt.NDArray[Any]:
    """Convert ids to the file's type; raise for too large ids, which records may contain."""
    ids = part.ids
    if len(ids) and int(ids.max()) > np.iinfo(dtype).max:
        raise TokenizerError(
            "the data contain a token id outside the vocabulary",
            field="data.sources",
            got=f"token id {int(ids.max())} in {part.piece.file}:{part.piece.line}",
            allowed=f"ids below {tokenizer.vocab_size}",
            remedy="Set tokenizer.path to the tokenizer that encoded the ids",
        )
    return ids.astype(dtype)


def open_tokens(folder: Path, side: str) -> TokenStore:
    """Open the files that `write_tokens` wrote.

    Raises:
        DataError: a file does not have the size that was written (full disk, power failure).
    """
    content = json.loads((folder / f"{side}.json").read_text(encoding="utf-8"))
    counts = TokenCounts(**content | {"source_documents": tuple(content["source_documents"])})
    mask_path = folder / f"{side}.supervised"
    weights_path = folder / f"{side}.weights"
    dtype = np.dtype(counts.dtype)
    for path, num_bytes in (
        (folder / f"{side}.tokens", counts.num_tokens * dtype.itemsize),
        (folder / f"{side}.documents", (counts.num_documents + 1) * 8),
        *([(mask_path, counts.num_tokens)] if mask_path.is_file() else []),
        *(
            [(weights_path, 4 * counts.num_tokens)]
            if counts.num_weighted or weights_path.is_file()
            else []
        ),
    ):
        num_actual_bytes = path.stat().st_size if path.is_file() else 0
        if num_actual_bytes != num_bytes:
            raise DataError(
                "a file of the data cache is damaged",
                field=str(path),
                got=f"{num_actual_bytes} bytes",
                allowed=f"{num_bytes} bytes",
                remedy=f"Delete {folder}; it will be built again",
            )
    tokens: npt.NDArray[np.unsignedinteger]
    if counts.num_tokens:
        tokens = np.memmap(folder / f"{side}.tokens", dtype=dtype, mode="r")
    else:
        tokens = np.zeros(0, dtype=dtype)
    supervised = (
        np.memmap(mask_path, dtype=np.uint8, mode="r")
        if mask_path.is_file() and counts.num_tokens
        else None
    )
    weights = (
        np.memmap(weights_path, dtype="<f4", mode="r")
        if weights_path.is_file() and counts.num_tokens
        else None
    )
    return TokenStore(
        tokens, np.fromfile(folder / f"{side}.documents", dtype="<u8"), counts, supervised, weights
    )


def _add_frame(
    piece: TextPiece, ids: npt.NDArray[np.uint32], tokenizer: Tokenizer
) -> npt.NDArray[np.uint32]:
    prefix = tokenizer.prefix_ids if piece.is_document_start else ()
    suffix = tokenizer.suffix_ids if piece.is_document_end else ()
    if not prefix and not suffix:
        return ids
    return np.concatenate(
        [np.array(prefix, dtype=np.uint32), ids, np.array(suffix, dtype=np.uint32)]
    )


def _join_words(pieces: Iterable[TextPiece], tokenizer: Tokenizer) -> Iterator[TextPiece]:
    """Join pieces that would encode differently alone, so that piece size has no effect."""
    pending: TextPiece | None = None
    parts: list[str] = []
    for piece in pieces:
        if pending is not None:
            if not piece.is_document_start and not tokenizer.is_split_safe(parts[-1], piece.text):
                parts.append(piece.text)
                _check_length(sum(map(len, parts)), tokenizer)
                pending = pending._replace(is_document_end=piece.is_document_end)
                continue
            yield pending._replace(text="".join(parts))
        pending = piece
        parts = [piece.text]
    if pending is not None:
        yield pending._replace(text="".join(parts))


def _check_length(num_characters: int, tokenizer: Tokenizer) -> None:
    """Raise for a document so large that encoding it at once needs too much memory."""
    if num_characters > MAX_RECORD_BYTES:
        raise DataError(
            "a document is too long for this tokenizer, which does not split text into words",
            field="data.sources",
            got=f"at least {num_characters:,} characters with a {tokenizer.kind} tokenizer",
            allowed=f"{MAX_RECORD_BYTES:,} characters",
            remedy="Split the text into several files, or into records of JSON lines",
        )


def _batch_pieces(pieces: Iterable[TextPiece]) -> Iterator[list[TextPiece]]:
    """Group pieces into batches of enough text to keep every core busy."""
    min_characters = max(_MIN_BATCH_NUM_CHARACTERS, PIECE_NUM_CHARACTERS * (os.cpu_count() or 1))
    batch: list[TextPiece] = []
    num_characters = 0
    for piece in pieces:
        batch.append(piece)
        num_characters += len(piece.text)
        if num_characters >= min_characters:
            yield batch
            batch = []
            num_characters = 0
    if batch:
        yield batch
