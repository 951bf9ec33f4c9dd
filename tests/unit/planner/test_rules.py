"""The planner's rules are the engine's: what one turns down, the other refuses."""

from __future__ import annotations

from itertools import product

import pytest

from shardwright import placement
from shardwright.errors import InputError
from shardwright.layout import Layout
from shardwright.layout_rules import check_layout
from shardwright.planner.divisibility import explain_layout_conflict, list_divisors, list_schedules
from shardwright.planner.model_costs import ModelFacts
from tests.unit.planner import models


def engine_refuses(shape: object, layout: Layout, sequence_length: int) -> bool:
    try:
        check_layout(shape, layout, sequence_length)  # type: ignore[arg-type]
    except InputError:
        return True
    return False


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe"])
@pytest.mark.parametrize("sequence_length", [96, 100])
def test_what_the_planner_turns_down_the_engine_refuses(name: str, sequence_length: int) -> None:
    shape = models.shape(name)
    facts = ModelFacts(shape)
    differ = []
    for tp, cp, pp, ep, parallel in product(
        (1, 2, 3, 16), (1, 2, 3), (1, 4, 5), (1, 3, 8), (True, False)
    ):
        shards = ep if ep > 1 else 1
        for method in ("ring", "all_gather", "ulysses") if cp > 1 else ("auto",):
            layout = Layout(
                tp=tp, cp=cp, pp=pp, ep=ep, dp_shard=shards, zero_stage=3, sequence_parallel=parallel, cp_method=method
            )  # fmt: skip
            if (
                explain_layout_conflict(facts, layout, sequence_length, 8) is not None
            ) != engine_refuses(shape, layout, sequence_length):
                differ.append(
                    (str(layout), explain_layout_conflict(facts, layout, sequence_length, 8))
                )
    assert differ == []


def test_every_schedule_that_is_offered_can_be_cut_into_stages() -> None:
    shape = models.shape("llama")
    facts = ModelFacts(shape)
    for pp, num in product((2, 3, 4), (1, 2, 4, 6, 8)):
        offered = list(list_schedules(facts, pp, num))
        assert ("1f1b", None) in offered
        for schedule, virtual in offered:
            assert placement.partition_stages(
                shape, Layout(pp=pp, schedule=schedule, virtual_stages=virtual), 128
            )


def test_divisors_of_one_and_of_primes() -> None:
    assert list_divisors(1) == (1,)
    assert list_divisors(13) == (1, 13)
    assert list_divisors(16384) == tuple(2**power for power in range(15))
