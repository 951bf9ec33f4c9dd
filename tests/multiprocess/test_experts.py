"""Sparse models against one process: experts replicated, and sharded over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from shardwright.architecture import read_config, read_recipe_shape
from shardwright.config.recipe import RecomputeKind
from shardwright.config.training import PrecisionSection
from shardwright.layout import Layout
from shardwright.model import Decoder
from shardwright.model.block import RecomputeRunner
from shardwright.parallel import fsdp
from shardwright.parallel.experts import row_exchange
from shardwright.parallel.recompute import build_block_runner
from shardwright.plans import BatchPlan
from shardwright.verification.cases import VERIFICATION_DTYPES, VerificationCase
from shardwright.verification.cell import MutationContext
from shardwright.verification.verification import VerificationReport, verify
from tests import deep_ep_double
from tests.multiprocess.models import DEEPSEEK, GPT_OSS, MIXTRAL, build_model, build_recipe
from tests.multiprocess.pool import RankPool

PLAIN = VerificationCase(1, "none", documents=False)
LOSSES = VerificationCase(2, "full", router_losses=True)
CAPACITY = VerificationCase(2, "selective", router_losses=True, capacity_factor=0.8)
IDLE = VerificationCase(1, "full", router_losses=True, idle_experts=True)
PADDED: dict[str, Any] = {"expert_dispatch": "padded", "expert_row_limit": 8.0}
CROWDED: dict[str, Any] = {"expert_dispatch": "padded", "expert_row_limit": 1.0}


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
        pytest.param(
            DEEPSEEK,
            Layout(dp_replicate=2, dp_shard=2, zero_stage=3),
            PLAIN,
            marks=pytest.mark.long,
        ),
        # sharded experts
        (MIXTRAL, Layout(dp_shard=2, ep=2, zero_stage=1), PLAIN),
        (MIXTRAL, Layout(dp_shard=2, ep=2, expert_dispatch="halves", zero_stage=2), CAPACITY),
        (DEEPSEEK, Layout(dp_shard=2, ep=2, expert_dispatch="halves", zero_stage=3), LOSSES),
        (
            GPT_OSS,
            Layout(dp_shard=4, ep=2, expert_dispatch="once_per_rank", zero_stage=3),
            CAPACITY,
        ),
        pytest.param(
            GPT_OSS, Layout(dp_shard=4, ep=4, zero_stage=1), LOSSES, marks=pytest.mark.long
        ),
        (
            DEEPSEEK,
            Layout(dp_replicate=2, dp_shard=2, ep=2, expert_dispatch="once_per_rank", zero_stage=2),
            CAPACITY,
        ),
        (
            DEEPSEEK,
            Layout(dp_shard=2, ep=2, expert_dispatch="once_per_rank", zero_stage=3, wrap_blocks=2),
            IDLE,
        ),
        pytest.param(
            MIXTRAL,
            Layout(dp_shard=4, ep=4, expert_dispatch="once_per_rank", zero_stage=1),
            LOSSES,
            marks=pytest.mark.long,
        ),
        (GPT_OSS, Layout(dp_shard=4, ep=4, expert_dispatch="halves", zero_stage=2), IDLE),
        # the same number of rows for every rank; with a low limit steps are repeated
        (MIXTRAL, Layout(dp_shard=2, ep=2, zero_stage=1, **PADDED), CAPACITY),
        (GPT_OSS, Layout(dp_shard=4, ep=2, zero_stage=3, **PADDED), LOSSES),
        (DEEPSEEK, Layout(dp_shard=2, ep=2, tp=2, zero_stage=2, **CROWDED), CAPACITY),
        (
            MIXTRAL,
            Layout(dp_shard=2, ep=2, pp=2, zero_stage=2, schedule="zb_h1", **CROWDED),
            VerificationCase(4, "full", router_losses=True),
        ),
        (GPT_OSS, Layout(cp=2, ep=2, cp_method="ring", **CROWDED), IDLE),
        # context parallelism
        (MIXTRAL, Layout(cp=2, cp_method="all_gather"), CAPACITY),
        (DEEPSEEK, Layout(cp=2, ep=2, expert_dispatch="halves", cp_method="ring"), LOSSES),
        (
            GPT_OSS,
            Layout(cp=2, ep=2, expert_dispatch="once_per_rank", zero_stage=3, cp_method="ring"),
            CAPACITY,
        ),
        (MIXTRAL, Layout(dp_replicate=2, cp=2, ep=2, cp_method="all_gather"), CAPACITY),
        # pipelines
        (DEEPSEEK, Layout(pp=2), VerificationCase(4, "none", router_losses=True)),
        (
            MIXTRAL,
            Layout(
                dp_shard=2, ep=2, expert_dispatch="halves", pp=2, zero_stage=2, schedule="zb_h1"
            ),
            VerificationCase(4, "full", router_losses=True),
        ),
        pytest.param(
            MIXTRAL,
            Layout(
                dp_shard=2,
                ep=2,
                expert_dispatch="once_per_rank",
                pp=2,
                zero_stage=2,
                schedule="zb_h1",
            ),
            VerificationCase(4, "full", router_losses=True),
            marks=pytest.mark.long,
        ),
        # tensor parallelism
        (GPT_OSS, Layout(tp=2), CAPACITY),
        (DEEPSEEK, Layout(tp=2, sequence_parallel=False), LOSSES),
        (DEEPSEEK, Layout(dp_shard=2, ep=2, expert_dispatch="halves", tp=2, zero_stage=3), LOSSES),
        (
            GPT_OSS,
            Layout(
                dp_shard=2,
                ep=2,
                expert_dispatch="once_per_rank",
                tp=2,
                zero_stage=1,
                sequence_parallel=False,
            ),
            LOSSES,
        ),
    ],
    ids=str,
)
def test_experts_equal_one_process(
    ranks: RankPool, config: dict[str, Any], layout: Layout, case: VerificationCase
) -> None:
    report = verify_layout(ranks, config, layout, case)
    assert report.passed, list_failures(report)


@pytest.mark.parametrize(
    ("config", "layout", "case"),
    [
        (MIXTRAL, Layout(dp_shard=2, ep=2, expert_dispatch="deep_ep", zero_stage=1), CAPACITY),
        (DEEPSEEK, Layout(dp_shard=2, ep=2, expert_dispatch="deep_ep", zero_stage=3), LOSSES),
        (GPT_OSS, Layout(dp_shard=4, ep=4, expert_dispatch="deep_ep", zero_stage=2), IDLE),
        pytest.param(
            DEEPSEEK,
            Layout(dp_shard=2, ep=2, expert_dispatch="deep_ep", tp=2),
            CAPACITY,
            marks=pytest.mark.long,
        ),
        pytest.param(
            GPT_OSS,
            Layout(cp=2, ep=2, expert_dispatch="deep_ep", cp_method="ring"),
            LOSSES,
            marks=pytest.mark.long,
        ),
        pytest.param(
            MIXTRAL,
            Layout(
                dp_shard=2, ep=2, expert_dispatch="deep_ep", pp=2, zero_stage=2, schedule="zb_h1"
            ),
            VerificationCase(4, "full", router_losses=True),
            marks=pytest.mark.long,
        ),
    ],
    ids=str,
)
def test_deep_ep_equals_one_process(
    ranks: RankPool, config: dict[str, Any], layout: Layout, case: VerificationCase
) -> None:
    report = verify_layout(ranks, config, layout, case, deep_ep_double.install)
    assert report.passed, list_failures(report)


@contextmanager
def wrap_experts_separately() -> Iterator[None]:
    """Wrap experts separately, as FSDP2 requires before torch 2.13."""
    with patch.object(fsdp, "_build_expert_placement", lambda *_: None):
        yield


@contextmanager
def compile_around_separate_experts() -> Iterator[None]:
    """Compile the blocks, too: no hook of the experts may run inside."""
    with wrap_experts_separately(), compile_blocks():
        yield


@pytest.mark.parametrize(
    ("num_layers", "layout", "case", "context"),
    [
        (
            1,  # each layer takes seconds to compile
            Layout(dp_shard=2, ep=2, expert_dispatch="halves", zero_stage=1),
            PLAIN,
            compile_around_separate_experts,
        ),
        (2, Layout(dp_shard=4, ep=2, zero_stage=3), LOSSES, wrap_experts_separately),
    ],
    ids=["compiled", "uncompiled"],
)
def test_experts_wrapped_separately(
    ranks: RankPool,
    num_layers: int,
    layout: Layout,
    case: VerificationCase,
    context: MutationContext,
) -> None:
    config = GPT_OSS | {"num_hidden_layers": num_layers}
    report = verify_layout(ranks, config, layout, case, context)
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
        pytest.param(
            MIXTRAL,
            Layout(dp_shard=2, ep=2, expert_dispatch="halves", zero_stage=1),
            CAPACITY,
            marks=pytest.mark.long,  # test_compiled_graphs.py compares it with uncompiled blocks
        ),
        pytest.param(
            DEEPSEEK, Layout(dp_shard=2, ep=2, zero_stage=3), LOSSES, marks=pytest.mark.long
        ),
        pytest.param(GPT_OSS, Layout(dp_shard=4, ep=4, zero_stage=2), IDLE, marks=pytest.mark.long),
        pytest.param(
            DEEPSEEK,
            Layout(dp_shard=2, ep=2, expert_dispatch="halves", tp=2, zero_stage=3),
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


class RecordedStep(NamedTuple):
    """Order of a sparse layer's operations, and the loss and gradients of a step."""

    log: list[str]
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]


