"""Prepared data of a recipe: datasets, tokenizer and report."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.data.data_report import DataReport
from shardwright.data.dataset import TokenDataset
from shardwright.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class PreparedData:
    """Datasets, tokenizer and report. `content_hash` changes if any sample changes."""

    train: TokenDataset
    validation: TokenDataset | None
    tokenizer: Tokenizer
    report: DataReport
    content_hash: str
