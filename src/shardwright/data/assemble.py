"""From tokens on disk to the dataset of a side: cut into windows or packed, source by source where they are mixed."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Literal

import numpy as np

from shardwright.config.schema import Recipe
from shardwright.data.cache import build_once, key_of
from shardwright.data.corpus import Side
from shardwright.data.dataset import TokenDataset, WindowDataset
from shardwright.data.mix import MixedDataset
from shardwright.data.pack import PackedDataset, Packing, pack_documents
from shardwright.data.pairs import lay_pairs
from shardwright.data.store import TokenStore
from shardwright.errors import DataError

PackingKind = Literal["windows", "documents", "none", "pairs"]


def choose_packing(recipe: Recipe, kinds: Collection[str]) -> PackingKind:
    """How documents become samples; `auto` is by what the sources hold, as canonical forms.

    Raises:
        DataError: windows over records, which would let one conversation see another; preferences that are not asked for, or that
            are asked for and are not there.
    """
    asked, with_records = recipe.data.packing, bool(set(kinds) - {"text"})
    if recipe.preference is not None or "preference" in kinds:
        _check_preferences(recipe, kinds)
        return "pairs"
    if asked == "auto":
        return "documents" if with_records else "windows"
    if asked == "windows" and with_records:
        raise DataError(
            "windows run across the borders of records",
            field="data.packing",
            got=asked,
            allowed="documents, none or auto",
            remedy="Conversations, pairs and given ids are documents of their own",
        )
    return asked


def _check_preferences(recipe: Recipe, kinds: Collection[str]) -> None:
    """Refuse pairs without `preference`, `preference` without pairs, and settings that pairs do not have."""
    others = sorted(set(kinds) - {"preference"})
    if recipe.preference is None:
        raise DataError(
            "the sources hold chosen and rejected responses, and nothing says what to learn from them",
            field="data.sources",
            remedy="Say `preference: {kind: dpo}`; to learn the chosen responses alone name them: "
            "`records: prompt_completion, columns: {completion: chosen}`",
        )
    if others:
        raise DataError(
            "preferences are learned from pairs, and some sources hold something else",
            field="data.sources",
            got=", ".join(others),
            allowed="records with `chosen` and `rejected` responses, and their `prompt`",
        )
    if recipe.data.packing not in ("auto", "none"):
        raise DataError("a row holds one pair", field="data.packing", got=recipe.data.packing, allowed="auto")
    if recipe.data.supervise == "all":
        raise DataError(
            "a prompt that both responses share says nothing of the preference",
            field="data.supervise",
            got="all",
            allowed="assistant or last",
        )


def open_dataset(recipe: Recipe, root: Path, key: str, side: Side, store: TokenStore, packing: PackingKind) -> TokenDataset:
    """The samples of a side. `key` names the tokens; the packing of them is kept in the cache `root` too.

    Raises:
        DataError: nothing to learn from, or documents that are too long where that is refused.
    """
    weights = [source.weight for source in recipe.data.sources]
    if side == "validation" or weights[0] is None:
        return _open_part(recipe, root, key, side, store, packing, None)
    parts = tuple(_open_part(recipe, root, key, side, store, packing, number) for number in range(len(weights)))
    return MixedDataset(parts, tuple(weight for weight in weights if weight is not None), recipe.seed)


def _open_part(
    recipe: Recipe, root: Path, key: str, side: Side, store: TokenStore, packing: PackingKind, source: int | None
) -> TokenDataset:
    length, whole = recipe.training.sequence_length, side == "validation"
    field = "data.validation" if whole else "data.sources" if source is None else f"data.sources.{source}"
    documents = store.documents if source is None else _of_source(store, source)
    num_documents, num_tokens = len(documents) - 1, int(documents[-1] - documents[0]) if len(documents) else 0
    found = f"{num_tokens} tokens in {num_documents} documents"
    if packing == "windows":
        stream = store.tokens if source is None else store.tokens[int(documents[0]) : int(documents[-1])]
        windows = WindowDataset(stream, length, seed=recipe.seed, whole=whole)
        if not len(windows):
            raise DataError(
                f"the {side} text is shorter than one window",
                field=field,
                got=found,
                allowed="2 tokens or more" if whole else f"{length + 1} tokens or more: sequence_length {length} and a label",
                remedy="Give more text" if whole else "Give more text, or shorten training.sequence_length",
            )
        return windows

    if packing == "pairs":
        assert store.supervised is not None, "pairs are records"
        pairs = lay_pairs(store.tokens, documents, length, store.supervised, recipe.data.overlong)
        if not len(pairs):
            raise DataError(f"no pair of the {side} responses fits a row", field="training.sequence_length", got=length)
        return pairs
    overlong, alone = recipe.data.overlong, packing == "none"

    def build(folder: Path) -> None:
        packed = pack_documents(documents, length, supervised=store.supervised, overlong=overlong, alone=alone)
        packed.save(folder / "packing.npz")

    name = f"packed/{key_of([PACKING_VERSION, key, side, length, overlong, alone, source])}"
    laid = Packing.load(build_once(root, name, build) / "packing.npz")
    dataset = PackedDataset(store.tokens, laid, length, store.supervised, store.weights, alone)
    if not len(dataset):
        dropped = dataset.packing.num_dropped
        raise DataError(
            f"no token of the {side} documents is supervised",
            field=field,
            got=found + (f", {dropped} of them longer than a row and dropped" if dropped else ""),
            allowed="documents of two tokens or more: the first of each is never predicted",
        )
    return dataset


PACKING_VERSION = 2
"""Part of every key of a packing: raise it when the same tokens would be laid otherwise."""


def _of_source(store: TokenStore, source: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Starts of the documents of one source and the end of the last: sources lie one behind the other."""
    counts = [*store.counts.source_documents, *[0] * (source + 1)]
    first = sum(counts[:source])
    return store.documents[first : first + counts[source] + 1]
