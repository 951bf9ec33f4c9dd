"""Patches that add known wrong gradients of tensor parallelism; see `reductions`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from shardwright.layout import ParameterLayout, Shard
from shardwright.model.attention.attention import Attention
from shardwright.model.dropout import Dropout
from shardwright.model.mlp import FeedForward
from shardwright.model.products.linear import Linear
from shardwright.numerics import VocabularyShard, loss
from shardwright.parallel import ParallelModel, apply, collectives
from shardwright.parallel.gradient_reduction import PendingReduction
from shardwright.parallel.tensor_parallel import TensorParallel

# The loss over a sharded vocabulary


@contextmanager
def smooth_over_own_vocabulary() -> Iterator[None]:
    """Spread label smoothing over the rows of one rank.

    Recipes of the cells have no smoothing, so the test of the loss itself must detect this.
    """
    original = loss._LogitTransform.compute_gradient

    def smooth_locally(self: Any, chunk: Any, labels_C1: Tensor) -> Tensor:
        gradient_CV = original(self, chunk, labels_C1)
        if self.vocabulary is None:
            return gradient_CV
        correct = self.label_smoothing / self.vocabulary.vocab_size
        wrong = self.label_smoothing / gradient_CV.shape[1]
        return gradient_CV.add_(correct - wrong)  # for a loss without scale and cap

    with patch.object(loss._LogitTransform, "compute_gradient", smooth_locally):
        yield


@contextmanager
def count_every_rank_in_loss() -> Iterator[None]:
    """Treat whole logits as a rank's own: the normaliser counts all of them, log(tp) too much."""
    original = VocabularyShard.normalise

    def count_again(
        self: VocabularyShard, logits: Tensor, log_probs: Tensor, target: Tensor, **named: Any
    ) -> Any:
        degree = self.gather_ranks(target.new_zeros(1)).shape[0]
        target_C, mean_C = original(self, logits, log_probs, target, **named)
        log_probs -= torch.tensor(degree, dtype=log_probs.dtype).log()
        return target_C - torch.tensor(degree, dtype=target_C.dtype).log(), mean_C

    with patch.object(VocabularyShard, "normalise", count_again):
        yield


@contextmanager
def normalise_over_own_vocabulary() -> Iterator[None]:
    """Compute each chunk's softmax over the rank's own rows."""

    def normalise_locally(
        self: VocabularyShard,
        logits: Tensor,
        log_probs: Tensor,
        target: Tensor,
        *,
        has_smoothing: bool,
    ) -> Any:
        shift = logits.max(dim=1).values - log_probs.max(dim=1).values
        return target[:, 0] - shift, torch.zeros_like(shift)

    with patch.object(VocabularyShard, "normalise", normalise_locally):
        yield


