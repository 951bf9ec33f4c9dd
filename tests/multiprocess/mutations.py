"""Known wrong gradients, put back into a worker process while its context is entered. Numbers are docs/silent-bugs.md's.

Each is a patch of the engine or of what feeds it; the reference never sees it. Functions stand at the top of the module because
they travel to the workers by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from shardwright.data.loader import MicroBatch
from shardwright.layout import ParameterLayout
from shardwright.model import Block, Decoder
from shardwright.model.dropout import Dropout, DropoutKey
from shardwright.numerics import clip
from shardwright.parallel import ParallelModel, replicate
from shardwright.train import step
from shardwright.verify import cell

# One normaliser


@contextmanager
def mean_of_means_over_accumulation() -> Iterator[None]:
    """1: every micro-batch is divided by its own tokens, and the means are averaged."""
    forward = Decoder.forward

    def mean_loss(self: Decoder, *arguments: Any, **named: Any) -> Tensor:
        return forward(self, *arguments, **named) / (named["labels_BT"] != -100).sum().clamp(min=1)

    def count(model: ParallelModel, micro_batches: Sequence[MicroBatch]) -> Tensor:
        return torch.tensor(len(micro_batches) * model.layout.data_ranks)

    with patch.object(Decoder, "forward", mean_loss), patch.object(step, "count_supervised", count):
        yield


@contextmanager
def tokens_counted_per_rank() -> Iterator[None]:
    """2: every rank divides by its own tokens, and gradients are averaged over ranks."""

    def count(model: ParallelModel, micro_batches: Sequence[MicroBatch]) -> Tensor:
        return torch.tensor(sum(batch.num_supervised for batch in micro_batches) * model.layout.data_ranks)

    with patch.object(step, "count_supervised", count):
        yield


@contextmanager
def normaliser_forgets_an_axis() -> Iterator[None]:
    """4: the divisor is summed over one of the two data axes."""

    def count(model: ParallelModel, micro_batches: Sequence[MicroBatch]) -> Tensor:
        tokens = torch.tensor(sum(batch.num_supervised for batch in micro_batches))
        return model.sum_over(tokens, ("dp_shard",)) * model.layout.dp_replicate

    with patch.object(step, "count_supervised", count):
        yield


@contextmanager
def loss_of_the_own_rank() -> Iterator[None]:
    """5: the reported loss is summed over some ranks and divided by the tokens of all."""
    original = ParallelModel.sum_over_data

    def forget_losses(self: ParallelModel, tensor: Tensor) -> Tensor:
        return tensor if tensor.is_floating_point() else original(self, tensor)

    with patch.object(ParallelModel, "sum_over_data", forget_losses):
        yield


@contextmanager
def a_batch_reports_no_tokens() -> Iterator[None]:
    """6: one path forgets to count its tokens."""
    original = cell.step_micro_batches

    def forgetful(*arguments: Any) -> list[MicroBatch]:
        return [replace(batch, num_supervised=0) if i == 0 else batch for i, batch in enumerate(original(*arguments))]

    with patch.object(cell, "step_micro_batches", forgetful):
        yield


@contextmanager
def rescaled_by_accumulation() -> Iterator[None]:
    """10: the sum is divided by the number of micro-batches once more."""
    original = step.count_supervised
    with patch.object(step, "count_supervised", lambda model, batches: original(model, batches) * len(batches)):
        yield


@contextmanager
def final_scaling_skipped() -> Iterator[None]:
    """11: summed losses are never divided."""
    with patch.object(step, "count_supervised", lambda _model, _batches: torch.tensor(1)):
        yield


# A reduction missing or wrong


@contextmanager
def gradients_averaged_by_ddp() -> Iterator[None]:
    """2: DDP's own mean over ranks, on top of the global normaliser."""
    with patch.object(DistributedDataParallel, "register_comm_hook", lambda *_arguments: None):
        yield


@contextmanager
def gradients_averaged_by_fsdp() -> Iterator[None]:
    """2: FSDP2's own mean over ranks, on top of the global normaliser."""
    with (
        patch.object(FSDPModule, "set_gradient_divide_factor", lambda *_arguments: None),
        patch.object(FSDPModule, "set_force_sum_reduction_for_comms", lambda *_arguments: None),
    ):
        yield


@contextmanager
def replicas_not_summed() -> Iterator[None]:
    """17: the sum over replicas of a shard is lost."""
    original = FSDPModule.set_requires_all_reduce
    with patch.object(FSDPModule, "set_requires_all_reduce", lambda self, _on, **named: original(self, False, **named)):
        yield


