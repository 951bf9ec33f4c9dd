"""Formulas of activations in flight equal counts on the schedules."""

from __future__ import annotations

import pytest

from shardwright.errors import ScheduleError
from shardwright.planner.time.pipeline import count_passes_in_flight
from shardwright.schedule import count_peak_activations, load_schedule
from shardwright.schedule.registry import PIPELINE_SCHEDULES


@pytest.mark.parametrize("name", PIPELINE_SCHEDULES)
def test_formulas_equal_counts_on_the_schedules(name: str) -> None:
    compared = 0
    for virtual in (2, 3, 5) if name == "interleaved_1f1b" else (None,):
        for ranks in range(1, 8):
            for micro_batches in range(1, 21):
                try:
                    schedule = load_schedule(name, ranks, micro_batches, virtual)
                except ScheduleError:
                    continue  # the schedule does not support these numbers
                assert count_passes_in_flight(
                    name, ranks, micro_batches, virtual
                ) == count_peak_activations(schedule), (ranks, micro_batches)
                compared += 1
    assert compared > 50
