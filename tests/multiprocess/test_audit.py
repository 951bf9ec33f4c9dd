"""Worked examples of docs/audit on two CPU ranks, and shards of every kind that ranks record."""

from __future__ import annotations

import os
import runpy
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardwright.audit import Recorder
from shardwright.audit.check import AuditReport, check_recorded_step
from shardwright.audit.record import load_step
from shardwright.layout import Layout
from shardwright.verification.cell import MutationContext
from shardwright.verification.grid import list_grid_layouts
from tests.multiprocess.mutations import context, experts, tensor
from tests.multiprocess.mutations.table import EP, GATHER, RING
from tests.multiprocess.pool import RankPool

EXAMPLES = Path(__file__).parents[2] / "docs/audit"


def run_example(name: str, folder: str, *arguments: Any, **options: Any) -> None:
    runpy.run_path(str(EXAMPLES / f"{name}.py"))["train"](folder, *arguments, **options)


def list_failures(report: AuditReport) -> list[Any]:
    return [each for each in (*report.parameters, *report.findings) if not each.passed]


def assert_passes(folder: Path) -> AuditReport:
    report = check_recorded_step(folder)
    assert report.passed, list_failures(report)
    assert not report.diagnoses
    return report


@pytest.mark.parametrize("name", ["ddp_loop", "fsdp2_loop"])
def test_a_hand_written_loop_equals_one_process(ranks: RankPool, tmp_path: Path, name: str) -> None:
    ranks.run(2, run_example, name, str(tmp_path))
    report = assert_passes(tmp_path)
    assert report.num_data_ranks == 2
    assert {finding.quantity for finding in report.findings} >= {"clip", "update", "gradient norm"}


@pytest.mark.parametrize(
    ("name", "mistake"),
    [("ddp_loop", "mean_of_micro_batch_means"), ("fsdp2_loop", "mean_of_rank_means")],
)
def test_the_mistake_of_a_hand_written_loop_is_named(
    ranks: RankPool, tmp_path: Path, name: str, mistake: str
) -> None:
    ranks.run(2, run_example, name, str(tmp_path), True)
    report = check_recorded_step(tmp_path)
    assert not report.passed
    assert report.diagnoses[0].keys == (mistake,)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp_replicate=2),
        Layout(dp_shard=2, zero_stage=1),
        Layout(dp_shard=2, zero_stage=2),
        Layout(dp_shard=2, zero_stage=3),
        Layout(tp=2),
        Layout(pp=2),
        Layout(cp=2),
        Layout(dp_shard=2, ep=2, zero_stage=1),
        Layout(dp_shard=2, ep=2, zero_stage=3),
        Layout(cp=2, ep=2, zero_stage=1),
    ],
    ids=str,
)
def test_our_own_engine_equals_one_process(ranks: RankPool, tmp_path: Path, layout: Layout) -> None:
    ranks.run(2, run_example, "shardwright_engine", str(tmp_path), layout)
    report = assert_passes(tmp_path)
    assert {finding.quantity for finding in report.findings} >= {"loss", "clip", "update"}


@pytest.mark.long
@pytest.mark.parametrize("layout", list_grid_layouts(), ids=str)
def test_our_own_engine_equals_one_process_under_the_layouts_of_the_grid(
    ranks: RankPool, tmp_path: Path, layout: Layout
) -> None:
    ranks.run(layout.world_size, run_example, "shardwright_engine", str(tmp_path), layout)
    report = assert_passes(tmp_path)
    assert {finding.quantity for finding in report.findings} >= {"loss", "clip", "update"}


def run_engine_with_bug(patch: MutationContext, folder: str, layout: Layout) -> None:
    with patch():
        run_example("shardwright_engine", folder, layout)


