"""Preparation of a recipe's data: split and tokenise the sources, open datasets."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from shardwright.config.data import DataSource
from shardwright.config.recipe import Recipe
from shardwright.data.chat_template import ChatTemplate, load_chat_template
from shardwright.data.corpus import (
    Corpus,
    ReadCallback,
    RecordStatistics,
    Side,
    scan_records,
    split_corpus,
)
from shardwright.data.data_cache import build_once, compute_key, find_cache_root, fingerprint_files
from shardwright.data.data_report import DataReport, SourceReport, describe_side
from shardwright.data.dataset import TokenDataset
from shardwright.data.dataset_assembly import choose_packing, open_dataset
from shardwright.data.encoding_workers import encode_in_order
from shardwright.data.file_listing import list_files
from shardwright.data.mixed_dataset import MixedDataset
from shardwright.data.record_formats import RECORD_KINDS, extract_texts
from shardwright.data.remote_sources import fetch_sources
from shardwright.data.sources import BrokenRecord, SourceFile, detect_schemas
from shardwright.data.supervision import RecordEncoder
from shardwright.data.token_store import EncodeRecords, TokenStore, open_tokens, write_tokens
from shardwright.data.tokenizer import AbsentTokenizer, FastTokenizer, Tokenizer
from shardwright.data.tokenizer_loading import (
    END_OF_TEXT,
    has_tokenizer,
    load_tokenizer,
    train_bpe,
    train_characters,
)
from shardwright.errors import DataError, TokenizerError

CACHE_VERSION = 3
"""Part of every cache key; increase it when the same sources would give other tokens or
files."""

ProgressCallback = Callable[[str, int, int], None]
"""Callback for progress: (stage, done, total), approximately in characters."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreparedData:
    """Datasets, tokenizer and report. `content_hash` changes if any sample changes."""

    train: TokenDataset
    validation: TokenDataset | None
    tokenizer: Tokenizer
    report: DataReport
    content_hash: str


def prepare_data(
    recipe: Recipe, vocab_size: int | None = None, *, progress: ProgressCallback | None = None
) -> PreparedData:
    """Tokenise the recipe's sources once and open the datasets; all ranks get the same result.

    Args:
        vocab_size: vocabulary size of the model, which every token id is checked against; None
            skips the check.
        progress: called while sources are read and tokenised; never if the cache is complete.

    Raises:
        DataError: sources that cannot be read, have too many broken records, or contain nothing
            to train on.
        TokenizerError: no tokenizer, or one with ids outside the model's vocabulary.
    """
    sources = _SourceFiles(recipe, progress)
    given_tokenizer = _load_given_tokenizer(recipe, sources.canonical_kinds, vocab_size)
    packing = choose_packing(recipe, sources.canonical_kinds)
    template = _load_template(recipe, given_tokenizer) if sources.has_records else None
    key = _compute_tokens_key(recipe, sources, given_tokenizer, template)
    folder = build_once(
        sources.root,
        f"tokens/{key}",
        partial(_tokenise_sources, sources, given_tokenizer, template),
    )
    saved = json.loads((folder / "records.json").read_text(encoding="utf-8"))
    records = _check_records(saved["records"], recipe)
    tokenizer = (
        given_tokenizer if given_tokenizer is not None else load_tokenizer(folder / "tokenizer")
    )
    if template is not None and isinstance(tokenizer, FastTokenizer):
        tokenizer.chat_template = template.text
    stores: dict[Side, TokenStore] = {"train": open_tokens(folder, "train")}
    if (folder / "validation.json").is_file():
        stores["validation"] = open_tokens(folder, "validation")
    _check_vocabulary(stores, tokenizer, vocab_size)
    _check_supervision(stores, recipe)
    datasets = {
        side: open_dataset(recipe, sources.root, key, side, store, packing)
        for side, store in stores.items()
    }
    sides = {side: describe_side(stores[side], dataset) for side, dataset in datasets.items()}
    report = DataReport(
        num_files=saved["num_files"],
        records=_sum_statistics(records),
        num_duplicates_dropped=saved["num_duplicates_dropped"],
        tokenizer_kind=tokenizer.kind
        if isinstance(tokenizer, AbsentTokenizer)
        else recipe.tokenizer.kind,
        vocab_size=tokenizer.vocab_size,
        packing=packing,
        supervise=recipe.data.supervise if sources.has_records else None,
        template=None if template is None else recipe.data.chat_template or "the tokenizer's own",
        sources=_describe_sources(sources, stores["train"], datasets["train"]),
        train=sides["train"],
        validation=sides.get("validation"),
    )
    weights = [source.weight for source in recipe.data.sources]
    content_hash = compute_key(
        [key, tokenizer.content_hash, packing, recipe.data.overlong, weights]
    )
    return PreparedData(
        datasets["train"], datasets.get("validation"), tokenizer, report, content_hash
    )


