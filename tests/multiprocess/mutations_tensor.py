"""Known wrong gradients of tensor parallelism, put back into a worker process while its context is
entered; see `mutations`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from shardwright.layout import ParameterLayout, Shard
from shardwright.model.attention import Attention
from shardwright.model.dropout import Dropout
from shardwright.model.linear import Linear
from shardwright.model.mlp import FeedForward
from shardwright.numerics import VocabularyShard, loss
from shardwright.parallel import ParallelModel, apply, collectives
from shardwright.parallel.gradient_reduction import PendingReduction
from shardwright.parallel.tensor_parallel import TensorParallel

# The loss over a cut vocabulary


@contextmanager
def smoothing_over_the_own_vocabulary() -> Iterator[None]:
    """8: label smoothing spreads over the rows that a rank holds. The trainer's loss has none: the
    loss's own test must see it.
    """
    original = loss._LogitTransform.compute_gradient

    def local(self: Any, chunk: Any, labels_C1: Tensor) -> Tensor:
        gradient_CV = original(self, chunk, labels_C1)
        if self.vocabulary is None:
            return gradient_CV
        right = self.label_smoothing / self.vocabulary.vocab_size
        wrong = self.label_smoothing / gradient_CV.shape[1]
        return gradient_CV.add_(right - wrong)  # as it is without scale and cap

    with patch.object(loss._LogitTransform, "compute_gradient", local):
        yield


@contextmanager
def loss_counts_every_rank() -> Iterator[None]:
    """9: whole logits are taken for a rank's own: the normaliser of each rank counts all of them,
    log(tp) too much.
    """
    original = VocabularyShard.normalise

    def counted_again(
        self: VocabularyShard, logits: Tensor, log_probs: Tensor, target: Tensor, **named: Any
    ) -> Any:
        degree = self.gather_ranks(target.new_zeros(1)).shape[0]
        target_C, mean_C = original(self, logits, log_probs, target, **named)
        log_probs -= torch.tensor(degree, dtype=log_probs.dtype).log()
        return target_C - torch.tensor(degree, dtype=target_C.dtype).log(), mean_C

    with patch.object(VocabularyShard, "normalise", counted_again):
        yield


@contextmanager
def normalised_over_the_own_vocabulary() -> Iterator[None]:
    """titan 3412: each chunk's softmax is that of the rank's own rows."""

    def own(
        self: VocabularyShard, logits: Tensor, log_probs: Tensor, target: Tensor, *, smoothed: bool
    ) -> Any:
        shift = logits.max(dim=1).values - log_probs.max(dim=1).values
        return target[:, 0] - shift, torch.zeros_like(shift)

    with patch.object(VocabularyShard, "normalise", own):
        yield


def _without_sum(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """A collective whose backward pass keeps this rank's share."""
    degree_slice = {
        collectives.copy_to_all: collectives._identity,
        collectives.all_gather: collectives._slice_local,
    }[function]
    with patch.object(
        collectives,
        "_all_reduce" if function is collectives.copy_to_all else "_reduce_scatter",
        degree_slice,
    ):
        return function(*arguments)


@contextmanager
def head_without_its_backward_sum() -> Iterator[None]:
    """18: the hidden states before the head get the gradient of the rank's own rows only."""
    original = TensorParallel.shard_vocabulary
    entering = TensorParallel.prepare_input
    in_head = [False]

    def vocabulary(self: TensorParallel, vocab_size: int) -> VocabularyShard:
        in_head[0] = True
        return original(self, vocab_size)

    def enter(self: TensorParallel, x_BSD: Tensor) -> Tensor:
        if not in_head[0]:
            return entering(self, x_BSD)
        in_head[0] = False
        if self.sequence_parallel:
            return _without_sum(collectives.all_gather, x_BSD, 1, self.group)
        return _without_sum(collectives.copy_to_all, x_BSD, self.group)

    with (
        patch.object(TensorParallel, "shard_vocabulary", vocabulary),
        patch.object(TensorParallel, "prepare_input", enter),
    ):
        yield


# A reduction missing or wrong


def _dropping(wanted: Callable[[str], bool]) -> Any:
    """Leaves the sums of some parameters out."""
    original = apply.list_pending_reductions

    def fewer(
        layouts: Mapping[str, ParameterLayout], *arguments: Any, **named: Any
    ) -> list[PendingReduction]:
        return [
            pending
            for pending in original(layouts, *arguments, **named)
            if not wanted(pending.name)
        ]

    return patch.object(apply, "list_pending_reductions", fewer)


@contextmanager
def norms_of_tokens_are_not_summed() -> Iterator[None]:
    """12: norms under sequence parallelism keep the gradient of the rank's own tokens."""
    with _dropping(lambda name: "layernorm" in name):
        yield


@contextmanager
def final_norm_is_not_summed() -> Iterator[None]:
    """13: the last norm alone is forgotten."""
    with _dropping(lambda name: name == "model.norm.weight"):
        yield