EVENTS = {"plan": "read", "dispatch": "issue", "combine": "issue", "wait": "wait"}
"""Events of `record_step` by the call of DeepEP."""


def record_step(layout: Layout, recompute: RecomputeKind, is_compiled: bool) -> RecordedStep:
    """Record when row counts are read, exchanges start and end, and experts run, in one sparse
    layer.
    """
    log = _order_log
    log.clear()
    precision = PrecisionSection(kind="fp64")
    patches = ExitStack()
    patches.enter_context(deep_ep_double.install(lambda call: log.append(EVENTS[call])))
    model = build_model(read_config(DEEPSEEK), layout, BatchPlan(12, 2, 1, 2), precision, seed=0)
    model.decoder.set_recompute(build_block_runner(model.decoder.shape, layout, recompute))

    def add_logging(name: str) -> None:
        module = model.decoder.get_submodule(f"layers.1.mlp.{name}")
        compute = module.forward
        module.forward = lambda *arguments: _log_call(compute(*arguments), name)

    def log_before(function: Any, event: str) -> Any:
        def call(*arguments: Any) -> Any:
            log.append(event)
            return function(*arguments)

        return call

    for name in ("shared_experts", "experts"):
        add_logging(name)
    if is_compiled:
        torch._dynamo.reset()  # graphs of earlier tests count towards torch's limit
        model.decoder.blocks[1].compile_forward(backend="aot_eager", fullgraph=True)
    ids_BT = torch.arange(24).view(2, 12)
    with patches:
        for name, event in (
            ("read_row_counts", "read"),
            ("start_all_to_all", "issue"),
            ("wait_all_to_all", "wait"),
        ):
            logged = log_before(getattr(row_exchange, name), event)
            patches.enter_context(patch.object(row_exchange, name, logged))
        loss = model.module(ids_BT, labels_BT=ids_BT, row_weight=0.0)
        log.append("backward")
        loss.backward()
    model.finish_gradients()
    gradients = {
        name: gradient.clone()
        for name, _ in model.named_parameters()
        if (gradient := model.gather_gradient(name)) is not None
    }
    return RecordedStep(list(log), loss.detach(), gradients)


