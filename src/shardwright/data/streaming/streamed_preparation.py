"""Preparation of a recipe whose training sources are streamed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.config.data import DataSource
from shardwright.config.recipe import Recipe
from shardwright.data.corpus import (
    DUPLICATE,
    SKIPPED,
    TRAIN,
    Corpus,
    RecordStatistics,
    Side,
    scan_records,
)
from shardwright.data.data_cache import build_once, compute_key
from shardwright.data.data_checks import (
    check_records,
    check_supervision,
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
from shardwright.data.dataset import TokenDataset
from shardwright.data.dataset_assembly import choose_packing, open_dataset
from shardwright.data.prepared_data import PreparedData
from shardwright.data.records.record_formats import RecordSchema
from shardwright.data.records.supervision import RecordEncoder
from shardwright.data.scheduled_mixture import build_weight_schedule, describe_weight_schedule
from shardwright.data.sources.source_files import ProgressCallback, SourceFiles
from shardwright.data.sources.source_reader import (
    SourceFile,
    detect_schemas,
    read_first_rows,
)
from shardwright.data.streaming.shard_cache import ShardCache
from shardwright.data.streaming.shard_index import ShardIndex
from shardwright.data.streaming.shard_listing import SourceShard, list_shards
from shardwright.data.streaming.shard_tokens import ShardBuilder, describe_settings
from shardwright.data.streaming.streamed_training import open_streamed_training
from shardwright.data.tokens.encoding_workers import encode_in_order
from shardwright.data.tokens.token_store import TokenCounts, open_tokens, write_tokens
from shardwright.data.tokens.tokenisation import CACHE_VERSION, load_given_tokenizer, load_template
from shardwright.data.tokens.tokenizer import FastTokenizer
from shardwright.errors import DataError, TokenizerError

_STATISTICS_FILE = "records.json"
_SCHEMA_FILE = "schemas.json"


@dataclass(frozen=True)
class _StreamedSources:
    """Index of the training sources, and the files of the validation sources."""

    index: ShardIndex
    builder: ShardBuilder
    files: SourceFiles


def prepare_streamed_data(
    recipe: Recipe, vocab_size: int | None, progress: ProgressCallback | None
) -> PreparedData:
    """Index the training sources, tokenise the validation sources, and open the datasets.

    Raises:
        DataError, TokenizerError: see `prepare_data`; also a cache that is too small, and a
            tokenizer that would be trained on the sources.
    """
    sources = _open_sources(recipe, vocab_size, progress)
    index = sources.index
    builder = sources.builder
    tokenizer = builder.tokenizer
    index.complete(progress)
    training = open_streamed_training(recipe, index, build_weight_schedule(recipe.data))
    statistics = [training.statistics]
    counts: dict[Side, TokenCounts] = {"train": training.report.counts}
    validation: TokenDataset | None = None
    num_duplicates = 0
    sides = {"train": training.report}
    key = ""
    if sources.files.validation:
        key, folder = _tokenise_validation(sources)
        saved = json.loads((folder / _STATISTICS_FILE).read_text(encoding="utf-8"))
        num_duplicates = saved.pop("num_duplicates")
        statistics.append(RecordStatistics.from_dict(saved))
        store = open_tokens(folder, "validation")
        counts["validation"] = store.counts
    check_records(statistics, recipe)
    check_vocabulary(counts, tokenizer, vocab_size)
    check_supervision(counts, recipe)
    if sources.files.validation:
        validation = open_dataset(
            recipe, sources.files.root, key, "validation", store, builder.packing
        )
        sides["validation"] = describe_side(store, validation)
    if builder.template is not None and isinstance(tokenizer, FastTokenizer):
        tokenizer.chat_template = builder.template.text
    report = DataReport(
        num_files=len(index.shards) + len(sources.files.validation),
        records=sum_statistics(statistics),
        num_duplicates_dropped=num_duplicates,
        packing=builder.packing,
        **describe_encoding(recipe, tokenizer, builder.template, has_records=builder.has_records),
        sources=describe_sources(
            recipe.data.sources,
            [shard.file for shard in index.shards],
            training.report.counts.source_documents,
            compute_shares(training.dataset),
        ),
        train=training.report,
        validation=sides.get("validation"),
    )
    assert recipe.data.streaming is not None
    content_hash = compute_key(
        [
            index.content_hash,
            [shard.file.source_index for shard in index.shards],
            key,
            describe_settings(builder),
            [source.weight for source in recipe.data.sources],
            recipe.data.streaming.window_files,
            *describe_weight_schedule(recipe.data),
        ]
    )
    return PreparedData(training.dataset, validation, tokenizer, report, content_hash)


def is_indexed(recipe: Recipe) -> bool:
    """Return True if the index of the streamed sources is complete; reads no file of them.

    Raises:
        DataError, TokenizerError: sources that do not exist, no tokenizer.
    """
    return _open_sources(recipe, 0, None).index.is_complete


def _open_sources(
    recipe: Recipe, vocab_size: int | None, progress: ProgressCallback | None
) -> _StreamedSources:
    streaming = recipe.data.streaming
    assert streaming is not None
    if recipe.tokenizer.kind != "huggingface":
        raise TokenizerError(
            "a tokenizer is not trained on streamed sources",
            field="tokenizer.kind",
            got=recipe.tokenizer.kind,
            allowed="huggingface",
            remedy="Train it on a part of the data, and set tokenizer.path to its folder",
        )
    validation_only = recipe.data.model_copy(update={"sources": (), "streaming": None})
    files = SourceFiles(recipe.model_copy(update={"data": validation_only}), progress)
    cache = ShardCache(files.root / "streamed", streaming.cache_bytes)
    shards = _find_shards(recipe.data.sources, cache, "data.sources")
    kinds = {
        "text" if shard.file.format == "text" else shard.file.records.canonical for shard in shards
    } | files.canonical_kinds
    has_records = bool(kinds - {"text"})
    tokenizer = load_given_tokenizer(recipe, kinds, vocab_size)
    assert tokenizer is not None, "only a tokenizer that is trained is absent"
    builder = ShardBuilder(
        recipe,
        tokenizer,
        load_template(recipe, tokenizer) if has_records else None,
        has_records,
        choose_packing(recipe, kinds),
    )
    return _StreamedSources(ShardIndex(cache, shards, builder), builder, files)


def _tokenise_validation(sources: _StreamedSources) -> tuple[str, Path]:
    """Tokenise the validation sources without documents of the training data.

    Returns:
        The key of the tokens, and their folder.
    """
    files = sources.files
    builder = sources.builder
    index = sources.index
    key = compute_key(
        [CACHE_VERSION, files.key, describe_settings(builder), index.content_hash, "validation"]
    )

    def build(folder: Path) -> None:
        scan = scan_records(
            files.validation,
            files.build_read_callback("reading validation", 1),
        )
        scan.statistics.check(builder.recipe.data.max_broken_fraction, "data.validation")
        sides = np.where(scan.num_characters > 0, TRAIN, SKIPPED).astype(np.uint8)
        sides[(sides == TRAIN) & index.contains_documents(scan.digests)] = DUPLICATE
        num_duplicates = int(np.count_nonzero(sides == DUPLICATE))
        if not np.any(sides == TRAIN):
            raise DataError(
                "all text of the validation sources is also in the training sources",
                field="data.validation",
                got=f"{scan.statistics.num_records} records, {scan.statistics.num_broken} of them "
                f"broken and {num_duplicates} also in data.sources",
                remedy="Use other text, or remove data.validation",
            )
        encode = None
        data = builder.recipe.data
        if builder.has_records:
            encoder = RecordEncoder(
                builder.tokenizer, builder.template, data.supervise, data.max_record_characters
            )
            encode = partial(encode_in_order, encoder, num_workers=data.num_workers)
        corpus = Corpus(scan, None, sides, None, None)
        pieces = corpus.iterate_pieces("train")
        report = files.build_read_callback(
            "tokenising validation", corpus.count_characters("train")
        )
        side: Side = "validation"
        _, broken = write_tokens(folder, side, pieces, builder.tokenizer, report, encode)
        statistics = scan.statistics.add_broken(broken)
        content = statistics._asdict() | {
            "broken": [item._asdict() for item in statistics.broken],
            "num_duplicates": num_duplicates,
        }
        (folder / _STATISTICS_FILE).write_text(json.dumps(content), encoding="utf-8")

    return key, build_once(files.root, f"tokens/{key}", build)


def _find_shards(
    sources: Sequence[DataSource], cache: ShardCache, field: str
) -> tuple[SourceShard, ...]:
    """List the shards of all sources, and detect the kind of records from the first of each.

    Raises:
        DataError: as `list_shards` and `detect_schemas`.
    """
    shards = list_shards(sources, field)
    if all(shard.file_system is None for shard in shards):
        files = detect_schemas([shard.file for shard in shards], sources, field)
        return tuple(replace(shard, file=file) for shard, file in zip(shards, files, strict=True))

    def build(folder: Path) -> None:
        files = detect_schemas(
            [shard.file for shard in shards],
            sources,
            field,
            lambda files: _read_first_rows(files, shards, cache),
        )
        schemas = [[file.records.kind, file.records.columns] for file in files]
        (folder / _SCHEMA_FILE).write_text(json.dumps(schemas), encoding="utf-8")

    settings = [source.model_dump(mode="json") for source in sources]
    key = compute_key([settings, [shard.stamp for shard in shards]])
    folder = build_once(cache.root, f"schemas/{key}", build)
    schemas = json.loads((folder / _SCHEMA_FILE).read_text(encoding="utf-8"))
    return tuple(
        replace(
            shard,
            file=replace(shard.file, records=RecordSchema(kind, tuple(map(tuple, columns)))),
        )
        for shard, (kind, columns) in zip(shards, schemas, strict=True)
    )


def _read_first_rows(
    files: Sequence[SourceFile], shards: Sequence[SourceShard], cache: ShardCache
) -> list[dict[str, Any]]:
    """Return the first records of the first file that has any; fetches one file at a time."""
    for file in files:
        shard = next(shard for shard in shards if shard.file == file)
        with cache.open_scratch(shard.fetched_bytes) as folder:
            if rows := read_first_rows([shard.fetch(folder)]):
                return rows
    return []