@contextmanager
def norms_on_heads_are_summed_with_tokens_only() -> Iterator[None]:
    """15: a norm on cut heads is summed where the residual stream is cut, and forgotten where it is
    not.
    """
    original = apply.list_pending_reductions

    def fewer(
        layouts: Mapping[str, ParameterLayout], mesh: Any, **named: Any
    ) -> list[PendingReduction]:
        sums = original(layouts, mesh, **named)
        return [
            p
            for p in sums
            if mesh.layout.sequence_parallel
            or not p.name.endswith(("q_norm.weight", "k_norm.weight"))
        ]

    with patch.object(apply, "list_pending_reductions", fewer):
        yield


@contextmanager
def summed_before_the_last_micro_batch() -> Iterator[None]:
    """14: norms are summed after the first backward pass, as a hook would that was registered
    before the engine's.
    """
    original = ParallelModel.synchronise_gradients

    def early(self: ParallelModel, last: bool) -> Any:
        if last:
            self.finish_gradients()
            self._sums = []
        return original(self, last)

    with patch.object(ParallelModel, "synchronise_gradients", early):
        yield


@contextmanager
def shared_key_value_heads_are_not_summed() -> Iterator[None]:
    """16: ranks that hold the same key-value head each keep the gradient of their own query
    heads.
    """
    with _dropping(lambda name: name.endswith(("k_proj.weight", "v_proj.weight"))):
        yield


@contextmanager
def statistics_of_the_own_heads() -> Iterator[None]:
    """15, its cousin: a norm over the width of all heads takes the mean over a rank's own."""

    def own(
        self: Attention, tensor: TensorParallel | None, num_heads: int
    ) -> Callable[[Tensor], Tensor] | None:
        return (
            None
            if tensor is None
            else lambda squares: squares / (max(1, num_heads // tensor.degree) * self.head_dim)
        )

    with patch.object(Attention, "_build_mean_square", own):
        yield


@contextmanager
def bias_on_every_share() -> Iterator[None]:
    """The bias of a row-cut product is added by every rank before the sum."""

    def early(
        self: Linear,
        x: Tensor,
        sum_shares: Callable[[Tensor], Tensor] | None = None,
        _dropout: Dropout | None = None,
    ) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        product = self._multiply(x, bias)
        return product if sum_shares is None else sum_shares(product)

    with patch.object(Linear, "forward", early):
        yield


@contextmanager
def input_gradient_keeps_the_own_share() -> Iterator[None]:
    """The feed-forward's input gets the gradient of a rank's own features."""
    original = FeedForward.forward

    def local(
        self: FeedForward,
        x_BTD: Tensor,
        tensor: TensorParallel | None = None,
        _dropout: Dropout | None = None,
    ) -> Tensor:
        if tensor is None:
            return original(self, x_BTD)
        if tensor.sequence_parallel:
            entered = _without_sum(collectives.all_gather, x_BTD, 1, tensor.group)
        else:
            entered = _without_sum(collectives.copy_to_all, x_BTD, tensor.group)
        return self.compute(entered, tensor.reduce_output)

    with patch.object(FeedForward, "forward", local):
        yield


# Norm and clip


def _counting(change: Callable[[ParameterLayout], ParameterLayout]) -> Any:
    original = ParallelModel.list_norm_gradients

    def changed(self: ParallelModel) -> list[tuple[Tensor | None, ParameterLayout]]:
        return [(gradient, change(described)) for gradient, described in original(self)]

    return patch.object(ParallelModel, "list_norm_gradients", changed)


@contextmanager
def cut_parameters_taken_for_copies() -> Iterator[None]:
    """29: the norm counts the first rank's share of a cut parameter as if the others had copies of
    it.
    """
    with _counting(
        lambda d: replace(d, shards=tuple(shard for shard in d.shards if shard.axis != "tp"))
    ):
        yield


@contextmanager
def copies_counted_by_every_rank() -> Iterator[None]:
    """35: what tensor-parallel ranks hold alike is counted once by each of them."""

    def counted(d: ParameterLayout) -> ParameterLayout:
        return d if "tp" in d.shard_axes else replace(d, shards=(Shard("tp", 0), *d.shards))

    with _counting(counted):
        yield


# Random numbers


@contextmanager
def heads_number_themselves_locally() -> Iterator[None]:
    """45: every rank drops attention weights as if its first head were the model's."""
    original = Dropout.drop_attention

    def local(
        self: Dropout, weights: Tensor, rate: float, *, first_head: int = 0, **named: Any
    ) -> Tensor:
        return original(self, weights, rate, first_head=0, **named)

    with patch.object(Dropout, "drop_attention", local):
        yield


@contextmanager
def tokens_number_themselves_locally() -> Iterator[None]:
    """45: every rank drops its tokens of the residual stream as if they were the first of the
    row.
    """
    original = Dropout.select_local_tokens

    def first(self: Dropout, tensor: TensorParallel | None) -> Dropout:
        shared = original(self, tensor)
        return Dropout(self.keys_BT[:, : shared.keys_BT.shape[1]])

    with patch.object(Dropout, "select_local_tokens", first):
        yield
