"""Each ZeRO stage has the memory that parallel/fsdp.py states, read from the storages of live
tensors; prefetching respects its limits.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.architecture import read_config
from shardwright.config.training import OptimizerSection, PrecisionSection
from shardwright.layout import Layout
from shardwright.optim import build_optimizer
from shardwright.parallel import ParallelModel, comm_timing
from shardwright.plans import BatchPlan
from shardwright.training.step import update_parameters
from tests.multiprocess.models import build_model
from tests.multiprocess.pool import RankPool

RANKS = 4
CONFIG = {
    # Every first dimension is a multiple of four, so shares are exact; blocks, embedding and head
    # have the same size.
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32,
}


def build(layout: Layout) -> ParallelModel:
    batch = BatchPlan(8, 1, 1, layout.data_ranks)
    precision = PrecisionSection(kind="fp32")
    return build_model(read_config(CONFIG), layout, batch, precision, seed=0)


def compute_loss(model: ParallelModel) -> Tensor:
    ids_BT = torch.arange(8).view(1, 8)
    loss: Tensor = model.module(ids_BT, labels_BT=ids_BT)
    return loss


RELEASE_SECONDS = 30.0


def wait_for_live_bytes(model: ParallelModel, at_most: float = float("inf")) -> int:
    """Return bytes of all storages of this process's tensors, gradients included.

    Gloo's threads release a collective's operands some time after it has completed, later on a
    busy machine. So wait deadline the bytes are `at_most`, with a time limit.
    """
    lowest = count_live_bytes(model)
    deadline = time.monotonic() + RELEASE_SECONDS
    while lowest > at_most and time.monotonic() < deadline:
        time.sleep(0.05)
        lowest = min(lowest, count_live_bytes(model))
    return lowest


def read_settled_bytes(model: ParallelModel) -> int:
    """Return the bytes once three readings in a row agree, where no expected value is known."""
    readings = [count_live_bytes(model)]
    while len(readings) < 3 or len(set(readings[-3:])) > 1:
        time.sleep(0.05)
        readings.append(count_live_bytes(model))
    return readings[-1]


def count_live_bytes(model: ParallelModel) -> int:
    gc.collect()
    tensors: list[Tensor] = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    # FSDP2 of torch 2.15 keeps unsharded gradients in `grad` of weights that are no parameters now.
    leaves = [each for each in tensors if each.is_leaf]
    leaves += [parameter for _, parameter in model.named_parameters()]
    tensors += [leaf.grad for leaf in leaves if leaf.grad is not None]
    storages: dict[int, int] = {}
    for tensor in tensors:
        if tensor.device.type == "cpu":
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            storage = local.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def measure(layout: Layout, expected: dict[str, float]) -> dict[str, float]:
    """Return live bytes at moments of a step, as shares of the model's parameters."""
    gc.collect()
    gc.freeze()  # objects of earlier tests are not counted, and traversing them takes long
    try:
        return measure_step(layout, expected)
    finally:
        gc.unfreeze()


def measure_step(layout: Layout, expected: dict[str, float]) -> dict[str, float]:
    whole = 4 * read_config(CONFIG).num_parameters
    model = build(layout)
    before = read_settled_bytes(model)
    base = before - sum(
        p._local_tensor.untyped_storage().nbytes() if isinstance(p, DTensor) else 4 * p.numel()
        for _, p in model.named_parameters()
    )

    def share(moment: str) -> float:
        return (
            wait_for_live_bytes(model, base + (expected[moment] + TOLERANCE) * whole) - base
        ) / whole

    optimizer = build_optimizer(
        model.named_parameters(), OptimizerSection(), learning_rate=1e-3, weight_decay=0.0
    )
    shares = {"built": (before - base) / whole}
    with torch.no_grad():
        compute_loss(model)
    shares["after forward"] = share("after forward")
    for last in (False, True):
        with model.synchronise_gradients(is_last=last):
            compute_loss(model).backward()
        if not last:
            shares["between micro-batches"] = share("between micro-batches")
    model.finish_gradients()
    shares["gradients finished"] = share("gradients finished")
    update_parameters(model, optimizer, learning_rate=1e-3, max_grad_norm=1.0)
    model.invalidate_weights()  # stages 1 and 2 gather the next step's parameters already
    shares["after step"] = share("after step")
    return shares


TOLERANCE = 0.02
"""Share of the whole model."""