@contextmanager
def a_bucket_of_one_is_not_reduced() -> Iterator[None]:
    """22: a parameter that fills a bucket by itself is never reduced."""
    original = replicate._sum_bucket

    def sum_bucket(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        if len(bucket.parameters()) > 1:
            return original(group, bucket)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    sum_bucket.__annotations__ = original.__annotations__  # DDP compares the types themselves
    with patch.object(replicate, "_sum_bucket", sum_bucket):
        yield


@contextmanager
def last_micro_batch_after_the_reduction() -> Iterator[None]:
    """23: the sum over ranks is taken before the last micro-batch is added."""
    original = ParallelModel.synchronising
    with patch.object(ParallelModel, "synchronising", lambda self, last: original(self, not last)):
        yield


@contextmanager
def embedding_counted_once() -> Iterator[None]:
    """44: of a tied weight's two gradients one is lost."""
    original = Decoder.head_weight
    assert isinstance(original, property)
    with patch.object(Decoder, "head_weight", property(lambda self: original.fget(self).detach())):  # type: ignore[misc]
        yield


# Norm and clip


@contextmanager
def norm_of_the_own_shard() -> Iterator[None]:
    """29: shards are taken for copies, and not summed."""
    own = lambda gradients, _sum_over, **_: clip.global_norm(gradients, lambda tensor, _axes: tensor)  # noqa: E731
    with patch.object(step, "global_norm", own):
        yield


@contextmanager
def norm_counts_copies() -> Iterator[None]:
    """titan 2318: copies are taken for shards, and the norm grows by the square root of the replicas."""

    def counted(gradients: Iterable[tuple[Tensor | None, ParameterLayout]], sum_over: clip.SumOver, **options: Any) -> Tensor:
        return clip.global_norm(gradients, lambda tensor, axes: sum_over(tensor, (*axes, "dp_replicate")), **options)

    with patch.object(step, "global_norm", counted):
        yield


@contextmanager
def norm_of_some_layers() -> Iterator[None]:
    """30: the norm covers this stage's parameters only."""

    def partial_norm(gradients: Sequence[tuple[Tensor | None, ParameterLayout]], sum_over: clip.SumOver, **options: Any) -> Tensor:
        return clip.global_norm(gradients[: len(gradients) // 2], sum_over, **options)

    with patch.object(step, "global_norm", partial_norm):
        yield


@contextmanager
def clipped_per_group() -> Iterator[None]:
    """31: decayed and undecayed parameters are clipped by norms of their own."""
    original = ParallelModel.gradients

    def clip_vectors_first(self: ParallelModel) -> list[tuple[Tensor | None, ParameterLayout]]:
        gradients = original(self)
        vectors = [(gradient, layout) for gradient, layout in gradients if len(layout.shape) == 1]
        whole = clip.global_norm(gradients, self.sum_over)
        own = clip.global_norm(vectors, self.sum_over)
        if bool(own > 0):
            clip.scale_([gradient for gradient, _ in vectors if gradient is not None], whole / own)
        return gradients

    with patch.object(ParallelModel, "gradients", clip_vectors_first):
        yield


@contextmanager
def clip_also_enlarges() -> Iterator[None]:
    """32: the coefficient is not held below 1."""
    with patch.object(step, "clip_coefficient", lambda norm, limit: limit / (norm + 1e-6)):
        yield


@contextmanager
def clip_by_the_square() -> Iterator[None]:
    """32: the coefficient uses the squared norm."""
    with patch.object(step, "clip_coefficient", lambda norm, limit: (limit / (norm.square() + 1e-6)).clamp(max=1.0)):
        yield


@contextmanager
def infinite_gradients_are_clipped() -> Iterator[None]:
    """32: inf times a coefficient of zero becomes nan, and is stepped with."""
    with patch.object(step, "isfinite", lambda _value: True):
        yield


@contextmanager
def each_rank_decides_to_skip() -> Iterator[None]:
    """32: a rank looks at its own gradients only; the others step."""

    def own_norm(norm: Tensor, _sum_over_all: object) -> Tensor:
        return norm if dist.get_rank() == dist.get_world_size() - 1 else torch.nan_to_num(norm, nan=1.0, posinf=1.0)

    with patch.object(step, "agree_on_norm", own_norm):
        yield


@contextmanager
def zero_norm_divides() -> Iterator[None]:
    """33: a norm of zero makes the coefficient nan."""
    with patch.object(step, "clip_coefficient", lambda norm, limit: (limit * norm / norm.square()).clamp(max=1.0)):
        yield


@contextmanager
def no_tokens_divide() -> Iterator[None]:
    """33: a step without a supervised token divides zero by zero."""
    with patch.object(step, "_at_least_something", lambda count: count):
        yield


@contextmanager
def clip_eats_an_iterator() -> Iterator[None]:
    """34: the norm walks an iterator to its end, and nothing is left to clip."""
    original = ParallelModel.gradients
    walked = lambda self: iter(original(self)[len(original(self)) :])  # noqa: E731
    with patch.object(ParallelModel, "gradients", walked):
        yield


# Buffers and accumulation


@contextmanager
def buckets_share_a_buffer() -> Iterator[None]:
    """37: a bucket's sum is overwritten by the next one's before it is read."""
    shared = torch.zeros(1 << 20, dtype=torch.float64)

    def sum_bucket(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        place = shared[: bucket.buffer().numel()].copy_(bucket.buffer())
        dist.all_reduce(place, group=group)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(place)
        return future

    sum_bucket.__annotations__ = replicate._sum_bucket.__annotations__  # DDP compares the types themselves
    with patch.object(replicate, "_sum_bucket", sum_bucket):
        yield


@contextmanager
def gradients_alias_parameters() -> Iterator[None]:
    """38: a gathered parameter lies in the memory of a gradient."""
    original = ParallelModel.finish_gradients

    def alias(self: ParallelModel) -> None:
        original(self)
        _, parameter = next(iter(self.named_parameters()))
        parameter.grad = parameter.detach()

    with patch.object(ParallelModel, "finish_gradients", alias):
        yield


@contextmanager
def padding_is_summed() -> Iterator[None]:
    """39: the padding of uneven shards is not zero, and counts in the norm."""

    def padded(gradients: Sequence[tuple[Tensor | None, ParameterLayout]], sum_over: clip.SumOver, **options: Any) -> Tensor:
        grown = [
            (None if g is None else torch.cat([g.flatten(), g.new_ones(-layout.shape[0] % dist.get_world_size())]), layout)
            for g, layout in gradients
        ]
        return clip.global_norm(grown, sum_over, **options)

    with patch.object(step, "global_norm", padded):
        yield


@contextmanager
def stale_parameters_are_kept() -> Iterator[None]:
    """38: gathered parameters outlive the optimizer step, and the next forward pass reads them."""
    with patch.object(ParallelModel, "finish_gradients", lambda _self: None):
        yield


@contextmanager
def some_gradients_keep_the_loss_scale() -> Iterator[None]:
    """41: only what lies in the big buffer is scaled; vectors are forgotten."""
    original = step.scale_
    with patch.object(step, "scale_", lambda gradients, factor: original([g for g in gradients if g.ndim > 1], factor)):
        yield


@contextmanager
def loss_scale_is_not_divided() -> Iterator[None]:
    """43: the update does not know of the loss scale."""
    original = cell.update
    with patch.object(cell, "update", lambda *arguments, **named: original(*arguments, **(named | {"scaler": None}))):
        yield


@contextmanager
def accumulated_gradients_are_wiped() -> Iterator[None]:
    """42: a micro-batch starts by clearing what the ones before it left."""
    original = ParallelModel.synchronising

    def wipe(self: ParallelModel, last: bool) -> Any:
        for _, parameter in self.named_parameters():
            parameter.grad = None
        return original(self, last)

    with patch.object(ParallelModel, "synchronising", wipe):
        yield


@contextmanager
def gradients_are_not_dropped() -> Iterator[None]:
    """43: zero_grad is skipped, and the next step adds to this one's gradients."""
    with patch.object(torch.optim.Optimizer, "zero_grad", lambda _self, **_named: None):
        yield


# Random numbers, layout, data


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
        return original(replace(self, keys_BT=self.keys_BT ^ 1) if backward else self, x_BTD, *arguments)

    with patch.object(Dropout, "drop", drop):
        yield


@contextmanager
def layers_number_themselves_locally() -> Iterator[None]:
    """46: dropout is keyed by the layer's number within its group."""
    original = Block.__init__

    def renumbered(self: Block, shape: Any, index: int) -> None:
        original(self, shape, index)
        self.index = 0

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
    original = cell.step_micro_batches

    def moved(dataset: Any, order: Any, batch: Any, number: int, data_rank: int) -> list[MicroBatch]:
        return original(dataset, order, batch, *change(number, data_rank))

    return patch.object(cell, "step_micro_batches", moved)


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
    with patch.object(step, "set_learning_rate", lambda optimizer, rate: original(optimizer, rate / dist.get_world_size())):
        yield


@contextmanager
def nothing() -> Iterator[None]:
    """No bug: what must pass."""
    with ExitStack():
        yield
