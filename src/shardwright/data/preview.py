"""Preview of training data: length of the training, and samples decoded back to text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from shardwright.config import Recipe
from shardwright.config.data import IGNORED_LABEL
from shardwright.data.dataset import Sample, TokenDataset
from shardwright.data.prepared_data import PreparedData
from shardwright.data.run_order import build_run_order
from shardwright.data.tokens.tokenizer import Tokenizer
from shardwright.errors import RecipeError
from shardwright.plans import count_steps, resolve_batch, resolve_degrees

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


SampleSide = Literal["train", "validation"]


@dataclass(frozen=True)
class TrainingLength:
    """Length of the training: optimizer steps, and passes over the training samples."""

    global_batch_size: int
    data_ranks: int
    num_steps: int
    num_epochs: float


@dataclass(frozen=True)
class DecodedSample:
    """A decoded sample; `position` is in the run's sample order (for validation, in the
    dataset)."""

    side: SampleSide
    position: int
    index: int
    num_tokens: int
    num_supervised: int
    num_padding: int
    spans: list[PreviewSpan]


def compute_training_length(
    recipe: Recipe, num_samples: int, num_ranks: int | None
) -> TrainingLength:
    """Compute steps and epochs of the run on `num_ranks`.

    None uses the data ranks of the recipe's layout, or one.
    """
    if num_ranks is not None:
        _, batch = resolve_degrees(recipe, num_ranks)
    else:
        batch = resolve_batch(
            recipe.training, (recipe.layout.dp_replicate or 1) * (recipe.layout.dp_shard or 1)
        )
    batch_size = batch.global_batch_size
    num_steps = count_steps(recipe.training, num_samples, batch_size)
    return TrainingLength(
        batch_size, batch.data_ranks, num_steps, num_steps * batch_size / num_samples
    )


def decode_samples(
    recipe: Recipe,
    prepared: PreparedData,
    side: SampleSide,
    position: int,
    num_samples: int,
    global_batch_size: int,
) -> list[DecodedSample]:
    """Decode the samples that the run reads from `position` on.

    Raises:
        RecipeError: The recipe has no validation data.
    """
    dataset: TokenDataset | None = prepared.train if side == "train" else prepared.validation
    if dataset is None:
        raise RecipeError(
            "there is no validation data",
            field="data.validation_fraction",
            got=0,
            remedy="Set a fraction, or data.validation",
        )
    order = build_run_order(dataset, recipe.seed, global_batch_size)
    decoded = []
    for current in range(position, position + num_samples):
        if side == "validation" and current >= len(dataset):
            break
        index, epoch = (
            (order.get_index(current), order.get_epoch(current))
            if side == "train"
            else (current, 0)
        )
        sample = dataset.get_sample(index, epoch)
        spans = read_spans(sample, prepared.tokenizer)
        num_free = sample.num_padding
        supervised = sum(span.num_tokens for span in spans if span.is_supervised)
        decoded.append(
            DecodedSample(
                side, current, index, len(sample.labels) - num_free, supervised, num_free, spans
            )
        )
    return decoded
