"""Intervals of predictions and probabilities of fitting."""

from __future__ import annotations

import math
import re

import pytest

from shardwright.hardware import find_node
from shardwright.hardware.cluster_spec import Accelerator
from shardwright.planner.uncertainty import (
    MIN_FIT_PROBABILITY,
    ErrorSpread,
    ErrorSpreads,
    load_error_spreads,
)

SPREADS = ErrorSpreads(
    {
        quantity: {
            "base": ErrorSpread(0.03, 0.06),
            "trainer": ErrorSpread(0.04, 0.08),
            "accelerator": ErrorSpread(0.0, 0.1),
            "sparse": ErrorSpread(0.4, 0.0),
            "own": ErrorSpread(0.015, 0.025),
            "cpu": ErrorSpread(0.01, 0.02),
        }
        for quantity in ("time", "memory")
    },
    {"time": {"measured": 30, "Hopper": 10**9}},
)


def find_accelerator(name: str) -> Accelerator:
    return find_node(name).accelerator


def test_the_ends_of_an_interval_are_the_tenth_and_ninetieth_percentile() -> None:
    spread = ErrorSpread(0.05, 0.2)
    low, high = spread.apply(70.0)
    assert low == pytest.approx(70 * math.exp(-0.05))
    assert high == pytest.approx(70 * math.exp(0.2))
    assert spread.compute_probability(70.0, high) == pytest.approx(MIN_FIT_PROBABILITY)
    assert spread.compute_probability(70.0, low) == pytest.approx(1 - MIN_FIT_PROBABILITY)
    assert spread.compute_probability(70.0, 70.0) == pytest.approx(0.5)


def test_without_spread_a_value_fits_or_does_not() -> None:
    exact = ErrorSpread()
    assert [exact.compute_probability(1.0, limit) for limit in (0.0, 0.99, 1.0, 2.0)] == [
        0.0,
        0.0,
        1.0,
        1.0,
    ]


def test_causes_add_up_and_shrink_with_measurements() -> None:
    h100 = find_accelerator("H100")
    unmeasured = SPREADS.get_uncertainty(h100, "new", is_sparse=False).time
    assert unmeasured.low == pytest.approx(0.05, rel=1e-3)  # hypot(0.03, 0.04)
    assert unmeasured.high == pytest.approx(0.10, rel=1e-3)
    measured = SPREADS.get_uncertainty(h100, "measured", is_sparse=False).time
    assert measured.low == pytest.approx(math.hypot(0.03, 0.04 / 2), rel=1e-3)  # 30 rows: 1/4
    sparse = SPREADS.get_uncertainty(h100, "measured", is_sparse=True).time
    assert sparse.low == pytest.approx(math.hypot(measured.low, 0.4))
    assert sparse.high == measured.high
    other = SPREADS.get_uncertainty(find_accelerator("A100"), "measured", is_sparse=False).time
    assert other.high == pytest.approx(math.hypot(measured.high, 0.1), rel=1e-3)


def test_memory_of_our_own_engine_has_a_spread_of_its_own() -> None:
    h100 = find_accelerator("H100")
    own = SPREADS.get_uncertainty(h100, "shardwright", is_sparse=False)
    sparse = SPREADS.get_uncertainty(h100, "shardwright", is_sparse=True)
    other = SPREADS.get_uncertainty(h100, "new", is_sparse=False)
    assert own.memory.low == pytest.approx(0.015)
    assert own.memory.high == pytest.approx(math.hypot(0.025, 0.1))
    assert sparse.memory.low == pytest.approx(math.hypot(0.015, 0.4))
    assert other.memory.low == pytest.approx(0.05)
    assert own.time == other.time


def test_measured_ranks_of_a_cpu_have_a_spread_of_their_own() -> None:
    cpu = find_accelerator("CPU")
    uncertainty = SPREADS.get_uncertainty(cpu, "shardwright", is_sparse=True, is_measured=True)
    assert uncertainty.time == ErrorSpread(0.01, 0.02)
    assert uncertainty.evidence == "rates measured on these ranks"
    assert SPREADS.get_uncertainty(cpu, "shardwright", is_sparse=False).time.high > 0.1


def test_packaged_intervals_are_wide_where_nothing_was_measured() -> None:
    spreads = load_error_spreads()
    h100 = find_accelerator("H100")
    own = spreads.get_uncertainty(h100, "shardwright", is_sparse=False)
    measured = spreads.get_uncertainty(h100, "megatron-core", is_sparse=False)
    cpu = spreads.get_uncertainty(
        find_accelerator("CPU"), "shardwright", is_sparse=False, is_measured=True
    )
    unknown = spreads.get_uncertainty(h100, "unknown", is_sparse=False)
    assert unknown.time.high > own.time.high > 1.5 * measured.time.high
    assert unknown.memory.high > 2 * own.memory.high
    assert own.memory_margin > 0.05
    assert cpu.time.high < own.time.high / 2
    assert re.match(r"measured runs: [1-9]\d* of shardwright, ", own.evidence)
