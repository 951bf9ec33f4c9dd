"""Known wrong random numbers, learning rates and data, put back into a worker process while its
context is entered.
"""

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
from shardwright.train import step
from shardwright.verify import cell


def _patch_dropout_key(change: Callable[[Tensor, int], Tensor]) -> Any:
    original = DropoutKey

    def key(seed: int, number: int, sample_indices_B: Tensor) -> DropoutKey:
        return original(seed, number, change(sample_indices_B, number))

    return patch.object(step, "DropoutKey", key)


@contextmanager
def dropout_depends_on_the_place_in_the_batch() -> Iterator[None]:
    """45: masks are keyed by the row of the micro-batch and not by the sample."""
    with _patch_dropout_key(lambda indices, _step: torch.arange(len(indices))):
        yield


@contextmanager
def dropout_depends_on_the_rank() -> Iterator[None]:
    """45: every rank has a random state of its own."""
    with _patch_dropout_key(lambda indices, _step: indices + 1000 * dist.get_rank()):
        yield


@contextmanager
def dropout_differs_when_recomputed() -> Iterator[None]:
    """45: recomputation, which runs within the backward pass, draws new masks."""
    original = Dropout.drop

    def drop(self: Dropout, x_BTD: Tensor, *arguments: Any) -> Tensor:
        backward = torch._C._current_graph_task_id() != -1
        return original(
            replace(self, keys_BT=self.keys_BT ^ 1) if backward else self, x_BTD, *arguments
        )

    with patch.object(Dropout, "drop", drop):
        yield


@contextmanager
def layers_number_themselves_locally() -> Iterator[None]:
    """46: dropout is keyed by the layer's number within its group."""
    original = Block.__init__

    def renumbered(self: Block, shape: Any, index: int) -> None:
        original(self, shape, index)
        self.layer_index = 0

    with patch.object(Block, "__init__", renumbered):
        yield


@contextmanager
def documents_see_each_other() -> Iterator[None]:
    """47: packed rows lose their document boundaries."""
    forward = Decoder.forward

    def leaky(self: Decoder, *arguments: Any, **named: Any) -> Tensor:
        return forward(self, *arguments, **(named | {"document_ids_BT": None}))

    with patch.object(Decoder, "forward", leaky):
        yield


@contextmanager
def one_group_keeps_its_learning_rate() -> Iterator[None]:
    """49: the schedule reaches the first parameter group only."""

    def set_first(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
        optimizer.param_groups[0]["lr"] = learning_rate

    with patch.object(step, "set_learning_rate", set_first):
        yield


@contextmanager
def groups_collide() -> Iterator[None]:
    """49: decayed and undecayed parameters share a group."""
    original = cell.build_optimizer

    def merged(*arguments: Any, **named: Any) -> torch.optim.Optimizer:
        optimizer = original(*arguments, **named)
        for group in optimizer.param_groups:
            group["weight_decay"] = optimizer.param_groups[0]["weight_decay"]
        return optimizer

    with patch.object(cell, "build_optimizer", merged):
        yield


def _patch_cursor(change: Callable[[int, int], tuple[int, int]]) -> Any:
    original = cell.read_step_micro_batches

    def moved(
        dataset: Any, order: Any, batch: Any, number: int, data_rank: int
    ) -> list[MicroBatch]:
        return original(dataset, order, batch, *change(number, data_rank))

    return patch.object(cell, "read_step_micro_batches", moved)


@contextmanager
def every_rank_reads_the_same() -> Iterator[None]:
    """50: the cursor forgets the data rank."""
    with _patch_cursor(lambda number, _data_rank: (number, 0)):
        yield


@contextmanager
def the_cursor_stands_still() -> Iterator[None]:
    """50: the cursor is not moved on after a step."""
    with _patch_cursor(lambda _number, data_rank: (0, data_rank)):
        yield


@contextmanager
def schedule_steps_once_per_rank() -> Iterator[None]:
    """50: every process moves the schedule on."""
    original = step.set_learning_rate
    with patch.object(
        step,
        "set_learning_rate",
        lambda optimizer, rate: original(optimizer, rate / dist.get_world_size()),
    ):
        yield
