"""Every parallelism in NCCL's order: `nccl_order` describes the process group and the check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from shardwright.architecture import read_recipe_shape
from shardwright.config.training import OptimizerSection
from shardwright.data.loader import MicroBatch
from shardwright.errors import RankFailed
from shardwright.layout import Layout
from shardwright.optim import build_optimizer
from shardwright.parallel import p2p_channels
from shardwright.parallel.p2p_channels import P2PChannels
from shardwright.plans import BatchPlan, Plan
from shardwright.schedule import PIPELINE_SCHEDULES, assign_channel_groups
from shardwright.training.step import accumulate_gradients, update_parameters
from shardwright.verification import cell
from shardwright.verification.cases import VerificationCase
from shardwright.verification.grid import (
    GRID_SEQUENCE_LENGTH,
    GridCell,
    group_by_reference,
    list_cells,
    read_grid_shape,
)
from shardwright.verification.reference import (
    SGD_LEARNING_RATE,
    VerificationProblem,
    write_reference,
)
from shardwright.verification.verification import verify
from tests.covering_cells import NUM_COVERING_LAYERS
from tests.multiprocess.models import LLAMA, build_recipe
from tests.multiprocess.nccl_order.order import WrongOrder
from tests.multiprocess.nccl_order.pool import OrderedRankPool
from tests.multiprocess.nccl_order.rules import RefusedByNccl
from tests.multiprocess.test_pipeline_execution import build, micro_batch

AXES = ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep")


def exchange_numbers(calls: Sequence[str]) -> list[float]:
    """Send this rank's number around a ring by these calls; return the number received."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    sent = torch.full((1,), float(rank))
    received = torch.zeros(1)
    works = []
    for call in calls:
        if call == "send":
            works.append(dist.isend(sent, (rank + 1) % size))
        elif call == "receive":
            works.append(dist.irecv(received, (rank - 1) % size))
        elif call == "batch":
            works += dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, sent, (rank + 1) % size),
                    dist.P2POp(dist.irecv, received, (rank - 1) % size),
                ]
            )
        elif call == "change":
            sent += 1
        elif call == "wait":
            for work in works:
                assert work is not None
                work.wait()
    return received.tolist()


def test_a_send_that_is_buffered_is_refused(ordered_ranks: OrderedRankPool) -> None:
    with pytest.raises(WrongOrder) as caught:
        ordered_ranks.run(3, exchange_numbers, ["send", "receive", "wait"])
    assert "deadlock on NCCL" in str(caught.value)
    assert "after the connection for message of (0, 1)" in str(caught.value)


def test_a_batch_is_one_operation(ordered_ranks: OrderedRankPool) -> None:
    assert ordered_ranks.run(3, exchange_numbers, ["batch", "wait"]) == [[2.0], [0.0], [1.0]]


def read_early() -> list[float]:
    peer = 1 - dist.get_rank()
    received = torch.zeros(1)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, torch.ones(1), peer), dist.P2POp(dist.irecv, received, peer)]
    )
    early: list[float] = received.tolist()
    for work in works:
        work.wait()
    assert received.item() == 1.0
    return early


def test_a_receive_is_unreadable_until_it_is_waited_for(ordered_ranks: OrderedRankPool) -> None:
    assert torch.tensor(ordered_ranks.run(2, read_early)).isnan().all()


def test_a_buffer_that_changes_while_it_is_sent_is_refused(
    ordered_ranks: OrderedRankPool,
) -> None:
    with pytest.raises(RankFailed, match="an input changed before a wait for"):
        ordered_ranks.run(2, exchange_numbers, ["batch", "change", "wait"])


def test_an_operation_that_nobody_waits_for_is_refused(ordered_ranks: OrderedRankPool) -> None:
    with pytest.raises(WrongOrder, match="rank 0 never waits for send: message 1"):
        ordered_ranks.run(2, exchange_numbers, ["batch"])


def send_by_tag() -> list[float]:
    """Send two numbers with tags; the receives name the tags in the other order."""
    number = torch.zeros(2)
    for value in (0, 1):
        if dist.get_rank() == 0:
            dist.send(torch.full((1,), float(value)), 1, tag=value)
        else:
            dist.recv(number[value : value + 1], 0, tag=1 - value)
    return number.tolist()


def test_messages_arrive_in_order_whatever_their_tags(ordered_ranks: OrderedRankPool) -> None:
    """gloo delivers by tag, and NCCL does not know them."""
    assert ordered_ranks.run(2, send_by_tag)[1] == [0.0, 1.0]


