"""Streamed sources of a recipe: their shards with the kind of records in each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwright.config.data import DataSource
from shardwright.data.data_cache import build_once, compute_key
from shardwright.data.records.record_formats import RecordSchema
from shardwright.data.sources import SourceFile, detect_schemas, read_first_rows
from shardwright.data.streaming.shard_cache import ShardCache
from shardwright.data.streaming.shard_listing import SourceShard, list_shards

_SCHEMA_FILE = "schemas.json"


def find_shards(
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
