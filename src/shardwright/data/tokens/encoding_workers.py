"""Encoding of records by several processes, in order (Jinja holds the GIL in threads)."""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice

from shardwright.data.records.conversation import UnusableRecord
from shardwright.data.records.supervision import EncodedRecord, RecordEncoder
from shardwright.data.sources.source_reader import TextPiece
from shardwright.errors import DataError
from shardwright.worker_processes import block_interrupts

RECORDS_PER_BATCH = 64
RECORDS_BEFORE_WORKERS = 4096
"""Number of records encoded before workers start, which takes seconds: small sets need no
workers."""
MAX_WORKERS = 16

EncodingOutcome = tuple[TextPiece, EncodedRecord | str]
"""A record and its ids, or the reason why it is skipped."""

_encoder: RecordEncoder | None = None


def encode_in_order(
    encoder: RecordEncoder, pieces: Iterable[TextPiece], num_workers: int | None
) -> Iterator[EncodingOutcome]:
    """Yield every piece with its outcome, in order; keeps a few hundred records in memory.

    Args:
        num_workers: number of processes; None means one per core, at most `MAX_WORKERS`.

    Raises:
        TokenizerError: see `RecordEncoder.encode`.
        DataError: a worker process died.
    """
    pieces = iter(pieces)
    num_workers = num_workers or min(MAX_WORKERS, os.cpu_count() or 1)
    # A daemon may not have children.
    if num_workers == 1 or multiprocessing.current_process().daemon:
        yield from _encode_in_process(encoder, pieces)
        return
    yield from _encode_in_process(encoder, islice(pieces, RECORDS_BEFORE_WORKERS))
    batch = list(islice(pieces, RECORDS_PER_BATCH))
    if not batch:
        return
    # Fork would copy locks of the tokenizer's threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, context, _start_worker, (encoder,)) as pool:
        waiting: deque[tuple[list[TextPiece], Future[list[EncodedRecord | str]]]] = deque()
        try:
            while batch or waiting:
                while batch and len(waiting) < 4 * num_workers:
                    records = [(piece.canonical, piece.text) for piece in batch]
                    with block_interrupts():  # the first one starts the processes
                        waiting.append((batch, pool.submit(_encode_batch, records)))
                    batch = list(islice(pieces, RECORDS_PER_BATCH))
                done, future = waiting.popleft()
                yield from zip(done, future.result(), strict=True)
        except BrokenProcessPool as error:
            raise DataError(
                "a tokenizer worker process died",
                field="data.num_workers",
                got=num_workers,
                remedy="It may have run out of memory: reduce the number",
            ) from error
        finally:
            for _, future in waiting:
                future.cancel()


def _encode_in_process(
    encoder: RecordEncoder, pieces: Iterable[TextPiece]
) -> Iterator[EncodingOutcome]:
    for piece in pieces:
        yield piece, _encode_record(encoder, piece.canonical, piece.text)


def _start_worker(encoder: RecordEncoder) -> None:
    global _encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _encoder = encoder


def _encode_batch(records: list[tuple[str, str]]) -> list[EncodedRecord | str]:
    assert _encoder is not None
    return [_encode_record(_encoder, canonical, content) for canonical, content in records]


def _encode_record(encoder: RecordEncoder, canonical: str, content: str) -> EncodedRecord | str:
    try:
        return encoder.encode(canonical, content)
    except UnusableRecord as error:
        return str(error)
