"""Samples turned back into text, told apart by what is supervised: what a person should look at before training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.data.dataset import IGNORED_LABEL, Sample
from shardwright.data.tokenizer import Tokenizer

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_MAX_BYTES_OF_CHARACTER = 4
_CONTEXT_TOKENS = 4


@dataclass(frozen=True)
class Span:
    """A token, or the few that make one character, as text. `document` numbers the documents of a sample from 0."""

    text: str
    num_tokens: int
    supervised: bool
    document: int


def read_spans(sample: Sample, tokenizer: Tokenizer) -> list[Span]:
    """The tokens of a sample in order, the last label included; free positions at the end are left out.

    A token is supervised when the position before it must predict it: the first token of a document never is.
    """
    spans: list[Span] = []
    for document, (ids, supervised) in enumerate(_documents(sample)):
        spans += _spans_of(ids, supervised, document, tokenizer)
    return spans


def _documents(sample: Sample) -> Iterator[tuple[list[int], list[bool]]]:
    """Ids of each document of the sample with its last label, and whether each is predicted."""
    length = len(sample.labels) - sample.num_free
    if sample.document_ids is None:
        starts = [0]
    else:
        starts = [0, *(np.flatnonzero(np.diff(sample.document_ids[:length])) + 1).tolist()]
    for start, end in zip(starts, [*starts[1:], length], strict=True):
        predicted = (sample.labels[start:end] != IGNORED_LABEL).tolist()
        ids = sample.input_ids[start:end].tolist()
        if predicted and predicted[-1]:
            ids.append(int(sample.labels[end - 1]))
        yield ids, [False, *predicted][: len(ids)]


def _spans_of(ids: Sequence[int], supervised: Sequence[bool], document: int, tokenizer: Tokenizer) -> Iterator[Span]:
    first = 0
    for end in range(1, len(ids) + 1):
        # Decoded behind what precedes it: some tokenizers drop the space before a first word.
        context = list(ids[max(0, first - _CONTEXT_TOKENS) : first])
        before = tokenizer.decode(context) if context else ""
        text = tokenizer.decode([*context, *ids[first:end]])
        text = text[len(before) :] if text.startswith(before) else tokenizer.decode(ids[first:end])
        incomplete = text.endswith(_INCOMPLETE) and end - first < _MAX_BYTES_OF_CHARACTER and end < len(ids)
        if not incomplete:
            yield Span(text, end - first, supervised[end - 1], document)
            first = end