_order_log: list[str] = []


@torch.library.custom_op("shardwright_tests::log_call", mutates_args=())
def _log_call(x: torch.Tensor, name: str) -> torch.Tensor:
    _order_log.append(name)
    return x.clone()


_log_call.register_fake(lambda x, name: torch.empty_like(x))
_log_call.register_autograd(
    lambda ctx, gradient: (_log_call(gradient, ctx.name), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "name", inputs[1]),
)

WHOLE = (
    ["read", "issue", "shared_experts", "wait", "experts", "issue", "wait"],
    ["issue", "wait", "experts", "issue", "shared_experts", "wait"],
)
BOTH_HALVES = ("wait", "experts", "issue") * 2
"""The second half is on its way while the first has its experts, which start to return the first
before the second has its own."""
HALVES = (
    ["read", "issue", "issue", "shared_experts", *BOTH_HALVES, "wait", "wait"],
    ["issue", "issue", *BOTH_HALVES, "shared_experts", "wait", "wait"],
)
PLACES = ["read", "issue", "wait"]
"""Numbers of rows, and the places of choices among them."""
ONCE = (
    [*PLACES, "issue", "issue", "shared_experts", "wait", "wait", "experts", "issue", "wait"],
    ["issue", "wait", "experts", "issue", "issue", "shared_experts", "wait", "wait"],
)
"""Weights are sent with the rows."""
AS_WHOLE = (WHOLE[0][1:], WHOLE[1])
"""The host reads no numbers of rows."""


