"""Properties of the pipeline executor other than float64 gradients: changing shapes, memory,
order, low precision, evaluation.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.architecture import read_config
from shardwright.config.training import PrecisionSection
from shardwright.data.loader import MicroBatch
from shardwright.layout import Layout
from shardwright.parallel import (
    ParallelModel,
    gradient_reduction,
    pipeline_parallel,
)
from shardwright.parallel.p2p_channels import P2PChannels
from shardwright.plans import BatchPlan
from shardwright.schedule import (
    PIPELINE_SCHEDULES,
    build_schedule,
    check_schedule,
    write_schedule,
)
from shardwright.training.metrics.step_times import StepTimes
from shardwright.training.step import accumulate_gradients
from shardwright.verification.cases import VerificationCase
from tests.multiprocess.models import LLAMA, build_model
from tests.multiprocess.pool import RankPool
from tests.multiprocess.test_pipeline import verify_layout

CONFIG = LLAMA | {"num_hidden_layers": 4}
FP64 = PrecisionSection(kind="fp64")


def build(
    layout: Layout, precision: PrecisionSection = FP64, num_micro_batches: int = 4
) -> ParallelModel:
    batch = BatchPlan(12, 2, num_micro_batches, layout.data_ranks)
    return build_model(read_config(CONFIG), layout, batch, precision, seed=3)


def micro_batch(num_rows: int, num_tokens: int, seed: int) -> MicroBatch:
    random = torch.Generator().manual_seed(seed)
    ids_BT = torch.randint(0, CONFIG["vocab_size"], (num_rows, num_tokens), generator=random)
    positions_BT = torch.arange(num_tokens).expand(num_rows, num_tokens)
    return MicroBatch(
        ids_BT,
        ids_BT.roll(-1, 1),
        positions_BT,
        None,
        torch.arange(num_rows),
        num_rows * num_tokens,
    )


def compute_gradients(model: ParallelModel, steps: list[list[MicroBatch]]) -> dict[str, Tensor]:
    """Return the gradients of several steps, added up."""
    for number, batches in enumerate(steps):
        accumulate_gradients(model, batches, seed=0, step=number)
    return {name: model.gather_gradient(name) for name in model.layouts}


def compare_with_one_process(
    layout: Layout, shapes: list[list[tuple[int, int]]], precision: PrecisionSection
) -> float:
    """Return the worst relative error of any gradient, after steps of micro-batches of these
    shapes.
    """
    steps = [
        [micro_batch(*size, 10 * i + j) for j, size in enumerate(sizes)]
        for i, sizes in enumerate(shapes)
    ]
    got = compute_gradients(build(layout, precision, len(steps[0])), steps)
    with patch("torch.distributed.all_reduce"):  # each rank computes this alone
        expected = compute_gradients(build(Layout(), precision, len(steps[0])), steps)
    return max(
        float((got[name] - expected[name]).norm() / expected[name].norm()) for name in expected
    )


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_shapes_change_within_a_step_and_from_step_to_step(ranks: RankPool, schedule: str) -> None:
    shapes = [[(2, 12), (1, 7), (3, 12), (2, 5)], [(2, 9)] * 4, [(1, 1), (2, 12), (4, 3), (1, 12)]]
    for error in ranks.run(
        2, compare_with_one_process, Layout(pp=2, schedule=schedule), shapes, FP64
    ):
        assert error < 1e-12


BF16 = PrecisionSection(kind="bf16")


def compare_schedules(one: Layout, other: Layout) -> float:
    steps = [[micro_batch(2, 12, number) for number in range(16)]]
    first, second = (compute_gradients(build(layout, BF16, 16), steps) for layout in (one, other))
    return max(float((first[name] - second[name]).norm() / first[name].norm()) for name in first)


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_deferred_products_are_summed_in_fp32(ranks: RankPool, zero_stage: int) -> None:
    """Products are rounded to bf16 but their sum over 16 micro-batches is not; that would be
    2e-3 off.
    """
    plain = Layout(pp=2, dp_shard=2, zero_stage=zero_stage)
    for schedule in ("zb_h1", "dualpipev"):
        for error in ranks.run(4, compare_schedules, plain, replace(plain, schedule=schedule)):
            assert error < 1e-5


def count_saved_activations(layout: Layout) -> tuple[int, int]:
    """Return this rank's index in the pipeline and the most activations saved between actions."""
    largest = 0
    model = build(layout, num_micro_batches=8)
    compute = pipeline_parallel._StepExecution._compute

    def count(self: Any, *arguments: Any, **options: Any) -> Tensor | None:
        nonlocal largest
        output: Tensor | None = compute(self, *arguments, **options)
        largest = max(largest, len(self.saved_forwards) + len(self.deferred_products))
        return output

    with patch.object(pipeline_parallel._StepExecution, "_compute", count):
        accumulate_gradients(
            model, [micro_batch(1, 6, number) for number in range(8)], seed=0, step=0
        )
    assert model.pipeline is not None
    return model.pipeline.rank, largest


