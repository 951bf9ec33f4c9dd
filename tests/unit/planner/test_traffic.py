"""Bytes that a cut sends by the planner's formulas: those that tests/multiprocess/test_traffic.py counts on real ranks."""

from __future__ import annotations

from typing import Any

import pytest

from shardwright.layout import CpMethod, Layout
from shardwright.planner.candidate import Candidate
from shardwright.planner.communication import Group, groups_of
from shardwright.planner.facts import ModelFacts
from shardwright.planner.traffic import _context
from tests.unit.planner import models

TOKENS, ROWS = 128, 2


class Counting:
    """A network on which a byte that a rank sends takes a second."""

    def all_gather(self, group: Group, num_bytes: float) -> float:
        return num_bytes * (group.num_ranks - 1) / group.num_ranks

    reduce_scatter = all_to_all = all_gather

    def send(self, group: Group, num_bytes: float) -> float:
        return num_bytes


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize(("precision", "wide"), [("bf16", 2.0), ("fp32", 1.0)])
def test_context_parallelism_sends_what_real_ranks_were_seen_to_send(degree: int, precision: Any, wide: float) -> None:
    facts, size = ModelFacts(models.shape("llama")), 4 / wide

    def sent(method: CpMethod) -> tuple[float, float]:
        layout = Layout(cp=degree, cp_method=method)
        candidate = Candidate(layout, TOKENS, ROWS, precision=precision)
        network: Any = Counting()
        forward, backward, _ = _context(facts, candidate, network, groups_of(layout)["cp"])
        return forward, backward

    pair = 2 * ROWS * (TOKENS / degree) * 4 * 32 * size  # four heads of 32 for keys and values
    # Keys and values stop before they come home, in both passes; their gradients, in fp32, come home.
    assert sent("ring") == pytest.approx(((degree - 1) * pair, (degree - 1) * pair + degree * wide * pair))
    gathered = (degree - 1) * pair
    assert sent("all_gather") == pytest.approx((gathered, gathered * (1 + wide)))
    heads = 2 * ROWS * (TOKENS / degree) * (8 + 4) * 32 * size * (degree - 1) / degree
    assert sent("ulysses") == pytest.approx((heads, heads))
