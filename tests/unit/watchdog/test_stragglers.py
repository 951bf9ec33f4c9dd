"""A slow rank is named within the steps that the recipe says, and nobody is on a clean run, however
restless the machine.
"""

from __future__ import annotations

import random

import pytest

from shardwright.watchdog.stragglers import StragglerDetector


def steps_until_named(
    watch: StragglerDetector, slow: int, factor: float, chance: random.Random
) -> int:
    for step in range(1, 100):
        own = [
            chance.gauss(1.0, 0.05) * (factor if rank == slow and step > 20 else 1.0)
            for rank in range(4)
        ]
        if (told := watch.observe(own)) is not None:
            assert told.startswith(f"rank {slow} is slow")
            return step - 20
    raise AssertionError("nobody was named")


@pytest.mark.parametrize("peers", [[[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0], [1], [2], [3]]])
def test_a_slow_rank_is_named_in_time(peers: list[list[int]]) -> None:
    for seed in range(20):
        assert (
            steps_until_named(StragglerDetector(1.5, 15, peers), 2, 1.9, random.Random(seed)) <= 20
        )


def test_a_stage_with_more_work_is_not_slow() -> None:
    watch = StragglerDetector(1.5, 15, [[0], [1], [2], [3]])
    assert not any(watch.observe([1.0, 1.0, 3.0, 1.0]) for _ in range(200))
    told = [watch.observe([1.0, 2.0, 3.0, 1.0]) for _ in range(20)]
    assert any(
        line is not None and line.startswith("rank 1 is slow: its own work took 2.0 times")
        for line in told
    )


def test_hiccups_name_nobody_and_an_end_is_told() -> None:
    chance = random.Random(1)
    watch = StragglerDetector(1.5, 15, [[0, 1]])
    for _ in range(20_000):  # one step in thirty takes up to ten times as long
        own = [
            chance.gauss(1.0, 0.1) * (chance.uniform(1, 10) if chance.random() < 1 / 30 else 1)
            for _ in range(2)
        ]
        told = watch.observe(own)
        if told is not None:
            pytest.fail(told)
    for _ in range(20):
        watch.observe([1.0, 3.0])
    assert "rank 1 is as fast as its peers again" in [watch.observe([1.0, 1.0]) for _ in range(10)]
