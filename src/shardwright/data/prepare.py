"""From a recipe to datasets: sources are divided, tokenised once into the cache, and opened through memory maps."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.config.schema import Recipe
from shardwright.data.cache import build_once, cache_root, fingerprint, key_of
from shardwright.data.corpus import Corpus, Read, Records, Side, divide, weigh
from shardwright.data.dataset import TokenDataset, WindowDataset
from shardwright.data.pack import PackedDataset, Packing, pack_documents
from shardwright.data.sources import Broken, SourceFile, list_files
from shardwright.data.store import TokenCounts, TokenStore, open_tokens, write_tokens
from shardwright.data.tokenize import load_tokenizer, train_bpe, train_characters
from shardwright.data.tokenizer import Tokenizer
from shardwright.errors import DataError, TokenizerError

CACHE_VERSION = 1
"""Part of every key of the cache: raise it when the same sources would give other tokens or other files."""

Progress = Callable[[str, int, int], None]
"""Told what is being done, and how far: (stage, done, total) in characters, about."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SideReport:
    """One side of the split, as the model sees it in one pass. `length_histogram`: documents of up to so many tokens."""

    counts: TokenCounts
    num_samples: int
    num_supervised: int
    padding_fraction: float
    length_histogram: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class DataReport:
    """What the sources hold and what became of it."""

    num_files: int
    records: Records
    num_duplicates_dropped: int
    tokenizer_kind: str
    vocab_size: int
    train: SideReport
    validation: SideReport | None

    def as_dict(self) -> dict[str, Any]:
        """JSON."""
        return asdict(self) | {"records": self.records._asdict() | {"broken": [item._asdict() for item in self.records.broken]}}


@dataclass(frozen=True)
class Prepared:
    """Everything that training needs of the data. `content_hash` names the samples: sources, tokenizer, split and packing."""

    train: TokenDataset
    validation: TokenDataset | None
    tokenizer: Tokenizer
    report: DataReport
    content_hash: str


def prepare(recipe: Recipe, vocab_size: int | None = None, *, progress: Progress | None = None) -> Prepared:
    """Tokenise the recipe's sources once and open them; every rank calls this and gets the same.

    Args:
        vocab_size: the model's, against which every token of the data is held; None checks nothing.
        progress: called while sources are read and tokenised; not at all when the cache has everything.

    Raises:
        DataError: sources that cannot be read, are broken too often, or hold nothing to learn from.
        TokenizerError: no tokenizer, or one with ids that the model lacks.
    """
    sources = _Sources(recipe, progress)
    given = _given_tokenizer(recipe)
    spec: Any = given.content_hash if given is not None else [recipe.tokenizer.kind, recipe.tokenizer.vocab_size]
    key = key_of([CACHE_VERSION, sources.key, spec])
    folder = build_once(sources.root, f"tokens/{key}", partial(_tokenise, sources, given))
    saved = json.loads((folder / "records.json").read_text(encoding="utf-8"))
    records = [Records(**{**item, "broken": tuple(Broken(**broken) for broken in item["broken"])}) for item in saved["records"]]
    for found, field in zip(records, ("data.sources", "data.validation"), strict=False):
        found.check(recipe.data.max_broken_fraction, field)
        if found.num_broken:
            first = found.broken[0]
            message = "set aside %d of %d records of %s that cannot be read; the first is %s:%d: %s"
            log.warning(message, found.num_broken, found.num_records, field, first.file, first.line, first.reason)
    tokenizer = given if given is not None else load_tokenizer(folder / "tokenizer")
    stores: dict[Side, TokenStore] = {"train": open_tokens(folder, "train")}
    if (folder / "validation.json").is_file():
        stores["validation"] = open_tokens(folder, "validation")
    _check_fits(stores, tokenizer, vocab_size)
    datasets = {side: _open_dataset(recipe, sources.root, key, side, store) for side, store in stores.items()}
    sides = {side: _side_report(stores[side], dataset) for side, dataset in datasets.items()}
    report = DataReport(
        num_files=saved["num_files"],
        records=_sum_records(records),
        num_duplicates_dropped=saved["num_duplicates_dropped"],
        tokenizer_kind=recipe.tokenizer.kind,
        vocab_size=tokenizer.vocab_size,
        train=sides["train"],
        validation=sides.get("validation"),
    )
    content_hash = key_of([key, tokenizer.content_hash, recipe.data.packing])
    return Prepared(datasets["train"], datasets.get("validation"), tokenizer, report, content_hash)


