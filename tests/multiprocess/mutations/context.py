"""Patches that add known wrong gradients of context parallelism; see `reductions`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.data.loader import MicroBatch
from shardwright.model import Decoder, decoder, forward_context
from shardwright.model.dropout import Dropout, DropoutKey
from shardwright.parallel import ParallelModel
from shardwright.parallel.context import attention_kernels, context_parallel, ring_attention
from shardwright.parallel.context.attention_kernels import PartialAttention
from shardwright.parallel.context.block_mask import RowChunks
from shardwright.training import step

# Normaliser


def _count_local_supervised(model: ParallelModel, micro_batches: Sequence[MicroBatch]) -> Tensor:
    """Count the supervised tokens at the positions of this context rank."""
    assert model.decoder.parallel_hooks.context is not None
    context = model.decoder.parallel_hooks.context
    num_tokens = micro_batches[0].labels_BT.shape[1]
    positions = context.find_local_tokens(context.split_rows(num_tokens, None))
    return torch.stack(
        [(batch.labels_BT[:, positions] != -100).sum() for batch in micro_batches]
    ).sum()


@contextmanager
def average_means_of_context_ranks() -> Iterator[None]:
    """Divide by the supervised tokens of each context rank and average the ranks' gradients."""

    def count(model: ParallelModel, micro_batches: Sequence[MicroBatch]) -> Tensor:
        return model.sum_over_batch(_count_local_supervised(model, micro_batches)) * model.layout.cp

    with patch.object(step, "count_supervised", count):
        yield


@contextmanager
def omit_context_from_normaliser() -> Iterator[None]:
    """Count a context rank's own tokens and sum them only over the ranks that read other rows."""

    def count(model: ParallelModel, micro_batches: Sequence[MicroBatch]) -> Tensor:
        return model.sum_over_batch(_count_local_supervised(model, micro_batches))

    with patch.object(step, "count_supervised", count):
        yield


@contextmanager
def count_context_twice_in_normaliser() -> Iterator[None]:
    """Count whole rows on each of the ranks that share them."""
    original = step.count_supervised
    with patch.object(
        step, "count_supervised", lambda model, batches: original(model, batches) * model.layout.cp
    ):
        yield


@contextmanager
def count_context_twice_in_reported_loss() -> Iterator[None]:
    """Multiply the reported loss by the number of context ranks."""
    original = ParallelModel.sum_over_data

    def count_twice(self: ParallelModel, tensor: Tensor) -> Tensor:
        return original(self, tensor) * (self.layout.cp if tensor.is_floating_point() else 1)

    with patch.object(ParallelModel, "sum_over_data", count_twice):
        yield


@contextmanager
def multiply_loss_by_context() -> Iterator[None]:
    """Multiply the loss by the context ranks, for a mean over them that is never computed."""
    forward = Decoder.forward

    def scale_loss(self: Decoder, *arguments: Any, **named: Any) -> Tensor:
        assert self.parallel_hooks.context is not None
        return forward(self, *arguments, **named) * dist.get_world_size()

    with patch.object(Decoder, "forward", scale_loss):
        yield


# Reductions


@contextmanager
def drop_key_gradients_of_other_ranks() -> Iterator[None]:
    """Drop the gradients that other ranks' queries give to keys and values."""
    with patch.object(ring_attention, "_add_pairs", lambda first, *_others: first):
        yield


@contextmanager
def stop_ring_one_rank_early() -> Iterator[None]:
    """Pass the gradients of keys and values once too few, so that each rank gets a neighbour's."""

    def stop_early(
        back: ring_attention._RowBackward, k_BKLE: Tensor, v_BKLV: Tensor
    ) -> ring_attention.KeyValuePair:
        gradients = None
        passing = None
        for key_values in ring_attention._iterate_key_values(k_BKLE, v_BKLV, back.settings):
            if gradients is not None:
                assert back.settings.ranks.group is not None
                passing = ring_attention._RingPass(gradients, back.settings.ranks.group)
            gradients = back.accumulate(key_values)
            if passing is not None:
                gradients = ring_attention._add_pairs(gradients, passing.wait())
        assert gradients is not None
        return gradients

    with patch.object(ring_attention, "_ring_backward", stop_early):
        yield


