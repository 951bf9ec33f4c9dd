"""Packed documents never attend to or predict each other; a leak would be silent."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.config.data import IGNORED_LABEL
from shardwright.data.dataset import Sample
from shardwright.data.packed_dataset import PackedDataset, Packing, pack_documents
from shardwright.errors import DataError

document_lengths = st.lists(st.integers(min_value=0, max_value=40), min_size=1, max_size=30)


def pack(lengths: list[int], sequence_length: int) -> PackedDataset:
    """Pack documents with tokens 1, 2, 3, ... in sequence, so a token identifies its document."""
    documents = np.cumsum([0, *lengths]).astype(np.uint64)
    tokens = np.arange(1, sum(lengths) + 1, dtype=np.uint32)
    return PackedDataset(tokens, pack_documents(documents, sequence_length), sequence_length)


def list_predictions(sample: Sample) -> list[tuple[int, int]]:
    """List (input token, label) of every supervised position."""
    return [
        (int(i), int(t))
        for i, t in zip(sample.input_ids, sample.labels, strict=True)
        if t != IGNORED_LABEL
    ]


@given(lengths=document_lengths, sequence_length=st.integers(1, 24))
@settings(max_examples=150, deadline=None)
def test_each_token_is_predicted_once_from_its_own_document(
    lengths: list[int], sequence_length: int
) -> None:
    dataset = pack(lengths, sequence_length)
    predicted_pairs = Counter(
        pair
        for index in range(len(dataset))
        for pair in list_predictions(dataset.get_sample(index))
    )
    ends = np.cumsum(lengths)
    starts = ends - lengths
    expected_pairs = Counter(
        (token, token + 1)
        for s, e in zip(starts, ends, strict=True)
        for token in range(int(s) + 1, int(e))
    )
    assert predicted_pairs == expected_pairs
    assert dataset.num_supervised == sum(expected_pairs.values())


@given(lengths=document_lengths, sequence_length=st.integers(1, 24))
@settings(max_examples=150, deadline=None)
def test_document_ids_and_positions_mark_every_boundary(
    lengths: list[int], sequence_length: int
) -> None:
    dataset = pack(lengths, sequence_length)
    document_of = np.repeat(np.arange(len(lengths)), lengths)
    for index in range(len(dataset)):
        sample = dataset.get_sample(index)
        assert sample.document_ids is not None
        for number in range(int(sample.document_ids.max()) + 1):
            places = np.flatnonzero(sample.document_ids == number)
            assert places.tolist() == list(range(places[0], places[0] + len(places))), (
                "a document occupies contiguous positions"
            )
            assert sample.positions[places].tolist() == list(range(len(places)))
            tokens = sample.input_ids[places]
            if sample.labels[places[0]] == IGNORED_LABEL:  # free positions
                assert (tokens == 0).all()
                assert (sample.labels[places] == IGNORED_LABEL).all()
            else:
                assert (np.diff(tokens) == 1).all()
                assert len(set(document_of[tokens - 1])) == 1
                assert (sample.labels[places] == tokens + 1).all()


@given(lengths=document_lengths, sequence_length=st.integers(1, 24))
@settings(max_examples=60, deadline=None)
def test_a_document_that_fits_is_never_split(lengths: list[int], sequence_length: int) -> None:
    documents = np.cumsum([0, *lengths]).astype(np.uint64)
    packing = pack_documents(documents, sequence_length)
    starts = Counter(packing.piece_starts_P.tolist())
    for start, length in zip(documents[:-1].tolist(), lengths, strict=True):
        if 2 <= length <= sequence_length + 1:
            assert starts[start] == 1
            assert (
                packing.piece_lengths_P[packing.piece_starts_P.tolist().index(start)] == length - 1
            )


def test_rows_have_little_padding() -> None:
    generator = np.random.default_rng(0)
    dataset = pack(generator.integers(2, 100, size=500).tolist(), 128)
    assert dataset.padding_fraction < 0.01
    assert len(dataset) == -(-dataset.num_supervised // 128)  # the smallest possible number of rows


def test_packing_is_deterministic_and_loads_as_saved(tmp_path: Path) -> None:
    documents = np.cumsum([0, 5, 9, 2, 30, 4]).astype(np.uint64)
    first = pack_documents(documents, 8)
    second = pack_documents(documents, 8)
    first.save(tmp_path / "packing.npz")
    loaded = Packing.load(tmp_path / "packing.npz")
    for name in ("piece_starts_P", "piece_lengths_P", "row_starts_R1"):
        assert (getattr(first, name) == getattr(second, name)).all()
        assert (getattr(first, name) == getattr(loaded, name)).all()


def test_documents_of_one_token_predict_nothing() -> None:
    assert len(pack([1, 1, 0], 8)) == 0


def test_indices_out_of_range_are_refused() -> None:
    dataset = pack([5, 5], 8)
    for index in (-1, len(dataset)):
        with pytest.raises(IndexError):
            dataset.get_sample(index)


@given(
    lengths=document_lengths,
    sequence_length=st.integers(1, 12),
    data=st.data(),
    is_unpacked=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_only_tokens_of_the_mask_are_supervised(
    lengths: list[int], sequence_length: int, data: st.DataObject, is_unpacked: bool
) -> None:
    total = sum(lengths)
    mask = np.array(
        data.draw(st.lists(st.integers(0, 1), min_size=total, max_size=total)), dtype=np.uint8
    )
    documents = np.cumsum([0, *lengths]).astype(np.uint64)
    packing = pack_documents(
        documents, sequence_length, supervised_mask=mask, is_unpacked=is_unpacked
    )
    dataset = PackedDataset(np.arange(total, dtype=np.uint32), packing, sequence_length, mask)
    firsts = set(documents[:-1].tolist())
    expected = sorted(token for token in range(total) if mask[token] and token not in firsts)
    labels = [dataset.get_sample(index).labels for index in range(len(dataset))]
    assert (
        sorted(int(label) for row in labels for label in row if label != IGNORED_LABEL) == expected
    )
    assert dataset.num_supervised == len(expected)
    for index in range(len(dataset)):
        pieces = list(dataset.iterate_pieces(index))
        assert all(mask[start + 1 : start + length + 1].any() for start, length in pieces), (
            "a piece has no supervised token"
        )
        assert len(pieces) == 1 or not is_unpacked
    whole = pack_documents(documents, sequence_length)
    assert packing.num_unsupervised == len(whole.piece_starts_P) - len(packing.piece_starts_P)


@pytest.mark.parametrize(("overlong", "num_split", "num_dropped"), [("cut", 2, 0), ("drop", 0, 2)])
def test_documents_longer_than_a_row_are_counted(
    overlong: str, num_split: int, num_dropped: int
) -> None:
    # A document of 9 tokens has 8 predictions and fits.
    documents = np.cumsum([0, 9, 10, 20, 3]).astype(np.uint64)
    packing = pack_documents(documents, 8, overlong=overlong)  # type: ignore[arg-type]
    assert (packing.num_split, packing.num_dropped) == (num_split, num_dropped)
    assert int(packing.piece_lengths_P.sum()) == (8 + 9 + 19 + 2 if overlong == "cut" else 8 + 2)


def test_documents_longer_than_a_row_are_refused_if_the_recipe_says_so() -> None:
    with pytest.raises(
        DataError,
        match=r"1 of 2 documents, the longest of 10 tokens.*9 tokens: training\.sequence_length",
    ):
        pack_documents(np.cumsum([0, 9, 10]).astype(np.uint64), 8, overlong="refuse")
    assert (
        len(
            pack_documents(
                np.cumsum([0, 9, 9]).astype(np.uint64), 8, overlong="refuse"
            ).piece_starts_P
        )
        == 2
    )


def test_unpacked_rows_have_the_order_of_the_documents() -> None:
    packing = pack_documents(np.cumsum([0, 4, 12, 3]).astype(np.uint64), 8, is_unpacked=True)
    assert packing.piece_starts_P.tolist() == [0, 4, 12, 16]
    assert packing.row_starts_R1.tolist() == [0, 1, 2, 3, 4]