def reduce_refused_tensors() -> list[str]:
    messages = []
    for tensor, operation in (
        (torch.ones(2, dtype=torch.int16), dist.ReduceOp.SUM),
        (torch.ones(2, 3).t(), dist.ReduceOp.SUM),
        (torch.ones(2, dtype=torch.int32), dist.ReduceOp.BOR),
        (torch.ones(2).to(torch.float8_e4m3fn), dist.ReduceOp.MAX),
    ):
        with pytest.raises(RefusedByNccl) as caught:
            dist.all_reduce(tensor, operation)
        messages.append(str(caught.value))
    return messages


def test_tensors_and_reductions_that_nccl_lacks_are_refused(ordered_ranks: OrderedRankPool) -> None:
    dtype, gaps, operation, bytes_of_floats = ordered_ranks.run(2, reduce_refused_tensors)[0]
    assert dtype == "allreduce: NCCL has no data type for torch.int16"
    assert gaps == "allreduce: tensors must be contiguous, not (1, 3)"
    assert operation == "allreduce: cannot use ReduceOp.BOR with NCCL"
    assert bytes_of_floats == "allreduce: NCCL reduces the bytes of torch.float8_e4m3fn"


def sum_in_two_groups(is_reversed: bool) -> list[float]:
    """Sum a number in two groups of all ranks, asynchronously; the last rank may reverse them."""
    everyone = list(range(dist.get_world_size()))
    groups = [dist.new_group(everyone), dist.new_group(everyone)]
    sums = [torch.ones(1), torch.ones(1)]
    order = [1, 0] if is_reversed and dist.get_rank() == everyone[-1] else [0, 1]
    works = [dist.all_reduce(sums[i], group=groups[i], async_op=True) for i in order]
    for work in works:
        assert work is not None
        work.wait()
    return [float(each) for each in sums]


def test_first_collectives_of_two_groups_in_opposite_order_are_refused(
    ordered_ranks: OrderedRankPool,
) -> None:
    assert ordered_ranks.run(2, sum_in_two_groups, False) == [[2.0, 2.0]] * 2
    with pytest.raises(WrongOrder, match="rank 1 opens the connection for allreduce"):
        ordered_ranks.run(2, sum_in_two_groups, True)


def call_different_collectives() -> None:
    number = torch.ones(1)
    if dist.get_rank():
        dist.all_reduce(number)
    else:
        dist.barrier()


def receive_before_send() -> None:
    peer = 1 - dist.get_rank()
    dist.recv(torch.zeros(1), peer)
    dist.send(torch.ones(1), peer)


def test_operations_that_are_stuck_are_named() -> None:
    with OrderedRankPool(stuck_seconds=2.0) as pool:
        with pytest.raises(WrongOrder, match="rank 0: barrier; rank 1: allreduce"):
            pool.run(2, call_different_collectives)
        with pytest.raises(WrongOrder, match="rank 1 never calls its part of message 1 "):
            pool.run(2, receive_before_send)


def run_step(layout: Layout, num_micro_batches: int, fault: str) -> float:
    """Run a training step of a pipeline with a known fault in its channels."""

    def group_by_direction(rank_of_stage: Sequence[int]) -> dict[tuple[int, int], int]:
        return {pair: int(pair[0] > pair[1]) for pair in assign_channel_groups(rank_of_stage)}

    faults = {
        "one group per direction": patch.object(
            p2p_channels, "assign_channel_groups", group_by_direction
        ),
        "no connection": patch.object(P2PChannels, "_connect", lambda _self: None),
    }
    with faults[fault]:
        model = build(layout, num_micro_batches=num_micro_batches)
        batches = [micro_batch(1, 6, number) for number in range(num_micro_batches)]
        return float(accumulate_gradients(model, batches, seed=0, step=0).mean())


def test_one_group_per_direction_waits_in_a_circle(ordered_ranks: OrderedRankPool) -> None:
    with pytest.raises(WrongOrder) as caught:
        ordered_ranks.run(4, run_step, Layout(pp=4), 8, "one group per direction")
    assert "is queued on rank" in str(caught.value)
    assert "behind message" in str(caught.value)


def test_channels_that_are_not_connected_wait_in_a_circle(ordered_ranks: OrderedRankPool) -> None:
    """Each rank's first call is a receive of a message that answers its own."""
    with pytest.raises(WrongOrder, match="opens the connection for message"):
        ordered_ranks.run(2, run_step, Layout(pp=2), 4, "no connection")


