"""Properties of ParallelModel other than float64 gradients: low precisions, evaluation,
agreement of ranks, times, initial weights.
"""

from __future__ import annotations

import math
from typing import Any, Literal
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.architecture import read_config
from shardwright.architecture.adapter_targets import add_adapters
from shardwright.config.adapter_section import AdapterSection
from shardwright.config.training import OptimizerSection, PrecisionSection
from shardwright.data.loader import MicroBatch
from shardwright.errors import LayoutError, RankFailed
from shardwright.layout import Layout
from shardwright.model.weight_init import initialise_parameter
from shardwright.numerics import get_local_tensor
from shardwright.optim import build_optimizer
from shardwright.parallel import ParallelModel
from shardwright.plans import BatchPlan
from shardwright.training.metrics.step_times import StepTimes
from shardwright.training.step import accumulate_gradients, update_parameters
from shardwright.verification.grid import GRID_MODELS
from tests.multiprocess.models import LLAMA, TENSOR_LLAMA, build_model
from tests.multiprocess.pool import RankPool

TOKENS = 12
SEED = 3
LAYOUTS = [
    Layout(dp_replicate=2, bucket_size_bytes=2048),
    Layout(dp_shard=2, zero_stage=1),
    Layout(dp_shard=2, zero_stage=2),
    Layout(dp_shard=2, zero_stage=3),
]


def build(
    layout: Layout,
    precision: PrecisionSection,
    config: dict[str, Any] = LLAMA,
    adapters: AdapterSection | None = None,
) -> ParallelModel:
    batch = BatchPlan(TOKENS, 2, 2, layout.data_ranks)
    shape = add_adapters(read_config(config), adapters)
    return build_model(shape, layout, batch, precision, seed=SEED)


def micro_batches(rank: int) -> list[MicroBatch]:
    batches = []
    for number in range(2):
        random = torch.Generator().manual_seed(10 * rank + number)
        ids_BT = torch.randint(0, LLAMA["vocab_size"], (2, TOKENS), generator=random)
        positions_BT = torch.arange(TOKENS).expand(2, TOKENS)
        batches.append(
            MicroBatch(ids_BT, ids_BT.roll(-1, 1), positions_BT, None, torch.arange(2), 2 * TOKENS)
        )
    return batches


