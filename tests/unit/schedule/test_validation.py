"""The check refuses every invalid schedule and names the place."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardwright.errors import ScheduleError
from shardwright.schedule import (
    PIPELINE_SCHEDULES,
    Action,
    ActionTimes,
    Schedule,
    build_schedule,
    check_schedule,
    parse_schedule,
    plan_steps,
    simulate,
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,1F1,1B0,1B1", "0F1 is missing"),
        ("0F0,0F1,0B0,0B1\n1F0,1B0,1F1", "stage 1, micro-batch 1 has F:"),
        ("0F0,0B0,0B0\n1F0,1B0", "0B0 occurs 2 times"),
        ("0F0,0B0,0W0\n1F0,1B0", "has B and F and W"),
        ("0F0,0I0\n1F0,1B0", "has F and I"),
        ("0F0,0B0\n1B0,1F0", "1B0 (number 1) comes before 1F0"),
        ("0F0,0W0,0I0\n1F0,1B0", "0W0 (number 2) comes before 0I0"),
        ("0F0,0B0\n2F0,2B0", "no rank computes stage 1 of 3"),
        ("0F0,0B0\n0F1,0B1", "rank 1 computes 0F1, but stage 0 is on rank 0"),
        (
            "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1",
            "1F1 needs the message of 0F1 from rank 0 to rank 1; "
            "rank 0 issues the message of 0F1 from rank 0 to rank 1 after 0F1; "
            "0F1 runs on rank 0 after 0B0; "
            "0B0 needs the message of 1B0 from rank 1 to rank 0",
        ),
        ("1F0,0F0,0B0,1B0", "deadlock: 1F0 needs 0F0; 0F0 runs on rank 0 after 1F0"),
    ],
)
def test_schedules_that_cannot_run_are_refused_with_the_place(text: str, message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        check_schedule(parse_schedule(text, "broken"))
    assert message in str(caught.value)


def test_a_rank_without_actions_is_refused() -> None:
    with pytest.raises(ScheduleError, match="rank 1 computes nothing"):
        check_schedule(Schedule("idle", (parse_schedule("0F0,0B0", "one").rows[0], ())))


@given(
    st.sampled_from(sorted(PIPELINE_SCHEDULES)),
    st.integers(1, 4),
    st.integers(1, 3),
    st.randoms(use_true_random=False),
)
def test_check_and_simulation_agree_on_schedules_that_can_run(
    name: str, p: int, rounds: int, random
) -> None:
    """After a swap of two neighbouring actions, check and simulation agree."""
    schedule = build_schedule(name, p, 2 * p * rounds)
    rows = [list(row) for row in schedule.rows]
    row = random.choice(rows)
    assume(len(row) > 1)
    index = random.randrange(len(row) - 1)
    row[index], row[index + 1] = row[index + 1], row[index]
    changed = Schedule("swapped", tuple(map(tuple, rows)))
    in_order = all(
        (a.stage, a.micro_batch) != (b.stage, b.micro_batch)
        for a, b in [(row[index], row[index + 1])]
    )
    try:
        check_schedule(changed)
    except ScheduleError as error:
        if "deadlock" in str(error):
            with pytest.raises(ScheduleError, match="cannot run"):
                simulate(changed, ActionTimes.uniform(changed.num_stages))
        else:
            assert not in_order
        return
    assert in_order
    simulate(changed, ActionTimes.uniform(changed.num_stages))


@given(
    st.sampled_from(sorted(PIPELINE_SCHEDULES)),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(0, 4),
)
def test_every_receive_is_posted_once_in_order_before_it_is_needed(
    name: str, p: int, rounds: int, lookahead: int
) -> None:
    schedule = build_schedule(name, p, 2 * p * rounds)
    steps_of_rank = plan_steps(schedule, lookahead=lookahead)
    for rank, steps in enumerate(steps_of_rank):
        posted = [transfer for step in steps for transfer in step.posted_receives]
        assert len(set(posted)) == len(posted)
        assert set(posted) == {
            s.sent_transfer
            for row in steps_of_rank
            for s in row
            if s.sent_transfer and s.sent_transfer.receiver == rank
        }
        for sender in range(p):
            assert [t.sequence_number for t in posted if t.sender == sender] == list(
                range(sum(t.sender == sender for t in posted))
            )
        posted_so_far = set()
        for step in steps:
            posted_so_far |= set(step.posted_receives)
            assert step.awaited_transfer is None or step.awaited_transfer in posted_so_far
        sends = [step.sent_transfer for step in steps if step.sent_transfer]
        assert all(
            a.sequence_number < b.sequence_number
            for a, b in pairwise(sends)
            if a.receiver == b.receiver
        )


@pytest.mark.parametrize("name", sorted(PIPELINE_SCHEDULES))
def test_a_message_completes_the_sends_that_its_sender_has_waited_for(name: str) -> None:
    """No send is released before its receiver has it, and none twice."""
    steps_of_rank = plan_steps(build_schedule(name, 3, 12))
    num_released = 0
    for rank, steps in enumerate(steps_of_rank):
        released: set[Action] = set()
        sent: set[Action] = set()
        for step in steps:
            awaited = step.awaited_transfer
            if awaited is None:
                assert step.completed_sends == ()
            else:
                senders_row = steps_of_rank[awaited.sender]
                position = next(
                    i for i, other in enumerate(senders_row) if other.sent_transfer == awaited
                )
                waited = {
                    other.awaited_transfer.action
                    for other in senders_row[: position + 1]
                    if other.awaited_transfer and other.awaited_transfer.sender == rank
                }
                assert set(step.completed_sends) <= waited & sent
                assert released.isdisjoint(step.completed_sends)
                released |= set(step.completed_sends)
            if step.sent_transfer is not None:
                sent.add(step.sent_transfer.action)
        # Gradients answer all hidden states; nothing answers the last gradients.
        assert all(action.kind != "F" for action in sent - released)
        num_released += len(released)
    assert num_released > 20


def test_split_backwards_keep_activations_until_the_weight_gradients() -> None:
    late = parse_schedule("0F0,0I0,0F1,0I1,0W0,0W1", "late")
    early = parse_schedule("0F0,0I0,0W0,0F1,0I1,0W1", "soon")
    assert check_schedule(late).peak_activations == (2,)
    assert check_schedule(early).peak_activations == (1,)