class _Sources:
    """The files of a recipe; read and divided only if somebody asks for the corpus."""

    def __init__(self, recipe: Recipe, progress: Progress | None) -> None:
        self.recipe = recipe
        self.root = cache_root(recipe.data.cache_dir)
        self.training = list_files(recipe.data.sources, "data.sources")
        self.validation = list_files(recipe.data.validation, "data.validation")
        self._progress = progress
        data = recipe.data
        split = [] if self.validation else [data.validation_fraction, data.validation_split if data.validation_fraction else None]
        self.key = key_of([fingerprint(self.training, self.root), fingerprint(self.validation, self.root), split])

    @cached_property
    def corpus(self) -> Corpus:
        """Every record weighed and put on its side."""
        limit = self.recipe.data.max_broken_fraction
        training = weigh(self.training, self.reading("reading", _num_bytes(self.training)))
        training.records.check(limit, "data.sources")
        validation = None
        if self.validation:
            validation = weigh(self.validation, self.reading("reading validation", _num_bytes(self.validation)))
            validation.records.check(limit, "data.validation")
        return divide(training, validation, self.recipe.data)

    def reading(self, stage: str, total: int) -> Read:
        """A callback for the characters read, which tells `progress` every half percent."""
        progress, step, told = self._progress, max(1, total // 200), 0
        if progress is None:
            return lambda done: None
        progress(stage, 0, total)

        def read(done: int) -> None:
            nonlocal told
            if done - told >= step:
                told = done
                progress(stage, min(done, total), total)

        return read

    def texts(self, side: Side, stage: str) -> Any:
        """The texts of a side, telling progress."""
        num_read, read = 0, self.reading(stage, self.corpus.characters(side))
        for piece in self.corpus.pieces(side):
            num_read += len(piece.text)
            read(num_read)
            yield piece.text


def _num_bytes(files: tuple[SourceFile, ...]) -> int:
    return sum(file.path.stat().st_size for file in files)


def _given_tokenizer(recipe: Recipe) -> Tokenizer | None:
    """The tokenizer that does not depend on the sources."""
    if recipe.tokenizer.kind != "huggingface":
        return None
    folder = recipe.tokenizer.path or recipe.model.path
    if folder is None:
        raise TokenizerError(
            "no tokenizer is named",
            field="tokenizer.path",
            remedy="Name a folder with tokenizer.json, or choose tokenizer.kind: bpe or character",
        )
    if not Path(folder).expanduser().is_dir():
        raise TokenizerError("no such folder", field="tokenizer.path", got=folder)
    return load_tokenizer(Path(folder).expanduser())


def _tokenise(sources: _Sources, given: Tokenizer | None, folder: Path) -> None:
    """Fill a folder of the cache: the tokenizer if it is trained here, the tokens of both sides, and what was counted."""
    corpus = sources.corpus
    tokenizer = given
    if tokenizer is None:
        tokenizer = _train_tokenizer(sources)
        tokenizer.save(folder / "tokenizer")
    sides: tuple[Side, ...] = ("train", "validation")
    for side in sides:
        if num_characters := corpus.characters(side):
            read = sources.reading(f"tokenising {side}", num_characters)
            write_tokens(folder, side, corpus.pieces(side), tokenizer, read)
    records = [corpus.training.records, *([corpus.validation.records] if corpus.validation else [])]
    content = {
        "num_files": len(sources.training) + len(sources.validation),
        "records": [item._asdict() | {"broken": [broken._asdict() for broken in item.broken]} for item in records],
        "num_duplicates_dropped": corpus.num_duplicates_dropped,
    }
    (folder / "records.json").write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def _train_tokenizer(sources: _Sources) -> Tokenizer:
    """A tokenizer made from the sources.

    Merges of a BPE are learnt from the training side only. The alphabet of a character tokenizer is that of both sides: it
    is no statistic, and a held-out character without an id could not be evaluated at all.
    """
    section = sources.recipe.tokenizer
    if section.kind == "bpe":
        assert section.vocab_size is not None  # the schema demands it
        tokenizer: Tokenizer = train_bpe(sources.texts("train", "training the tokenizer"), section.vocab_size)
        if tokenizer.vocab_size < section.vocab_size:
            log.warning("the text has repeated pairs for a vocabulary of %d only, not %d", tokenizer.vocab_size, section.vocab_size)
        return tokenizer
    sides: tuple[Side, ...] = ("train", "validation")
    return train_characters(text for side in sides for text in sources.texts(side, "reading the alphabet"))


def _check_fits(stores: dict[Side, TokenStore], tokenizer: Tokenizer, vocab_size: int | None) -> None:
    if vocab_size is None:
        return
    largest = max(store.counts.max_id for store in stores.values())
    if largest >= vocab_size:
        raise TokenizerError(
            "the tokenizer does not fit the model: the data hold a token id outside its vocabulary",
            field="model.vocab_size",
            got=f"token id {largest}, from a tokenizer of {tokenizer.vocab_size} ids",
            allowed=f"ids below the model's vocab_size of {vocab_size}",
            remedy="Use the model's own tokenizer, or a model with a larger vocabulary",
        )


def _open_dataset(recipe: Recipe, root: Path, key: str, side: Side, store: TokenStore) -> TokenDataset:
    length, whole = recipe.training.sequence_length, side == "validation"
    field = "data.validation" if whole else "data.sources"
    found = f"{store.counts.num_tokens} tokens in {store.counts.num_documents} documents"
    dataset: TokenDataset
    if recipe.data.packing == "windows":
        dataset = WindowDataset(store.tokens, length, seed=recipe.seed, whole=whole)
        if not len(dataset):
            raise DataError(
                f"the {side} text is shorter than one window",
                field=field,
                got=found,
                allowed="2 tokens or more" if whole else f"{length + 1} tokens or more: sequence_length {length} and a label",
                remedy="Give more text" if whole else "Give more text, or shorten training.sequence_length",
            )
        return dataset

    def build(folder: Path) -> None:
        pack_documents(store.documents, length).save(folder / "packing.npz")

    folder = build_once(root, f"packed/{key_of([CACHE_VERSION, key, side, length])}", build)
    dataset = PackedDataset(store.tokens, Packing.load(folder / "packing.npz"), length)
    if not len(dataset):
        raise DataError(
            f"no token of the {side} documents is supervised",
            field=field,
            got=found,
            allowed="documents of two tokens or more: the first of each is never predicted",
        )
    return dataset


def _side_report(store: TokenStore, dataset: TokenDataset) -> SideReport:
    lengths = np.diff(store.documents.astype(np.int64))
    # Bins (0, 1], (1, 2], (2, 4], ... up to the longest document.
    bins = np.ceil(np.log2(np.maximum(lengths, 1))).astype(int)
    histogram = tuple((2**number, int(count)) for number, count in enumerate(np.bincount(bins)))
    return SideReport(
        counts=store.counts,
        num_samples=len(dataset),
        num_supervised=dataset.num_supervised,
        padding_fraction=dataset.padding_fraction if isinstance(dataset, PackedDataset) else 0.0,
        length_histogram=histogram,
    )


def _sum_records(records: list[Records]) -> Records:
    return Records(
        sum(item.num_records for item in records),
        sum(item.num_broken for item in records),
        sum(item.num_empty_files for item in records),
        tuple(broken for item in records for broken in item.broken),
    )