@contextmanager
def overwrite_query_gradients() -> Iterator[None]:
    """Keep only the query gradient of the keys received last."""
    original = ring_attention._RowBackward.accumulate

    def overwrite(
        self: ring_attention._RowBackward, key_values: ring_attention.KeyValueShard
    ) -> ring_attention.KeyValuePair:
        self.d_q_BHLE.zero_()
        return original(self, key_values)

    with patch.object(ring_attention._RowBackward, "accumulate", overwrite):
        yield


@contextmanager
def use_log_sum_exp_of_block() -> Iterator[None]:
    """Use the output and log-sum-exp of a block in its backward pass instead of the row's."""
    backward = attention_kernels.CpuFlashKernel.backward

    def use_own_block(
        self: attention_kernels.CpuFlashKernel,
        d_out: Tensor,
        tile: attention_kernels.TileInputs,
        _whole: PartialAttention,
    ) -> Any:
        return backward(self, d_out, tile, self.forward(tile))

    with patch.object(attention_kernels.CpuFlashKernel, "backward", use_own_block):
        yield


@contextmanager
def mix_heads_in_ulysses() -> Iterator[None]:
    """Join heads after the all-to-all as if the rank were the last dim."""

    def mix(x_BHTE: Tensor, group: dist.ProcessGroup) -> Tensor:
        whole = to_tokens(x_BHTE, group)
        return whole.unflatten(1, (group.size(), -1)).transpose(1, 2).flatten(1, 2)

    to_tokens = context_parallel.exchange_to_tokens
    with patch.object(context_parallel, "exchange_to_tokens", mix):
        yield


@contextmanager
def divide_gradients_by_context() -> Iterator[None]:
    """Divide gradients by the ranks of a sequence, although nothing is sharded over them."""
    finish = ParallelModel.finish_gradients

    def divide(self: ParallelModel) -> None:
        finish(self)
        for _, parameter in self.named_parameters():
            if parameter.grad is not None:
                parameter.grad.div_(self.layout.cp)

    with patch.object(ParallelModel, "finish_gradients", divide):
        yield


# Random numbers, layout, data


@contextmanager
def key_dropout_by_local_position() -> Iterator[None]:
    """Number the tokens of every context rank from 0."""
    original = Dropout.from_key

    def number_locally(key: DropoutKey, places_T: Tensor, device: torch.device) -> Dropout:
        return original(key, torch.arange(len(places_T)), device)

    with patch.object(Dropout, "from_key", number_locally):
        yield


@contextmanager
def ignore_document_boundaries() -> Iterator[None]:
    """Drop the document boundaries in attention over context ranks."""
    original = RowChunks.from_documents
    with patch.object(
        RowChunks,
        "from_documents",
        lambda num_tokens, chunks, *_ids: original(num_tokens, chunks, None),
    ):
        yield


@contextmanager
def count_positions_locally() -> Iterator[None]:
    """Rotate the tokens of a context rank as if they were the first of the row."""
    original = forward_context.build_forward_context

    def build(
        shape: Any, x_BTD: Tensor, positions_BT: Tensor, ids_BT: Any, places_T: Tensor, **rest: Any
    ) -> Any:
        local = positions_BT.clone()
        local[:, places_T] = torch.arange(len(places_T))
        return original(shape, x_BTD, local, ids_BT, places_T, **rest)

    with patch.object(decoder, "build_forward_context", build):
        yield


@contextmanager
def merge_queries_without_keys() -> Iterator[None]:
    """Merge the log-sum-exp of 0 that the fused kernel returns for a fully masked query."""
    with patch.object(attention_kernels, "_mask_queries_without_keys", lambda part, _visible: part):
        yield
