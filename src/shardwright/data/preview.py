"""Preview of samples as text, with the supervised tokens marked, to inspect before training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.data.dataset import IGNORED_LABEL, Sample
from shardwright.data.tokenizer import Tokenizer

_REPLACEMENT_CHARACTER = "\N{REPLACEMENT CHARACTER}"
_MAX_CHARACTER_BYTES = 4
_NUM_CONTEXT_TOKENS = 4


@dataclass(frozen=True)
class PreviewSpan:
    """Text of one token or of the tokens of one character. `document` counts from 0."""

    text: str
    num_tokens: int
    is_supervised: bool
    document: int


def read_spans(sample: Sample, tokenizer: Tokenizer) -> list[PreviewSpan]:
    """Return the tokens of a sample in order, with the last label and without padding.

    A token is supervised if the position before it predicts it; the first token of a document
    never is.
    """
    spans: list[PreviewSpan] = []
    for document, (ids, supervised) in enumerate(_iterate_documents(sample)):
        spans += _iterate_spans(ids, supervised, document, tokenizer)
    return spans


def _iterate_documents(sample: Sample) -> Iterator[tuple[list[int], list[bool]]]:
    """Yield the ids of each document with its last label, and a mask of the predicted ones."""
    length = len(sample.labels) - sample.num_padding
    if sample.document_ids is None:
        starts = [0]
    else:
        starts = [0, *(np.flatnonzero(np.diff(sample.document_ids[:length])) + 1).tolist()]
    for start, end in zip(starts, [*starts[1:], length], strict=True):
        is_predicted = (sample.labels[start:end] != IGNORED_LABEL).tolist()
        ids = sample.input_ids[start:end].tolist()
        if is_predicted and is_predicted[-1]:
            ids.append(int(sample.labels[end - 1]))
        yield ids, [False, *is_predicted][: len(ids)]


def _iterate_spans(
    ids: Sequence[int], supervised_mask: Sequence[bool], document: int, tokenizer: Tokenizer
) -> Iterator[PreviewSpan]:
    first = 0
    for end in range(1, len(ids) + 1):
        # Decode with the preceding tokens: some tokenizers drop the space before a first word.
        context = list(ids[max(0, first - _NUM_CONTEXT_TOKENS) : first])
        before = tokenizer.decode(context) if context else ""
        text = tokenizer.decode([*context, *ids[first:end]])
        text = text[len(before) :] if text.startswith(before) else tokenizer.decode(ids[first:end])
        is_incomplete = (
            text.endswith(_REPLACEMENT_CHARACTER)
            and end - first < _MAX_CHARACTER_BYTES
            and end < len(ids)
        )
        if not is_incomplete:
            yield PreviewSpan(text, end - first, supervised_mask[end - 1], document)
            first = end
