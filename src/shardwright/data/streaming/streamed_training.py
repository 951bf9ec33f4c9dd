"""Training side of a recipe with streamed sources: datasets and statistics from the index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.config.recipe import Recipe
from shardwright.data.corpus import MAX_BROKEN_LISTED, RecordStatistics
from shardwright.data.data_report import SideReport
from shardwright.data.sample_order import mix_bits
from shardwright.data.scheduled_mixture import ScheduledMixture, WeightSchedule
from shardwright.data.streaming.shard_index import ShardIndex
from shardwright.data.streaming.shard_tokens import ShardEntry, compute_padding_fraction
from shardwright.data.streaming.streamed_dataset import StreamedDataset
from shardwright.data.tokens.token_store import TokenCounts
from shardwright.errors import DataError


@dataclass(frozen=True)
class StreamedTraining:
    """Dataset of the training side, with its statistics."""

    dataset: StreamedDataset | ScheduledMixture
    report: SideReport
    statistics: RecordStatistics


def open_streamed_training(
    recipe: Recipe, index: ShardIndex, schedule: WeightSchedule | None
) -> StreamedTraining:
    """Open the shards of a complete index as one dataset, or as a mixture with weights.

    Raises:
        DataError: no samples, or a cache that is too small for a window of shards.
    """
    streaming = recipe.data.streaming
    assert streaming is not None
    num_sources = len(recipe.data.sources)
    groups = [tuple(range(len(index.shards)))]
    if schedule is not None:
        groups = [
            tuple(n for n, shard in enumerate(index.shards) if shard.file.source_index == source)
            for source in range(num_sources)
        ]
    entries = index.entries
    for number, group in enumerate(groups):
        if not sum(entries[shard].num_samples for shard in group):
            counts = _sum_counts([entries[shard] for shard in group], [0] * len(group), 1)
            raise DataError(
                "the files have no samples",
                field="data.sources" if schedule is None else f"data.sources.{number}",
                got=f"{counts.num_tokens} tokens in {counts.num_documents} documents, in "
                f"{len(group)} files",
                allowed="files of at least one row: sequence_length and a label for windows",
                remedy="Add text, or reduce training.sequence_length",
            )
    _check_cache(index, groups, streaming.window_files)
    length = recipe.training.sequence_length
    parts = tuple(
        StreamedDataset(
            index,
            group,
            length,
            streaming.window_files,
            recipe.seed if schedule is None else mix_bits(recipe.seed ^ mix_bits(number + 1)),
        )
        for number, group in enumerate(groups)
    )

    def release_shards() -> None:
        for part in parts:
            part.close_shards()

    index.release_shards = release_shards
    dataset = parts[0] if schedule is None else ScheduledMixture(parts, schedule, recipe.seed)
    owners = [shard.file.source_index for shard in index.shards]
    report = SideReport(
        counts=_sum_counts(entries, owners, num_sources),
        num_samples=len(dataset),
        num_supervised=dataset.num_supervised,
        padding_fraction=compute_padding_fraction(entries, length),
        length_histogram=_sum_lengths(entries),
        num_cut=sum(entry.num_split for entry in entries),
        num_dropped=sum(entry.num_dropped for entry in entries),
        num_unsupervised_pieces=sum(entry.num_unsupervised for entry in entries),
    )
    return StreamedTraining(dataset, report, _sum_statistics(entries))


def _check_cache(index: ShardIndex, groups: Sequence[Sequence[int]], window_shards: int) -> None:
    """Raise if the cache cannot have the largest window and one more file at the same time."""
    entries = index.entries
    window_bytes = sum(
        sum(sorted((entries[shard].num_bytes for shard in group), reverse=True)[:window_shards])
        for group in groups
    )
    build_bytes = max(index.count_build_bytes(number) for number in range(len(entries)))
    needed = window_bytes + build_bytes
    if index.cache.max_bytes < needed:
        raise DataError(
            f"the cache is too small for windows of {window_shards} files",
            field="data.streaming.cache_bytes",
            got=f"{index.cache.max_bytes:,} bytes",
            allowed=f"at least {needed:,} bytes: {window_bytes:,} for the largest window and "
            f"{build_bytes:,} for a file while it is tokenised",
            remedy="Raise the limit, reduce data.streaming.window_files, or split the files",
        )


def _sum_counts(
    entries: Sequence[ShardEntry], owners: Sequence[int], num_sources: int
) -> TokenCounts:
    counts = [entry.counts for entry in entries]
    documents = [0] * num_sources
    for owner, count in zip(owners, counts, strict=True):
        documents[owner] += count.num_documents
    largest = max(counts, key=lambda count: count.max_id)
    return TokenCounts(
        num_documents=sum(count.num_documents for count in counts),
        num_characters=sum(count.num_characters for count in counts),
        num_tokens=sum(count.num_tokens for count in counts),
        num_unknown=sum(count.num_unknown for count in counts),
        max_id=largest.max_id,
        dtype=largest.dtype,
        source_documents=tuple(documents),
        num_answered_tokens=sum(count.num_answered_tokens for count in counts),
        num_answered_supervised=sum(count.num_answered_supervised for count in counts),
        num_weighted=sum(count.num_weighted for count in counts),
        max_id_place=largest.max_id_place,
    )


def _sum_lengths(entries: Sequence[ShardEntry]) -> tuple[tuple[int, int], ...]:
    num_bins = max(len(entry.lengths) for entry in entries)
    return tuple(
        (2**number, sum(entry.lengths[number] for entry in entries if number < len(entry.lengths)))
        for number in range(num_bins)
    )


def _sum_statistics(entries: Sequence[ShardEntry]) -> RecordStatistics:
    statistics = [entry.statistics for entry in entries]
    return RecordStatistics(
        sum(item.num_records for item in statistics),
        sum(item.num_broken for item in statistics),
        sum(item.num_empty_files for item in statistics),
        tuple(broken for item in statistics for broken in item.broken)[:MAX_BROKEN_LISTED],
    )