def compute_gradients(layout: Layout, precision: PrecisionSection) -> dict[str, Tensor]:
    model = build(layout, precision)
    scale = 1024.0 if precision.kind == "fp16" else 1.0
    accumulate_gradients(model, micro_batches(dist.get_rank()), seed=0, step=0, loss_scale=scale)
    whole = {name: model.gather_gradient(name) for name, _ in model.named_parameters()}
    assert all(gradient is not None for gradient in whole.values())
    return {name: gradient / scale for name, gradient in whole.items() if gradient is not None}


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Return the relative distance of all gradients as one vector."""
    difference = torch.stack([(a[name].double() - b[name].double()).norm() for name in b]).norm()
    return float(
        difference / torch.stack([gradient.double().norm() for gradient in b.values()]).norm()
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_reductions_are_fp32_unless_bf16_is_configured(ranks: RankPool, layout: Layout) -> None:
    exact, _ = ranks.run(2, compute_gradients, layout, PrecisionSection(kind="fp32"))
    rounded, _ = ranks.run(
        2, compute_gradients, layout, PrecisionSection(kind="fp32", reduce_dtype="bf16")
    )
    assert all(gradient.dtype == torch.float32 for gradient in (exact | rounded).values())
    # The error of one rounding to 8 bits of mantissa.
    assert 1e-4 < distance(rounded, exact) < 1e-2


@pytest.mark.parametrize(
    ("kind", "nearest", "furthest"), [("bf16", 1e-3, 3e-2), ("fp16", 1e-4, 3e-3)]
)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_half_precisions_keep_fp32_masters_gradients_and_moments(
    ranks: RankPool, layout: Layout, kind: Literal["bf16", "fp16"], nearest: float, furthest: float
) -> None:
    exact, _ = ranks.run(2, compute_gradients, LAYOUTS[0], PrecisionSection(kind="fp32"))
    mixed, _ = ranks.run(2, compute_gradients, layout, PrecisionSection(kind=kind))
    assert nearest < distance(mixed, exact) < furthest
    assert (
        ranks.run(2, collect_dtypes, layout, PrecisionSection(kind=kind)) == [{torch.float32}] * 2
    )


def collect_dtypes(layout: Layout, precision: PrecisionSection) -> set[torch.dtype]:
    model = build(layout, precision)
    optimizer = build_optimizer(
        model.named_parameters(), OptimizerSection(), learning_rate=0.1, weight_decay=0.0
    )
    accumulate_gradients(model, micro_batches(dist.get_rank()), seed=0, step=0)
    dtypes = {gradient.dtype for gradient, _ in model.list_gradients() if gradient is not None}
    update_parameters(model, optimizer, learning_rate=0.1, max_grad_norm=1.0)
    for _, parameter in model.named_parameters():
        dtypes |= {parameter.dtype} | {
            optimizer.state[parameter][moment].dtype for moment in ("exp_avg", "exp_avg_sq")
        }
    return dtypes


def train_in_bf16(
    layout: Layout, reduce_dtype: Literal["fp32", "bf16"]
) -> tuple[set[torch.dtype], set[torch.dtype]]:
    """Return the dtypes of weights, gradients and moments, and those of all-reduced gradients."""
    precision = PrecisionSection(kind="bf16", master_weights="bf16", reduce_dtype=reduce_dtype)
    model = build(layout, precision, TENSOR_LLAMA)
    optimizer: Any = build_optimizer(
        model.named_parameters(),
        OptimizerSection(),
        learning_rate=0.1,
        weight_decay=0.0,
        model=model,
    )
    summed = set()
    all_reduce = dist.all_reduce

    def record(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        if tensor.numel() >= LLAMA["hidden_size"]:
            summed.add(tensor.dtype)
        return all_reduce(tensor, *arguments, **options)

    with mock.patch.object(dist, "all_reduce", record):
        rank = 0 if layout.tp > 1 else dist.get_rank()
        accumulate_gradients(model, micro_batches(rank), seed=0, step=0)
    dtypes = {gradient.dtype for gradient, _ in model.list_gradients() if gradient is not None}
    update_parameters(model, optimizer, learning_rate=0.1, max_grad_norm=1.0)
    for _, parameter in model.named_parameters():
        dtypes |= {parameter.dtype}
        dtypes |= {optimizer.state[parameter][name].dtype for name in ("exp_avg", "exp_avg_sq")}
    return dtypes, summed


@pytest.mark.parametrize("layout", [*LAYOUTS, Layout(tp=2), Layout(dp_replicate=2, pp=2)], ids=str)
def test_bf16_weights_have_bf16_gradients_that_are_summed_in_fp32(
    ranks: RankPool, layout: Layout
) -> None:
    for dtypes, summed in ranks.run(layout.world_size, train_in_bf16, layout, "fp32"):
        assert dtypes == {torch.bfloat16}
        assert torch.bfloat16 not in summed
    if layout == LAYOUTS[0]:
        for _, summed in ranks.run(2, train_in_bf16, layout, "bf16"):
            assert summed == {torch.bfloat16}


def update_with_a_bad_replica(layout: Layout) -> tuple[bool, float, bool]:
    """Return (skipped, norm, has changed weights) of a step with a nan in the last rank's copy
    of a summed gradient.
    """
    model = build(layout, PrecisionSection(kind="fp32"), GRID_MODELS["dense"])
    optimizer = build_optimizer(
        model.named_parameters(), OptimizerSection(name="sgd"), learning_rate=1.0, weight_decay=0.0
    )
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    accumulate_gradients(
        model, micro_batches(dist.get_rank() if layout.tp == 1 else 0), seed=0, step=0
    )
    if dist.get_rank() == layout.world_size - 1:
        norm = next(
            parameter for name, parameter in model.named_parameters() if name == "model.norm.weight"
        )
        assert norm.grad is not None
        norm.grad[0] = torch.nan
    done = update_parameters(model, optimizer, learning_rate=1.0, max_grad_norm=1.0)
    return (
        done.is_skipped,
        done.gradient_norm,
        any(not torch.equal(p, before[name]) for name, p in model.named_parameters()),
    )


@pytest.mark.parametrize("layout", [LAYOUTS[0], Layout(tp=2)], ids=str)
def test_every_rank_skips_if_one_replica_has_a_nan(ranks: RankPool, layout: Layout) -> None:
    for skipped, norm, moved in ranks.run(2, update_with_a_bad_replica, layout):
        assert skipped
        assert math.isnan(norm)
        assert not moved


def gather_initial_weights(layout: Layout) -> dict[str, Tensor]:
    model = build(layout, PrecisionSection(kind="fp32"))
    return {name: model.gather_parameter(name).clone() for name, _ in model.named_parameters()}


def test_every_layout_starts_bit_equal(ranks: RankPool) -> None:
    specs = read_config(LLAMA).list_parameters()
    for layout in (
        *LAYOUTS[:1],
        LAYOUTS[3],
        Layout(dp_shard=3, zero_stage=2),
        Layout(dp_replicate=2, dp_shard=2, zero_stage=3),
    ):
        for weights in ranks.run(layout.world_size, gather_initial_weights, layout):
            for spec in specs:
                assert torch.equal(
                    weights[spec.name], initialise_parameter(spec, SEED, dtype=torch.float32)
                ), (str(layout), spec.name)


def evaluate_between_steps(layout: Layout) -> tuple[list[float], bool]:
    """Return losses of two steps with an evaluation before each, and whether all parameters are
    shards after each evaluation.
    """
    model = build(layout, PrecisionSection(kind="fp32"))
    optimizer = build_optimizer(
        model.named_parameters(), OptimizerSection(), learning_rate=0.1, weight_decay=0.0
    )
    losses = []
    sharded = True
    for number in range(2):
        with model.evaluate_mode() as module:
            losses.append(
                float(module(torch.arange(TOKENS)[None], labels_BT=torch.arange(TOKENS)[None]))
            )
        current = dict(model.decoder.named_parameters())
        sharded &= all(current[name] is parameter for name, parameter in model.named_parameters())
        accumulate_gradients(model, micro_batches(dist.get_rank()), seed=0, step=number)
        update_parameters(model, optimizer, learning_rate=0.1, max_grad_norm=1.0)
    return losses, sharded


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=str)
def test_evaluation_sees_the_updated_weights_and_leaves_shards(
    ranks: RankPool, layout: Layout
) -> None:
    (expected, _), _ = ranks.run(2, evaluate_between_steps, LAYOUTS[0])
    for losses, sharded in ranks.run(2, evaluate_between_steps, layout):
        assert losses == pytest.approx(expected, rel=1e-4)
        assert losses[0] != pytest.approx(losses[1], rel=1e-3)
        assert sharded


class RecordedGathers(TorchDispatchMode):
    """Records the beginning of every gather, at which FSDP2 copies the shards."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if "all_gather_copy_in" in str(func):
            self.events.append("gather")
        return func(*args, **(kwargs or {}))