def _skip_backward_sum(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Run a collective whose backward pass keeps this rank's part only."""
    backward = {
        collectives.copy_to_all: collectives._identity,
        collectives.all_gather: collectives._slice_local,
    }[function]
    with patch.object(
        collectives,
        "_run_all_reduce" if function is collectives.copy_to_all else "_run_reduce_scatter",
        backward,
    ):
        return function(*arguments)


def _prepare_without_sum(self: TensorParallel, x_BSD: Tensor) -> Tensor:
    if self.sequence_parallel:
        return _skip_backward_sum(collectives.all_gather, x_BSD, 1, self.group)
    return _skip_backward_sum(collectives.copy_to_all, x_BSD, self.group)


@contextmanager
def skip_backward_sum_of_head() -> Iterator[None]:
    """Give the hidden states before the head the gradient of the rank's own rows only."""
    original = TensorParallel.shard_vocabulary
    prepare = TensorParallel.prepare_input
    in_head = [False]

    def note_head(self: TensorParallel, vocab_size: int) -> VocabularyShard:
        in_head[0] = True
        return original(self, vocab_size)

    def prepare_without_sum(self: TensorParallel, x_BSD: Tensor) -> Tensor:
        if not in_head[0]:
            return prepare(self, x_BSD)
        in_head[0] = False
        return _prepare_without_sum(self, x_BSD)

    with (
        patch.object(TensorParallel, "shard_vocabulary", note_head),
        patch.object(TensorParallel, "prepare_input", prepare_without_sum),
    ):
        yield


# Reductions


def _patch_pending_reductions(is_omitted: Callable[[str], bool]) -> Any:
    """Omit the sums of the parameters for which `is_omitted` is true."""
    original = apply.list_pending_reductions

    def list_fewer(
        layouts: Mapping[str, ParameterLayout], *arguments: Any, **named: Any
    ) -> list[PendingReduction]:
        return [
            pending
            for pending in original(layouts, *arguments, **named)
            if not is_omitted(pending.name)
        ]

    return patch.object(apply, "list_pending_reductions", list_fewer)


@contextmanager
def skip_sum_of_layer_norms() -> Iterator[None]:
    """Keep the gradient of the rank's own tokens for norms under sequence parallelism."""
    with _patch_pending_reductions(lambda name: "layernorm" in name):
        yield


@contextmanager
def skip_sum_of_final_norm() -> Iterator[None]:
    """Skip the sum of the last norm alone."""
    with _patch_pending_reductions(lambda name: name == "model.norm.weight"):
        yield


@contextmanager
def sum_head_norms_with_tokens_only() -> Iterator[None]:
    """Sum a norm on sharded heads only where the residual stream is sharded too."""
    original = apply.list_pending_reductions

    def list_fewer(
        layouts: Mapping[str, ParameterLayout], mesh: Any, **named: Any
    ) -> list[PendingReduction]:
        sums = original(layouts, mesh, **named)
        return [
            p
            for p in sums
            if mesh.layout.sequence_parallel
            or not p.name.endswith(("q_norm.weight", "k_norm.weight"))
        ]

    with patch.object(apply, "list_pending_reductions", list_fewer):
        yield


@contextmanager
def sum_before_last_micro_batch() -> Iterator[None]:
    """Sum norms after the first backward pass, like a hook registered before the engine's."""
    original = ParallelModel.synchronise_gradients

    def sum_early(self: ParallelModel, last: bool) -> Any:
        if last:
            self.finish_gradients()
            self._pending_reductions = []
        return original(self, last)

    with patch.object(ParallelModel, "synchronise_gradients", sum_early):
        yield


@contextmanager
def skip_sum_of_shared_key_value_heads() -> Iterator[None]:
    """Keep the gradient of the own query heads on ranks that share a key-value head."""
    with _patch_pending_reductions(lambda name: name.endswith(("k_proj.weight", "v_proj.weight"))):
        yield


@contextmanager
def compute_statistics_of_own_heads() -> Iterator[None]:
    """Compute the mean of a norm over all heads from the rank's own heads."""

    def build_local(
        self: Attention, tensor: TensorParallel | None, num_heads: int
    ) -> Callable[[Tensor], Tensor] | None:
        return (
            None
            if tensor is None
            else lambda squares: squares / (max(1, num_heads // tensor.degree) * self.head_dim)
        )

    with patch.object(Attention, "_build_mean_square", build_local):
        yield


@contextmanager
def add_bias_on_every_rank() -> Iterator[None]:
    """Add the bias of a row-parallel product on every rank before the sum."""

    def add_bias_first(
        self: Linear,
        x: Tensor,
        tensor: TensorParallel | None = None,
        _dropout: Dropout | None = None,
    ) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        product = self._multiply(x, bias)
        return product if tensor is None else tensor.reduce_output(product)

    with patch.object(Linear, "forward", add_bias_first):
        yield


@contextmanager
def skip_backward_sum_of_feed_forward() -> Iterator[None]:
    """Give the feed-forward's input the gradient of a rank's own features."""
    original = FeedForward.forward

    def forward_without_sum(
        self: FeedForward,
        x_BTD: Tensor,
        tensor: TensorParallel | None = None,
        _dropout: Dropout | None = None,
    ) -> Tensor:
        with patch.object(TensorParallel, "prepare_input", _prepare_without_sum):
            return original(self, x_BTD, tensor)

    with patch.object(FeedForward, "forward", forward_without_sum):
        yield


# Norm and clip


def _patch_norm_layouts(change: Callable[[ParameterLayout], ParameterLayout]) -> Any:
    original = ParallelModel.list_norm_gradients

    def list_changed(self: ParallelModel) -> list[tuple[Tensor | None, ParameterLayout]]:
        return [(gradient, change(layout)) for gradient, layout in original(self)]

    return patch.object(ParallelModel, "list_norm_gradients", list_changed)


@contextmanager
def treat_sharded_parameters_as_replicas() -> Iterator[None]:
    """Count the first rank's shard in the norm as if the other ranks had replicas of it."""
    with _patch_norm_layouts(
        lambda d: replace(d, shards=tuple(shard for shard in d.shards if shard.axis != "tp"))
    ):
        yield


@contextmanager
def count_replicas_on_every_tensor_rank() -> Iterator[None]:
    """Count parameters that tensor-parallel ranks replicate once on each of them."""

    def add_shard(d: ParameterLayout) -> ParameterLayout:
        return d if "tp" in d.shard_axes else replace(d, shards=(Shard("tp", 0), *d.shards))

    with _patch_norm_layouts(add_shard):
        yield


# Random numbers


@contextmanager
def number_heads_locally() -> Iterator[None]:
    """Drop attention weights on every rank as if its first head were the model's."""
    original = Dropout.drop_attention

    def drop_from_head_0(
        self: Dropout, weights: Tensor, rate: float, *, first_head: int = 0, **named: Any
    ) -> Tensor:
        return original(self, weights, rate, first_head=0, **named)

    with patch.object(Dropout, "drop_attention", drop_from_head_0):
        yield


@contextmanager
def number_tokens_locally() -> Iterator[None]:
    """Drop the residual stream's tokens on every rank as if they were the first of the row."""
    original = Dropout.select_local_tokens

    def select_first(self: Dropout, tensor: TensorParallel | None) -> Dropout:
        shared = original(self, tensor)
        return Dropout(self.keys_BT[:, : shared.keys_BT.shape[1]])

    with patch.object(Dropout, "select_local_tokens", select_first):
        yield
