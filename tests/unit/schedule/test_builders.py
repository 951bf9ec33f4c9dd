"""Every named schedule runs, with the bubble and the activations that its paper gives."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardwright.errors import ScheduleError
from shardwright.schedule import (
    PIPELINE_SCHEDULES,
    Action,
    ActionTimes,
    Schedule,
    build_forward_only,
    build_schedule,
    check_schedule,
    count_stages_per_rank,
    load_schedule,
    simulate,
    write_schedule,
)

names = st.sampled_from(sorted(PIPELINE_SCHEDULES))
ranks = st.integers(1, 6)
seconds = st.floats(0.05, 5.0)


def build_valid(name: str, p: int, m: int, v: int | None = None) -> Schedule:
    """Build a schedule; reject the example if the family does not support the numbers."""
    family = PIPELINE_SCHEDULES[name]
    assume(
        not (family.has_divisibility_rule and m % p) and m >= family.min_micro_batches_per_rank * p
    )
    return build_schedule(name, p, m, v if family.stage_assignment == "looped" else None)


def make_even_times(
    schedule: Schedule, forward: float = 1, inputs: float = 1, weights: float = 1
) -> ActionTimes:
    """Divide the given times of a rank evenly among its stages."""
    share = schedule.num_ranks / schedule.num_stages
    return ActionTimes.uniform(
        schedule.num_stages, forward * share, inputs * share, weights * share
    )


@given(names, ranks, st.integers(1, 24), st.integers(1, 4))
def test_every_schedule_is_complete_ordered_and_free_of_deadlock(
    name: str, p: int, m: int, v: int
) -> None:
    schedule = build_valid(name, p, m, v)
    proof = check_schedule(schedule)
    assert (schedule.num_ranks, schedule.num_micro_batches) == (p, m)
    assert schedule.num_stages == p * count_stages_per_rank(
        name, v if PIPELINE_SCHEDULES[name].stage_assignment == "looped" else None
    )
    assert schedule.has_split_backward == any(a.kind == "W" for row in schedule.rows for a in row)
    assert PIPELINE_SCHEDULES[name].has_split_backward or not schedule.has_split_backward
    crossings = sum(
        a != b for a, b in zip(schedule.rank_of_stage, schedule.rank_of_stage[1:], strict=False)
    )
    assert proof.num_transfers == 2 * crossings * m


@given(names, ranks, st.integers(1, 16), st.data())
def test_no_step_is_shorter_than_its_work_or_its_longest_chain(
    name: str, p: int, m: int, data: st.DataObject
) -> None:
    schedule = build_valid(name, p, m)
    per_stage = st.tuples(*[seconds] * schedule.num_stages)
    times = ActionTimes(
        *(data.draw(per_stage) for _ in range(3)),
        transfer=(data.draw(seconds),) * (schedule.num_stages - 1),
    )
    timeline = simulate(schedule, times)
    chain_seconds = sum(times.forward) + sum(times.input_gradient)
    assert timeline.step_seconds >= max(timeline.busy_seconds) - 1e-9
    assert timeline.step_seconds >= chain_seconds - 1e-9
    assert 0 < timeline.utilisation <= 1 + 1e-9
    assert sum(timeline.busy_seconds) == pytest.approx(
        m * (chain_seconds + sum(times.weight_gradient))
    )
    ends = {
        a: e
        for row, es in zip(schedule.rows, timeline.ends, strict=True)
        for a, e in zip(row, es, strict=True)
    }
    for row, starts in zip(schedule.rows, timeline.starts, strict=True):
        for action, start in zip(row, starts, strict=True):
            if action.kind == "F" and action.stage:
                is_transferred = (
                    schedule.rank_of_stage[action.stage - 1] != schedule.rank_of_stage[action.stage]
                )
                before = action._replace(stage=action.stage - 1)
                assert (
                    start >= ends[before] + is_transferred * times.transfer[action.stage - 1] - 1e-9
                )


@given(names, ranks, st.integers(1, 16), st.data())
def test_times_by_action_give_the_same_timeline_as_times_by_stage(
    name: str, p: int, m: int, data: st.DataObject
) -> None:
    schedule = build_valid(name, p, m)
    times = make_even_times(schedule, *data.draw(st.tuples(seconds, seconds, seconds)))
    by_kind = {"F": times.forward, "I": times.input_gradient, "W": times.weight_gradient}
    by_kind["B"] = tuple(map(sum, zip(by_kind["I"], by_kind["W"], strict=True)))
    action_times = {
        action: by_kind[action.kind][action.stage] for row in schedule.rows for action in row
    }
    assert simulate(schedule, action_times) == simulate(schedule, times)


@given(ranks, st.integers(1, 24))
def test_gpipe_and_1f1b_have_their_bubble_and_peak_activations(p: int, m: int) -> None:
    for name in ("gpipe", "1f1b"):
        schedule = build_schedule(name, p, m)
        timeline = simulate(schedule, make_even_times(schedule))
        assert timeline.bubble_fraction == pytest.approx((p - 1) / m)
        assert timeline.utilisation == pytest.approx(m / (m + p - 1))
    assert check_schedule(build_schedule("gpipe", p, m)).peak_activations == (m,) * p
    assert check_schedule(build_schedule("1f1b", p, m)).peak_activations == tuple(
        min(p - rank, m) for rank in range(p)
    )


@given(ranks, st.integers(1, 5), st.integers(1, 4))
def test_interleaving_divides_the_bubble(p: int, rounds: int, v: int) -> None:
    m = p * rounds
    schedule = build_schedule("interleaved_1f1b", p, m, v)
    assert simulate(schedule, make_even_times(schedule)).bubble_fraction == pytest.approx(
        (p - 1) / (v * m)
    )
    # Narayanan et al. 2021: 1 + (p - 1) / (p v) times the p of 1F1B, in shares of whole ranks
    assert check_schedule(schedule).peak_activations[0] == min((v - 1) * p + 2 * (p - 1) + 1, v * m)


@given(ranks, st.integers(1, 4), st.tuples(seconds, seconds, seconds))
def test_zb_h1_has_a_third_of_the_bubble_with_the_memory_of_1f1b(
    p: int, rounds: int, times: tuple[float, float, float]
) -> None:
    m = 2 * p * rounds
    schedule = build_schedule("zb_h1", p, m)
    plain = build_schedule("1f1b", p, m)
    assert check_schedule(schedule).peak_activations == (p,) * p
    assert max(check_schedule(plain).peak_activations) == p
    timeline = simulate(schedule, make_even_times(schedule))
    assert timeline.bubble_fraction == pytest.approx((p - 1) / m / 3)
    forward, inputs, weights = times
    if inputs + forward >= weights:  # Qi et al. 2023, table 1: (p - 1) (F + I - W)
        wait = simulate(schedule, make_even_times(schedule, *times)).step_seconds - m * sum(times)
        assert (
            wait
            <= simulate(plain, make_even_times(plain, *times)).step_seconds - m * sum(times) + 1e-9
        )


@given(st.sampled_from(["zbv", "dualpipev"]), ranks, st.integers(2, 4))
def test_folded_schedules_wait_only_for_the_first_forward(name: str, p: int, rounds: int) -> None:
    m = p * rounds
    schedule = build_schedule(name, p, m)
    timeline = simulate(schedule, make_even_times(schedule))
    # Rank p - 1 starts after p - 1 half forwards, never waits again, and finishes last.
    assert timeline.step_seconds == pytest.approx(3 * m + (p - 1) / 2)
    # In halves of a rank's share: the p of 1F1B, and one half more.
    assert max(check_schedule(schedule).peak_activations) <= 2 * p + 1


@pytest.mark.parametrize(
    ("name", "p", "m", "v", "message"),
    [
        ("interleaved_1f1b", 4, 6, None, "allowed: 4 or 8"),
        ("interleaved_1f1b", 4, 3, None, "allowed: 4)"),
        ("dualpipev", 4, 7, None, "allowed: 8 or more"),
        ("1f1b", 4, 8, 2, "holds 1 stage on each rank"),
        ("zbv", 4, 8, 3, "holds 2 stages on each rank"),
        ("1f1b", 0, 8, None, "at least one"),
        ("gpipe", 2, 0, None, "at least one"),
        ("ZB-V", 2, 4, None, "Did you mean zbv"),
        ("1f1", 2, 4, None, "Did you mean 1f1b"),
    ],
)
def test_unsupported_numbers_are_refused_with_supported_ones(
    name: str, p: int, m: int, v: int | None, message: str
) -> None:
    with pytest.raises(ScheduleError) as caught:
        build_schedule(name, p, m, v)
    assert message in str(caught.value)


def test_a_schedule_file_must_match_the_run(tmp_path) -> None:
    path = tmp_path / "own.csv"
    path.write_text(write_schedule(build_schedule("zb_h1", 2, 4)))
    assert load_schedule(str(path), 2, 4).rows == build_schedule("zb_h1", 2, 4).rows
    for p, m, message in ((4, 4, "for 2 ranks"), (2, 8, "for 4 micro-batches")):
        with pytest.raises(ScheduleError, match=message):
            load_schedule(str(path), p, m)


@given(names, ranks, st.integers(1, 12))
def test_evaluation_runs_forwards_over_the_same_stages(name: str, p: int, m: int) -> None:
    placement = build_valid(name, p, 2 * p).rank_of_stage
    schedule = build_forward_only(placement, m)
    check_schedule(schedule)
    assert schedule.rank_of_stage == placement
    assert not schedule.has_backward
    assert {a for row in schedule.rows for a in row} == {
        Action("F", s, b) for s in range(len(placement)) for b in range(m)
    }


@pytest.mark.parametrize(
    ("p", "m", "has_warning"), [(4, 7, True), (4, 8, False), (1, 1, False), (2, 1, True)]
)
def test_fewer_than_two_micro_batches_per_stage_give_a_warning_with_numbers(
    p: int, m: int, has_warning: bool
) -> None:
    warning = build_schedule("1f1b", p, m).describe_low_utilisation()
    assert (warning is not None) == has_warning
    assert warning is None or f"{m} / {m + p - 1}" in warning