def train_with_gathers(
    layout: Layout, rule: str, is_early: bool
) -> tuple[list[Tensor], list[str], list[str]]:
    """Return numbers of four steps, and the events of the first update and the second step."""
    model = build(layout, PrecisionSection(kind="bf16"))
    assert model.early_gathers is not None
    if not is_early:
        model.early_gathers = None
    optimizer: Any = build_optimizer(
        model.named_parameters(),
        OptimizerSection(name=rule),  # type: ignore[arg-type]
        learning_rate=0.1,
        weight_decay=0.1,
        model=model,
    )
    update_pieces = optimizer.update_pieces
    events: list[str] = []

    def record_update(pieces: Any) -> None:
        update_pieces(pieces)
        if pieces:
            events.append("update")

    optimizer.update_pieces = record_update
    numbers = []
    recorded = []
    for number in range(4):
        events.clear()
        with RecordedGathers(events):
            loss = accumulate_gradients(
                model, micro_batches(dist.get_rank()), seed=0, step=number
            ).loss_sum
            recorded.append(list(events))
            events.clear()
            update_parameters(model, optimizer, learning_rate=0.1, max_grad_norm=1.0)
            recorded.append(list(events))
        current = dict(model.decoder.named_parameters())
        assert all(current[name] is shard for name, shard in model.named_parameters()), "waited"
        numbers.append(loss)
        if number == 1:
            with model.evaluate_mode() as module:
                numbers.append(module(torch.arange(4)[None], labels_BT=torch.arange(4)[None]))
        if number == 2:  # as a rollback does
            model.invalidate_weights()
            with torch.no_grad():
                for _, parameter in model.named_parameters():
                    get_local_tensor(parameter).mul_(0.5)
    weights = [get_local_tensor(parameter.detach()) for _, parameter in model.named_parameters()]
    return [*numbers, *weights], recorded[1], recorded[2]


