"""Formulas of activations in flight equal counts on the schedules."""

from __future__ import annotations

from operator import le

import pytest

from shardwright.errors import ScheduleError
from shardwright.planner.memory.stage_load import BackwardMoment
from shardwright.planner.time.pipeline import count_passes_in_flight, list_backward_moments
from shardwright.schedule import Schedule, count_peak_activations, load_schedule, plan_steps
from shardwright.schedule.registry import PIPELINE_SCHEDULES
from shardwright.schedule.transfers import Transfer


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


def list_moments(schedule: Schedule, rank: int) -> set[BackwardMoment]:
    """List, for every I and B, what is in memory then, from the sets of actions before it."""
    row = schedule.rows[rank]
    num_stages = schedule.num_stages // schedule.num_ranks
    moments = set()
    inputs: set[tuple[int, int]] = set()
    early: set[Transfer] = set()
    for position, step in enumerate(plan_steps(schedule)[rank]):
        action = step.action
        early |= set(step.posted_receives)
        if step.awaited_transfer is not None:
            early.remove(step.awaited_transfer)
            if action.kind == "F":
                inputs.add(action[1:])
        if action.kind not in ("I", "B"):
            continue
        done = {(other.kind, other.stage, other.micro_batch) for other in row[:position]}
        started = {(stage, number) for kind, stage, number in done if kind == "F"}
        passed = {(stage, number) for kind, stage, number in done if kind in ("I", "B")}
        outputs = started - passed - {(schedule.num_stages - 1, action.micro_batch)}
        num_messages = len(inputs - passed) + len(outputs) + len(early)
        passed.add(action[1:])
        waiting = {
            (stage, number)
            for kind, stage, number in done
            if kind == "I" and ("W", stage, number) not in done
        }
        latest = [other[1:] for other in row[:position] if other.kind == "F"][-1]
        with_gradients = {stage for kind, stage, _ in done | {tuple(action)} if kind in ("W", "B")}
        moments.add(
            BackwardMoment(
                len(started - passed) / num_stages,
                len(waiting) / num_stages,
                int(latest not in passed),
                len(with_gradients) / num_stages,
                num_messages,
                len({item for item in started - passed if item[0] == schedule.num_stages - 1}),
                action.kind == "I",
            )
        )
    return moments


@pytest.mark.parametrize("name", ["zb_h1", "zbv", "dualpipev"])
def test_backward_moments_are_those_of_the_whole_schedule(name: str) -> None:
    """Counted on the first micro-batches only, they are those of many, and no moment has more; but
    for one message: a channel's receives are posted in order."""
    for ranks, micro_batches in ((2, 4), (2, 13), (3, 12), (4, 24)):
        schedule = load_schedule(name, ranks, micro_batches)
        for rank in range(ranks):
            counted = list_backward_moments(name, ranks, micro_batches, None, rank)
            moments = list_moments(schedule, rank)
            assert all(
                moment in moments
                or moment._replace(num_messages=moment.num_messages + 1) in moments
                for moment in counted
            )
            assert all(
                any(
                    moment.is_deferring == other.is_deferring
                    and moment.num_staying == other.num_staying
                    and all(map(le, moment, other._replace(num_messages=other.num_messages + 1)))
                    for other in counted
                )
                for moment in moments
            )
