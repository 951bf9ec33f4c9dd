"""Texts that the model writes while it trains, under whatever layout trains it.

There is no cache of keys and values here: every token is a forward pass of whole rows, in which the loss is replaced by the
choice of the next token. So every cut of the loss is a cut of this, and a pipeline or a foreign class needs nothing of its own.

Legend: B rows (a text each), T tokens of a row, N tokens of this rank, S rows whose last token is here, D hidden, V vocabulary.
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

from shardwright.architecture import ForeignShape, ModelShape
from shardwright.config import Recipe
from shardwright.data.dataset import IGNORED_LABEL, Int64Array, Sample, TokenDataset
from shardwright.data.loader import MicroBatch
from shardwright.data.tokenizer import AbsentTokenizer, Tokenizer
from shardwright.errors import InputError, RecipeError
from shardwright.layout import AXES, RankGrid
from shardwright.model.head import LossFunction, head_logits
from shardwright.parallel import ParallelModel

_PLAIN_PROMPT_TOKENS = 16
"""Of a text that is learnt from its first token on."""


@dataclass(frozen=True)
class Prompt:
    """What the model goes on from, and what the validation data says there."""

    ids: tuple[int, ...]
    expected_ids: tuple[int, ...]


@dataclass(frozen=True)
class WrittenText:
    """A prompt, what the data says and what the model wrote. `stopped`: whether it ended the text itself."""

    prompt: str
    expected: str
    text: str
    stopped: bool


def check_samples(recipe: Recipe, shape: ModelShape, tokenizer: Tokenizer, *, validates: bool) -> None:
    """Refuse samples that could not be written, before ranks start.

    Raises:
        RecipeError: no validation data, no tokenizer, or a model whose logits we do not make.
    """
    if not recipe.evaluation.num_samples:
        return
    field, got = "evaluation.num_samples", recipe.evaluation.num_samples
    if isinstance(tokenizer, AbsentTokenizer):
        raise RecipeError(
            "samples are text, which needs a tokenizer; the sources hold token ids, and there is none",
            field=field,
            got=got,
            allowed="0",
            remedy="Name the tokenizer that the ids were made with in tokenizer.path",
        )
    if not validates:
        raise RecipeError(
            "samples go on from validation data, and there is none",
            field=field,
            got=got,
            allowed="0",
            remedy="Hold something out: data.validation_fraction, or data.validation",
        )
    if isinstance(shape, ForeignShape) and not shape.plain_head:
        raise RecipeError(
            f"the logits of transformers' {shape.class_name} are more than its head's product",
            field=field,
            got=got,
            allowed="0",
            remedy="Export the model, and generate with transformers",
        )


def choose_prompts(dataset: TokenDataset, count: int, max_new_tokens: int) -> list[Prompt]:
    """Prompts from rows spread evenly over a dataset: documents of them, up to their first learnt token.

    Fewer than `count` where the dataset holds fewer documents.
    """
    num_rows = min(count, len(dataset))
    rows = [dataset.sample(number * len(dataset) // num_rows) for number in range(num_rows)]
    documents = [list(_documents_of(row)) for row in rows]
    # The first of every row, then the second of every row, and so on.
    turns = [found[turn] for turn in range(max(map(len, documents))) for found in documents if turn < len(found)]
    return [_prompt_of(ids, labels, max_new_tokens) for ids, labels in turns[:count]]


def _documents_of(row: Sample) -> Iterator[tuple[Int64Array, Int64Array]]:
    """Ids and labels of the documents of a row in which something is learnt."""
    borders = [0, len(row.labels) - row.num_free]
    if row.document_ids is not None:
        borders[1:1] = (np.flatnonzero(np.diff(row.document_ids[: borders[-1]])) + 1).tolist()
    for start, end in pairwise(borders):
        if (row.labels[start:end] != IGNORED_LABEL).any():
            yield row.input_ids[start:end], row.labels[start:end]


def _prompt_of(ids: Int64Array, labels: Int64Array, max_new_tokens: int) -> Prompt:
    first = int(np.argmax(labels != IGNORED_LABEL))
    if first == 0:
        first = min(_PLAIN_PROMPT_TOKENS, len(ids)) - 1
    expected = labels[first:][:max_new_tokens]
    ends = np.flatnonzero(expected == IGNORED_LABEL)
    expected = expected[: int(ends[0])] if len(ends) else expected
    return Prompt(tuple(ids[: first + 1].tolist()), tuple(expected.tolist()))


def write_texts(
    model: ParallelModel,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    *,
    sequence_length: int,
    max_new_tokens: int,
    abandon: Callable[[], bool],
) -> list[WrittenText] | None:
    """Go on from the prompts by the likeliest tokens; every rank calls this and gets the same.

    A text ends with the tokenizer's end of text, after `max_new_tokens`, or with the row.

    Args:
        sequence_length: tokens of a row, which the layout is known to divide.
        abandon: asked before every token, answered alike on every rank; True ends it without a result.
    """
    rows = [list(prompt.ids) for prompt in prompts]
    stopped = [False] * len(rows)
    model.decoder.eval()
    try:
        with model.evaluating():
            for _ in range(max_new_tokens):
                if abandon():
                    return None
                going = [not stopped[row] and len(ids) < sequence_length for row, ids in enumerate(rows)]
                if not any(going):
                    break
                chosen = _next_tokens(model, rows, sequence_length, tokenizer.vocab_size)
                for row in range(len(rows)):
                    if going[row]:
                        stopped[row] = chosen[row] == tokenizer.eos_id
                        rows[row] += [] if stopped[row] else [chosen[row]]
    finally:
        model.decoder.train()
    return [
        WrittenText(
            prompt=tokenizer.decode(list(prompt.ids)),
            expected=tokenizer.decode(list(prompt.expected_ids)),
            text=tokenizer.decode(ids[len(prompt.ids) :]),
            stopped=ended,
        )
        for prompt, ids, ended in zip(prompts, rows, stopped, strict=True)
    ]


def _next_tokens(model: ParallelModel, rows: Sequence[Sequence[int]], sequence_length: int, vocab_size: int) -> list[int]:
    """The likeliest token behind each row, on every rank."""
    batch = _batch_of(rows, sequence_length)
    chosen_B = torch.zeros(len(rows), dtype=torch.int64, device=model.device)

    def choose(hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, labels_N: Tensor, **options: Any) -> Tensor:
        here = labels_N != IGNORED_LABEL
        vocabulary = options.pop("vocabulary", None)
        logits_SV = head_logits(hidden_ND[here], weight_VD, bias_V, **{"logit_scale": 1.0, "soft_cap": None} | options)
        if vocabulary is not None:
            logits_SV = vocabulary.whole(logits_SV)
        # Rows that only pad the vocabulary have no text.
        chosen_B[labels_N[here]] = logits_SV[:, :vocab_size].argmax(dim=1)
        return hidden_ND.new_zeros(())

    def arguments(moved: MicroBatch) -> dict[str, Any]:
        def row_loss(_tokens_of: Callable[[Tensor], Tensor]) -> LossFunction:
            return choose

        return moved.arguments() | {"row_loss": row_loss}

    model.losses([batch], arguments)
    coordinates = RankGrid(model.layout).coordinates(0 if model.mesh is None else model.mesh.rank)
    if any(coordinates[axis] for axis in ("dp_replicate", "dp_shard", "tp")):
        chosen_B.zero_()  # they have chosen the same, and one has to be believed where a last bit differs
    return model.sum_over(chosen_B, AXES).tolist()


def _batch_of(rows: Sequence[Sequence[int]], sequence_length: int) -> MicroBatch:
    """Rows filled up at the end, which nothing before it sees; the one label of each is its number, at its last token."""
    ids_BT = torch.zeros(len(rows), sequence_length, dtype=torch.int64)
    labels_BT = torch.full_like(ids_BT, IGNORED_LABEL)
    for number, ids in enumerate(rows):
        ids_BT[number, : len(ids)] = torch.tensor(ids)
        labels_BT[number, len(ids) - 1] = number
    positions_BT = torch.arange(sequence_length).repeat(len(rows), 1)
    return MicroBatch(ids_BT, labels_BT, positions_BT, None, torch.arange(len(rows)), len(rows))


def save_texts(folder: Path, step: int, texts: Sequence[WrittenText]) -> Path:
    """Write the texts of a step, a JSON line each.

    Raises:
        InputError: the folder cannot be written.
    """
    path = folder / f"step-{step:08d}.jsonl"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(asdict(text), ensure_ascii=False) + "\n" for text in texts), encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", field="run.dir", got=str(path)) from error
    return path
