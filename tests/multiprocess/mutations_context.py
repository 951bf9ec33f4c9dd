"""Known wrong gradients of context parallelism, put back into a worker process while its context is entered; see `mutations`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.data.loader import MicroBatch
from shardwright.model import Decoder, decoder
from shardwright.model import context as model_context
from shardwright.model.dropout import Dropout, DropoutKey
from shardwright.parallel import ParallelModel, blocks, context, ring
from shardwright.parallel.blocks import Partial
from shardwright.parallel.sight import Row
from shardwright.train import step

# One normaliser


def _own_tokens(model: ParallelModel, micro_batches: Sequence[MicroBatch]) -> Tensor:
    """Supervised tokens among the places that this context rank has."""
    assert model.decoder.cuts.context is not None
    places = model.decoder.cuts.context.places(micro_batches[0].labels_BT.shape[1])
    return torch.stack([(batch.labels_BT[:, places] != -100).sum() for batch in micro_batches]).sum()


@contextmanager
def context_ranks_average_their_means() -> Iterator[None]:
    """3: every context rank divides by its own supervised tokens, and the ranks' gradients are averaged."""

    def count(model: ParallelModel, micro_batches: Sequence[MicroBatch]) -> Tensor:
        return model.sum_over_batch(_own_tokens(model, micro_batches)) * model.layout.cp

    with patch.object(step, "count_supervised", count):
        yield


@contextmanager
def normaliser_forgets_context() -> Iterator[None]:
    """4: every context rank counts its own tokens, and they are summed over the ranks that read other rows only."""

    def count(model: ParallelModel, micro_batches: Sequence[MicroBatch]) -> Tensor:
        return model.sum_over_batch(_own_tokens(model, micro_batches))

    with patch.object(step, "count_supervised", count):
        yield


@contextmanager
def normaliser_counts_context_twice() -> Iterator[None]:
    """4, the other way: whole rows are counted by each of the ranks that share them."""
    original = step.count_supervised
    with patch.object(step, "count_supervised", lambda model, batches: original(model, batches) * model.layout.cp):
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
        assert self.cuts.context is not None
        return forward(self, *arguments, **named) * dist.get_world_size()

    with patch.object(Decoder, "forward", scaled):
        yield


# A reduction missing or wrong


@contextmanager
def keys_get_no_gradient_from_other_ranks() -> Iterator[None]:
    """19: what other ranks' queries give to keys and values is lost."""
    with patch.object(ring, "_add", lambda first, *_others: first):
        yield


@contextmanager
def gradients_stop_one_rank_short_of_home() -> Iterator[None]:
    """19: the ring passes gradients of keys and values on once too few, so each rank takes a neighbour's."""

    def stop(back: ring._Backward, k_BKLE: Tensor, v_BKLV: Tensor) -> ring.KeysValues:
        gradients, passing = None, None
        for arrived in ring._arrivals(k_BKLE, v_BKLV, back.how):
            if gradients is not None:
                assert back.how.group is not None
                passing = ring._Pass(gradients, back.how.group)
            gradients = back.take(arrived)
            if passing is not None:
                gradients = ring._add(gradients, passing.wait())
        assert gradients is not None
        return gradients

    with patch.object(ring, "_ring_backward", stop):
        yield


@contextmanager
def queries_get_their_gradient_from_some_keys() -> Iterator[None]:
    """19: the queries' gradient is that of the last keys that came."""
    original = ring._Backward.take

    def overwrite(self: ring._Backward, arrived: ring.Arrived) -> ring.KeysValues:
        self.d_q_BHLE.zero_()
        return original(self, arrived)

    with patch.object(ring._Backward, "take", overwrite):
        yield


@contextmanager
def blocks_go_back_by_their_own_log_sum_exp() -> Iterator[None]:
    """19: the backward of a block takes the output and log-sum-exp of that block in place of the whole row's."""
    backward = blocks.CpuFlash.backward

    def own(self: blocks.CpuFlash, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, _whole: Partial, *rest: Any) -> Any:
        return backward(self, d_out, q, k, v, self.forward(q, k, v, *rest), *rest)

    with patch.object(blocks.CpuFlash, "backward", own):
        yield


@contextmanager
def ulysses_mixes_heads() -> Iterator[None]:
    """20: back from the all-to-all, heads are put together as if the rank came last."""

    def mix(x_BHTE: Tensor, group: dist.ProcessGroup) -> Tensor:
        whole = to_tokens(x_BHTE, group)
        return whole.unflatten(1, (group.size(), -1)).transpose(1, 2).flatten(1, 2)

    to_tokens = context.to_tokens
    with patch.object(context, "to_tokens", mix):
        yield


@contextmanager
def gradients_divided_by_context() -> Iterator[None]:
    """21: gradients are divided by the ranks that share a sequence, though nothing is sharded over them."""
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
    original = Dropout.of

    def local(key: DropoutKey, places_T: Tensor, device: torch.device) -> Dropout:
        return original(key, torch.arange(len(places_T)), device)

    with patch.object(Dropout, "of", local):
        yield


@contextmanager
def documents_see_each_other() -> Iterator[None]:
    """47: the cut attention does not hear of documents."""
    original = Row.of
    with patch.object(Row, "of", lambda num_tokens, num_chunks, _ids: original(num_tokens, num_chunks, None)):
        yield


@contextmanager
def positions_of_the_own_share() -> Iterator[None]:
    """47: a context rank's tokens turn as if they were the row's first."""
    original = model_context.build_context

    def build(shape: Any, x_BTD: Tensor, positions_BT: Tensor, ids_BT: Any, places_T: Tensor, **rest: Any) -> Any:
        local = positions_BT.clone()
        local[:, places_T] = torch.arange(len(places_T))
        return original(shape, x_BTD, local, ids_BT, places_T, **rest)

    with patch.object(decoder, "build_context", build):
        yield


@contextmanager
def blind_queries_count() -> Iterator[None]:
    """The fused kernel's silent answer to a query that sees nothing of a block, a log-sum-exp of 0, is merged as if it saw."""
    with patch.object(blocks, "_hide_blind", lambda part, _visible: part):
        yield
