"""Communication starts before the products that it overlaps with: the order on CPU ranks, which
does not depend on a device's timing.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.config.training import PrecisionSection
from shardwright.layout import Layout
from shardwright.rehearsal.collective_recorder import COLLECTIVE_NAMESPACES, parse_operator
from shardwright.training.step import accumulate_gradients
from tests.multiprocess.models import LLAMA
from tests.multiprocess.pool import RankPool
from tests.multiprocess.test_layouts import build, micro_batches

LAYERS: int = LLAMA["num_hidden_layers"]
PRODUCTS = 7
"""Matrix products of a block's forward pass: query, key, value, out, gate, up, down."""


class OperationRecorder(TorchDispatchMode):
    """Records operations in order: kinds of collectives, and `product` for a matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.issued: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition("::")[2].partition(".")[0]
        if func.namespace in COLLECTIVE_NAMESPACES:
            call = parse_operator(name, args)
            if call is not None and call.num_bytes > 8:
                self.issued.append(call.kind)
        elif name in ("mm", "addmm", "bmm"):
            self.issued.append("product")
        return func(*args, **(kwargs or {}))


def record_step(layout: Layout) -> list[str]:
    """Return the operations of a third step with one micro-batch on this rank."""
    model = build(layout, PrecisionSection(kind="fp32"))
    for _ in range(3):
        with OperationRecorder() as order:
            accumulate_gradients(model, micro_batches(dist.get_rank())[:1], seed=0, step=0)
    return order.issued


def count_issued_before(issued: list[str], kind: str, product: int) -> int:
    """Count the operations of a kind before a product, which is counted from 0 or, if negative,
    from the end.
    """
    products = [i for i, operation in enumerate(issued) if operation == "product"]
    return issued[: products[product]].count(kind)


@pytest.mark.parametrize(("prefetch_depth", "ahead"), [(0, 0), (1, 1)])
def test_parameters_are_gathered_before_the_preceding_block_computes(
    gloo_ranks: RankPool, prefetch_depth: int, ahead: int
) -> None:
    layout = Layout(dp_shard=2, zero_stage=3, prefetch_depth=prefetch_depth)
    for issued in gloo_ranks.run(2, record_step, layout):
        for block in range(LAYERS):
            # The root's, its own, and those ahead.
            expected = 1 + min(block + 1 + ahead, LAYERS)
            assert count_issued_before(issued, "all_gather", block * PRODUCTS) == expected


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_are_scattered_during_the_backward_pass_of_earlier_blocks(
    gloo_ranks: RankPool, stage: int
) -> None:
    layout = Layout(dp_shard=2, zero_stage=stage)  # type: ignore[arg-type]
    for issued in gloo_ranks.run(2, record_step, layout):
        # All blocks but the first have started theirs before the last product of the backward
        # pass.
        assert count_issued_before(issued, "reduce_scatter", -1) == LAYERS - 1
        assert count_issued_before(issued, "reduce_scatter", -2 * PRODUCTS) >= LAYERS - 2


def test_buckets_are_reduced_during_the_backward_pass(gloo_ranks: RankPool) -> None:
    for issued in gloo_ranks.run(2, record_step, Layout(dp_replicate=2, bucket_size_bytes=8192)):
        assert issued.count("all_reduce") >= 3
        assert count_issued_before(issued, "all_reduce", -1) >= issued.count("all_reduce") - 2