def is_prepared(recipe: Recipe) -> bool:
    """Return True if the cache contains the recipe's tokens; tokenises nothing.

    Raises:
        DataError, TokenizerError: sources that do not exist, no tokenizer.
    """
    sources = _SourceFiles(recipe, None)
    given_tokenizer = _load_given_tokenizer(recipe, sources.canonical_kinds, 0)
    template = _load_template(recipe, given_tokenizer) if sources.has_records else None
    return (
        sources.root / f"tokens/{_compute_tokens_key(recipe, sources, given_tokenizer, template)}"
    ).is_dir()


def _compute_tokens_key(
    recipe: Recipe,
    sources: _SourceFiles,
    tokenizer: Tokenizer | None,
    template: ChatTemplate | None,
) -> str:
    """Compute the cache key of the tokens from everything that they depend on."""
    tokenizer_spec: Any = (
        tokenizer.content_hash
        if tokenizer is not None
        else [recipe.tokenizer.kind, recipe.tokenizer.vocab_size]
    )
    rendering: list[Any] = []
    if sources.has_records:
        template_spec = template and [template.text, dict(template.variables)]
        rendering = [recipe.data.supervise, template_spec, recipe.data.max_record_characters]
    return compute_key([CACHE_VERSION, sources.key, tokenizer_spec, *rendering])


def _check_records(saved: list[dict[str, Any]], recipe: Recipe) -> list[RecordStatistics]:
    """Check the number of broken records of each side; log a warning if there are any."""
    records = [
        RecordStatistics(
            **{**item, "broken": tuple(BrokenRecord(**broken) for broken in item["broken"])}
        )
        for item in saved
    ]
    for statistics, field in zip(records, ("data.sources", "data.validation"), strict=False):
        statistics.check(recipe.data.max_broken_fraction, field)
        if statistics.num_broken:
            first = statistics.broken[0]
            message = (
                "skipped %d of %d records of %s because they cannot be read; the first is %s:%d: %s"
            )
            logger.warning(
                message,
                statistics.num_broken,
                statistics.num_records,
                field,
                first.file,
                first.line,
                first.reason,
            )
    return records


def _load_template(recipe: Recipe, tokenizer: Tokenizer | None) -> ChatTemplate | None:
    """Load the chat template of a recipe; warn if it may render the current date."""
    if isinstance(tokenizer, AbsentTokenizer):
        if recipe.data.chat_template is not None:
            raise TokenizerError(
                "a chat template needs a tokenizer, but there is none for these token ids",
                field="data.chat_template",
                got=recipe.data.chat_template,
                remedy="Remove it, or set tokenizer.path",
            )
        return None
    folder = recipe.tokenizer.path or recipe.model.path
    eos_token = (
        END_OF_TEXT
        if tokenizer is None
        else None
        if tokenizer.eos_id is None
        else tokenizer.decode([tokenizer.eos_id])
    )
    tokenizer_folder = (
        Path(os.path.expanduser(folder)) if tokenizer is not None and folder is not None else None
    )
    template = load_chat_template(
        tokenizer_folder, recipe.data.chat_template, recipe.data.template_variables, eos_token
    )
    if (
        template is not None
        and "strftime_now" in template.text
        and "date_string" not in template.variables
    ):
        logger.warning(
            "the chat template may render today's date; "
            "set data.template_variables: {date_string: ...} to a fixed date"
        )
    return template


def _describe_sources(
    sources: _SourceFiles, store: TokenStore, dataset: TokenDataset
) -> tuple[SourceReport, ...]:
    counts = [*store.counts.source_documents, *[0] * len(sources.recipe.data.sources)]
    shares = (
        [n / len(dataset) for n in dataset.num_samples_per_part]
        if isinstance(dataset, MixedDataset)
        else None
    )
    reports = []
    for number, source in enumerate(sources.recipe.data.sources):
        files = [file for file in sources.training if file.source_index == number]
        kinds = {file.records.kind if file.format != "text" else "text" for file in files}
        records = next((file.records for file in files if file.format != "text"), None)
        reports.append(
            SourceReport(
                path=source.path,
                num_files=len(files),
                records=", ".join(kind for kind in RECORD_KINDS if kind in kinds),
                columns=records.columns if records is not None else (),
                num_documents=counts[number],
                weight=source.weight,
                share=shares[number] if shares else None,
            )
        )
    return tuple(reports)


