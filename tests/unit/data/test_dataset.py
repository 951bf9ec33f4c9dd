"""Windows of a token stream: labels, offsets, and how often each token is predicted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.config.data import IGNORED_LABEL
from shardwright.data.dataset import WindowDataset


def make_stream(num_tokens: int) -> np.ndarray:
    return np.arange(100, 100 + num_tokens, dtype=np.uint16)


def test_labels_are_the_next_tokens() -> None:
    dataset = WindowDataset(make_stream(50), sequence_length=8, seed=3)
    for index in range(len(dataset)):
        sample = dataset.get_sample(index, epoch=1)
        assert (sample.labels == sample.input_ids + 1).all()
        assert sample.positions.tolist() == list(range(8))
        assert sample.document_ids is None
        assert sample.input_ids.dtype == sample.labels.dtype == np.int64


def test_neighbouring_windows_overlap_by_one_token() -> None:
    dataset = WindowDataset(make_stream(50), sequence_length=8)
    assert dataset.get_sample(0).labels[-1] == dataset.get_sample(1).input_ids[0]


@given(
    num_tokens=st.integers(9, 200),
    length=st.integers(1, 8),
    epoch=st.integers(0, 5),
    seed=st.integers(0, 99),
)
@settings(max_examples=100, deadline=None)
def test_an_epoch_predicts_no_token_twice_and_misses_less_than_two_windows(
    num_tokens: int, length: int, epoch: int, seed: int
) -> None:
    dataset = WindowDataset(make_stream(num_tokens), length, seed=seed)
    predicted = np.concatenate(
        [dataset.get_sample(index, epoch).labels for index in range(len(dataset))]
    )
    assert len(set(predicted.tolist())) == len(predicted) == dataset.num_supervised
    assert num_tokens - 1 - len(predicted) < 2 * length


def test_epochs_start_at_different_offsets() -> None:
    dataset = WindowDataset(make_stream(1000), sequence_length=16, seed=0)
    offsets = {dataset.get_offset(epoch) for epoch in range(200)}
    assert offsets == set(range(16))
    assert dataset.get_offset(7) == WindowDataset(
        make_stream(1000), sequence_length=16, seed=0
    ).get_offset(7)
    assert [dataset.get_offset(e) for e in range(9)] != [
        WindowDataset(make_stream(1000), 16, seed=1).get_offset(e) for e in range(9)
    ]


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(0, 0), (8, 0), (9, 1), (15, 1), (16, 1), (23, 1), (24, 2), (32, 3)],
)
def test_number_of_training_windows(num_tokens: int, expected: int) -> None:
    dataset = WindowDataset(make_stream(num_tokens), sequence_length=8)
    assert len(dataset) == expected
    for epoch in range(30):
        for index in range(expected):
            assert len(dataset.get_sample(index, epoch).labels) == 8


@given(num_tokens=st.integers(2, 200), length=st.integers(1, 16))
@settings(max_examples=100, deadline=None)
def test_evaluation_predicts_every_token_but_the_first_exactly_once(
    num_tokens: int, length: int
) -> None:
    dataset = WindowDataset(make_stream(num_tokens), length, is_evaluation=True)
    labels = np.concatenate([dataset.get_sample(index).labels for index in range(len(dataset))])
    assert labels[labels != IGNORED_LABEL].tolist() == make_stream(num_tokens)[1:].tolist()
    assert dataset.num_supervised == num_tokens - 1
    assert all(len(dataset.get_sample(index).input_ids) == length for index in range(len(dataset)))


def test_indices_out_of_range_are_refused() -> None:
    dataset = WindowDataset(make_stream(50), sequence_length=8)
    for index in (-1, len(dataset)):
        with pytest.raises(IndexError):
            dataset.get_sample(index)
