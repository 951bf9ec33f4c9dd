"""Checks of tokenised data against the recipe and the model."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from shardwright.config.recipe import Recipe
from shardwright.data.corpus import RecordStatistics, Side
from shardwright.data.records.token_files import check_tokenizers
from shardwright.data.sources.source_reader import SourceFile
from shardwright.data.tokens.token_store import TokenCounts
from shardwright.data.tokens.tokenizer import AbsentTokenizer, Tokenizer
from shardwright.errors import DataError, TokenizerError

logger = logging.getLogger(__name__)


def check_token_files(files: Sequence[SourceFile], tokenizer: Tokenizer | None) -> None:
    """Check that the sources' files of token ids were written with the recipe's tokenizer.

    Raises:
        DataError, TokenizerError: as `check_tokenizers`.
    """
    is_known = tokenizer is not None and not isinstance(tokenizer, AbsentTokenizer)
    check_tokenizers(
        (file.path for file in files if file.format == "tokens"),
        tokenizer.content_hash if tokenizer is not None and is_known else None,
    )


def check_records(records: Sequence[RecordStatistics], recipe: Recipe) -> None:
    """Check the number of broken records of each side; log a warning if there are any.

    Raises:
        DataError: more records of a side are broken than the recipe allows.
    """
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


def check_supervision(counts_by_side: Mapping[Side, TokenCounts], recipe: Recipe) -> None:
    """Check that prompts are not supervised by mistake. Packing checks that any token is.

    Raises:
        DataError: every token of records with prompts is supervised.
    """
    for side, counts in counts_by_side.items():
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


def check_vocabulary(
    counts_by_side: Mapping[Side, TokenCounts], tokenizer: Tokenizer, vocab_size: int | None
) -> None:
    """Raise if an id is outside the model's vocabulary; `vocab_size` None skips the check.

    Raises:
        DataError, TokenizerError: the largest id of a side is too large.
    """
    if vocab_size is None:
        return
    largest, location = max(
        (counts.max_id, counts.max_id_place) for counts in counts_by_side.values()
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


def sum_statistics(records: Sequence[RecordStatistics]) -> RecordStatistics:
    """Return the statistics of all sides together."""
    return RecordStatistics(
        sum(item.num_records for item in records),
        sum(item.num_broken for item in records),
        sum(item.num_empty_files for item in records),
        tuple(broken for item in records for broken in item.broken),
    )
