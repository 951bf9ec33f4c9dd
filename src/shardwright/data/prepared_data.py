"""Prepared data of a recipe: datasets, tokenizer and report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwright.data.corpus import Side
from shardwright.data.data_report import DataReport
from shardwright.data.dataset import TokenDataset
from shardwright.data.tokens.token_store import TokenStore
from shardwright.data.tokens.tokenizer import Tokenizer


@dataclass(frozen=True)
class PreparedData:
    """Datasets, tokenizer and report. `content_hash` changes if any sample changes."""

    train: TokenDataset
    validation: TokenDataset | None
    tokenizer: Tokenizer
    report: DataReport
    content_hash: str
    stores: Mapping[Side, TokenStore] = field(default_factory=dict)
    """Tokens of each side in the cache; empty if the sources are streamed."""
