"""From a recipe to datasets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardwright.config.schema import Recipe
from shardwright.data.dataset import TokenDataset, WindowDataset
from shardwright.data.tokenize import CharacterTokenizer, Tokenizer
from shardwright.errors import DataError

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class DataReport:
    """What was found."""

    num_documents: int
    num_train_tokens: int
    num_validation_tokens: int


@dataclass(frozen=True)
class Prepared:
    """Everything that training needs of the data."""

    train: TokenDataset
    validation: TokenDataset | None
    tokenizer: Tokenizer
    report: DataReport


def prepare(recipe: Recipe, vocab_size: int | None = None, *, progress: Progress | None = None) -> Prepared:
    """Tokenise the recipe's sources once and open them as datasets; every rank calls this and gets the same.

    `vocab_size` is the model's: a token id that does not fit it is a TokenizerError. None checks nothing.
    """
    text = "".join(Path(source.path).read_text(encoding="utf-8") for source in recipe.data.sources)
    tokenizer = CharacterTokenizer(text)
    cut = int(len(text) * (1.0 - recipe.data.validation_fraction))
    train, held_out = (piece.astype(np.uint16) for piece in tokenizer.encode_pieces([text[:cut], text[cut:]]))
    length = recipe.training.sequence_length
    dataset = WindowDataset(train, length, seed=recipe.seed)
    if not len(dataset):
        raise DataError("the training text is shorter than one window", got=f"{len(train)} tokens", allowed=f"{length + 1} or more")
    validation = WindowDataset(held_out, length, whole=True) if len(held_out) > 1 else None
    return Prepared(dataset, validation, tokenizer, DataReport(len(recipe.data.sources), len(train), len(held_out)))
