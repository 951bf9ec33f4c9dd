"""Statistics of the prepared data: sources, records, tokens and samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from shardwright.config.data import DataSource
from shardwright.config.recipe import Recipe
from shardwright.data.corpus import RecordStatistics
from shardwright.data.dataset import TokenDataset, WindowDataset
from shardwright.data.packed_dataset import PackedDataset
from shardwright.data.records.chat_template import ChatTemplate
from shardwright.data.records.record_formats import RECORD_KINDS
from shardwright.data.scheduled_mixture import ScheduledMixture
from shardwright.data.sources.source_reader import SourceFile
from shardwright.data.tokens.token_store import TokenCounts, TokenStore
from shardwright.data.tokens.tokenizer import AbsentTokenizer, Tokenizer


@dataclass(frozen=True)
class SourceReport:
    """One training source: its record kinds and its share of the samples.

    `columns` are (role, column name) pairs. `share` is the fraction of an epoch's samples if
    sources have weights, else None.
    """

    path: str
    num_files: int
    records: str
    columns: tuple[tuple[str, str], ...]
    num_documents: int
    weight: float | None
    share: float | None


@dataclass(frozen=True)
class SideReport:
    """One side of the split, for one pass over its samples.

    `length_histogram` has pairs of a length in tokens and the number of documents up to that
    length (and above the previous one). Of documents longer than a sample, `num_cut` are split
    over several rows and `num_dropped` are left out. `num_unsupervised_pieces` pieces of split
    documents are left out because none of their tokens is supervised.
    """

    counts: TokenCounts
    num_samples: int
    num_supervised: int
    padding_fraction: float
    length_histogram: tuple[tuple[int, int], ...]
    num_cut: int = 0
    num_dropped: int = 0
    num_unsupervised_pieces: int = 0


@dataclass(frozen=True)
class DataReport:
    """Report on the prepared data of a recipe, both sides."""

    num_files: int
    records: RecordStatistics
    num_duplicates_dropped: int
    tokenizer_kind: str
    vocab_size: int
    packing: str
    supervise: str | None
    template: str | None
    sources: tuple[SourceReport, ...]
    train: SideReport
    validation: SideReport | None

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON-compatible values."""
        return asdict(self) | {
            "records": self.records._asdict()
            | {"broken": [item._asdict() for item in self.records.broken]}
        }


def describe_encoding(
    recipe: Recipe, tokenizer: Tokenizer, template: ChatTemplate | None, *, has_records: bool
) -> dict[str, Any]:
    """Return the fields of a `DataReport` on how text and records become token ids."""
    is_absent = isinstance(tokenizer, AbsentTokenizer)
    return {
        "tokenizer_kind": tokenizer.kind if is_absent else recipe.tokenizer.kind,
        "vocab_size": tokenizer.vocab_size,
        "supervise": recipe.data.supervise if has_records else None,
        "template": None
        if template is None
        else recipe.data.chat_template or "the tokenizer's own",
    }


def describe_sources(
    sources: Sequence[DataSource],
    files: Sequence[SourceFile],
    num_documents: Sequence[int],
    shares: Sequence[float] | None,
) -> tuple[SourceReport, ...]:
    """Describe the training sources; `shares` are their fractions of the samples, if weighted."""
    counts = [*num_documents, *[0] * len(sources)]
    reports = []
    for number, source in enumerate(sources):
        source_files = [file for file in files if file.source_index == number]
        kinds = {file.records.kind if file.format != "text" else "text" for file in source_files}
        records = next((file.records for file in source_files if file.format != "text"), None)
        reports.append(
            SourceReport(
                path=source.path,
                num_files=len(source_files),
                records=", ".join(kind for kind in RECORD_KINDS if kind in kinds),
                columns=records.columns if records is not None else (),
                num_documents=counts[number],
                weight=source.weight,
                share=shares[number] if shares else None,
            )
        )
    return tuple(reports)


def compute_shares(dataset: TokenDataset) -> tuple[float, ...] | None:
    """Return the share of each source in an epoch's samples, at the first step of a schedule.

    None if the sources have no weights.
    """
    if isinstance(dataset, ScheduledMixture):
        return dataset.schedule.get_shares(0)
    return None


def describe_side(store: TokenStore, dataset: TokenDataset) -> SideReport:
    """Summarise the tokens and samples of one side."""
    lengths = np.diff(store.documents.astype(np.int64))
    # Bins (0, 1], (1, 2], (2, 4], ... up to the longest document.
    bins = np.ceil(np.log2(np.maximum(lengths, 1))).astype(int)
    histogram = tuple((2**number, int(count)) for number, count in enumerate(np.bincount(bins)))
    parts = dataset.parts if isinstance(dataset, ScheduledMixture) else (dataset,)
    packed = [part for part in parts if isinstance(part, PackedDataset)]
    return SideReport(
        counts=store.counts,
        num_samples=len(dataset),
        num_supervised=dataset.num_supervised,
        padding_fraction=_compute_padding_fraction(dataset),
        length_histogram=histogram,
        num_cut=sum(part.packing.num_split for part in packed),
        num_dropped=sum(part.packing.num_dropped for part in packed),
        num_unsupervised_pieces=sum(part.packing.num_unsupervised for part in packed),
    )


def _compute_padding_fraction(dataset: TokenDataset) -> float:
    """Return the fraction of padding in one epoch, of a mixture at the first step's shares; 0 for
    windows."""
    if isinstance(dataset, PackedDataset):
        return dataset.padding_fraction
    if isinstance(dataset, ScheduledMixture):
        return sum(
            share * _compute_padding_fraction(part)
            for share, part in zip(dataset.schedule.get_shares(0), dataset.parts, strict=True)
        )
    assert isinstance(dataset, WindowDataset)
    return 0.0
