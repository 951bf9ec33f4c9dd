"""Files of a recipe with their records, read and split on demand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

from shardwright.config.data import DataSource
from shardwright.config.recipe import Recipe
from shardwright.data.corpus import Corpus, ReadCallback, Side, scan_records, split_corpus
from shardwright.data.data_cache import compute_key, find_cache_root, fingerprint_files
from shardwright.data.records.record_formats import extract_texts
from shardwright.data.sources.file_listing import list_files
from shardwright.data.sources.remote_sources import fetch_sources
from shardwright.data.sources.source_reader import SourceFile, detect_schemas

ProgressCallback = Callable[[str, int, int], None]
"""Callback for progress: (stage, done, total), approximately in characters."""
ProgressOpener = Callable[[], AbstractContextManager[ProgressCallback | None]]
"""Opens a progress display for reading and tokenising data."""


class SourceFiles:
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
