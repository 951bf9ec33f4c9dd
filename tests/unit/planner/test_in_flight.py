"""Formulas of activations in flight equal counts on the schedules."""

from __future__ import annotations

import pytest

from shardwright.errors import ScheduleError
from shardwright.planner.time.pipeline import count_deferred_passes, count_passes_in_flight
from shardwright.schedule import Action, count_peak_activations, load_schedule
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


def list_moments(row: tuple[Action, ...]) -> set[tuple[int, int, int]]:
    """List, for every I, the passes that are saved and those that wait for their W then, and 1 if
    the latest forward pass is one of the former."""
    moments = set()
    for position, action in enumerate(row):
        if action.kind != "I":
            continue
        done = {(other.kind, other.stage, other.micro_batch) for other in row[:position]}
        started = {(stage, number) for kind, stage, number in done if kind == "F"}
        passed = {(stage, number) for kind, stage, number in done if kind in ("I", "B")}
        passed.add((action.stage, action.micro_batch))
        waiting = {
            (stage, number)
            for kind, stage, number in done
            if kind == "I" and ("W", stage, number) not in done
        }
        latest = [other[1:] for other in row[:position] if other.kind == "F"][-1]
        moments.add((len(started - passed), len(waiting), int(latest not in passed)))
    return moments


@pytest.mark.parametrize("name", ["zb_h1", "zbv", "dualpipev"])
def test_deferred_passes_are_those_of_the_whole_schedule(name: str) -> None:
    """Counted on the first micro-batches only, they are those of many, and no moment has more."""
    for ranks, micro_batches in ((2, 4), (2, 13), (3, 12), (4, 24)):
        rows = load_schedule(name, ranks, micro_batches).rows
        for row, counted in zip(
            rows, count_deferred_passes(name, ranks, micro_batches), strict=True
        ):
            moments = list_moments(row)
            assert set(counted) <= moments
            assert all(
                any(
                    saved <= other[0] and waiting <= other[1] and staying == other[2]
                    for other in counted
                )
                for saved, waiting, staying in moments
            )
