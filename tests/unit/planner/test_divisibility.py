"""The planner rejects the layouts that the engine refuses, and no others."""

from __future__ import annotations

from itertools import product

import pytest

from shardwright import placement
from shardwright.errors import InputError
from shardwright.layout import Layout
from shardwright.placement import place_model
from shardwright.planner.model_costs import ModelFacts
from shardwright.planner.search.divisibility import (
    explain_layout_conflict,
    list_divisors,
    list_schedules,
)
from shardwright.schedule.registry import PIPELINE_SCHEDULES, build_schedule
from tests.unit.planner import models


def is_refused_by_engine(shape: object, layout: Layout, sequence_length: int) -> bool:
    try:
        place_model(shape, layout, sequence_length)  # type: ignore[arg-type]
    except InputError:
        return True
    return False


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe"])
@pytest.mark.parametrize("sequence_length", [96, 100])
def test_the_planner_and_the_engine_refuse_the_same_layouts(
    name: str, sequence_length: int
) -> None:
    shape = models.read_shape(name)
    facts = ModelFacts(shape)
    differences = []
    for tp, cp, pp, ep, parallel in product(
        (1, 2, 3, 16), (1, 2, 3), (1, 4, 5), (1, 3, 8), (True, False)
    ):
        shards = ep if ep > 1 else 1
        for method in ("ring", "all_gather", "ulysses") if cp > 1 else ("auto",):
            layout = Layout(
                tp=tp, cp=cp, pp=pp, ep=ep, dp_shard=shards, zero_stage=3,
                sequence_parallel=parallel, cp_method=method,
            )  # fmt: skip
            if (
                explain_layout_conflict(facts, layout, sequence_length, 8) is not None
            ) != is_refused_by_engine(shape, layout, sequence_length):
                differences.append(
                    (str(layout), explain_layout_conflict(facts, layout, sequence_length, 8))
                )
    assert differences == []


def test_the_planner_and_the_engine_refuse_the_same_schedules() -> None:
    shape = models.read_shape("llama")
    facts = ModelFacts(shape)
    for schedule, virtual, pp, num in product(
        PIPELINE_SCHEDULES, (None, 1, 2, 9), (2, 3, 4), (1, 2, 6)
    ):
        layout = Layout(pp=pp, schedule=schedule, virtual_stages=virtual)
        try:
            placement.partition_stages(shape, layout, 128)
            build_schedule(schedule, pp, num, virtual)
        except InputError as error:
            refusal: InputError | None = error
        else:
            refusal = None
        conflict = explain_layout_conflict(facts, layout, 128, num)
        assert (conflict is None) == (refusal is None), (layout, num, conflict, refusal)


def test_layers_can_be_partitioned_for_every_listed_schedule() -> None:
    shape = models.read_shape("llama")
    facts = ModelFacts(shape)
    for pp, num in product((2, 3, 4), (1, 2, 4, 6, 8)):
        schedules = list(list_schedules(facts, pp, num))
        assert ("1f1b", None) in schedules
        for schedule, virtual in schedules:
            assert placement.partition_stages(
                shape, Layout(pp=pp, schedule=schedule, virtual_stages=virtual), 128
            )


def test_divisors_of_one_and_of_primes() -> None:
    assert list_divisors(1) == (1,)
    assert list_divisors(13) == (1, 13)
    assert list_divisors(16384) == tuple(2**power for power in range(15))
