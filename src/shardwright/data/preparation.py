"""Preparation of a recipe's data: tokenise the sources once, check them, open datasets."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from shardwright.config.data import DataSection
from shardwright.config.recipe import Recipe
from shardwright.data.corpus import RecordStatistics, Side
from shardwright.data.data_cache import build_once, compute_key
from shardwright.data.data_checks import (
    check_records,
    check_supervision,
    check_token_files,
    check_vocabulary,
    sum_statistics,
)
from shardwright.data.data_report import (
    DataReport,
    compute_shares,
    describe_encoding,
    describe_side,
    describe_sources,
)
from shardwright.data.dataset_assembly import choose_packing, open_dataset
from shardwright.data.prepared_data import PreparedData
from shardwright.data.scheduled_mixture import describe_weight_schedule
from shardwright.data.sources.source_files import ProgressCallback, SourceFiles
from shardwright.data.streaming.streamed_preparation import is_indexed, prepare_streamed_data
from shardwright.data.tokens.token_store import TokenStore, open_tokens
from shardwright.data.tokens.tokenisation import (
    compute_tokens_key,
    load_given_tokenizer,
    load_template,
    tokenise_sources,
)
from shardwright.data.tokens.tokenizer import FastTokenizer
from shardwright.data.tokens.tokenizer_loading import load_tokenizer

_CONSTANT_WEIGHTS_VERSION = 2
"""Part of the hash of sources with constant weights; increase it when they would be read in another
order."""


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
    if recipe.data.streaming is not None:
        return prepare_streamed_data(recipe, vocab_size, progress)
    sources = SourceFiles(recipe, progress)
    given_tokenizer = load_given_tokenizer(recipe, sources.canonical_kinds, vocab_size)
    check_token_files((*sources.training, *sources.validation), given_tokenizer)
    packing = choose_packing(recipe, sources.canonical_kinds)
    template = load_template(recipe, given_tokenizer) if sources.has_records else None
    key = compute_tokens_key(recipe, sources, given_tokenizer, template)
    folder = build_once(
        sources.root, f"tokens/{key}", partial(tokenise_sources, sources, given_tokenizer, template)
    )
    saved = json.loads((folder / "records.json").read_text(encoding="utf-8"))
    records = [RecordStatistics.from_dict(item) for item in saved["records"]]
    check_records(records, recipe)
    tokenizer = (
        given_tokenizer if given_tokenizer is not None else load_tokenizer(folder / "tokenizer")
    )
    if template is not None and isinstance(tokenizer, FastTokenizer):
        tokenizer.chat_template = template.text
    stores: dict[Side, TokenStore] = {"train": open_tokens(folder, "train")}
    if (folder / "validation.json").is_file():
        stores["validation"] = open_tokens(folder, "validation")
    counts = {side: store.counts for side, store in stores.items()}
    check_vocabulary(counts, tokenizer, vocab_size)
    check_supervision(counts, recipe)
    datasets = {
        side: open_dataset(recipe, sources.root, key, side, store, packing)
        for side, store in stores.items()
    }
    sides = {side: describe_side(stores[side], dataset) for side, dataset in datasets.items()}
    report = DataReport(
        num_files=saved["num_files"],
        records=sum_statistics(records),
        num_duplicates_dropped=saved["num_duplicates_dropped"],
        packing=packing,
        **describe_encoding(recipe, tokenizer, template, has_records=sources.has_records),
        sources=describe_sources(
            recipe.data.sources,
            sources.training,
            stores["train"].counts.source_documents,
            compute_shares(datasets["train"]),
        ),
        train=sides["train"],
        validation=sides.get("validation"),
    )
    content_hash = compute_key(
        [
            key,
            tokenizer.content_hash,
            packing,
            recipe.data.overlong,
            *_describe_weights(recipe.data),
        ]
    )
    return PreparedData(
        datasets["train"], datasets.get("validation"), tokenizer, report, content_hash, stores
    )


def _describe_weights(section: DataSection) -> list[Any]:
    """Return the weights of the sources, and how they determine the order, as JSON values."""
    weights = [source.weight for source in section.sources]
    if weights[0] is None or section.weight_schedule:
        return [weights, *describe_weight_schedule(section)]
    return [weights, _CONSTANT_WEIGHTS_VERSION]


def is_prepared(recipe: Recipe) -> bool:
    """Return True if the cache contains the recipe's tokens; tokenises nothing.

    Raises:
        DataError, TokenizerError: sources that do not exist, no tokenizer.
    """
    if recipe.data.streaming is not None:
        return is_indexed(recipe)
    sources = SourceFiles(recipe, None)
    given_tokenizer = load_given_tokenizer(recipe, sources.canonical_kinds, 0)
    template = load_template(recipe, given_tokenizer) if sources.has_records else None
    return (
        sources.root / f"tokens/{compute_tokens_key(recipe, sources, given_tokenizer, template)}"
    ).is_dir()