def choose_cells() -> list[GridCell]:
    """Choose a cell of two ranks for each parallelism, schedule and context method."""
    cells: dict[tuple[object, ...], GridCell] = {}
    for each in list_cells(2):
        if each.layout.pp == 1:
            each = replace(each, num_layers=NUM_COVERING_LAYERS)
        layout = each.layout
        schedule = layout.schedule if layout.pp > 1 else None
        method = layout.cp_method if layout.cp > 1 else None
        if each.refusal is None:
            cells.setdefault((*map(layout.degree, AXES), layout.zero_stage, schedule, method), each)
    return list(cells.values())


def train_two_steps(problem: VerificationProblem, plan: Plan) -> list[float]:
    """Return the losses of two steps of SGD, with an evaluation between them."""
    model = cell.build_model(problem, plan)
    optimizer = build_optimizer(
        model.named_parameters(),
        OptimizerSection(name="sgd"),
        learning_rate=SGD_LEARNING_RATE,
        weight_decay=0.0,
    )
    losses = []
    for step in range(2):
        loss = cell.accumulate_step(problem, plan, model, step)
        update_parameters(
            model,
            optimizer,
            learning_rate=SGD_LEARNING_RATE,
            max_grad_norm=None,
            router_table=loss.router_table,
        )
        losses.append(loss.mean())
        with model.evaluate_mode():
            evaluation_loss = model.compute_losses(
                cell._read_micro_batches(problem, plan, step), MicroBatch.build_model_arguments
            )
        assert evaluation_loss.isfinite()
    return losses


def test_steps_with_an_evaluation_between_them(
    ordered_ranks: OrderedRankPool, tmp_path: Path
) -> None:
    """Pairs of parallelisms train in NCCL's order in `test_grid`, without an evaluation."""
    check_losses(choose_cells(), ordered_ranks, tmp_path / "reference.safetensors")


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8, 16])
def test_steps_under_every_layout_of_the_grid(
    ordered_ranks: OrderedRankPool, tmp_path: Path, num_ranks: int
) -> None:
    """Every model in every layout, with one of the cases that `make verify-all` runs over gloo."""
    cells: dict[tuple[str, Layout], GridCell] = {}
    for each in list_cells():
        if each.refusal is None and each.layout.world_size == num_ranks:
            if each.layout.pp == 1:
                each = replace(each, num_layers=NUM_COVERING_LAYERS)
            cells.setdefault((each.model, each.layout), each)
    assert len(cells) >= 3
    check_losses(list(cells.values()), ordered_ranks, tmp_path / "reference.safetensors")


def check_losses(cells: Sequence[GridCell], ordered_ranks: OrderedRankPool, path: Path) -> None:
    """Check the losses of two steps under each cell's layout against one process."""
    for group in group_by_reference(cells):
        first = group[0]
        case = first.case
        problem = VerificationProblem(
            shape=read_grid_shape(first.model, first.num_layers),
            frozen_names=frozenset(),
            attention="auto",
            optimizer=OptimizerSection(),
            batch=BatchPlan(GRID_SEQUENCE_LENGTH, 2, case.accumulation, first.layout.data_ranks),
            case=case,
            dtype="float32",
            seed=0,
        )
        ordered_ranks.run(1, write_reference, problem, path)
        expected = load_file(path)["loss"][:2].tolist()
        for chosen in group:
            layout = chosen.layout
            plan = problem.build_plan(layout)
            for losses in ordered_ranks.run(layout.world_size, train_two_steps, problem, plan):
                assert losses == pytest.approx(expected, rel=1e-4), (chosen.model, str(layout))


@pytest.mark.parametrize("num_ranks", [2, 4, pytest.param(8, marks=pytest.mark.long)])
def test_every_schedule(ordered_ranks: OrderedRankPool, num_ranks: int) -> None:
    recipe = build_recipe(LLAMA | {"num_hidden_layers": 2 * num_ranks})
    layouts = [Layout(pp=num_ranks, schedule=name) for name in PIPELINE_SCHEDULES]
    report = verify(
        recipe,
        read_recipe_shape(recipe),
        layouts,
        [VerificationCase(2 * num_ranks, tied=True)],
        ["float32"],
        sequence_length=12,
        pool=ordered_ranks,
    )
    assert report.passed, report


def run_replicated_step(layout: Layout) -> float:
    model = build(layout)
    batches = [micro_batch(1, 6, 10 * dist.get_rank() + number) for number in range(4)]
    return float(accumulate_gradients(model, batches, seed=0, step=0).mean())


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zbv"])
def test_reductions_behind_backward_passes_wait_in_no_circle(
    ordered_ranks: OrderedRankPool, schedule: str
) -> None:
    layout = Layout(pp=2, dp_replicate=2, schedule=schedule)
    losses = ordered_ranks.run(4, run_replicated_step, layout)
    assert len(set(losses)) == 1
