"""Products that overlap with tensor-parallel communication, against blocking collectives: numbers,
order of calls, and what a recomputation repeats.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.config.recipe import RecomputeKind
from shardwright.config.training import PrecisionSection
from shardwright.data.loader import MicroBatch
from shardwright.errors import LayoutError
from shardwright.layout import Layout
from shardwright.layout.saved_results import SavedResults
from shardwright.model.products.linear import Linear
from shardwright.parallel.pipelined import communication, operators
from shardwright.parallel.pipelined.products import PipelinedProducts
from shardwright.parallel.recompute import build_block_runner
from shardwright.rehearsal.collective_recorder import COLLECTIVE_NAMESPACES
from shardwright.training.step import accumulate_gradients
from shardwright.verification.cases import VerificationCase
from shardwright.verification.grid import GRID_MODELS
from tests.compiled_graphs import GraphCounter, compile_boxed
from tests.multiprocess.nccl_order.pool import OrderedRankPool
from tests.multiprocess.pool import RankPool
from tests.multiprocess.test_communication_results import MODELS, measure_step
from tests.multiprocess.test_layouts import TOKENS, build
from tests.multiprocess.test_tensor import assert_equals_one_process

FP64 = PrecisionSection(kind="fp64")
SPLIT_STREAM = Layout(tp=2)
WHOLE_STREAM = Layout(tp=2, sequence_parallel=False)
KINDS: tuple[RecomputeKind, ...] = ("none", "selective", "full")


def build_batch(num_sequences: int) -> MicroBatch:
    """Build a micro-batch that is the same on both ranks."""
    ids_BT = torch.randint(
        0, 61, (num_sequences, TOKENS), generator=torch.Generator().manual_seed(5)
    )
    positions_BT = torch.arange(TOKENS).expand_as(ids_BT)
    indices_B = torch.arange(num_sequences)
    return MicroBatch(ids_BT, ids_BT.roll(-1, 1), positions_BT, None, indices_B, ids_BT.numel())


def compute_gradients(
    layout: Layout,
    config: dict[str, Any],
    kind: RecomputeKind,
    batch: MicroBatch,
    *,
    is_compiled: bool = False,
) -> list[Tensor]:
    model = build(layout, FP64, config)
    model.decoder.set_recompute(build_block_runner(model.decoder.shape, layout, kind))
    if is_compiled:
        GraphCounter().compile(model.decoder)
    accumulate_gradients(model, [batch], seed=0, step=0)
    return [gradient for gradient, _ in model.list_gradients() if gradient is not None]


def compare_with_blocking(
    layout: Layout, config: dict[str, Any], num_sequences: int, max_chunks: int
) -> list[tuple[str, bool, float]]:
    """Return for each kind of recomputation whether all gradients are equal bit by bit, and the
    largest difference relative to the largest gradient of a parameter.
    """
    batch = build_batch(num_sequences)
    expected = compute_gradients(layout, config, "none", batch)
    assert len(expected) > 5
    results = []
    pipelined = replace(layout, async_tensor_parallel="chunked")
    for kind in KINDS:
        with patch.object(communication, "MAX_TENSOR_CHUNKS", max_chunks):
            gradients = compute_gradients(pipelined, config, kind, batch)
        pairs = list(zip(gradients, expected, strict=True))
        distance = max(float((got - want).abs().max() / want.abs().max()) for got, want in pairs)
        results.append((kind, all(torch.equal(got, want) for got, want in pairs), distance))
    return results


@pytest.mark.parametrize("layout", [SPLIT_STREAM, WHOLE_STREAM], ids=str)
@pytest.mark.parametrize("model", ["dense", pytest.param("gpt2-dropout", marks=pytest.mark.long)])
def test_one_chunk_has_the_bits_of_blocking_collectives(
    ranks: RankPool, layout: Layout, model: str
) -> None:
    """Two sequences sum a weight's gradient in another order."""
    for results in ranks.run(2, compare_with_blocking, layout, MODELS[model], 1, 1):
        assert [is_equal for _, is_equal, _ in results] == [True] * 3, results


@pytest.mark.parametrize("layout", [SPLIT_STREAM, WHOLE_STREAM], ids=str)
def test_chunks_have_the_gradients_of_blocking_collectives(ranks: RankPool, layout: Layout) -> None:
    for results in ranks.run(2, compare_with_blocking, layout, MODELS["dense"], 2, 3):
        assert all(distance < 1e-12 for _, _, distance in results), results


