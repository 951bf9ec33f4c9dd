"""Who hangs, from pulses alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from shardwright.watchdog.hang_diagnosis import diagnose_hang, find_skipped_collective
from shardwright.watchdog.heartbeat import (
    CollectiveEntry,
    CommunicationChannel,
    Heartbeat,
    build_channel,
)

WORLD = build_channel("0", (0, 1, 2))
NOW = 1000.0


def rank(
    number: int,
    entered: Sequence[tuple[CommunicationChannel, str, int]],
    *,
    alive: float = NOW,
    since: float = 990.0,
    halted: float = 995.0,
    waits: bool = True,
    world_size: int = 3,
) -> Heartbeat:
    counts: dict[int, int] = {}
    records = []
    for channel, operation, elements in entered:
        counts[channel.key] = counts.get(channel.key, 0) + 1
        records.append(
            CollectiveEntry(channel.key, counts[channel.key], operation, elements, halted)
        )
    channels = {channel.key: channel for channel, _, _ in entered}
    waiting = halted if waits else None
    return Heartbeat(
        number,
        100 + number,
        world_size,
        "step",
        4,
        since,
        5.0,
        alive,
        waiting,
        tuple(records),
        channels,
    )


SUM = (WORLD, "all_reduce", 8)
GATHER = (WORLD, "all_gather", 16)


def test_who_does_not_run_is_named_with_what_it_lacks() -> None:
    views = [
        rank(0, [SUM, GATHER]),
        rank(1, [SUM, GATHER]),
        rank(2, [SUM], alive=NOW - 8, waits=False),
    ]
    for state, told in (("T", "rank 2 stopped by a signal"), ("R", "rank 2 not running Python")):
        verdict = diagnose_hang(views, NOW, {0: "S", 1: "S", 2: state})
        assert verdict.blocking_ranks == (2,)
        assert told in verdict.message
        assert (
            "rank 2 is missing from all_gather #2 (16 elements) of group 0 (ranks 0-2), where ranks 0, 1 have"
            in verdict.message
        )


def test_who_is_waited_for_and_waits_for_nobody_is_named() -> None:
    """Ranks 0 and 1 wait for each other's groups in turn; what all of it waits for is rank 2."""
    pair = build_channel("1", (0, 1))
    other = build_channel("2", (1, 2))
    views = [
        rank(0, [SUM, (pair, "all_reduce", 4)]),
        rank(1, [SUM, (other, "all_reduce", 4)]),
        rank(2, [SUM], waits=False),
    ]
    verdict = diagnose_hang(views, NOW, {})
    assert verdict.blocking_ranks == (2,)
    assert (
        "missing from all_reduce #1 (4 elements) of group 2 (ranks 1, 2), where rank 1 has waited"
        in verdict.message
    )


def test_the_first_to_halt_is_named_where_all_wait_for_each_other() -> None:
    one = build_channel("1", (0, 1))
    two = build_channel("2", (0, 1))
    views = [
        rank(0, [(one, "barrier", 0)], world_size=2, halted=994.0),
        rank(1, [(two, "barrier", 0)], world_size=2, halted=996.0),
    ]
    assert diagnose_hang(views, NOW, {}).blocking_ranks == (0,)


def test_a_message_that_was_only_sent_or_prepared_for_keeps_nobody_waiting() -> None:
    there = build_channel("0", (0, 1), pair=(0, 1))
    back = build_channel("0", (0, 1), pair=(1, 0))
    ahead = rank(0, [(there, "send", 9), (back, "recv", 9)], waits=False, world_size=2)
    verdict = diagnose_hang([ahead, rank(1, [], waits=False, world_size=2, since=980.0)], NOW, {})
    assert verdict.blocking_ranks == (1,)
    assert (
        "no rank is missing from a collective; rank 1 has been in step 4 for 20.0 s"
        in verdict.message
    )
    waiting = rank(0, [(there, "send", 9), (back, "recv", 9)], world_size=2)
    verdict = diagnose_hang([waiting, rank(1, [], waits=False, world_size=2)], NOW, {})
    assert (
        "rank 1 is missing from recv #1 (9 elements) of messages from rank 1 to rank 0"
        in verdict.message
    )


def test_a_rank_that_skipped_a_collective_is_named_by_what_came_after() -> None:
    course = [
        SUM,
        GATHER,
        (WORLD, "all_reduce", 3),
        (WORLD, "broadcast", 5),
        (WORLD, "all_reduce", 1),
    ]
    shorter = [*course[:2], *course[3:]]
    for views in (
        [rank(0, course), rank(1, shorter), rank(2, course)],
        [rank(0, course, world_size=2), rank(1, shorter, world_size=2)],
    ):
        found = find_skipped_collective(views)
        assert found is not None
        assert found.blocking_ranks == (1,)
        assert "rank 1 skipped all_reduce #3 (3 elements)" in found.message
        assert "it entered broadcast" in found.message
    assert find_skipped_collective([rank(0, course), rank(1, course[:3]), rank(2, course)]) is None


@pytest.mark.parametrize("skipper", [0, 1])
def test_where_two_ranks_stand_still_at_once_the_steps_before_tell_who_skipped(
    skipper: int,
) -> None:
    last = (WORLD, "all_reduce", 3)
    following = (WORLD, "broadcast", 5)
    step = [*[(WORLD, "all_gather", size) for size in range(8)], last, following]
    waiting = [*step, *step[:9]]
    skipping = [*step, *step[:8], following]
    courses = [waiting, skipping] if skipper == 1 else [skipping, waiting]
    found = find_skipped_collective(
        [rank(number, course, world_size=2) for number, course in enumerate(courses)]
    )
    assert found is not None
    assert found.blocking_ranks == (skipper,)
    assert f"rank {skipper} skipped all_reduce #19 (3 elements)" in found.message


def test_what_is_on_other_machines_is_said_to_be_there() -> None:
    verdict = diagnose_hang([rank(0, [SUM]), rank(1, [SUM])], NOW, {})
    assert verdict.blocking_ranks == ()
    assert "on another machine (ranks [2])" in verdict.message
