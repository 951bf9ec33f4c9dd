"""Expert loads: reading and monitoring."""

from __future__ import annotations

import torch

from shardwright.architecture import read_config
from shardwright.training.metrics.expert_load import (
    ExpertLoadMonitor,
    ExpertLoads,
    read_expert_loads,
)
from tests.reference.cases import CASES


def make_loads(*tokens: int, layer: int = 3) -> ExpertLoads:
    return ExpertLoads({layer: tokens}, 0, 0.0, 0.0)


def test_loads_of_sparse_layers_are_read_from_a_table() -> None:
    shape = read_config(CASES["deepseek_v3"])  # one dense layer, two sparse ones
    table = torch.zeros(3, 8 + 3, dtype=torch.float64)
    table[1:, :8] = torch.tensor([[4, 0, 0, 0, 0, 0, 0, 4], [1, 1, 1, 1, 1, 1, 1, 1]])
    table[1:, 8:] = torch.tensor([[2, 6.0, 1.0], [1, 3.0, 2.0]])
    loads = read_expert_loads(table, shape, num_rows=3)
    assert loads.tokens_by_layer == {1: (4, 0, 0, 0, 0, 0, 0, 4), 2: (1,) * 8}
    assert (loads.num_dropped, loads.balance_loss, loads.z_loss, loads.max_load_ratio) == (
        3,
        1.5,
        0.5,
        4.0,
    )


def test_an_overloaded_expert_is_reported_once_with_numbers() -> None:
    # With four experts the limit is 2.5 times the even share.
    monitor = ExpertLoadMonitor(experts_per_token=1)
    even = make_loads(25, 25, 25, 25)
    heavy = make_loads(5, 85, 5, 5)
    assert [monitor.observe(heavy) for _ in range(monitor.WINDOW_STEPS - 1)] == [None] * (
        monitor.WINDOW_STEPS - 1
    )
    message = monitor.observe(heavy)
    assert message is not None
    assert "expert 1 of layer 3" in message
    assert "3.4 times its even share" in message
    assert "85 of 100 choices (85%; even is 25%)" in message
    assert monitor.observe(heavy) is None
    assert all(monitor.observe(even) is None for _ in range(60))
    assert sum(monitor.observe(heavy) is not None for _ in range(60)) == 1


def test_short_bursts_are_not_reported() -> None:
    monitor = ExpertLoadMonitor(experts_per_token=1)
    for step in range(100):
        assert (
            monitor.observe(
                make_loads(0, 100, 0, 0) if step % 10 == 9 else make_loads(25, 25, 25, 25)
            )
            is None
        )
