"""A slow rank is reported within the configured steps; a healthy run has no reports."""

from __future__ import annotations

import random

import pytest

from shardwright.watchdog.stragglers import StragglerDetector


def count_steps_until_reported(
    detector: StragglerDetector, slow: int, factor: float, generator: random.Random
) -> int:
    for step in range(1, 100):
        own = [
            generator.gauss(1.0, 0.05) * (factor if rank == slow and step > 20 else 1.0)
            for rank in range(4)
        ]
        if (message := detector.observe(own)) is not None:
            assert message.startswith(f"rank {slow} is slow")
            return step - 20
    raise AssertionError("no rank was reported")


@pytest.mark.parametrize("peers", [[[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0], [1], [2], [3]]])
def test_a_slow_rank_is_reported_in_time(peers: list[list[int]]) -> None:
    for seed in range(20):
        assert (
            count_steps_until_reported(
                StragglerDetector(1.5, 15, peers), 2, 1.9, random.Random(seed)
            )
            <= 20
        )


def test_a_stage_with_more_work_is_not_slow() -> None:
    detector = StragglerDetector(1.5, 15, [[0], [1], [2], [3]])
    assert not any(detector.observe([1.0, 1.0, 3.0, 1.0]) for _ in range(200))
    message = [detector.observe([1.0, 2.0, 3.0, 1.0]) for _ in range(20)]
    assert any(
        line is not None and line.startswith("rank 1 is slow: its own work took 2.0 times")
        for line in message
    )


def test_random_delays_are_not_reported_and_a_recovery_is() -> None:
    generator = random.Random(1)
    detector = StragglerDetector(1.5, 15, [[0, 1]])
    for _ in range(20_000):  # one step in thirty takes up to ten times as long
        own = [
            generator.gauss(1.0, 0.1)
            * (generator.uniform(1, 10) if generator.random() < 1 / 30 else 1)
            for _ in range(2)
        ]
        message = detector.observe(own)
        if message is not None:
            pytest.fail(message)
    for _ in range(20):
        detector.observe([1.0, 3.0])
    assert "rank 1 is as fast as its peers again" in [
        detector.observe([1.0, 1.0]) for _ in range(10)
    ]
