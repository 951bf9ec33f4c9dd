"""Files of token ids in shardwright's own format, written and read: `*.swtokens`.

All numbers are little-endian. docs/token-files.md describes the format byte by byte.

    0    8 bytes   SWTOKENS
    8    uint32    version of the format: 1
    12   uint32    bytes of an id: 2 or 4
    16   uint32    1 if there is a mask of supervised tokens, else 0
    20   uint32    vocabulary size of the tokenizer
    24   uint64    D, number of documents
    32   uint64    T, number of tokens
    40   16 bytes  hash of the tokenizer; zeros if there was none
    56   32 bytes  SHA-256 of the body: everything from byte 120 on
    88   32 bytes  SHA-256 of the bytes 0 to 87
    120            D + 1 uint64: index of each document's first token, then T
                   T ids
                   T bytes, 1 for each supervised token, if there is a mask
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from shardwright.errors import DataError, TokenizerError
from shardwright.files import open_regular_file

SUFFIX = ".swtokens"
VERSION = 1
MAX_DOCUMENT_TOKENS = 1 << 22
"""Largest document: as text its ids must fit into a record."""
_MAGIC = b"SWTOKENS"
_FIELDS = struct.Struct("<8sIIIIQQ16s32s")
_HASH_BYTES = 32
HEADER_BYTES = _FIELDS.size + _HASH_BYTES
_BLOCK_BYTES = 1 << 20
NO_TOKENIZER = "0" * 32
_FILE_NAME = re.compile(r"(\d{5,})-of-(\d{5,})" + re.escape(SUFFIX))


@dataclass(frozen=True)
class TokenFileHeader:
    """First 120 bytes of a file; `tokenizer_hash` is `Tokenizer.content_hash`, hexadecimal."""

    id_bytes: int
    has_mask: bool
    vocab_size: int
    num_documents: int
    num_tokens: int
    tokenizer_hash: str
    body_hash: bytes

    @property
    def num_bytes(self) -> int:
        """Size of the whole file."""
        return (
            HEADER_BYTES
            + 8 * (self.num_documents + 1)
            + self.num_tokens * (self.id_bytes + self.has_mask)
        )

    def pack(self) -> bytes:
        """Return the header's bytes."""
        fields = _FIELDS.pack(
            _MAGIC,
            VERSION,
            self.id_bytes,
            self.has_mask,
            self.vocab_size,
            self.num_documents,
            self.num_tokens,
            bytes.fromhex(self.tokenizer_hash),
            self.body_hash,
        )
        return fields + hashlib.sha256(fields).digest()


def write_token_file(
    path: Path,
    ids: npt.NDArray[Any],
    document_starts: npt.NDArray[Any],
    supervised_mask: npt.NDArray[np.uint8] | None,
    vocab_size: int,
    tokenizer_hash: str,
) -> None:
    """Write one file.

    Args:
        ids: ids of all documents, shape [T]; uint16 or uint32.
        document_starts: index of each document's first id, then T; shape [D + 1].
        supervised_mask: 1 for each supervised token, shape [T]; None if all are.
    """
    parts = [document_starts.astype("<u8").tobytes(), ids.astype(f"<u{ids.itemsize}").tobytes()]
    if supervised_mask is not None:
        parts.append(supervised_mask.astype("<u1").tobytes())
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    header = TokenFileHeader(
        ids.itemsize,
        supervised_mask is not None,
        vocab_size,
        len(document_starts) - 1,
        len(ids),
        tokenizer_hash,
        digest.digest(),
    )
    with open(path, "wb") as output:
        output.write(header.pack())
        for part in parts:
            output.write(part)


def read_header(path: Path) -> TokenFileHeader:
    """Read and check the header.

    Raises:
        DataError: the file is of another format or of a later version, damaged or truncated.
        OSError: it cannot be read.
    """
    with open_regular_file(path) as stream:
        return _read_header(path, stream)


