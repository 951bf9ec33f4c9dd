"""Sample texts that the model generates during training, under any layout.

There is no key-value cache: every token is a forward pass of whole rows, in which the choice of
the next token replaces the loss. This therefore works wherever the loss does, including under
pipelines and with transformers' own model classes.

Legend: B rows (one text each), T tokens of a row, N tokens of this rank, S rows whose last
token is on this rank, D hidden, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwright.architecture import HFShape, ModelShape
from shardwright.config import Recipe
from shardwright.config.data import IGNORED_LABEL
from shardwright.data.dataset import Int64Array, Sample, TokenDataset
from shardwright.data.loader import MicroBatch
from shardwright.data.tokens.tokenizer import AbsentTokenizer, Tokenizer
from shardwright.errors import InputError, RecipeError
from shardwright.layout import AXES, RankGrid
from shardwright.model.head import LossFunction, compute_logits
from shardwright.parallel import ParallelModel

_DEFAULT_PROMPT_TOKENS = 16
"""Prompt length for texts that are supervised from the first token."""


@dataclass(frozen=True)
class SamplePrompt:
    """Prompt ids from the validation data, and the ids that follow there."""

    ids: tuple[int, ...]
    expected_ids: tuple[int, ...]


@dataclass(frozen=True)
class SampleText:
    """Prompt, expected and generated text; `stopped` is True if the model ended the text."""

    prompt: str
    expected: str
    text: str
    stopped: bool


def check_samples(
    recipe: Recipe, shape: ModelShape, tokenizer: Tokenizer, *, has_validation_data: bool
) -> None:
    """Check that the samples that a recipe asks for can be generated, before ranks start.

    Raises:
        RecipeError: There is no validation data, no tokenizer, or no way to compute the logits.
    """
    field = "evaluation.num_samples"
    got = recipe.evaluation.num_samples
    if isinstance(tokenizer, AbsentTokenizer):
        raise RecipeError(
            "samples are text and need a tokenizer; the data sources are token ids without one",
            field=field,
            got=got,
            allowed="0",
            remedy="Set tokenizer.path to the tokenizer that made the ids",
        )
    if not has_validation_data:
        raise RecipeError(
            "samples continue validation data, and there is none",
            field=field,
            got=got,
            allowed="0",
            remedy="Reserve validation data: data.validation_fraction or data.validation",
        )
    if isinstance(shape, HFShape) and not shape.has_plain_head:
        raise RecipeError(
            f"the logits of transformers' {shape.class_name} depend on more than its output matrix",
            field=field,
            got=got,
            allowed="0",
            remedy="Export the model, and generate with transformers",
        )


def choose_prompts(dataset: TokenDataset, count: int, max_new_tokens: int) -> list[SamplePrompt]:
    """Choose prompts from rows spread evenly over a dataset.

    A prompt ends before a document's first supervised token. Fewer than `count` if the dataset
    has fewer documents.
    """
    num_rows = min(count, len(dataset))
    rows = [dataset.get_sample(number * len(dataset) // num_rows) for number in range(num_rows)]
    documents = [list(_iterate_documents(row)) for row in rows]
    # First document of every row, then second document of every row, and so on.
    turns = [
        row_documents[turn]
        for turn in range(max(map(len, documents)))
        for row_documents in documents
        if turn < len(row_documents)
    ]
    return [_build_prompt(ids, labels, max_new_tokens) for ids, labels in turns[:count]]


def _iterate_documents(row: Sample) -> Iterator[tuple[Int64Array, Int64Array]]:
    """Yield ids and labels of a row's documents that have supervised tokens."""
    borders = [0, len(row.labels) - row.num_padding]
    if row.document_ids is not None:
        borders[1:1] = (np.flatnonzero(np.diff(row.document_ids[: borders[-1]])) + 1).tolist()
    for start, end in pairwise(borders):
        if (row.labels[start:end] != IGNORED_LABEL).any():
            yield row.input_ids[start:end], row.labels[start:end]


def _build_prompt(ids: Int64Array, labels: Int64Array, max_new_tokens: int) -> SamplePrompt:
    first = int(np.argmax(labels != IGNORED_LABEL))
    if first == 0:
        first = min(_DEFAULT_PROMPT_TOKENS, len(ids)) - 1
    expected = labels[first:][:max_new_tokens]
    ends = np.flatnonzero(expected == IGNORED_LABEL)
    expected = expected[: int(ends[0])] if len(ends) else expected
    return SamplePrompt(tuple(ids[: first + 1].tolist()), tuple(expected.tolist()))