class OperationRecorder(TorchDispatchMode):
    """Names of products, collectives and waits in the order of their calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition("::")[2].partition(".")[0]
        if func.namespace == "shardwright":
            with self:  # the calls inside an operator of compiled code
                return getattr(operators, name)._init_fn(*args, **(kwargs or {}))
        if func.namespace in COLLECTIVE_NAMESPACES:
            self.calls.append("gather" if "gather" in name else "sum")
        elif name in ("mm", "addmm", "matmul"):
            self.calls.append("product")
        return func(*args, **(kwargs or {}))


def record_calls(sequence_parallel: bool, is_compiled: bool) -> list[list[str]]:
    """Record the passes of two layers over gathered tokens, then of one whose result is summed."""
    group = dist.group.WORLD
    assert group is not None
    pipeline = PipelinedProducts(group, "chunked", sequence_parallel)
    wait = pipeline.wait
    layers = [Linear(8, 8, bias=False) for _ in range(3)]
    x = torch.randn(1, 4, 8, requires_grad=True)
    passes = []

    def multiply(x: Tensor) -> list[Tensor]:
        return pipeline.multiply_gathered(x, [each.get_operands(x.dtype) for each in layers[:2]])

    def reduce(x: Tensor) -> Tensor:
        return pipeline.multiply_and_reduce([x], [layers[2].get_operands(x.dtype)])

    recorder = OperationRecorder()
    if is_compiled:
        multiply, reduce = compile_boxed(multiply, recorder), compile_boxed(reduce, recorder)
    # A compiler traces nothing while a recorder is active outside.
    with nullcontext() if is_compiled else recorder:

        def record_wait(_self: PipelinedProducts, works: Sequence[Any]) -> None:
            recorder.calls.append("wait")
            wait(works)

        def end_pass() -> None:
            passes.append(list(recorder.calls))
            recorder.calls.clear()

        with (
            patch.object(PipelinedProducts, "wait", record_wait),
            patch.object(communication, "MAX_TENSOR_CHUNKS", 2),
        ):
            products = multiply(x)
            end_pass()
            torch.autograd.backward(products, [torch.ones_like(each) for each in products])
            end_pass()
            reduced = reduce(products[0].detach().requires_grad_())
            end_pass()
            reduced.sum().backward()
            end_pass()
    return passes


@pytest.mark.parametrize("is_compiled", [False, True])
def test_chunks_are_communicated_beside_products(gloo_ranks: RankPool, is_compiled: bool) -> None:
    gathers = ["gather", "gather"]
    weights = ["product", "product"]
    for passes in gloo_ranks.run(2, record_calls, True, is_compiled):
        assert passes == [
            [*gathers, "wait", "product", "product", "wait", "product", "product"],
            [*["product", "product", "sum"] * 2, *weights, "wait"],
            [*["product", "sum"] * 2, "wait"],
            [*gathers, "wait", "product", "wait", "product", "product"],
        ]
    for passes in gloo_ranks.run(2, record_calls, False, is_compiled):
        assert passes == [
            weights,
            ["product", "product", "sum", *weights, "wait"],
            [*["product", "sum"] * 2, "wait"],
            ["product", "product"],
        ]


def measure_recomputation(layout: Layout, config: dict[str, Any]) -> list[Counter[str]]:
    """Return collectives and products of a step with each kind of recomputation."""
    model = build(layout, FP64, config)
    counts = []
    for kind in (*KINDS, GATHERED):
        step = measure_step(model, kind)
        counts.append(step.calls + Counter({"product": step.num_products}))
    return counts


GATHERED: SavedResults = frozenset(["gathered"])


def test_recomputation_repeats_results_that_it_does_not_keep(gloo_ranks: RankPool) -> None:
    """Two chunks for each gather and sum; four layers, and two micro-batches."""
    layout = replace(SPLIT_STREAM, async_tensor_parallel="chunked")
    num_blocks = 8
    for plain, selective, full, gathered in gloo_ranks.run(
        2, measure_recomputation, layout, MODELS["dense"]
    ):
        assert selective == plain
        assert full - plain == Counter(
            {
                "all_gather": 4 * num_blocks,
                "reduce_scatter": 2 * num_blocks,
                # Two chunks of projections, output, gate and up; the last product is not needed.
                "product": 2 * 6 * num_blocks,
            }
        )
        assert full - gathered == Counter({"all_gather": 4 * num_blocks})


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(
            Layout(tp=2, dp_shard=2, zero_stage=3, async_tensor_parallel="chunked"),
            marks=pytest.mark.long,
        ),
        Layout(tp=2, pp=2, schedule="zb_h1", async_tensor_parallel="chunked"),
    ],
    ids=str,
)
def test_with_other_parallelisms_in_nccl_order(
    ordered_ranks: OrderedRankPool, layout: Layout
) -> None:
    case = VerificationCase(2, "selective", dropout=True)
    assert_equals_one_process(ordered_ranks, GRID_MODELS["dense"], layout, case)


def register_fused_kernels() -> None:
    """Let this process run PyTorch's fused kernels on a CPU, by their own slow form."""
    global _library
    if _library is None:
        _library = torch.library.Library("symm_mem", "IMPL")
        for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
            slow = getattr(_symmetric_memory, f"_{name}_fallback")
            _library.impl(name, slow, "CPU")


_library: torch.library.Library | None = None


def compare_fused_kernels(config: dict[str, Any]) -> list[float]:
    if _library is None:
        pipeline = PipelinedProducts(dist.group.WORLD, "fused", True)
        operands = Linear(8, 8, bias=False).get_operands(torch.float32)
        with pytest.raises(LayoutError, match=r"no kernel .* for a cpu device.*Use chunked"):
            pipeline.multiply_gathered(torch.ones(1, 4, 8), [operands])
    register_fused_kernels()
    batch = build_batch(2)
    expected = compute_gradients(SPLIT_STREAM, config, "none", batch)
    distances = []
    layout = replace(SPLIT_STREAM, async_tensor_parallel="fused")
    for kind, is_compiled in [*((kind, False) for kind in KINDS), ("selective", True)]:
        gradients = compute_gradients(layout, config, kind, batch, is_compiled=is_compiled)
        pairs = zip(gradients, expected, strict=True)
        distances.append(
            max(float((got - want).abs().max() / want.abs().max()) for got, want in pairs)
        )
    return distances


@pytest.mark.parametrize("model", ["dense", pytest.param("gpt2-dropout", marks=pytest.mark.long)])
def test_fused_kernels_have_the_gradients_of_blocking_collectives(
    ranks: RankPool, model: str
) -> None:
    for distances in ranks.run(2, compare_fused_kernels, MODELS[model]):
        assert max(distances) < 1e-12
