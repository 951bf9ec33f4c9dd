"""Sparse models against one process: experts replicated, and sharded over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from shardwright.architecture import read_config, read_recipe_shape
from shardwright.config.training import PrecisionSection
from shardwright.layout import Layout
from shardwright.model import Decoder
from shardwright.model.block import RecomputeRunner
from shardwright.parallel import fsdp, row_exchange
from shardwright.plans import BatchPlan
from shardwright.verification.cases import VERIFICATION_DTYPES, VerificationCase
from shardwright.verification.cell import MutationContext
from shardwright.verification.verification import VerificationReport, verify
from tests.multiprocess.models import DEEPSEEK, GPT_OSS, MIXTRAL, build_model, build_recipe
from tests.multiprocess.pool import RankPool

PLAIN = VerificationCase(1, "none", documents=False)
LOSSES = VerificationCase(2, "full", router_losses=True)
CAPACITY = VerificationCase(2, "selective", router_losses=True, capacity_factor=0.8)
IDLE = VerificationCase(1, "full", router_losses=True, idle_experts=True)


def verify_layout(
    ranks: RankPool,
    config: dict[str, Any],
    layout: Layout,
    case: VerificationCase,
    mutation: MutationContext | None = None,
) -> VerificationReport:
    """Verify a layout; float32 uses grouped products, float64 the loop over experts.

    Mixtral runs in both dtypes, the other models in one.
    """
    recipe = build_recipe(config)
    dtypes = {
        "mixtral": VERIFICATION_DTYPES,
        "gpt_oss": VERIFICATION_DTYPES[:1],
        "deepseek_v3": VERIFICATION_DTYPES[1:],
    }[config["model_type"]]
    return verify(
        recipe,
        read_recipe_shape(recipe),
        [layout],
        [case],
        dtypes,
        sequence_length=12,
        pool=ranks,
        mutation=mutation,
    )


def list_failures(report: VerificationReport) -> list[Any]:
    return [
        (cell.failure, finding)
        for cell in report.cells
        for finding in cell.findings
        if not finding.passed
    ] + [cell.failure for cell in report.cells if cell.failure]


@pytest.mark.parametrize(
    ("config", "layout", "case"),
    [
        # experts on every rank
        (MIXTRAL, Layout(), CAPACITY),
        (MIXTRAL, Layout(dp_replicate=2), LOSSES),
        (MIXTRAL, Layout(dp_shard=2, zero_stage=3), CAPACITY),
        (GPT_OSS, Layout(dp_shard=2, zero_stage=1), LOSSES),
        (DEEPSEEK, Layout(dp_shard=2, zero_stage=2), LOSSES),
        (DEEPSEEK, Layout(dp_replicate=2, dp_shard=2, zero_stage=3), PLAIN),
        # sharded experts
        (MIXTRAL, Layout(dp_shard=2, ep=2, zero_stage=1), PLAIN),
        (MIXTRAL, Layout(dp_shard=2, ep=2, zero_stage=2), CAPACITY),
        (DEEPSEEK, Layout(dp_shard=2, ep=2, zero_stage=3), LOSSES),
        (GPT_OSS, Layout(dp_shard=4, ep=2, zero_stage=3), CAPACITY),
        (GPT_OSS, Layout(dp_shard=4, ep=4, zero_stage=1), LOSSES),
        (DEEPSEEK, Layout(dp_replicate=2, dp_shard=2, ep=2, zero_stage=2), CAPACITY),
        (DEEPSEEK, Layout(dp_shard=2, ep=2, zero_stage=3, wrap_blocks=2), IDLE),
        (GPT_OSS, Layout(dp_shard=4, ep=4, zero_stage=2), IDLE),
        # context parallelism
        (MIXTRAL, Layout(cp=2, cp_method="all_gather"), CAPACITY),
        (DEEPSEEK, Layout(cp=2, ep=2, cp_method="ring"), LOSSES),
        (GPT_OSS, Layout(cp=2, ep=2, zero_stage=3, cp_method="ring"), CAPACITY),
        (MIXTRAL, Layout(dp_replicate=2, cp=2, ep=2, cp_method="all_gather"), CAPACITY),
        # pipelines
        (DEEPSEEK, Layout(pp=2), VerificationCase(4, "none", router_losses=True)),
        (
            MIXTRAL,
            Layout(dp_shard=2, ep=2, pp=2, zero_stage=2, schedule="zb_h1"),
            VerificationCase(4, "full", router_losses=True),
        ),
        # tensor parallelism
        (GPT_OSS, Layout(tp=2), CAPACITY),
        (DEEPSEEK, Layout(tp=2, sequence_parallel=False), LOSSES),
        (DEEPSEEK, Layout(dp_shard=2, ep=2, tp=2, zero_stage=3), LOSSES),
        (GPT_OSS, Layout(dp_shard=2, ep=2, tp=2, zero_stage=1, sequence_parallel=False), LOSSES),
    ],
    ids=str,
)
def test_experts_equal_one_process(
    ranks: RankPool, config: dict[str, Any], layout: Layout, case: VerificationCase
) -> None:
    report = verify_layout(ranks, config, layout, case)
    assert report.passed, list_failures(report)


@contextmanager
def wrap_experts_separately() -> Iterator[None]:
    """Wrap experts separately, as FSDP2 requires before torch 2.13."""
    with patch.object(fsdp, "_build_expert_placement", lambda *_: None):
        yield


@pytest.mark.parametrize(
    ("layout", "case"),
    [
        (Layout(dp_shard=2, ep=2, zero_stage=1), PLAIN),
        (Layout(dp_shard=4, ep=2, zero_stage=3), LOSSES),
    ],
    ids=str,
)
def test_experts_wrapped_separately(
    ranks: RankPool, layout: Layout, case: VerificationCase
) -> None:
    report = verify_layout(ranks, GPT_OSS, layout, case, wrap_experts_separately)
    assert report.passed, list_failures(report)


@contextmanager
def compile_blocks() -> Iterator[None]:
    """Compile the blocks of every model that is built, each kind without a break."""
    set_recompute = Decoder.set_recompute
    counter = CompileCounterWithBackend("aot_eager")

    def set_and_compile(self: Decoder, run: RecomputeRunner | None) -> None:
        set_recompute(self, run)
        torch._dynamo.reset()
        self.compile_blocks(backend=counter, fullgraph=True)

    with patch.object(Decoder, "set_recompute", set_and_compile):
        yield
    assert counter.frame_count > 0


@pytest.mark.parametrize(
    ("config", "layout", "case"),
    [
        (MIXTRAL, Layout(dp_shard=2, ep=2, zero_stage=1), CAPACITY),
        pytest.param(
            DEEPSEEK, Layout(dp_shard=2, ep=2, zero_stage=3), LOSSES, marks=pytest.mark.long
        ),
        pytest.param(GPT_OSS, Layout(dp_shard=4, ep=4, zero_stage=2), IDLE, marks=pytest.mark.long),
        pytest.param(
            DEEPSEEK,
            Layout(dp_shard=2, ep=2, tp=2, zero_stage=3),
            CAPACITY,
            marks=pytest.mark.long,
        ),
        pytest.param(
            GPT_OSS, Layout(cp=2, ep=2, cp_method="ring"), CAPACITY, marks=pytest.mark.long
        ),
        pytest.param(DEEPSEEK, Layout(dp_shard=2, ep=2), PLAIN, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_compiled_blocks(
    ranks: RankPool, config: dict[str, Any], layout: Layout, case: VerificationCase
) -> None:
    report = verify_layout(ranks, config, layout, case, compile_blocks)
    assert report.passed, list_failures(report)


def record_order(zero_stage: Any, is_compiled: bool) -> list[str]:
    """Record when exchanges start and end and shared experts run, in one sparse layer."""
    log = _overlap_log
    log.clear()
    layout = Layout(dp_shard=2, ep=2, zero_stage=zero_stage)
    precision = PrecisionSection(kind="fp32")
    model = build_model(read_config(DEEPSEEK), layout, BatchPlan(12, 2, 1, 2), precision, seed=0)
    issue = row_exchange.start_all_to_all
    wait = row_exchange.wait_all_to_all

    def log_issue(*arguments: Any) -> Any:
        log.append("issue")
        return issue(*arguments)

    def log_wait(work: Any) -> None:
        log.append("wait")
        wait(work)

    shared = model.decoder.get_submodule("layers.1.mlp.shared_experts")
    compute = shared.forward
    shared.forward = lambda *arguments: _log_shared(compute(*arguments))
    if is_compiled:
        torch._dynamo.reset()  # graphs of earlier tests count towards torch's limit
        model.decoder.compile_blocks(backend="aot_eager", fullgraph=True)
    ids_BT = torch.arange(24).view(2, 12)
    with (
        patch.object(row_exchange, "start_all_to_all", log_issue),
        patch.object(row_exchange, "wait_all_to_all", log_wait),
    ):
        loss = model.module(ids_BT, labels_BT=ids_BT)
        log.append("backward")
        loss.backward()
    return log


_overlap_log: list[str] = []


@torch.library.custom_op("shardwright_tests::log_shared", mutates_args=())
def _log_shared(x: torch.Tensor) -> torch.Tensor:
    _overlap_log.append("shared")
    return x.clone()


_log_shared.register_fake(torch.empty_like)
_log_shared.register_autograd(lambda _ctx, gradient: _log_shared(gradient))


@pytest.mark.parametrize(("zero_stage", "is_compiled"), [(1, False), (3, False), (3, True)])
def test_shared_experts_overlap_with_the_exchange(
    ranks: RankPool, zero_stage: int, is_compiled: bool
) -> None:
    forward = ["issue", "shared", "wait", "issue", "wait"]
    backward = ["issue", "wait", "issue", "shared", "wait"]
    for log in ranks.run(2, record_order, zero_stage, is_compiled):
        assert log == [*forward, "backward", *backward]