def _read_header(path: Path, stream: IO[bytes]) -> TokenFileHeader:
    content = stream.read(HEADER_BYTES)
    if content[: len(_MAGIC)] != _MAGIC:
        raise DataError(
            "not a file of token ids in shardwright's format",
            field=str(path),
            got=f"it starts with {content[: len(_MAGIC)]!r}",
            allowed=f"{_MAGIC!r}",
            remedy="Write it with `shardwright data RECIPE --write-tokens FOLDER`",
        )
    if len(content) < HEADER_BYTES:
        raise _build_damage_error(path, f"{len(content)} bytes", f"{HEADER_BYTES} of the header")
    fields = content[: _FIELDS.size]
    version = int.from_bytes(content[8:12], "little")
    if version != VERSION:
        raise DataError(
            "this release does not read this version of the format",
            field=str(path),
            got=version,
            allowed=str(VERSION),
            remedy="Update shardwright, or write the file again",
        )
    if hashlib.sha256(fields).digest() != content[_FIELDS.size :]:
        raise _build_damage_error(path, "another hash of the header", "the hash in the file")
    _, _, id_bytes, has_mask, vocab_size, num_documents, num_tokens, tokenizer, body = (
        _FIELDS.unpack(fields)
    )
    header = TokenFileHeader(
        id_bytes, bool(has_mask), vocab_size, num_documents, num_tokens, tokenizer.hex(), body
    )
    num_bytes = path.stat().st_size
    if id_bytes not in (2, 4) or num_bytes != header.num_bytes:
        raise _build_damage_error(path, f"{num_bytes} bytes", f"{header.num_bytes} bytes")
    return header


def read_token_file(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the documents as rows of token ids, after the hash of the body has been checked.

    Raises:
        DataError: as `read_header`; another hash; documents that are not in order.
    """
    with open_regular_file(path) as stream, open_regular_file(path) as mask_stream:
        header = _read_header(path, stream)
        digest = hashlib.sha256()
        while block := stream.read(_BLOCK_BYTES):
            digest.update(block)
        if digest.digest() != header.body_hash:
            raise _build_damage_error(path, "another hash of the body", "the hash in its header")
        stream.seek(HEADER_BYTES)
        num_start_bytes = 8 * (header.num_documents + 1)
        starts = np.frombuffer(stream.read(num_start_bytes), "<u8").astype(np.int64)
        if starts[0] or starts[-1] != header.num_tokens or np.any(np.diff(starts) < 0):
            raise _build_damage_error(path, "documents that overlap", "documents in order")
        mask_stream.seek(HEADER_BYTES + num_start_bytes + header.num_tokens * header.id_bytes)
        for length in np.diff(starts).tolist():
            ids = np.frombuffer(stream.read(length * header.id_bytes), f"<u{header.id_bytes}")
            row: dict[str, Any] = {"input_ids": ids.tolist()}
            if header.has_mask:
                row["loss_mask"] = list(mask_stream.read(length))
            yield row


def format_file_name(number: int, num_files: int) -> str:
    """Return the name of a file of several, numbered from 0.

    >>> format_file_name(0, 12)
    '00000-of-00012.swtokens'
    """
    return f"{number:05}-of-{num_files:05}{SUFFIX}"


def find_missing_files(names: Iterable[str]) -> list[str]:
    """Return the names of files that others with their folder and number of files imply.

    >>> find_missing_files(["train/00001-of-00002.swtokens"])
    ['train/00000-of-00002.swtokens']
    """
    present = set(names)
    implied: dict[str, None] = {}
    for name in sorted(present):
        folder, slash, last = name.rpartition("/")
        if match := _FILE_NAME.fullmatch(last):
            for number in range(int(match[2])):
                implied[f"{folder}{slash}{format_file_name(number, int(match[2]))}"] = None
    return [name for name in implied if name not in present]


def check_tokenizers(paths: Iterable[Path], tokenizer_hash: str | None) -> None:
    """Check that files of token ids were written with the recipe's tokenizer.

    Args:
        tokenizer_hash: `Tokenizer.content_hash`; None for a recipe without a tokenizer, whose
            files must have been written with one and the same. Files that were written without a
            tokenizer fit any.

    Raises:
        TokenizerError: a file was written with another tokenizer.
    """
    expected = tokenizer_hash
    for path in paths:
        found = read_header(path).tokenizer_hash
        if found == NO_TOKENIZER:
            continue
        if expected is not None and found != expected:
            raise TokenizerError(
                "the token ids were written with another tokenizer",
                field=str(path),
                got=f"tokenizer {found}",
                allowed=f"tokenizer {expected}"
                + ("" if tokenizer_hash else ", as in the files before it"),
                remedy="Set tokenizer.path to the tokenizer that wrote the ids",
            )
        expected = found


def _build_damage_error(path: Path, got: str, allowed: str) -> DataError:
    return DataError(
        "the file of token ids is damaged or truncated",
        field=str(path),
        got=got,
        allowed=allowed,
        remedy="Copy or write it again",
    )