# Parameters (gathered + own shard) + gradients, + two moments after the step, in units of the whole
# model. DDP never frees its buckets, which contain the gradients.
EXPECTED = {
    0: {
        "built": 1,
        "after forward": 1,
        "between micro-batches": 2,
        "gradients finished": 2,
        "after step": 4,
    },
    1: {
        "built": 0.25,
        "after forward": 1.25,
        "between micro-batches": 2.25,
        "gradients finished": 0.5,
        "after step": 0.75,
    },
    2: {
        "built": 0.25,
        "after forward": 1.25,
        "between micro-batches": 1.5,
        "gradients finished": 0.5,
        "after step": 0.75,
    },
    3: {
        "built": 0.25,
        "after forward": 0.25,
        "between micro-batches": 0.5,
        "gradients finished": 0.5,
        "after step": 0.75,
    },
}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_each_stage_has_its_documented_memory(ranks: RankPool, stage: int) -> None:
    layout = Layout(dp_replicate=RANKS)
    if stage > 0:
        layout = Layout(dp_shard=RANKS, zero_stage=stage)  # type: ignore[arg-type]
    for shares in ranks.run(RANKS, measure, layout, EXPECTED[stage]):
        for moment, expected in EXPECTED[stage].items():
            assert shares[moment] == pytest.approx(expected, abs=TOLERANCE), (moment, shares)


def count_gathered(layout: Layout) -> tuple[int, int]:
    """Return the most block groups with full parameters at once, forward and backward, read
    inside every block.
    """
    model = build(layout)
    groups = model.fsdp_modules[:-1]
    states: list[Any] = [group._get_fsdp_state()._fsdp_param_group for group in groups]
    counts_by_pass: dict[bool, list[int]] = {False: [], True: []}

    def count(backward: bool) -> None:
        counts_by_pass[backward].append(
            sum(state.is_unsharded or state._all_gather_result is not None for state in states)
        )

    def hook(_module: nn.Module, arguments: tuple[Any, ...]) -> None:
        count(False)
        arguments[0].register_hook(lambda _gradient: count(True))

    for block in model.decoder.blocks:
        block.mlp.register_forward_pre_hook(hook)
    for _ in range(2):
        with model.synchronise_gradients(is_last=True):
            compute_loss(model).backward()
        model.finish_gradients()
    return max(counts_by_pass[False]), max(counts_by_pass[True])


@pytest.mark.parametrize(
    ("prefetch_depth", "max_gathers_in_flight", "gathered"),
    [(0, 2, 1), (1, 2, 2), (1, 1, 1), (2, 2, 2), (2, 3, 3), (3, 8, 4)],
)
def test_prefetching_gathers_as_many_groups_as_configured(
    ranks: RankPool, prefetch_depth: int, max_gathers_in_flight: int, gathered: int
) -> None:
    layout = Layout(
        dp_shard=2,
        zero_stage=3,
        prefetch_depth=prefetch_depth,
        max_gathers_in_flight=max_gathers_in_flight,
    )
    assert ranks.run(2, count_gathered, layout) == [(gathered, gathered)] * 2


def test_wrapping_two_blocks_gathers_two_at_a_time(ranks: RankPool) -> None:
    layout = Layout(dp_shard=2, zero_stage=3, wrap_blocks=2, prefetch_depth=0)
    assert ranks.run(2, count_groups, layout) == [4, 4]
    assert ranks.run(2, count_gathered, layout) == [(1, 1)] * 2


def count_groups(layout: Layout) -> int:
    return len(build(layout).fsdp_modules)


def count_reductions(layout: Layout) -> list[int]:
    """Count reduce-scatters and all-reduces of gradients in each micro-batch of a step of
    three.
    """
    model = build(layout)
    counts = []
    calls = 0

    def count_calls(original: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            return original(*arguments, **named)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", count_calls(dist.all_reduce))
        patch.setattr(
            comm_timing, "reduce_scatter_single", count_calls(comm_timing.reduce_scatter_single)
        )
        for number in range(3):
            calls = 0
            with model.synchronise_gradients(is_last=number == 2):
                compute_loss(model).backward()
            counts.append(calls)
    return counts


@pytest.mark.parametrize(
    ("layout", "counts"),
    [
        (Layout(dp_replicate=4), [0, 0, 1]),
        (Layout(dp_shard=4, zero_stage=1), [0, 0, 7]),
        (Layout(dp_shard=4, zero_stage=2), [7, 7, 7]),
        (Layout(dp_shard=4, zero_stage=3), [7, 7, 7]),
        (Layout(dp_replicate=2, dp_shard=2, zero_stage=1), [0, 0, 14]),
        (Layout(dp_replicate=2, dp_shard=2, zero_stage=3), [7, 7, 14]),
    ],
    ids=str,
)
def test_sums_are_deferred_where_memory_allows(
    ranks: RankPool, layout: Layout, counts: list[int]
) -> None:
    assert ranks.run(4, count_reductions, layout) == [counts] * 4