def generate_texts(
    model: ParallelModel,
    tokenizer: Tokenizer,
    prompts: Sequence[SamplePrompt],
    *,
    sequence_length: int,
    max_new_tokens: int,
    should_abort: Callable[[], bool],
) -> list[SampleText] | None:
    """Continue the prompts by greedy decoding. Collective; same result on all ranks.

    A text ends with the tokenizer's end of text, after `max_new_tokens`, or with the row.

    Args:
        sequence_length: Tokens of a row, divisible as the layout requires.
        should_abort: Called before every token; returns the same on all ranks. True ends
            without a result.
    """
    rows = [list(prompt.ids) for prompt in prompts]
    stopped = [False] * len(rows)
    model.decoder.eval()
    try:
        with model.evaluate_mode():
            for _ in range(max_new_tokens):
                if should_abort():
                    return None
                active = [
                    not stopped[row] and len(ids) < sequence_length for row, ids in enumerate(rows)
                ]
                if not any(active):
                    break
                chosen = _choose_next_tokens(model, rows, sequence_length, tokenizer.vocab_size)
                for row in range(len(rows)):
                    if active[row]:
                        stopped[row] = chosen[row] == tokenizer.eos_id
                        rows[row] += [] if stopped[row] else [chosen[row]]
    finally:
        model.decoder.train()
    return [
        SampleText(
            prompt=tokenizer.decode(list(prompt.ids)),
            expected=tokenizer.decode(list(prompt.expected_ids)),
            text=tokenizer.decode(ids[len(prompt.ids) :]),
            stopped=ended,
        )
        for prompt, ids, ended in zip(prompts, rows, stopped, strict=True)
    ]


def _choose_next_tokens(
    model: ParallelModel, rows: Sequence[Sequence[int]], sequence_length: int, vocab_size: int
) -> list[int]:
    """Return the most likely next token of each row, on every rank."""
    batch = _build_batch(rows, sequence_length)
    chosen_B = torch.zeros(len(rows), dtype=torch.int64, device=model.device)

    def choose(
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        labels_N: Tensor,
        **options: Any,
    ) -> Tensor:
        has_label = labels_N != IGNORED_LABEL
        vocabulary = options.pop("vocabulary", None)
        options.pop("num_supervised", None)
        logits_SV = compute_logits(
            hidden_ND[has_label],
            weight_VD,
            bias_V,
            **{"logit_scale": 1.0, "soft_cap": None} | options,
        )
        if vocabulary is not None:
            logits_SV = vocabulary.gather_logits(logits_SV)
        # Padding rows of the vocabulary have no text.
        chosen_B[labels_N[has_label]] = logits_SV[:, :vocab_size].argmax(dim=1)
        return hidden_ND.new_zeros(())

    def arguments(moved: MicroBatch) -> dict[str, Any]:
        def row_loss(_tokens_of: Callable[[Tensor], Tensor]) -> LossFunction:
            return choose

        return moved.build_model_arguments() | {"row_loss": row_loss}

    model.compute_losses([batch], arguments)
    coordinates = RankGrid(model.layout).coordinates(0 if model.mesh is None else model.mesh.rank)
    if any(coordinates[axis] for axis in ("dp_replicate", "dp_shard", "tp")):
        chosen_B.zero_()  # these have copies, which may differ in the last bit
    return model.sum_over(chosen_B, AXES).tolist()


def _build_batch(rows: Sequence[Sequence[int]], sequence_length: int) -> MicroBatch:
    """Build a batch of padded rows; each row's only label is its number, at its last token."""
    ids_BT = torch.zeros(len(rows), sequence_length, dtype=torch.int64)
    labels_BT = torch.full_like(ids_BT, IGNORED_LABEL)
    for number, ids in enumerate(rows):
        ids_BT[number, : len(ids)] = torch.tensor(ids)
        labels_BT[number, len(ids) - 1] = number
    positions_BT = torch.arange(sequence_length).repeat(len(rows), 1)
    return MicroBatch(ids_BT, labels_BT, positions_BT, None, torch.arange(len(rows)), len(rows))


def save_texts(folder: Path, step: int, texts: Sequence[SampleText]) -> Path:
    """Write the texts of a step, one JSON line each.

    Raises:
        InputError: The folder cannot be written.
    """
    path = folder / f"step-{step:08d}.jsonl"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(
            "".join(json.dumps(asdict(text), ensure_ascii=False) + "\n" for text in texts),
            encoding="utf-8",
        )
    except OSError as error:
        raise InputError(
            f"cannot be written: {error.strerror}", field="run.dir", got=str(path)
        ) from error
    return path
