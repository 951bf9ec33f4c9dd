"""Prepared tokens written to files, which are sources of other recipes (`format: tokens`)."""

from __future__ import annotations

import tempfile
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shardwright.data.prepared_data import PreparedData
from shardwright.data.records.token_files import (
    MAX_DOCUMENT_TOKENS,
    NO_TOKENIZER,
    format_file_name,
    write_token_file,
)
from shardwright.data.sources.remote_sources import is_remote
from shardwright.data.tokens.token_store import TokenStore
from shardwright.data.tokens.tokenizer import AbsentTokenizer, Tokenizer
from shardwright.errors import DataError
from shardwright.grouping import group_by_size
from shardwright.store_requests import convert_error, has_buckets, open_file_system, send_request

MAX_FILE_TOKENS = 1 << 26
"""Most tokens of a file, unless a single document has more: 128 or 256 MiB of ids."""


class WrittenTokens(NamedTuple):
    """Files written, and the number of documents left out because nothing is supervised."""

    files: tuple[str, ...]
    num_documents: int
    num_tokens: int
    num_left_out: int

    def describe(self) -> str:
        """Describe what was written, for the terminal."""
        text = (
            f"{self.num_documents:,} documents and {self.num_tokens:,} tokens "
            f"in {len(self.files):,} files"
        )
        if self.num_left_out:
            text += f"; {self.num_left_out:,} documents without a supervised token left out"
        return text


def write_prepared_tokens(
    prepared: PreparedData, target: str, max_file_tokens: int = MAX_FILE_TOKENS
) -> WrittenTokens:
    """Write the tokens of both sides below a folder or URL: `train` and `validation`.

    Documents stay in the order of the sources; a document without a supervised token after its
    first one is left out.

    Raises:
        DataError: tokens that the format cannot express, a folder that has files already, or a
            store that cannot be written.
    """
    if not prepared.stores:
        raise _build_refusal("streamed sources", "Write the tokens from a recipe without streaming")
    if prepared.report.packing == "pairs":
        raise _build_refusal("preferences", "Use the records as sources")
    if any(store.weights is not None for store in prepared.stores.values()):
        raise _build_refusal("loss weights of tokens", "Use the records as sources")
    _check_absent(target)
    names: list[str] = []
    num_documents = num_tokens = num_left_out = 0
    for side, store in prepared.stores.items():
        useful = _find_useful_documents(store)
        num_left_out += len(store.documents) - 1 - len(useful)
        lengths = np.diff(store.documents.astype(np.int64))[useful].tolist()
        groups = list(group_by_size(useful, lengths, max_file_tokens))
        for number, documents in enumerate(groups):
            name = f"{side}/{format_file_name(number, len(groups))}"
            with tempfile.TemporaryDirectory(prefix="shardwright-") as folder:
                path = Path(folder) / "tokens"
                num_tokens += _write_documents(path, store, documents, prepared.tokenizer)
                _publish(path, target, name)
            names.append(name)
            num_documents += len(documents)
    return WrittenTokens(tuple(names), num_documents, num_tokens, num_left_out)


def _write_documents(
    path: Path, store: TokenStore, documents: list[int], tokenizer: Tokenizer
) -> int:
    """Write these documents to one file; return the number of their tokens."""
    bounds = [(int(store.documents[item]), int(store.documents[item + 1])) for item in documents]
    starts = np.cumsum([0, *(end - start for start, end in bounds)])
    mask = store.supervised_mask
    write_token_file(
        path,
        np.concatenate([store.tokens[start:end] for start, end in bounds]),
        starts,
        None if mask is None else np.concatenate([mask[start:end] for start, end in bounds]),
        tokenizer.vocab_size,
        NO_TOKENIZER if isinstance(tokenizer, AbsentTokenizer) else tokenizer.content_hash,
    )
    return int(starts[-1])


def _find_useful_documents(store: TokenStore) -> list[int]:
    """Return the indices of the documents that supervise a token after their first one."""
    starts = store.documents.astype(np.int64)
    useful = []
    for number, (start, end) in enumerate(pairwise(starts.tolist())):
        if end - start > MAX_DOCUMENT_TOKENS:
            raise DataError(
                "a document is too long for a file of tokens",
                field="data.sources",
                got=f"{end - start:,} tokens in document {number}",
                allowed=f"{MAX_DOCUMENT_TOKENS:,} tokens",
                remedy="Split the text into several files, or into records of JSON lines",
            )
        mask = store.supervised_mask
        if end - start > 1 and (mask is None or mask[start + 1 : end].any()):
            useful.append(number)
    return useful


def _check_absent(target: str) -> None:
    """Raise if the target is not empty: its old files would be read as sources, too."""
    is_file = False
    try:
        if is_remote(target):
            file_system, path = open_file_system(target)
            file_system.invalidate_cache()
            is_used = bool(send_request(f"listing {target}", partial(file_system.find, path)))
        else:
            is_file = Path(target).is_file()
            is_used = is_file or (Path(target).is_dir() and any(Path(target).iterdir()))
    except Exception as error:  # every file system has its own exceptions
        raise _build_write_error(target, error) from None
    if is_used:
        raise DataError(
            "a file has this name" if is_file else "the folder is not empty",
            field="--write-tokens",
            got=target,
            allowed="a new or an empty folder",
            remedy="Name another one" + ("" if is_file else ", or remove the files in it"),
        )


def _publish(path: Path, target: str, name: str) -> None:
    """Copy a complete file to its target atomically."""
    try:
        if is_remote(target):
            file_system, base = open_file_system(target)
            remote = f"{base.rstrip('/')}/{name}"
            if not has_buckets(file_system):  # there it would create a misspelled bucket
                file_system.makedirs(remote.rpartition("/")[0], exist_ok=True)
            send_request(f"writing {target}", lambda: file_system.put_file(str(path), remote))
            return
        place = Path(target) / name
        place.parent.mkdir(parents=True, exist_ok=True)
        partial_place = place.with_suffix(".partial")
        with open(path, "rb") as source, open(partial_place, "wb") as output:
            while block := source.read(1 << 22):
                output.write(block)
        partial_place.replace(place)
    except Exception as error:  # every file system has its own exceptions
        raise _build_write_error(target, error) from None


def _build_write_error(target: str, error: Exception) -> DataError:
    return DataError(
        f"cannot be written: {convert_error(error)}", field="--write-tokens", got=target
    )


def _build_refusal(got: str, remedy: str) -> DataError:
    return DataError(
        "files of tokens cannot contain this data", field="--write-tokens", got=got, remedy=remedy
    )