class _SourceFiles:
    """Files of a recipe. They are read and split only when `corpus` is used."""

    def __init__(self, recipe: Recipe, progress: ProgressCallback | None) -> None:
        self.recipe = recipe
        self.root = find_cache_root(recipe.data.cache_dir)
        self._progress = progress
        self.training = self._find_files(recipe.data.sources, "data.sources")
        self.validation = self._find_files(recipe.data.validation, "data.validation")
        files = (*self.training, *self.validation)
        self.canonical_kinds = {
            "text" if file.format == "text" else file.records.canonical for file in files
        }
        self.has_records = bool(self.canonical_kinds - {"text"})
        data = recipe.data
        split: list[Any] = []
        if not self.validation:
            split_kind = data.validation_split if data.validation_fraction else None
            split = [data.validation_fraction, split_kind]
        # The same files may be in one source or several.
        owners = [file.source_index for file in self.training]
        self.key = compute_key(
            [
                fingerprint_files(self.training, self.root),
                fingerprint_files(self.validation, self.root),
                owners,
                split,
            ]
        )

    def _find_files(self, sources: Sequence[DataSource], field: str) -> tuple[SourceFile, ...]:
        local_sources = fetch_sources(sources, self.root, field, self._progress)
        return detect_schemas(list_files(local_sources, field), local_sources, field)

    @cached_property
    def corpus(self) -> Corpus:
        """All records, scanned and assigned to a side."""
        limit = self.recipe.data.max_broken_fraction
        training = scan_records(
            self.training, self.build_read_callback("reading", _count_bytes(self.training))
        )
        training.statistics.check(limit, "data.sources")
        validation = None
        if self.validation:
            validation = scan_records(
                self.validation,
                self.build_read_callback("reading validation", _count_bytes(self.validation)),
            )
            validation.statistics.check(limit, "data.validation")
        return split_corpus(training, validation, self.recipe.data)

    def build_read_callback(self, stage: str, num_characters: int) -> ReadCallback:
        """Return a callback for characters read that calls `progress` every half percent."""
        progress = self._progress
        step = max(1, num_characters // 200)
        last_reported = 0
        if progress is None:
            return lambda done: None
        progress(stage, 0, num_characters)

        def read(done: int) -> None:
            nonlocal last_reported
            if done - last_reported >= step:
                last_reported = done
                progress(stage, min(done, num_characters), num_characters)

        return read

    def iterate_texts(self, side: Side, stage: str) -> Any:
        """Yield the texts of a side and report progress."""
        num_read = 0
        report_read = self.build_read_callback(stage, self.corpus.count_characters(side))
        for piece in self.corpus.iterate_pieces(side):
            num_read += len(piece.text)
            report_read(num_read)
            yield from (
                [piece.text]
                if piece.canonical == "text"
                else extract_texts(piece.canonical, piece.text)
            )


def _count_bytes(files: tuple[SourceFile, ...]) -> int:
    return sum(file.path.stat().st_size for file in files)


def _load_given_tokenizer(
    recipe: Recipe, kinds: Collection[str], vocab_size: int | None
) -> Tokenizer | None:
    """Load the tokenizer, unless it is trained on the sources.

    Sources of token ids need none; then the result is an `AbsentTokenizer`, unless the recipe
    sets one.
    """
    if recipe.tokenizer.kind != "huggingface":
        return None
    folder = recipe.tokenizer.path or recipe.model.path
    if (
        set(kinds) == {"tokens"}
        and recipe.tokenizer.path is None
        and (folder is None or not _has_tokenizer(folder))
    ):
        if vocab_size is None:
            raise TokenizerError(
                "the vocabulary size is unknown: there is no tokenizer for these token ids",
                field="model.config.vocab_size",
                remedy="Set it, or set tokenizer.path",
            )
        logger.info("no tokenizer is used: the sources contain token ids")
        return AbsentTokenizer(vocab_size)
    if folder is None:
        raise TokenizerError(
            "no tokenizer is set",
            field="tokenizer.path",
            remedy="Use a folder with tokenizer.json, or set tokenizer.kind: bpe or character",
        )
    if not Path(os.path.expanduser(folder)).is_dir():
        raise TokenizerError("no such folder", field="tokenizer.path", got=folder)
    return load_tokenizer(Path(os.path.expanduser(folder)))


def _has_tokenizer(folder: str) -> bool:
    return has_tokenizer(Path(os.path.expanduser(folder)))


def _tokenise_sources(
    sources: _SourceFiles, given: Tokenizer | None, template: ChatTemplate | None, folder: Path
) -> None:
    """Fill a cache folder: the tokenizer if trained here, the tokens of both sides, counts."""
    corpus = sources.corpus
    tokenizer = given
    if tokenizer is None:
        tokenizer = _train_tokenizer(sources)
        tokenizer.save(folder / "tokenizer")
    encode: EncodeRecords | None = None
    if sources.has_records:
        section = sources.recipe.data
        encoder = RecordEncoder(
            tokenizer, template, section.supervise, section.max_record_characters
        )
        encode = partial(encode_in_order, encoder, num_workers=sources.recipe.data.num_workers)
    records = [
        corpus.training.statistics,
        *([corpus.validation.statistics] if corpus.validation else []),
    ]
    sides: tuple[Side, ...] = ("train", "validation")
    for side in sides:
        if num_characters := corpus.count_characters(side):
            report_read = sources.build_read_callback(f"tokenising {side}", num_characters)
            _, broken = write_tokens(
                folder, side, corpus.iterate_pieces(side), tokenizer, report_read, encode
            )
            # The last element: separate validation sources, else the sources of both sides.
            index = -1 if side == "validation" else 0
            records[index] = records[index].add_broken(broken)
    content = {
        "num_files": len(sources.training) + len(sources.validation),
        "records": [
            item._asdict() | {"broken": [broken._asdict() for broken in item.broken]}
            for item in records
        ],
        "num_duplicates_dropped": corpus.num_duplicates_dropped,
    }
    (folder / "records.json").write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def _train_tokenizer(sources: _SourceFiles) -> Tokenizer:
    """Train a tokenizer on the sources.

    BPE merges come from the training side only. The alphabet of a character tokenizer comes
    from both sides, because a validation character without an id could not be evaluated.
    """
    section = sources.recipe.tokenizer
    if section.kind == "bpe":
        assert section.vocab_size is not None  # the schema requires it
        tokenizer: Tokenizer = train_bpe(
            sources.iterate_texts("train", "training the tokenizer"), section.vocab_size
        )
        if tokenizer.vocab_size < section.vocab_size:
            logger.warning(
                "the vocabulary has only %d tokens, not %d: the text has no more repeated pairs",
                tokenizer.vocab_size,
                section.vocab_size,
            )
        return tokenizer
    sides: tuple[Side, ...] = ("train", "validation")
    return train_characters(
        text for side in sides for text in sources.iterate_texts(side, "reading the alphabet")
    )


def _check_supervision(stores: dict[Side, TokenStore], recipe: Recipe) -> None:
    """Raise if prompts are supervised by mistake. Packing raises if no token is supervised."""
    for side, store in stores.items():
        counts = store.counts
        if (
            recipe.data.supervise != "all"
            and 0 < counts.num_answered_tokens == counts.num_answered_supervised
        ):
            raise DataError(
                f"every token of the {side} records is supervised, not only the responses",
                field="data.supervise",
                got=recipe.data.supervise,
                remedy="The prompts are empty or the columns are wrong; "
                "to supervise every token, set data.supervise: all",
            )


def _check_vocabulary(
    stores: dict[Side, TokenStore], tokenizer: Tokenizer, vocab_size: int | None
) -> None:
    if vocab_size is None:
        return
    largest, location = max(
        (store.counts.max_id, store.counts.max_id_place) for store in stores.values()
    )
    if largest < vocab_size:
        return
    if isinstance(tokenizer, AbsentTokenizer):
        raise DataError(
            "the data contain a token id outside the model's vocabulary",
            field="data.sources",
            got=f"token id {largest} in {location}",
            allowed=f"ids below the model's vocab_size of {vocab_size}",
            remedy="Use the model of these ids, or one with a larger vocabulary",
        )
    raise TokenizerError(
        "the data contain a token id of the tokenizer outside the model's vocabulary",
        field="model.vocab_size",
        got=f"token id {largest}{location and f' in {location}'}, from a tokenizer of "
        f"{tokenizer.vocab_size} ids",
        allowed=f"ids below the model's vocab_size of {vocab_size}",
        remedy="Use the model's own tokenizer, or a model with a larger vocabulary",
    )


def _sum_statistics(records: list[RecordStatistics]) -> RecordStatistics:
    return RecordStatistics(
        sum(item.num_records for item in records),
        sum(item.num_broken for item in records),
        sum(item.num_empty_files for item in records),
        tuple(broken for item in records for broken in item.broken),
    )
