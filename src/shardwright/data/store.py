"""Tokens on disk: one flat file of ids per side, where each document starts, and what was counted on the way.

<side>.tokens      ids, little-endian uint16 where the vocabulary allows, else uint32
<side>.documents   uint64: index of each document's first token, and the number of tokens at the end
<side>.json        counts, and the type of the ids
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardwright.data.corpus import Read
from shardwright.data.sources import PIECE_CHARACTERS, Piece
from shardwright.data.tokenizer import Tokenizer
from shardwright.errors import DataError

_MIN_BATCH_CHARACTERS = 2 * 1024**2


@dataclass(frozen=True)
class TokenCounts:
    """What was counted while one side was tokenised. `num_unknown` are tokens that stand for text without ids."""

    num_documents: int
    num_characters: int
    num_tokens: int
    num_unknown: int
    max_id: int
    dtype: str


@dataclass(frozen=True)
class TokenStore:
    """One side of a corpus, read through memory maps."""

    tokens: npt.NDArray[np.unsignedinteger]
    documents: npt.NDArray[np.uint64]
    counts: TokenCounts


def write_tokens(folder: Path, side: str, pieces: Iterable[Piece], tokenizer: Tokenizer, on_read: Read) -> TokenCounts:
    """Tokenise `pieces` into `folder`, holding a few megabytes of text at a time."""
    dtype = np.dtype("<u2") if tokenizer.vocab_size <= 2**16 else np.dtype("<u4")
    starts = array("Q")
    num_tokens = num_characters = num_unknown = 0
    max_id = record = -1
    with open(folder / f"{side}.tokens", "wb") as stream:
        for batch in _batches(_whole_words(pieces, tokenizer)):
            for piece, text_ids in zip(batch, tokenizer.encode_pieces([piece.text for piece in batch]), strict=True):
                ids = _framed(piece, text_ids, tokenizer)
                if piece.record != record:  # the tail of a document that a split cut in two does not begin, but is a document here
                    starts.append(num_tokens)
                    record = piece.record
                stream.write(ids.astype(dtype).tobytes())  # numpy's tofile hides why a disk refuses
                num_tokens += len(ids)
                num_characters += len(piece.text)
                num_unknown += 0 if tokenizer.unknown_id is None else int(np.count_nonzero(ids == tokenizer.unknown_id))
                max_id = max(max_id, int(ids.max())) if len(ids) else max_id
            on_read(num_characters)
        stream.flush()
        os.fsync(stream.fileno())
    counts = TokenCounts(len(starts), num_characters, num_tokens, num_unknown, max_id, dtype.str)
    (folder / f"{side}.documents").write_bytes(np.array([*starts, num_tokens], dtype="<u8").tobytes())
    (folder / f"{side}.json").write_text(json.dumps(asdict(counts)), encoding="utf-8")
    return counts


def open_tokens(folder: Path, side: str) -> TokenStore:
    """What `write_tokens` wrote.

    Raises:
        DataError: the files are not of the size that was written; a disk was full or a machine lost power.
    """
    counts = TokenCounts(**json.loads((folder / f"{side}.json").read_text(encoding="utf-8")))
    dtype = np.dtype(counts.dtype)
    for path, num_bytes in (
        (folder / f"{side}.tokens", counts.num_tokens * dtype.itemsize),
        (folder / f"{side}.documents", (counts.num_documents + 1) * 8),
    ):
        if path.stat().st_size != num_bytes:
            raise DataError(
                "a file of the data cache is damaged",
                field=str(path),
                got=f"{path.stat().st_size} bytes",
                allowed=f"{num_bytes} bytes",
                remedy=f"Delete {folder}; it is made again",
            )
    tokens: npt.NDArray[np.unsignedinteger]
    if counts.num_tokens:
        tokens = np.memmap(folder / f"{side}.tokens", dtype=dtype, mode="r")
    else:
        tokens = np.zeros(0, dtype=dtype)
    return TokenStore(tokens, np.fromfile(folder / f"{side}.documents", dtype="<u8"), counts)


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
                held = held._replace(ends=piece.ends)
                continue
            yield held._replace(text="".join(parts))
        held, parts = piece, [piece.text]
    if held is not None:
        yield held._replace(text="".join(parts))


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
