"""Traffic is issued before the products that hide it: the order on CPU ranks, where nothing depends
on a device's timing.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.config.training import PrecisionSection
from shardwright.layout import Layout
from shardwright.rehearse.collective_recorder import COLLECTIVE_NAMESPACES, parse_operator
from shardwright.train.step import accumulate_gradients
from tests.multiprocess.models import LLAMA
from tests.multiprocess.pool import RankPool
from tests.multiprocess.test_layouts import build, micro_batches

LAYERS: int = LLAMA["num_hidden_layers"]
PRODUCTS = 7
"""Matrix products of a block's forward pass: query, key, value, out, gate, up, down."""


class Order(TorchDispatchMode):
    """What is issued, in order: kinds of collectives, and `product` for a matrix product."""

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


def order_of_a_step(layout: Layout) -> list[str]:
    """Of a third step with one micro-batch, on this rank."""
    model = build(layout, PrecisionSection(kind="fp32"))
    for _ in range(3):
        with Order() as order:
            accumulate_gradients(model, micro_batches(dist.get_rank())[:1], seed=0, step=0)
    return order.issued


def issued_before(issued: list[str], kind: str, product: int) -> int:
    """How many of a kind are issued before the given product (counted from 0, from the end where
    negative).
    """
    places = [place for place, what in enumerate(issued) if what == "product"]
    return issued[: places[product]].count(kind)


@pytest.mark.parametrize(("prefetch_depth", "ahead"), [(0, 0), (1, 1)])
def test_parameters_are_gathered_before_the_block_in_front_computes(
    ranks: RankPool, prefetch_depth: int, ahead: int
) -> None:
    layout = Layout(dp_shard=2, zero_stage=3, prefetch_depth=prefetch_depth)
    for issued in ranks.run(2, order_of_a_step, layout):
        for block in range(LAYERS):
            there = 1 + min(block + 1 + ahead, LAYERS)  # the root's, its own, and those ahead
            assert issued_before(issued, "all_gather", block * PRODUCTS) == there


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_are_scattered_while_earlier_blocks_go_back(ranks: RankPool, stage: int) -> None:
    for issued in ranks.run(2, order_of_a_step, Layout(dp_shard=2, zero_stage=stage)):  # type: ignore[arg-type]
        # All blocks but the first have sent theirs when the backward pass comes to its last
        # product.
        assert issued_before(issued, "reduce_scatter", -1) == LAYERS - 1
        assert issued_before(issued, "reduce_scatter", -2 * PRODUCTS) >= LAYERS - 2


def test_buckets_are_reduced_while_the_backward_pass_goes_on(ranks: RankPool) -> None:
    for issued in ranks.run(2, order_of_a_step, Layout(dp_replicate=2, bucket_size_bytes=8192)):
        assert issued.count("all_reduce") >= 3
        assert issued_before(issued, "all_reduce", -1) >= issued.count("all_reduce") - 2