@pytest.mark.parametrize("schedule", PIPELINE_SCHEDULES)
def test_saved_activations_equal_those_of_the_checker(ranks: RankPool, schedule: str) -> None:
    peaks = check_schedule(build_schedule(schedule, 2, 8)).peak_activations
    assert dict(ranks.run(2, count_saved_activations, Layout(pp=2, schedule=schedule))) == dict(
        enumerate(peaks)
    )


def record_order(layout: Layout) -> tuple[int, list[str]]:
    """Return this rank's index and the receives, computations and sends in order."""
    log: list[str] = []
    post = P2PChannels.post_receive
    receive = P2PChannels.wait_receive
    send = P2PChannels.send
    compute = pipeline_parallel._StepExecution._compute

    def wrap(operation: str, call: Any) -> Any:
        def log_call(self: Any, transfer: Any, *rest: Any, **named: Any) -> Any:
            log.append(f"{operation} {getattr(transfer, 'action', transfer)}")
            return call(self, transfer, *rest, **named)

        return log_call

    model = build(layout, num_micro_batches=3)
    with (
        patch.object(P2PChannels, "post_receive", wrap("post", post)),
        patch.object(P2PChannels, "wait_receive", wrap("take", receive)),
        patch.object(P2PChannels, "send", wrap("send", send)),
        patch.object(pipeline_parallel._StepExecution, "_compute", wrap("do", compute)),
    ):
        accumulate_gradients(
            model, [micro_batch(1, 6, number) for number in range(3)], seed=0, step=0
        )
    assert model.pipeline is not None
    return model.pipeline.rank, log


def test_receives_are_posted_before_the_computation_that_overlaps(ranks: RankPool) -> None:
    logs = dict(ranks.run(2, record_order, Layout(pp=2)))
    assert logs[1][:6] == ["post 0F0", "post 0F1", "take 0F0", "do 1F0", "do 1B0", "send 1B0"]
    assert logs[0][:4] == ["post 1B0", "do 0F0", "send 0F0", "do 0F1"]
    for rank, row in enumerate(build_schedule("1f1b", 2, 3).rows):
        assert [entry[3:] for entry in logs[rank] if entry.startswith("do")] == [
            str(action) for action in row
        ]
    late = logs[1].index("post 0F2")
    assert late < logs[1].index("do 1F1") < logs[1].index("take 0F2")


def count_pending_sends(layout: Layout) -> tuple[int, int]:
    """Return this rank's index and the most sent messages that may not be received."""
    largest = 0
    send = P2PChannels.send

    def count(self: P2PChannels, *arguments: Any) -> None:
        nonlocal largest
        send(self, *arguments)
        largest = max(largest, len(self._pending_sends))

    model = build(layout, num_micro_batches=12)
    with patch.object(P2PChannels, "send", count):
        accumulate_gradients(
            model, [micro_batch(1, 6, number) for number in range(12)], seed=0, step=0
        )
    assert model.pipeline is not None
    return model.pipeline.rank, largest


@pytest.mark.parametrize(
    ("schedule", "expected"), [("1f1b", (2, 2)), ("interleaved_1f1b", (4, 4)), ("zb_h1", (2, 2))]
)
def test_received_messages_are_released(
    gloo_ranks: RankPool, schedule: str, expected: tuple[int, int]
) -> None:
    # Hidden states that rank 0 sends, and gradients that rank 1 sends.
    layout = Layout(pp=2, schedule=schedule)
    assert dict(gloo_ranks.run(2, count_pending_sends, layout)) == dict(enumerate(expected))


