"""Tokenisation of a recipe's sources: tokenizer, chat template, cache key and token files."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

from shardwright.config.recipe import Recipe
from shardwright.data.corpus import Side
from shardwright.data.data_cache import compute_key
from shardwright.data.records.chat_template import ChatTemplate, load_chat_template
from shardwright.data.records.supervision import RecordEncoder
from shardwright.data.sources.source_files import SourceFiles
from shardwright.data.tokens.encoding_workers import encode_in_order
from shardwright.data.tokens.token_store import EncodeRecords, write_tokens
from shardwright.data.tokens.tokenizer import AbsentTokenizer, Tokenizer
from shardwright.data.tokens.tokenizer_loading import (
    END_OF_TEXT,
    has_tokenizer,
    load_tokenizer,
    train_bpe,
    train_characters,
)
from shardwright.errors import TokenizerError, explain_missing_path

CACHE_VERSION = 3
"""Part of every cache key; increase it when the same sources would give other tokens or
files."""

logger = logging.getLogger(__name__)


def compute_tokens_key(
    recipe: Recipe, sources: SourceFiles, tokenizer: Tokenizer | None, template: ChatTemplate | None
) -> str:
    """Compute the cache key of the tokens from everything that they depend on."""
    tokenizer_spec: Any = (
        tokenizer.content_hash
        if tokenizer is not None
        else [recipe.tokenizer.kind, recipe.tokenizer.vocab_size]
    )
    rendering: list[Any] = []
    if sources.has_records:
        template_spec = template and template.cache_key
        rendering = [recipe.data.supervise, template_spec, recipe.data.max_record_characters]
    return compute_key([CACHE_VERSION, sources.key, tokenizer_spec, *rendering])


def load_template(recipe: Recipe, tokenizer: Tokenizer | None) -> ChatTemplate | None:
    """Load the chat template of a recipe; warn if it may render the current date.

    Raises:
        TokenizerError: Token ids have no tokenizer, which a chat template needs.
    """
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
    tokenizer_folder = Path(folder) if tokenizer is not None and folder is not None else None
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


def load_given_tokenizer(
    recipe: Recipe, kinds: Collection[str], vocab_size: int | None
) -> Tokenizer | None:
    """Load the tokenizer, unless it is trained on the sources.

    Sources of token ids need none; then the result is an `AbsentTokenizer`, unless the recipe
    sets one.

    Raises:
        TokenizerError: The tokenizer is not set or not found, or the vocabulary size is unknown.
    """
    if recipe.tokenizer.kind != "huggingface":
        return None
    folder = recipe.tokenizer.path or recipe.model.path
    if (
        set(kinds) == {"tokens"}
        and recipe.tokenizer.path is None
        and (folder is None or not has_tokenizer(Path(folder)))
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
    if not Path(folder).is_dir():
        raise TokenizerError(
            "no such folder",
            field="tokenizer.path",
            got=folder,
            remedy=f"{explain_missing_path(str(folder))}Relative paths start at {Path.cwd()}",
        )
    return load_tokenizer(Path(folder))


def tokenise_sources(
    sources: SourceFiles, given: Tokenizer | None, template: ChatTemplate | None, folder: Path
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


def _train_tokenizer(sources: SourceFiles) -> Tokenizer:
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
