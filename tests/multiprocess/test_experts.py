"""Sparse models against one process: experts replicated, and sharded over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch

from shardwright.architecture import read_config, read_recipe_shape
from shardwright.config.training import PrecisionSection
from shardwright.layout import Layout
from shardwright.parallel import expert_parallel, fsdp
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
        (MIXTRAL, Layout(), CAPACITY),
        (MIXTRAL, Layout(dp_replicate=2), LOSSES),
        (MIXTRAL, Layout(dp_shard=2, zero_stage=3), CAPACITY),
        (GPT_OSS, Layout(dp_shard=2, zero_stage=1), LOSSES),
        (DEEPSEEK, Layout(dp_shard=2, zero_stage=2), LOSSES),
        (DEEPSEEK, Layout(dp_replicate=2, dp_shard=2, zero_stage=3), PLAIN),
    ],
    ids=str,
)
def test_experts_on_every_rank(
    ranks: RankPool, config: dict[str, Any], layout: Layout, case: VerificationCase
) -> None:
    report = verify_layout(ranks, config, layout, case)
    assert report.passed, list_failures(report)


@pytest.mark.parametrize(
    ("config", "layout", "case"),
    [
        (MIXTRAL, Layout(dp_shard=2, ep=2, zero_stage=1), PLAIN),
        (MIXTRAL, Layout(dp_shard=2, ep=2, zero_stage=2), CAPACITY),
        (DEEPSEEK, Layout(dp_shard=2, ep=2, zero_stage=3), LOSSES),
        (GPT_OSS, Layout(dp_shard=4, ep=2, zero_stage=3), CAPACITY),
        (GPT_OSS, Layout(dp_shard=4, ep=4, zero_stage=1), LOSSES),
        (DEEPSEEK, Layout(dp_replicate=2, dp_shard=2, ep=2, zero_stage=2), CAPACITY),
        (DEEPSEEK, Layout(dp_shard=2, ep=2, zero_stage=3, wrap_blocks=2), IDLE),
        (GPT_OSS, Layout(dp_shard=4, ep=4, zero_stage=2), IDLE),
    ],
    ids=str,
)
def test_sharded_experts(
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


@pytest.mark.parametrize(
    ("config", "layout", "case"),
    [
        (MIXTRAL, Layout(cp=2, cp_method="all_gather"), CAPACITY),
        (DEEPSEEK, Layout(cp=2, ep=2, cp_method="ring"), LOSSES),
        (GPT_OSS, Layout(cp=2, ep=2, zero_stage=3, cp_method="ring"), CAPACITY),
        (MIXTRAL, Layout(dp_replicate=2, cp=2, ep=2, cp_method="all_gather"), CAPACITY),
    ],
    ids=str,
)
def test_experts_under_context_parallelism(
    ranks: RankPool, config: dict[str, Any], layout: Layout, case: VerificationCase
) -> None:
    report = verify_layout(ranks, config, layout, case)
    assert report.passed, list_failures(report)


def record_order(zero_stage: Any) -> list[str]:
    """Record when exchanges start and end and shared experts run, in one sparse layer."""
    log: list[str] = []
    layout = Layout(dp_shard=2, ep=2, zero_stage=zero_stage)
    precision = PrecisionSection(kind="fp32")
    model = build_model(read_config(DEEPSEEK), layout, BatchPlan(12, 2, 1, 2), precision, seed=0)
    issue = expert_parallel.start_all_to_all
    wait = expert_parallel.wait_all_to_all

    def log_issue(*arguments: Any) -> Any:
        log.append("issue")
        return issue(*arguments)

    def log_wait(work: Any) -> None:
        log.append("wait")
        wait(work)

    shared = model.decoder.get_submodule("layers.1.mlp.shared_experts.down")
    shared.register_forward_hook(lambda *_arguments: log.append("shared"))
    shared.register_full_backward_hook(lambda *_arguments: log.append("shared"))
    ids_BT = torch.arange(24).view(2, 12)
    with (
        patch.object(expert_parallel, "start_all_to_all", log_issue),
        patch.object(expert_parallel, "wait_all_to_all", log_wait),
    ):
        loss = model.module(ids_BT, labels_BT=ids_BT)
        log.append("backward")
        loss.backward()
    return log


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_shared_experts_overlap_with_the_exchange(ranks: RankPool, zero_stage: int) -> None:
    forward = ["issue", "shared", "wait", "issue", "wait"]
    backward = ["issue", "wait", "issue", "shared", "wait"]
    for log in ranks.run(2, record_order, zero_stage):
        assert log == [*forward, "backward", *backward]


@pytest.mark.parametrize(
    ("config", "layout", "case"),
    [
        (DEEPSEEK, Layout(pp=2), VerificationCase(4, "none", router_losses=True)),
        (
            MIXTRAL,
            Layout(dp_shard=2, ep=2, pp=2, zero_stage=2, schedule="zb_h1"),
            VerificationCase(4, "full", router_losses=True),
        ),
    ],
    ids=str,
)
def test_experts_in_a_pipeline(
    ranks: RankPool, config: dict[str, Any], layout: Layout, case: VerificationCase
) -> None:
    report = verify_layout(ranks, config, layout, case)
    assert report.passed, list_failures(report)


@pytest.mark.parametrize(
    ("config", "layout", "case"),
    [
        (GPT_OSS, Layout(tp=2), CAPACITY),
        (DEEPSEEK, Layout(tp=2, sequence_parallel=False), LOSSES),
        (DEEPSEEK, Layout(dp_shard=2, ep=2, tp=2, zero_stage=3), LOSSES),
        (GPT_OSS, Layout(dp_shard=2, ep=2, tp=2, zero_stage=1, sequence_parallel=False), LOSSES),
    ],
    ids=str,
)
def test_experts_under_tensor_parallelism(
    ranks: RankPool, config: dict[str, Any], layout: Layout, case: VerificationCase
) -> None:
    report = verify_layout(ranks, config, layout, case)
    assert report.passed, list_failures(report)
