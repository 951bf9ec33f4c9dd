"""Datasets over tokens on disk: windows or packed documents, one part per weighted source."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from shardwright.config.recipe import Recipe
from shardwright.data.corpus import Side
from shardwright.data.data_cache import build_once, compute_key
from shardwright.data.dataset import TokenDataset, WindowDataset
from shardwright.data.packed_dataset import PackedDataset, Packing, pack_documents
from shardwright.data.records.preference_pairs import pack_pairs
from shardwright.data.scheduled_mixture import ScheduledMixture, build_weight_schedule
from shardwright.data.tokens.token_store import TokenStore
from shardwright.errors import DataError

PackingKind = Literal["windows", "documents", "none", "pairs"]


def choose_packing(recipe: Recipe, kinds: Collection[str]) -> PackingKind:
    """Return how documents become samples; `auto` depends on the canonical forms in `kinds`.

    Raises:
        DataError: windows over records, in which one conversation would attend to another;
            preference data without `preference` in the recipe, or `preference` without them.
    """
    requested = recipe.data.packing
    has_records = bool(set(kinds) - {"text"})
    if recipe.preference is not None or "preference" in kinds:
        _check_preferences(recipe, kinds)
        return "pairs"
    if requested == "auto":
        return "documents" if has_records else "windows"
    if requested == "windows" and has_records:
        raise DataError(
            "windows would cross the boundaries of records",
            field="data.packing",
            got=requested,
            allowed="documents, none or auto",
            remedy="Each conversation, pair or list of token ids is a document of its own",
        )
    return requested


def _check_preferences(recipe: Recipe, kinds: Collection[str]) -> None:
    """Raise for pairs without `preference`, the reverse, or settings that pairs lack."""
    others = sorted(set(kinds) - {"preference"})
    if recipe.preference is None:
        raise DataError(
            "the sources contain preferences (chosen, rejected), but the recipe has no "
            "`preference` section",
            field="data.sources",
            remedy="Set `preference: {kind: dpo}`, or train on the chosen responses only with "
            "`records: prompt_completion, columns: {completion: chosen}`",
        )
    if others:
        raise DataError(
            "preference tuning needs preferences, but some sources contain other records",
            field="data.sources",
            got=", ".join(others),
            allowed="records with `chosen` and `rejected` responses, and their `prompt`",
        )
    if recipe.data.packing not in ("auto", "none"):
        raise DataError(
            "pairs are not packed: each row has one pair",
            field="data.packing",
            got=recipe.data.packing,
            allowed="auto",
        )
    if recipe.data.supervise == "all":
        raise DataError(
            "both responses share the prompt, so it cannot be supervised in preference tuning",
            field="data.supervise",
            got="all",
            allowed="assistant or last",
        )


def open_dataset(
    recipe: Recipe, root: Path, key: str, side: Side, store: TokenStore, packing: PackingKind
) -> TokenDataset:
    """Open the dataset of one side. `key` identifies the tokens in the cache `root`.

    Raises:
        DataError: nothing to train on, or documents that are too long under `overlong: refuse`.
    """
    schedule = build_weight_schedule(recipe.data)
    if side == "validation" or schedule is None:
        return _open_source_dataset(recipe, root, key, side, store, packing, None)
    parts = tuple(
        _open_source_dataset(recipe, root, key, side, store, packing, number)
        for number in range(len(recipe.data.sources))
    )
    return ScheduledMixture(parts, schedule, recipe.seed)


def _open_source_dataset(
    recipe: Recipe,
    root: Path,
    key: str,
    side: Side,
    store: TokenStore,
    packing: PackingKind,
    source_index: int | None,
) -> TokenDataset:
    length = recipe.training.sequence_length
    is_evaluation = side == "validation"
    if is_evaluation:
        field = "data.validation"
    else:
        field = "data.sources" if source_index is None else f"data.sources.{source_index}"
    documents = (
        store.documents if source_index is None else _select_source_documents(store, source_index)
    )
    num_documents = len(documents) - 1
    num_tokens = int(documents[-1] - documents[0]) if len(documents) else 0
    summary = f"{num_tokens} tokens in {num_documents} documents"
    if packing == "windows":
        stream = (
            store.tokens
            if source_index is None
            else store.tokens[int(documents[0]) : int(documents[-1])]
        )
        windows = WindowDataset(stream, length, seed=recipe.seed, is_evaluation=is_evaluation)
        if not len(windows):
            raise _build_short_text_error(side, length, field, summary)
        return windows
    if packing == "pairs":
        return _open_pairs(recipe, side, store, documents)
    overlong = recipe.data.overlong
    is_unpacked = packing == "none"

    def build(folder: Path) -> None:
        packed = pack_documents(
            documents,
            length,
            supervised_mask=store.supervised_mask,
            overlong=overlong,
            is_unpacked=is_unpacked,
        )
        packed.save(folder / "packing.npz")

    packing_key = compute_key(
        [PACKING_VERSION, key, side, length, overlong, is_unpacked, source_index]
    )
    name = f"packed/{packing_key}"
    packing_result = Packing.load(build_once(root, name, build) / "packing.npz")
    dataset = PackedDataset(
        store.tokens, packing_result, length, store.supervised_mask, store.weights, is_unpacked
    )
    if not len(dataset):
        dropped = dataset.packing.num_dropped
        raise DataError(
            f"no token of the {side} documents is supervised",
            field=field,
            got=summary + (f"; {dropped} longer than a row were dropped" if dropped else ""),
            allowed="documents of at least two tokens, because the first token is never predicted",
        )
    return dataset


def _build_short_text_error(side: Side, length: int, field: str, summary: str) -> DataError:
    if side == "validation":
        allowed = "2 tokens or more"
        remedy = "Add text"
    else:
        allowed = f"{length + 1} tokens or more: sequence_length {length} and a label"
        remedy = "Add text, or reduce training.sequence_length"
    return DataError(
        f"the {side} text is shorter than one window",
        field=field,
        got=summary,
        allowed=allowed,
        remedy=remedy,
    )


def _open_pairs(
    recipe: Recipe, side: Side, store: TokenStore, documents: npt.NDArray[np.uint64]
) -> PackedDataset:
    length = recipe.training.sequence_length
    assert store.supervised_mask is not None, "pairs come from records, which have a mask"
    pairs = pack_pairs(store.tokens, documents, length, store.supervised_mask, recipe.data.overlong)
    if not len(pairs):
        raise DataError(
            f"no pair of {side} responses fits in a row",
            field="training.sequence_length",
            got=length,
        )
    return pairs


PACKING_VERSION = 2
"""Part of every packing's cache key; increase it when the same tokens would be packed
differently."""


def _select_source_documents(store: TokenStore, source_index: int) -> npt.NDArray[np.uint64]:
    """Return the document starts of one source and the end of its last document."""
    counts = [*store.counts.source_documents, *[0] * (source_index + 1)]
    first = sum(counts[:source_index])
    return store.documents[first : first + counts[source_index] + 1]