@pytest.mark.parametrize(
    ("patch", "layout", "mistakes", "subject"),
    [
        (experts.average_experts_over_ep, EP, ("some_scaled",), "all experts: factor 0.5"),
        (experts.sum_experts_over_ep, EP, ("experts_mixed",), "all experts"),
        (experts.detach_router, EP, ("router_detached",), ""),
        (
            context.average_means_of_context_ranks,
            RING,
            ("mean_of_context_means",),
            "2 context ranks",
        ),
        (
            context.omit_context_from_normaliser,
            GATHER,
            ("mean_of_context_means", "context_not_divided"),
            "2 context ranks",
        ),
        (context.divide_gradients_by_context, RING, ("divided_by_sharing_ranks",), "2 ranks"),
        (
            context.count_context_twice_in_reported_loss,
            RING,
            ("multiplied_by_sharing_ranks",),
            "loss as reported, 2 ranks",
        ),
        (
            context.drop_key_gradients_of_other_ranks,
            RING,
            ("key_gradients_lost",),
            "rows in 2 pairs of mirrored pieces: of queries in pair n, gradients with keys in pair "
            "n + 1 are left",
        ),
        (
            context.overwrite_query_gradients,
            GATHER,
            ("query_gradients_lost",),
            "rows in 4 pieces: of queries in piece n, gradients with keys in piece n are lost",
        ),
        (
            tensor.skip_backward_sum_of_head,
            Layout(tp=2),
            ("head_gradient_not_summed",),
            "2 ranks",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_known_bug_in_our_engine_is_named(
    ranks: RankPool,
    tmp_path: Path,
    patch: MutationContext,
    layout: Layout,
    mistakes: tuple[str, ...],
    subject: str,
) -> None:
    ranks.run(2, run_engine_with_bug, patch, str(tmp_path), layout)
    report = check_recorded_step(tmp_path)
    assert not report.passed
    diagnosis = report.diagnoses[0]
    assert (diagnosis.keys, diagnosis.subject) == (mistakes, subject)
    assert diagnosis.residual_after < 1e-2 * diagnosis.residual_before


def test_norms_that_tensor_ranks_do_not_sum_are_named(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, run_engine_with_bug, tensor.skip_sum_of_layer_norms, str(tmp_path), Layout(tp=2))
    report = check_recorded_step(tmp_path)
    assert report.diagnoses[0].keys == ("some_not_reduced",)
    assert all("layernorm" in each.name for each in report.parameters if not each.passed)


@pytest.fixture
def own_ranks() -> Iterator[RankPool]:
    """Return ranks of their own: transformers' Trainer leaves global state behind."""
    with RankPool(timeout_seconds=280.0) as pool:
        yield pool


def run_trainer(folder: str, port: int) -> None:
    rank = dist.get_rank()
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(dist.get_world_size()),
        "LOCAL_WORLD_SIZE": str(dist.get_world_size()),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    run_example("hf_trainer", folder)


def find_free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_the_trainer_of_transformers_equals_one_process(
    own_ranks: RankPool, tmp_path: Path
) -> None:
    own_ranks.run(2, run_trainer, str(tmp_path), find_free_port())
    report = assert_passes(tmp_path)
    assert report.num_micro_batches == 8
    assert "loss" in {finding.quantity for finding in report.findings}


def record_own_norm(folder: str, kind: str) -> None:
    """Record an FSDP2 step whose norm covers one rank's shards only, of all or of some parameters.

    The square of a rank counts where the name contains `kind`.
    """
    model = runpy.run_path(str(EXAMPLES / "fsdp2_loop.py"))["build_model"]()
    ids = torch.arange(12).view(1, 12) + dist.get_rank()
    recorder = Recorder(folder)
    with recorder.record_step(model):
        model(input_ids=ids, labels=ids).loss.backward()
        total = torch.zeros(())
        for name, parameter in model.named_parameters():
            whole = parameter.grad.full_tensor().square().sum()
            total += parameter.grad.to_local().square().sum() if kind in name else whole
        recorder.report(gradient_norm=total.sqrt())


@pytest.mark.parametrize(
    ("kind", "subject"),
    [("", "gradient norm"), ("mlp", "gradient norm, feed-forward projections")],
)
def test_the_norm_of_own_shards_is_named(
    ranks: RankPool, tmp_path: Path, kind: str, subject: str
) -> None:
    ranks.run(2, record_own_norm, str(tmp_path), kind)
    report = check_recorded_step(tmp_path)
    assert [(d.keys, d.subject) for d in report.diagnoses] == [(("own_norm_reported",), subject)]
    assert all(parameter.passed for parameter in report.parameters)


class Placed(nn.Module):
    """Parameters of several placements; sizes that the ranks do not divide."""

    def __init__(self, placements: list[list[Any]], mesh: Any) -> None:
        super().__init__()
        for number, placement in enumerate(placements):
            whole = torch.arange(7.0 * 5).view(7, 5) + number
            tensor = distribute_tensor(whole, mesh, placement, src_data_rank=None)
            self.register_parameter(f"p{number}", nn.Parameter(tensor))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(())
        for parameter in self.parameters():
            total = total + parameter.full_tensor().square().sum()  # type: ignore[attr-defined]
        return total


def record_placements(folder: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    placements = [
        [Shard(0), Replicate()],
        [Replicate(), Shard(1)],
        [Shard(1), Shard(0)],
        [Shard(0), Shard(0)],
        [Replicate(), Replicate()],
    ]
    model = Placed(placements, mesh)
    ids = torch.ones(1, 2)
    with Recorder(folder, data_rank=0).record_step(model):
        model(input_ids=ids, labels=ids).backward()


def record_strided(folder: str) -> None:
    """Record FSDP2 over a dimension that tensor parallelism shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Linear(5, 8, bias=False)
    whole = torch.arange(40.0).view(8, 5)
    model.weight = nn.Parameter(distribute_tensor(whole, mesh["tp"], [Shard(0)]))
    fully_shard(model, mesh=mesh["dp"])
    assert isinstance(model.weight, DTensor)
    recorder = Recorder(folder, data_rank=0)
    recorder.before_step(model, {"input_ids": torch.ones(1, 2), "labels": torch.ones(1, 2)})
    inputs = distribute_tensor(torch.ones(2, 5), mesh["tp"], [Replicate()])
    model(inputs).sum().backward()
    recorder.after_step(model)


def test_shards_of_every_placement_are_joined(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(4, record_placements, str(tmp_path))
    record = load_step(tmp_path)
    for number in range(5):
        (value,) = record.join("before", f"p{number}")
        whole = torch.arange(7.0 * 5).view(7, 5) + number
        assert torch.equal(value, whole)
        (gradient,) = record.join("gradient", f"p{number}")
        assert torch.equal(gradient, 2 * whole)


def test_strided_shards_are_joined(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(4, record_strided, str(tmp_path))
    (value,) = load_step(tmp_path).join("before", "weight")
    assert torch.equal(value, torch.arange(40.0).view(8, 5))


def record_fsdp1(folder: str) -> None:
    example = runpy.run_path(str(EXAMPLES / "ddp_loop.py"))
    model = FullyShardedDataParallel(
        example["build_model"](), use_orig_params=True, device_id=torch.device("cpu")
    )
    batches = example["read_batches"](1, dist.get_rank())
    total = torch.tensor(float(sum(map(example["count_targets"], batches))))
    dist.all_reduce(total)
    recorder = Recorder(folder)
    recorder.before_step(model, batches)
    for batch in batches:
        (example["compute_loss_sum"](model, batch) * dist.get_world_size() / total).backward()
    recorder.after_backward(model)
    recorder.after_step(model)


def test_fsdp1_is_gathered(own_ranks: RankPool, tmp_path: Path) -> None:
    own_ranks.run(2, record_fsdp1, str(tmp_path))
    report = assert_passes(tmp_path)
    assert any("update" in reason for reason in report.unchecked)
