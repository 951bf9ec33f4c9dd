"""Patches that add known wrong random numbers, learning rates and data; see `reductions`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.data.loader import MicroBatch
from shardwright.model import Block, Decoder
from shardwright.model.dropout import Dropout, DropoutKey
from shardwright.training import step
from shardwright.verification import cell


def _patch_dropout_key(change: Callable[[Tensor, int], Tensor]) -> Any:
    original = DropoutKey

    def build_key(seed: int, number: int, sample_indices_B: Tensor) -> DropoutKey:
        return original(seed, number, change(sample_indices_B, number))

    return patch.object(step, "DropoutKey", build_key)


@contextmanager
def key_dropout_by_row_of_batch() -> Iterator[None]:
    """Key dropout masks by the row of the micro-batch instead of the sample."""
    with _patch_dropout_key(lambda indices, _step: torch.arange(len(indices))):
        yield


@contextmanager
def key_dropout_by_rank() -> Iterator[None]:
    """Give every rank a random state of its own."""
    with _patch_dropout_key(lambda indices, _step: indices + 1000 * dist.get_rank()):
        yield


@contextmanager
def redraw_dropout_in_recompute() -> Iterator[None]:
    """Draw new masks in recomputation, which runs within the backward pass."""
    original = Dropout.drop

    def drop(self: Dropout, x_BTD: Tensor, *arguments: Any) -> Tensor:
        backward = torch._C._current_graph_task_id() != -1
        return original(
            replace(self, keys_BT=self.keys_BT ^ 1) if backward else self, x_BTD, *arguments
        )

    with patch.object(Dropout, "drop", drop):
        yield


@contextmanager
def key_dropout_by_local_layer() -> Iterator[None]:
    """Key dropout by the layer's number within its group."""
    original = Block.__init__

    def renumber(self: Block, shape: Any, index: int) -> None:
        original(self, shape, index)
        self.layer_index = 0

    with patch.object(Block, "__init__", renumber):
        yield


@contextmanager
def ignore_document_boundaries() -> Iterator[None]:
    """Drop the document boundaries of packed rows."""
    forward = Decoder.forward

    def drop_documents(self: Decoder, *arguments: Any, **named: Any) -> Tensor:
        return forward(self, *arguments, **(named | {"document_ids_BT": None}))

    with patch.object(Decoder, "forward", drop_documents):
        yield


@contextmanager
def schedule_first_group_only() -> Iterator[None]:
    """Set the scheduled learning rate in the first parameter group only."""

    def set_first(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
        optimizer.param_groups[0]["lr"] = learning_rate

    with patch.object(step, "set_learning_rate", set_first):
        yield


@contextmanager
def merge_parameter_groups() -> Iterator[None]:
    """Give decayed and undecayed parameters the same weight decay."""
    original = cell.build_optimizer

    def merge(*arguments: Any, **named: Any) -> torch.optim.Optimizer:
        optimizer = original(*arguments, **named)
        for group in optimizer.param_groups:
            group["weight_decay"] = optimizer.param_groups[0]["weight_decay"]
        return optimizer

    with patch.object(cell, "build_optimizer", merge):
        yield


def _patch_cursor(change: Callable[[int, int], tuple[int, int]]) -> Any:
    original = cell.read_step_micro_batches

    def move_cursor(
        dataset: Any, order: Any, batch: Any, number: int, data_rank: int
    ) -> list[MicroBatch]:
        return original(dataset, order, batch, *change(number, data_rank))

    return patch.object(cell, "read_step_micro_batches", move_cursor)


@contextmanager
def read_same_data_on_every_rank() -> Iterator[None]:
    """Ignore the data rank in the cursor."""
    with _patch_cursor(lambda number, _data_rank: (number, 0)):
        yield


@contextmanager
def freeze_cursor() -> Iterator[None]:
    """Leave the cursor unchanged after a step."""
    with _patch_cursor(lambda _number, data_rank: (0, data_rank)):
        yield


@contextmanager
def scale_learning_rate_by_ranks() -> Iterator[None]:
    """Advance the learning rate schedule once per process."""
    original = step.set_learning_rate
    with patch.object(
        step,
        "set_learning_rate",
        lambda optimizer, rate: original(optimizer, rate / dist.get_world_size()),
    ):
        yield
