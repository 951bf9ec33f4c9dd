"""Micro-batches are read one step ahead in a thread."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from shardwright.errors import DataError
from shardwright.training.batch_prefetch import BatchPrefetcher

CPU = torch.device("cpu")


def test_the_next_step_is_read_while_the_caller_works() -> None:
    read: list[tuple[int, str]] = []
    is_read = threading.Event()

    def read_step(step: int) -> Any:
        read.append((step, threading.current_thread().name))
        if step == 8:
            is_read.set()
        return [step]

    with BatchPrefetcher(read_step, CPU) as batches:
        assert batches.read(7, 8) == [7]
        assert is_read.wait(10.0), "step 8 is read without being asked for"
        assert batches.read(8, None) == [8]
    assert [step for step, _ in read] == [7, 8]
    assert {name for _, name in read} == {"read-batches_0"}


def test_a_rollback_discards_batches_that_were_read_ahead() -> None:
    with BatchPrefetcher(lambda step: [step], CPU) as batches:  # type: ignore[list-item]
        assert batches.read(7, 8) == [7]
        assert batches.read(3, 4) == [3]
        assert batches.read(4, None) == [4]


def test_an_error_is_raised_at_the_step_that_it_belongs_to() -> None:
    def read_step(step: int) -> Any:
        if step == 8:
            raise DataError("broken", field="data.sources")
        return [step]

    with BatchPrefetcher(read_step, CPU) as batches:
        assert batches.read(7, 8) == [7]
        with pytest.raises(DataError, match="broken"):
            batches.read(8, 9)


def test_the_thread_ends_with_the_context() -> None:
    with BatchPrefetcher(lambda step: [step], CPU) as batches:  # type: ignore[list-item]
        batches.read(1, 2)
    assert not any(thread.name.startswith("read-batches") for thread in threading.enumerate())
