"""Two measurements of one machine's rates as one profile."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.predicted import combine_profiles

from shardwright.hardware import (
    AttentionRate,
    CollectiveRate,
    ElementwiseRate,
    MatmulRate,
    MeasuredProfile,
)


def make_profile(scale: float, step_seconds: float | None) -> MeasuredProfile:
    """Return a profile whose rates are `scale` times as high."""
    return MeasuredProfile(
        "cpu",
        None,
        "2026",
        2**30,
        1e9 * scale,
        (MatmulRate("fp32", 8, 8, 8, 1e9 * scale),),
        (CollectiveRate("all_gather", 2, 2, 64, 1e-3 / scale, None, step_seconds),),
        attention=(AttentionRate("fp32", 8, 8, 1e9 * scale, 1e9 / scale),),
        elementwise=(ElementwiseRate("fp32", 8, 8, 1e9, 1e9 * scale),),
        handoff_seconds=1e-3 * scale,
    )


def test_the_faster_rates_and_mean_times_of_two_profiles_count() -> None:
    combined = combine_profiles(make_profile(1.0, 2e-3), make_profile(2.0, 4e-3))
    assert combined.memory_bytes_per_second == 2e9
    assert combined.matmuls[0].flops_per_second == 2e9
    (collective,) = combined.collectives
    assert (collective.seconds, collective.processor_seconds) == (5e-4, None)
    assert collective.step_seconds == pytest.approx(3e-3)
    attention = combined.attention[0]
    assert (attention.forward_flops_per_second, attention.backward_flops_per_second) == (2e9, 1e9)
    assert combined.handoff_seconds == pytest.approx(1.5e-3)
    assert combine_profiles(make_profile(1.0, None), make_profile(1.0, None)).collectives == (
        CollectiveRate("all_gather", 2, 2, 64, 1e-3),
    )


def test_rates_of_different_shapes_are_not_combined() -> None:
    first = make_profile(1.0, None)
    other = replace(first, matmuls=(MatmulRate("fp32", 16, 8, 8, 1e9),))
    with pytest.raises(AssertionError):
        combine_profiles(first, other)
