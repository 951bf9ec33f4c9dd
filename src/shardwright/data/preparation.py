"""Preparation of a recipe's data: tokenise the sources once, check them, open datasets."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

from shardwright.config.recipe import Recipe
from shardwright.data.corpus import RecordStatistics, Side
from shardwright.data.data_cache import build_once, compute_key
from shardwright.data.data_report import DataReport, SourceReport, describe_side
from shardwright.data.dataset import TokenDataset
from shardwright.data.dataset_assembly import choose_packing, open_dataset
from shardwright.data.mixed_dataset import MixedDataset
from shardwright.data.records.record_formats import RECORD_KINDS
from shardwright.data.source_files import ProgressCallback, SourceFiles
from shardwright.data.sources import BrokenRecord
from shardwright.data.token_store import TokenStore, open_tokens
from shardwright.data.tokenisation import (
    compute_tokens_key,
    load_given_tokenizer,
    load_template,
    tokenise_sources,
)
from shardwright.data.tokenizer import AbsentTokenizer, FastTokenizer, Tokenizer
from shardwright.data.tokenizer_loading import load_tokenizer
from shardwright.errors import DataError, TokenizerError

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
    sources = SourceFiles(recipe, progress)
    given_tokenizer = load_given_tokenizer(recipe, sources.canonical_kinds, vocab_size)
    packing = choose_packing(recipe, sources.canonical_kinds)
    template = load_template(recipe, given_tokenizer) if sources.has_records else None
    key = compute_tokens_key(recipe, sources, given_tokenizer, template)
    folder = build_once(
        sources.root,
        f"tokens/{key}",
        partial(tokenise_sources, sources, given_tokenizer, template),
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
    sources = SourceFiles(recipe, None)
    given_tokenizer = load_given_tokenizer(recipe, sources.canonical_kinds, 0)
    template = load_template(recipe, given_tokenizer) if sources.has_records else None
    return (
        sources.root / f"tokens/{compute_tokens_key(recipe, sources, given_tokenizer, template)}"
    ).is_dir()


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


def _describe_sources(
    sources: SourceFiles, store: TokenStore, dataset: TokenDataset
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
