"""Known wrong gradients of context parallelism, put back into a worker process while its context is
entered; see `mutations`.
"""

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
from shardwright.parallel import ParallelModel, attention_kernels, context_parallel, ring_attention
from shardwright.parallel.attention_kernels import PartialAttention
from shardwright.parallel.block_mask import RowChunks
from shardwright.train import step

# One normaliser


def _own_tokens(model: ParallelModel, micro_batches: Sequence[MicroBatch]) -> Tensor:
    """Supervised tokens among the places that this context rank has."""
    assert model.decoder.parallel_hooks.context is not None
    places = model.decoder.parallel_hooks.context.local_token_indices(
        micro_batches[0].labels_BT.shape[1]
    )
    return torch.stack(
        [(batch.labels_BT[:, places] != -100).sum() for batch in micro_batches]
    ).sum()


@contextmanager
def context_ranks_average_their_means() -> Iterator[None]:
    """3: every context rank divides by its own supervised tokens, and the ranks' gradients are
    averaged.
    """

    def count(model: ParallelModel, micro_batches: Sequence[MicroBatch]) -> Tensor:
        return model.sum_over_batch(_own_tokens(model, micro_batches)) * model.layout.cp

    with patch.object(step, "count_supervised", count):
        yield


@contextmanager
def normaliser_forgets_context() -> Iterator[None]:
    """4: every context rank counts its own tokens, and they are summed over the ranks that read
    other rows only.
    """

    def count(model: ParallelModel, micro_batches: Sequence[MicroBatch]) -> Tensor:
        return model.sum_over_batch(_own_tokens(model, micro_batches))

    with patch.object(step, "count_supervised", count):
        yield


@contextmanager
def normaliser_counts_context_twice() -> Iterator[None]:
    """4, the other way: whole rows are counted by each of the ranks that share them."""
    original = step.count_supervised
    with patch.object(
        step, "count_supervised", lambda model, batches: original(model, batches) * model.layout.cp
    ):
        yield


@contextmanager
def the_reported_loss_counts_context_twice() -> Iterator[None]:
    """5: the loss that is told is multiplied by the context ranks."""
    original = ParallelModel.sum_over_data

    def twice(self: ParallelModel, tensor: Tensor) -> Tensor:
        return original(self, tensor) * (self.layout.cp if tensor.is_floating_point() else 1)

    with patch.object(ParallelModel, "sum_over_data", twice):
        yield


@contextmanager
def the_loss_is_multiplied_by_context() -> Iterator[None]:
    """7: a loss is multiplied by the context ranks, for a mean over them that is not taken."""
    forward = Decoder.forward

    def scaled(self: Decoder, *arguments: Any, **named: Any) -> Tensor:
        assert self.parallel_hooks.context is not None
        return forward(self, *arguments, **named) * dist.get_world_size()

    with patch.object(Decoder, "forward", scaled):
        yield


# A reduction missing or wrong


@contextmanager
def keys_get_no_gradient_from_other_ranks() -> Iterator[None]:
    """19: what other ranks' queries give to keys and values is lost."""
    with patch.object(ring_attention, "_add_pairs", lambda first, *_others: first):
        yield


@contextmanager
def gradients_stop_one_rank_short_of_home() -> Iterator[None]:
    """19: the ring passes gradients of keys and values on once too few, so each rank takes a
    neighbour's.
    """

    def stop(
        back: ring_attention._RowBackward, k_BKLE: Tensor, v_BKLV: Tensor
    ) -> ring_attention.KeyValuePair:
        gradients = None
        passing = None
        for arrived in ring_attention._iterate_key_values(k_BKLE, v_BKLV, back.settings):
            if gradients is not None:
                assert back.settings.group is not None
                passing = ring_attention._RingPass(gradients, back.settings.group)
            gradients = back.accumulate(arrived)
            if passing is not None:
                gradients = ring_attention._add_pairs(gradients, passing.wait())
        assert gradients is not None
        return gradients

    with patch.object(ring_attention, "_ring_backward", stop):
        yield


@contextmanager
def queries_get_their_gradient_from_some_keys() -> Iterator[None]:
    """19: the queries' gradient is that of the last keys that came."""
    original = ring_attention._RowBackward.accumulate

    def overwrite(
        self: ring_attention._RowBackward, arrived: ring_attention.KeyValueShard
    ) -> ring_attention.KeyValuePair:
        self.d_q_BHLE.zero_()
        return original(self, arrived)

    with patch.object(ring_attention._RowBackward, "accumulate", overwrite):
        yield


@contextmanager
def blocks_go_back_by_their_own_log_sum_exp() -> Iterator[None]:
    """19: the backward of a block takes the output and log-sum-exp of that block in place of the
    whole row's.
    """
    backward = attention_kernels.CpuFlashKernel.backward

    def own(
        self: attention_kernels.CpuFlashKernel,
        d_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        _whole: PartialAttention,
        *rest: Any,
    ) -> Any:
        return backward(self, d_out, q, k, v, self.forward(q, k, v, *rest), *rest)

    with patch.object(attention_kernels.CpuFlashKernel, "backward", own):
        yield


@contextmanager
def ulysses_mixes_heads() -> Iterator[None]:
    """20: back from the all-to-all, heads are put together as if the rank came last."""

    def mix(x_BHTE: Tensor, group: dist.ProcessGroup) -> Tensor:
        whole = to_tokens(x_BHTE, group)
        return whole.unflatten(1, (group.size(), -1)).transpose(1, 2).flatten(1, 2)

    to_tokens = context_parallel.exchange_to_tokens
    with patch.object(context_parallel, "exchange_to_tokens", mix):
        yield


@contextmanager
def gradients_divided_by_context() -> Iterator[None]:
    """21: gradients are divided by the ranks that share a sequence, though nothing is sharded over
    them.
    """
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
def dropout_by_the_place_in_the_share() -> Iterator[None]:
    """45: a context rank's tokens are numbered from 0."""
    original = Dropout.from_key

    def local(key: DropoutKey, places_T: Tensor, device: torch.device) -> Dropout:
        return original(key, torch.arange(len(places_T)), device)

    with patch.object(Dropout, "from_key", local):
        yield


@contextmanager
def documents_see_each_other() -> Iterator[None]:
    """47: the cut attention does not hear of documents."""
    original = RowChunks.from_documents
    with patch.object(
        RowChunks,
        "from_documents",
        lambda num_tokens, num_chunks, _ids: original(num_tokens, num_chunks, None),
    ):
        yield


@contextmanager
def positions_of_the_own_share() -> Iterator[None]:
    """47: a context rank's tokens turn as if they were the row's first."""
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
def blind_queries_count() -> Iterator[None]:
    """The fused kernel's silent answer to a query that sees nothing of a block, a log-sum-exp of 0,
    is merged as if it saw.
    """
    with patch.object(attention_kernels, "_mask_queries_without_keys", lambda part, _visible: part):
        yield