def compute_losses_and_times(layout: Layout) -> tuple[float, float, dict[str, float]]:
    """Return the loss of evaluation, the loss of training and the step's parts in seconds."""
    model = build(layout)
    times = StepTimes(torch.device("cpu"))
    batches = [micro_batch(2, 8, number) for number in range(4)]
    model.decoder.eval()
    with model.evaluate_mode():
        evaluation_loss = model.compute_losses(
            batches, MicroBatch.build_model_arguments
        ) + model.compute_losses(batches[:1], MicroBatch.build_model_arguments)
    model.decoder.train()
    training_loss = accumulate_gradients(model, batches, seed=0, step=0, times=times).loss_sum
    first = accumulate_gradients(model, batches[:1] * 4, seed=0, step=1).loss_sum / 4
    return (
        float(model.sum_over_data(evaluation_loss)),
        float(training_loss + first),
        times.seconds(),
    )


@pytest.mark.parametrize(
    "layout",
    [Layout(pp=2, schedule="zbv"), Layout(pp=2, dp_shard=2, zero_stage=3, schedule="zb_h1")],
    ids=str,
)
def test_evaluation_runs_forward_only_and_times_are_reported_by_part(
    ranks: RankPool, layout: Layout
) -> None:
    for evaluation_loss, training_loss, parts in ranks.run(
        layout.world_size, compute_losses_and_times, layout
    ):
        assert evaluation_loss == pytest.approx(training_loss, rel=1e-12)
        assert {"forward", "backward", "waiting", "reduction"} <= set(parts)
        assert parts["forward"] > 0 < parts["waiting"]


def test_a_schedule_from_a_file(ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text(
        write_schedule(build_schedule("zb_h1", 2, 4)).replace("0W0,", "").replace("0W1", "0W1,0W0")
    )
    verify_layout(ranks, CONFIG, Layout(pp=2, schedule=str(path)), VerificationCase(4, tied=True))


def test_a_stage_that_is_frozen_completely(ranks: RankPool) -> None:
    for schedule in ("interleaved_1f1b", "zbv"):
        layout = Layout(pp=2, dp_shard=2, zero_stage=2, schedule=schedule)
        verify_layout(
            ranks,
            CONFIG,
            layout,
            VerificationCase(4, tied=False),
            model={"freeze": ["model.embed_tokens.weight", "model.layers.0.*"]},
        )


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=2),
        Layout(pp=2, dp_shard=2, zero_stage=3),
        Layout(pp=2, dp_shard=2, zero_stage=2, schedule="zbv"),
    ],
    ids=str,
)
def test_no_gradient_passes_below_the_first_trained_layer(ranks: RankPool, layout: Layout) -> None:
    """The second rank has frozen layers before trained ones, and the first rank only frozen ones
    unless it has the last stage."""
    verify_layout(
        ranks,
        CONFIG,
        layout,
        VerificationCase(4, tied=False),
        model={"freeze": ["model.embed_tokens.weight", "model.layers.[012].*"]},
    )


def record_actions_and_reductions(layout: Layout) -> tuple[list[str], float]:
    """Return the order of a step's actions and reductions (`reduce`), and the largest difference
    of a gradient from one that is reduced after the last action.
    """
    order: list[str] = []
    launch = gradient_reduction._launch_all_reduce

    def record(*arguments: Any) -> Any:
        order.append("reduce")
        return launch(*arguments)

    batches = [micro_batch(2, 12, 10 * dist.get_rank() + number) for number in range(4)]
    gradients = []
    orders = []
    for overlap in (ParallelModel.overlap_reductions, lambda *_: None):
        with patch.object(ParallelModel, "overlap_reductions", overlap):
            model = build(layout)
        assert model.pipeline is not None
        order.clear()
        model.pipeline.action_observer = lambda action, *_: order.append(str(action))
        with patch.object(gradient_reduction, "_launch_all_reduce", record):
            accumulate_gradients(model, batches, seed=0, step=0)
        gradients.append({name: model.gather_gradient(name) for name in model.layouts})
        orders.append(list(order))
    early, late = gradients
    difference = max(float((early[name] - late[name]).abs().max()) for name in early)
    return orders[0], difference


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zbv"])
def test_gradients_of_a_stage_are_reduced_behind_the_backward_passes_of_others(
    ranks: RankPool, schedule: str
) -> None:
    layout = Layout(pp=2, dp_replicate=2, schedule=schedule)
    for order, difference in ranks.run(4, record_actions_and_reductions, layout):
        assert difference == 0.0  # two summands: the order of a sum does not matter
        last_action = max(place for place, entry in enumerate(order) if entry != "reduce")
        assert order[:last_action].count("reduce") == 1, order
        assert order[last_action:].count("reduce") == 1, order