@pytest.mark.parametrize(
    ("zero_stage", "recompute", "is_compiled"),
    [
        (1, "none", False),
        (3, "full", False),
        (3, "none", True),
        pytest.param(2, "selective", False, marks=pytest.mark.long),
        pytest.param(3, "full", True, marks=pytest.mark.long),
    ],
)
def test_computation_overlaps_with_the_exchange(
    ranks: RankPool, zero_stage: Any, recompute: RecomputeKind, is_compiled: bool
) -> None:
    """Shared experts run during an exchange. The experts of one half of the tokens do so too if
    the other half is exchanged by itself, with the same loss and gradients. Rows sent once per
    rank are added in another order. Padded exchanges have the order of exact ones, but no read.
    DeepEP exchanges weights with the numbers, and their gradients with those of the rows.
    """
    whole = Layout(dp_shard=2, ep=2, zero_stage=zero_stage)
    halves, once, deep_ep = (
        replace(whole, expert_dispatch=each) for each in ("halves", "once_per_rank", "deep_ep")
    )
    padded = replace(whole, **PADDED)
    orders = {whole: WHOLE, halves: HALVES, once: ONCE, padded: AS_WHOLE, deep_ep: WHOLE}
    recorded = [ranks.run(2, record_step, layout, recompute, is_compiled) for layout in orders]
    for steps, (layout, (forward, backward)) in zip(recorded, orders.items(), strict=True):
        # Recomputation keeps numbers and places and repeats the rest. Of rows sent once per rank,
        # the return of sums has no saved tensor: it is not repeated, and its gradient is exchanged
        # before. A compiler decides when it recomputes.
        num_first = len(PLACES) if forward == ONCE[0] else forward.index("issue")
        num_before = 2 if layout in (once, deep_ep) else 0
        repeated = forward[num_first : len(forward) - num_before]
        repeated = [] if recompute == "none" else repeated
        for step in steps:
            first, second = split_at_backward(step.log)
            assert first == forward
            if not (is_compiled and repeated):
                assert second == [*backward[:num_before], *repeated, *backward[num_before:]]
    for expected, *others in zip(*recorded, strict=True):
        assert torch.equal(others[0].loss, expected.loss)
        assert torch.equal(others[2].loss, expected.loss)
        for got in others:
            torch.testing.assert_close(got.loss, expected.loss, rtol=1e-14, atol=0.0)
            assert got.gradients.keys() == expected.gradients.keys()
            for name, gradient in expected.gradients.items():
                torch.testing.assert_close(got.gradients[name], gradient, rtol=1e-12, atol=1e-14)


def split_at_backward(log: list[str]) -> tuple[list[str], list[str]]:
    """Split a log into forward and backward pass."""
    start = log.index("backward")
    return log[:start], log[start + 1 :]
