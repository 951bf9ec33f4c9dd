"""Bytes that a cut sends by the planner's formulas: those that tests/multiprocess/test_traffic.py
counts on real ranks.
"""

from __future__ import annotations

from typing import Any

import pytest

from shardwright.layout import CpMethod, Layout
from shardwright.planner import Efficiency
from shardwright.planner.candidate import Candidate
from shardwright.planner.communication import NetworkModel, StridedGroup, build_groups
from shardwright.planner.model_costs import ModelFacts
from shardwright.planner.published.conventions import FrameworkConventions
from shardwright.planner.traffic import (
    _compute_context_seconds,
    _compute_expert_seconds,
    _get_expert_overlap,
)
from tests.unit.planner import models

TOKENS = 128
ROWS = 2


class Counting:
    """A network on which a byte that a rank sends takes a second."""

    def time_all_gather(self, group: StridedGroup, num_bytes: float) -> float:
        return num_bytes * (group.num_ranks - 1) / group.num_ranks

    time_reduce_scatter = time_all_to_all = time_all_gather

    def time_send(self, group: StridedGroup, num_bytes: float) -> float:
        return num_bytes


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize(("precision", "wide"), [("bf16", 2.0), ("fp32", 1.0)])
def test_context_parallelism_sends_what_real_ranks_were_seen_to_send(
    degree: int, precision: Any, wide: float
) -> None:
    facts = ModelFacts(models.shape("llama"))
    size = 4 / wide

    def sent(method: CpMethod) -> tuple[float, float]:
        layout = Layout(cp=degree, cp_method=method)
        candidate = Candidate(layout, TOKENS, ROWS, precision=precision)
        network: Any = Counting()
        forward, backward, _ = _compute_context_seconds(
            facts, candidate, network, build_groups(layout)["cp"]
        )
        return forward, backward

    pair = 2 * ROWS * (TOKENS / degree) * 4 * 32 * size  # four heads of 32 for keys and values
    # Keys and values stop before they come home, in both passes; their gradients, in fp32, come
    # home.
    assert sent("ring") == pytest.approx(
        ((degree - 1) * pair, (degree - 1) * pair + degree * wide * pair)
    )
    gathered = (degree - 1) * pair
    assert sent("all_gather") == pytest.approx((gathered, gathered * (1 + wide)))
    heads = 2 * ROWS * (TOKENS / degree) * (8 + 4) * 32 * size * (degree - 1) / degree
    assert sent("ulysses") == pytest.approx((heads, heads))


RECIPES = FrameworkConventions("recipes", has_node_dispatch=True)


class Sending(Counting):
    """Notes what an exchange sends: in all, and of that between domains."""

    def __init__(self, per_node: int) -> None:
        self.cluster = models.cluster(16, per_node=per_node)
        self.sent: list[tuple[StridedGroup, float, float]] = []

    def time_dispatch(self, group: StridedGroup, num_bytes: float, crossing_bytes: float) -> float:
        self.sent.append((group, num_bytes, crossing_bytes))
        return 0.0


def exchange(
    layout: Layout, engine: FrameworkConventions, per_node: int = 16
) -> tuple[tuple[StridedGroup, float, float], float]:
    """What a rank's rows take one way, and the seconds of all else."""
    facts = ModelFacts(models.shape("qwen3_moe"))
    network = Sending(per_node)
    kind = next(kind for kind in facts.kinds if kind.shape.sparse)
    candidate = Candidate(layout, TOKENS, ROWS, engine=engine)
    others = _compute_expert_seconds(facts, kind, candidate, network, build_groups(layout))  # type: ignore[arg-type]
    return network.sent[0], others


def test_a_row_goes_once_to_each_rank_and_domain_that_holds_one_of_its_experts() -> None:
    (group, sent, crossing), _ = exchange(
        Layout(dp_shard=4, ep=4, zero_stage=1), RECIPES, per_node=2
    )
    token = ROWS * TOKENS * 256 * 2  # bf16
    assert group == StridedGroup(4, 1)
    assert sent == pytest.approx(token * 4 * (1 - 0.75**2)), "two draws from four ranks"
    assert crossing == pytest.approx(token * 2 * (1 - 0.5**2) * 0.5), (
        "two draws from two domains, one of them the own"
    )


def test_whole_experts_on_tensor_parallel_ranks_are_sent_a_part_of_the_sequence_by_each() -> None:
    layout = Layout(dp_shard=4, tp=2, ep=4, zero_stage=1, sequence_parallel=True)
    (group, sent, _), others = exchange(
        layout, FrameworkConventions("recipes", has_node_dispatch=True, has_unsharded_experts=True)
    )
    (cut_group, cut_sent, _), cut_others = exchange(layout, RECIPES)
    token = ROWS * TOKENS * 256 * 2
    assert (group, cut_group) == (StridedGroup(8, 1), StridedGroup(4, 2))
    assert sent == pytest.approx(token / 2 * 8 * (1 - (7 / 8) ** 2))
    assert cut_sent == pytest.approx(token / 2 * 4 * (1 - (3 / 4) ** 2))
    assert others == 0.0
    assert cut_others == pytest.approx(2 * token * 2 / 2), (
        "a cut expert's ranks gather each other's rows, and sum what comes of them"
    )


def test_rows_that_leave_a_domain_overlap_otherwise_than_those_that_stay() -> None:
    efficiency = Efficiency(expert_overlap=0.5, near_expert_overlap=0.25)
    layout = Layout(dp_shard=8, ep=8, zero_stage=1)
    within, across = (NetworkModel(models.cluster(8, per_node=n), efficiency) for n in (8, 4))
    assert _get_expert_overlap(Candidate(layout, TOKENS), within) == 0.25
    assert _get_expert_overlap(Candidate(layout, TOKENS), across) == 0.5