@pytest.mark.parametrize(
    ("stage", "rule", "expected"),
    [
        (1, "adamw", ["update", "gather"] * (1 + LLAMA["num_hidden_layers"])),
        (2, "muon", ["update"] + ["gather"] * (1 + LLAMA["num_hidden_layers"])),
    ],
)
def test_gathers_begin_when_their_shards_are_updated(
    ranks: RankPool, stage: Literal[1, 2], rule: str, expected: list[str]
) -> None:
    layout = Layout(dp_shard=2, zero_stage=stage)
    early = ranks.run(2, train_with_gathers, layout, rule, True)
    late = ranks.run(2, train_with_gathers, layout, rule, False)
    for (numbers, update, step), (late_numbers, late_update, late_step) in zip(
        early, late, strict=True
    ):
        assert all(map(torch.equal, numbers, late_numbers))
        assert update == expected
        assert late_update == [event for event in expected if event == "update"][:1]
        assert step == []
        assert late_step == [event for event in expected if event == "gather"]


def query_any_rank(layout: Layout) -> list[bool]:
    model = build(layout, PrecisionSection(kind="fp32"))
    last = dist.get_rank() == dist.get_world_size() - 1
    return [model.any_rank(False), model.any_rank(last), model.any_rank(True)]


def test_any_rank_considers_all_ranks(ranks: RankPool) -> None:
    assert (
        ranks.run(3, query_any_rank, Layout(dp_shard=3, zero_stage=3)) == [[False, True, True]] * 3
    )


def time_step(layout: Layout) -> dict[str, float]:
    model = build(layout, PrecisionSection(kind="fp32"))
    optimizer = build_optimizer(
        model.named_parameters(), OptimizerSection(), learning_rate=0.1, weight_decay=0.0
    )
    times = StepTimes(torch.device("cpu"))
    accumulate_gradients(model, micro_batches(dist.get_rank()), seed=0, step=0, times=times)
    update_parameters(model, optimizer, learning_rate=0.1, max_grad_norm=1.0, times=times)
    return times.seconds()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_part_of_a_step_takes_time(ranks: RankPool, layout: Layout) -> None:
    for seconds in ranks.run(2, time_step, layout):
        assert set(seconds) == {"forward", "backward", "reduction", "optimizer"}
        assert all(value > 0 for value in seconds.values()), seconds


def compute_logits(layout: Layout) -> None:
    model = build(layout, PrecisionSection(kind="fp32"))
    model.module(torch.arange(TOKENS)[None])


def test_logits_under_stage_3_are_not_trained_silently() -> None:
    with RankPool() as pool, pytest.raises(RankFailed, match="gradients of logits are unsupported"):
        pool.run(2, compute_logits, LAYOUTS[3])


def test_a_layout_for_other_ranks_is_refused() -> None:
    with (
        RankPool() as pool,
        pytest.raises(RankFailed, match="needs 3 ranks, but 2 are running") as caught,
    ):
        pool.run(2, gather_initial_weights, Layout(dp_shard=3, zero_stage=3))
    assert isinstance(caught.value.__cause__, LayoutError)


def are_parameters_dtensors(layout: Layout) -> bool:
    return all(
        isinstance(parameter, DTensor)
        for _, parameter in build(layout, PrecisionSection(kind="fp32")).named_parameters()
    )


def test_sharded_parameters_are_dtensors(ranks: RankPool) -> None:
    assert ranks.run(2, are_parameters_dtensors, LAYOUTS[3]) == [True, True]
    assert ranks.run(2, are_parameters_dtensors, LAYOUTS[0]) == [False, False]
