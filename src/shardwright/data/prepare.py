"""From a recipe to datasets: sources are divided, tokenised once into the cache, and opened through memory maps."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from shardwright.config.data import Source
from shardwright.config.schema import Recipe
from shardwright.data.assemble import choose_packing, open_dataset
from shardwright.data.cache import build_once, cache_root, fingerprint, key_of
from shardwright.data.chat import ChatTemplate, load_chat_template
from shardwright.data.corpus import Corpus, Read, Records, Side, divide, weigh
from shardwright.data.dataset import TokenDataset
from shardwright.data.formats import KINDS, plain_texts
from shardwright.data.listing import list_files
from shardwright.data.mix import MixedDataset
from shardwright.data.remote import localise
from shardwright.data.report import DataReport, SourceReport, describe_side
from shardwright.data.sources import Broken, SourceFile, identify
from shardwright.data.store import Encode, TokenStore, open_tokens, write_tokens
from shardwright.data.supervision import Encoder
from shardwright.data.tokenize import END_OF_TEXT, has_tokenizer, load_tokenizer, train_bpe, train_characters
from shardwright.data.tokenizer import AbsentTokenizer, FastTokenizer, Tokenizer
from shardwright.data.workers import encode_in_order
from shardwright.errors import DataError, TokenizerError

CACHE_VERSION = 3
"""Part of every key of the cache: raise it when the same sources would give other tokens or other files."""

Progress = Callable[[str, int, int], None]
"""Told what is being done, and how far: (stage, done, total) in characters, about."""

log = logging.getLogger(__name__)


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
    given = _given_tokenizer(recipe, sources.kinds, vocab_size)
    packing = choose_packing(recipe, sources.kinds)
    template = _template_of(recipe, given) if sources.with_records else None
    key = _key(recipe, sources, given, template)
    folder = build_once(sources.root, f"tokens/{key}", partial(_tokenise, sources, given, template))
    saved = json.loads((folder / "records.json").read_text(encoding="utf-8"))
    records = _check_records(saved["records"], recipe)
    tokenizer = given if given is not None else load_tokenizer(folder / "tokenizer")
    if template is not None and isinstance(tokenizer, FastTokenizer):
        tokenizer.chat_template = template.text
    stores: dict[Side, TokenStore] = {"train": open_tokens(folder, "train")}
    if (folder / "validation.json").is_file():
        stores["validation"] = open_tokens(folder, "validation")
    _check_fits(stores, tokenizer, vocab_size)
    _check_supervision(stores, recipe)
    datasets = {side: open_dataset(recipe, sources.root, key, side, store, packing) for side, store in stores.items()}
    sides = {side: describe_side(stores[side], dataset) for side, dataset in datasets.items()}
    report = DataReport(
        num_files=saved["num_files"],
        records=_sum_records(records),
        num_duplicates_dropped=saved["num_duplicates_dropped"],
        tokenizer_kind=tokenizer.kind if isinstance(tokenizer, AbsentTokenizer) else recipe.tokenizer.kind,
        vocab_size=tokenizer.vocab_size,
        packing=packing,
        supervise=recipe.data.supervise if sources.with_records else None,
        template=None if template is None else recipe.data.chat_template or "the tokenizer's own",
        sources=_describe_sources(sources, stores["train"], datasets["train"]),
        train=sides["train"],
        validation=sides.get("validation"),
    )
    weights = [source.weight for source in recipe.data.sources]
    content_hash = key_of([key, tokenizer.content_hash, packing, recipe.data.overlong, weights])
    return Prepared(datasets["train"], datasets.get("validation"), tokenizer, report, content_hash)


def is_prepared(recipe: Recipe) -> bool:
    """Whether the cache holds the recipe's tokens, so that `prepare` has nothing to read; files are looked up, not tokenised.

    Raises:
        DataError, TokenizerError: sources that are not there, no tokenizer.
    """
    sources = _Sources(recipe, None)
    given = _given_tokenizer(recipe, sources.kinds, 0)
    template = _template_of(recipe, given) if sources.with_records else None
    return (sources.root / f"tokens/{_key(recipe, sources, given, template)}").is_dir()


def _key(recipe: Recipe, sources: _Sources, given: Tokenizer | None, template: ChatTemplate | None) -> str:
    """Names the tokens in the cache by all that they depend on."""
    spec: Any = given.content_hash if given is not None else [recipe.tokenizer.kind, recipe.tokenizer.vocab_size]
    rendering: list[Any] = []
    if sources.with_records:
        written = template and [template.text, dict(template.variables)]
        rendering = [recipe.data.supervise, written, recipe.data.max_record_characters]
    return key_of([CACHE_VERSION, sources.key, spec, *rendering])


def _check_records(saved: list[dict[str, Any]], recipe: Recipe) -> list[Records]:
    """What could not be read of training and validation sources; told, or an error where it is too much."""
    records = [Records(**{**item, "broken": tuple(Broken(**broken) for broken in item["broken"])}) for item in saved]
    for found, field in zip(records, ("data.sources", "data.validation"), strict=False):
        found.check(recipe.data.max_broken_fraction, field)
        if found.num_broken:
            first = found.broken[0]
            message = "set aside %d of %d records of %s that cannot be read; the first is %s:%d: %s"
            log.warning(message, found.num_broken, found.num_records, field, first.file, first.line, first.reason)
    return records


def _template_of(recipe: Recipe, given: Tokenizer | None) -> ChatTemplate | None:
    """The chat template of a recipe. One that writes the date would give other tokens every day."""
    if isinstance(given, AbsentTokenizer):
        if recipe.data.chat_template is not None:
            raise TokenizerError(
                "a chat template makes text, which needs a tokenizer; the sources hold token ids, and there is none",
                field="data.chat_template",
                got=recipe.data.chat_template,
                remedy="Leave it out",
            )
        return None
    folder = recipe.tokenizer.path or recipe.model.path
    eos = END_OF_TEXT if given is None else None if given.eos_id is None else given.decode([given.eos_id])
    place = Path(os.path.expanduser(folder)) if given is not None and folder is not None else None
    template = load_chat_template(place, recipe.data.chat_template, recipe.data.template_variables, eos)
    if template is not None and "strftime_now" in template.text and "date_string" not in template.variables:
        log.warning("the chat template may write today's date; data.template_variables: {date_string: ...} fixes it")
    return template


def _describe_sources(sources: _Sources, store: TokenStore, dataset: TokenDataset) -> tuple[SourceReport, ...]:
    counts = [*store.counts.source_documents, *[0] * len(sources.recipe.data.sources)]
    shares = [n / len(dataset) for n in dataset.counts] if isinstance(dataset, MixedDataset) else None
    found = []
    for number, source in enumerate(sources.recipe.data.sources):
        files = [file for file in sources.training if file.source == number]
        kinds = {file.records.kind if file.format != "text" else "text" for file in files}
        records = next((file.records for file in files if file.format != "text"), None)
        found.append(
            SourceReport(
                path=source.path,
                num_files=len(files),
                records=", ".join(kind for kind in KINDS if kind in kinds),
                columns=records.columns if records is not None else (),
                num_documents=counts[number],
                weight=source.weight,
                share=shares[number] if shares else None,
            )
        )
    return tuple(found)


class _Sources:
    """The files of a recipe; read and divided only if somebody asks for the corpus."""

    def __init__(self, recipe: Recipe, progress: Progress | None) -> None:
        self.recipe = recipe
        self.root = cache_root(recipe.data.cache_dir)
        self._progress = progress
        self.training = self._find(recipe.data.sources, "data.sources")
        self.validation = self._find(recipe.data.validation, "data.validation")
        files = (*self.training, *self.validation)
        self.kinds = {"text" if file.format == "text" else file.records.canonical for file in files}
        self.with_records = bool(self.kinds - {"text"})
        data = recipe.data
        split = [] if self.validation else [data.validation_fraction, data.validation_split if data.validation_fraction else None]
        owners = [file.source for file in self.training]  # the same files may be one source or several
        self.key = key_of([fingerprint(self.training, self.root), fingerprint(self.validation, self.root), owners, split])

    def _find(self, sources: Sequence[Source], field: str) -> tuple[SourceFile, ...]:
        here = localise(sources, self.root, field, self._progress)
        return identify(list_files(here, field), here, field)

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
            yield from [piece.text] if piece.canonical == "text" else plain_texts(piece.canonical, piece.text)


def _num_bytes(files: tuple[SourceFile, ...]) -> int:
    return sum(file.path.stat().st_size for file in files)


def _given_tokenizer(recipe: Recipe, kinds: Collection[str], vocab_size: int | None) -> Tokenizer | None:
    """The tokenizer that does not depend on the sources. Token ids need none, unless the recipe names one."""
    if recipe.tokenizer.kind != "huggingface":
        return None
    folder = recipe.tokenizer.path or recipe.model.path
    if set(kinds) == {"tokens"} and recipe.tokenizer.path is None and (folder is None or not _has_tokenizer(folder)):
        if vocab_size is None:
            raise TokenizerError(
                "the size of the vocabulary is not known: the sources hold token ids, and there is no tokenizer",
                field="model.config.vocab_size",
                remedy="Write it there, or name a tokenizer in tokenizer.path",
            )
        log.info("no tokenizer: the sources hold token ids, which need none")
        return AbsentTokenizer(vocab_size)
    if folder is None:
        raise TokenizerError(
            "no tokenizer is named",
            field="tokenizer.path",
            remedy="Name a folder with tokenizer.json, or choose tokenizer.kind: bpe or character",
        )
    if not Path(os.path.expanduser(folder)).is_dir():
        raise TokenizerError("no such folder", field="tokenizer.path", got=folder)
    return load_tokenizer(Path(os.path.expanduser(folder)))


def _has_tokenizer(folder: str) -> bool:
    return has_tokenizer(Path(os.path.expanduser(folder)))


def _tokenise(sources: _Sources, given: Tokenizer | None, template: ChatTemplate | None, folder: Path) -> None:
    """Fill a folder of the cache: the tokenizer if it is trained here, the tokens of both sides, and what was counted."""
    corpus = sources.corpus
    tokenizer = given
    if tokenizer is None:
        tokenizer = _train_tokenizer(sources)
        tokenizer.save(folder / "tokenizer")
    encode: Encode | None = None
    if sources.with_records:
        section = sources.recipe.data
        encoder = Encoder(tokenizer, template, section.supervise, section.max_record_characters)
        encode = partial(encode_in_order, encoder, num_workers=sources.recipe.data.num_workers)
    records = [corpus.training.records, *([corpus.validation.records] if corpus.validation else [])]
    sides: tuple[Side, ...] = ("train", "validation")
    for side in sides:
        if num_characters := corpus.characters(side):
            read = sources.reading(f"tokenising {side}", num_characters)
            _, broken = write_tokens(folder, side, corpus.pieces(side), tokenizer, read, encode)
            place = -1 if side == "validation" else 0  # the last: validation sources of their own, or those of both sides
            records[place] = records[place].with_broken(broken)
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


def _check_supervision(stores: dict[Side, TokenStore], recipe: Recipe) -> None:
    """Prompts that are all learnt by accident; that none is learnt at all is found where records are encoded and packed."""
    for side, store in stores.items():
        counts = store.counts
        if recipe.data.supervise != "all" and 0 < counts.num_answered_tokens == counts.num_answered_supervised:
            raise DataError(
                f"every token of the {side} records is supervised, though only responses should be",
                field="data.supervise",
                got=recipe.data.supervise,
                remedy="The prompts are empty, or the columns are wrong; to learn every token say data.supervise: all",
            )


def _check_fits(stores: dict[Side, TokenStore], tokenizer: Tokenizer, vocab_size: int | None) -> None:
    if vocab_size is None:
        return
    largest, place = max((store.counts.max_id, store.counts.max_id_place) for store in stores.values())
    if largest < vocab_size:
        return
    if isinstance(tokenizer, AbsentTokenizer):
        raise DataError(
            "the data hold a token id outside the model's vocabulary",
            field="data.sources",
            got=f"token id {largest} in {place}",
            allowed=f"ids below the model's vocab_size of {vocab_size}",
            remedy="Take the model that the ids were made for, or one with a larger vocabulary",
        )
    raise TokenizerError(
        "the tokenizer does not fit the model: the data hold a token id outside its vocabulary",
        field="model.vocab_size",
        got=f"token id {largest}{place and f' in {place}'}, from a tokenizer of {tokenizer.vocab_size} ids",
        allowed=f"ids below the model's vocab_size of {vocab_size}",
        remedy="Use the model's own tokenizer, or a model with a larger vocabulary",
    )


def _sum_records(records: list[Records]) -> Records:
    return Records(
        sum(item.num_records for item in records),
        sum(item.num_broken for item in records),
        sum(item.num_empty_files for item in records),
        tuple(broken for item in records for broken in item.broken),
    )
