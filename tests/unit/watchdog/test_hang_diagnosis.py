"""Diagnosis of hangs from heartbeats alone."""

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


def make_heartbeat(
    number: int,
    entries: Sequence[tuple[CommunicationChannel, str, int]],
    *,
    alive: float = NOW,
    since: float = 990.0,
    stopped_at: float = 995.0,
    is_waiting: bool = True,
    world_size: int = 3,
) -> Heartbeat:
    counts: dict[int, int] = {}
    records = []
    for channel, operation, elements in entries:
        counts[channel.key] = counts.get(channel.key, 0) + 1
        records.append(
            CollectiveEntry(channel.key, counts[channel.key], operation, elements, stopped_at)
        )
    channels = {channel.key: channel for channel, _, _ in entries}
    waiting = stopped_at if is_waiting else None
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


def test_a_rank_that_does_not_run_is_named_with_its_missing_collective() -> None:
    views = [
        make_heartbeat(0, [SUM, GATHER]),
        make_heartbeat(1, [SUM, GATHER]),
        make_heartbeat(2, [SUM], alive=NOW - 8, is_waiting=False),
    ]
    for state, expected in (
        ("T", "rank 2 stopped by a signal"),
        ("R", "rank 2 not running Python"),
    ):
        verdict = diagnose_hang(views, NOW, {0: "S", 1: "S", 2: state})
        assert verdict.blocking_ranks == (2,)
        assert expected in verdict.message
        assert (
            "rank 2 is missing from all_gather #2 (16 elements) of group 0 (ranks 0-2), "
            "where ranks 0, 1 have" in verdict.message
        )


def test_the_rank_that_blocks_others_and_does_not_wait_is_named() -> None:
    """Rank 0 waits for rank 1, which waits for rank 2: rank 2 blocks both."""
    pair = build_channel("1", (0, 1))
    other = build_channel("2", (1, 2))
    views = [
        make_heartbeat(0, [SUM, (pair, "all_reduce", 4)]),
        make_heartbeat(1, [SUM, (other, "all_reduce", 4)]),
        make_heartbeat(2, [SUM], is_waiting=False),
    ]
    verdict = diagnose_hang(views, NOW, {})
    assert verdict.blocking_ranks == (2,)
    assert (
        "missing from all_reduce #1 (4 elements) of group 2 (ranks 1, 2), where rank 1 has waited"
        in verdict.message
    )


def test_the_first_rank_to_stop_is_named_if_all_wait_for_each_other() -> None:
    one = build_channel("1", (0, 1))
    two = build_channel("2", (0, 1))
    views = [
        make_heartbeat(0, [(one, "barrier", 0)], world_size=2, stopped_at=994.0),
        make_heartbeat(1, [(two, "barrier", 0)], world_size=2, stopped_at=996.0),
    ]
    assert diagnose_hang(views, NOW, {}).blocking_ranks == (0,)


def test_pending_sends_and_receives_alone_do_not_count_as_waiting() -> None:
    forward = build_channel("0", (0, 1), pair=(0, 1))
    backward = build_channel("0", (0, 1), pair=(1, 0))
    ahead = make_heartbeat(
        0, [(forward, "send", 9), (backward, "recv", 9)], is_waiting=False, world_size=2
    )
    verdict = diagnose_hang(
        [ahead, make_heartbeat(1, [], is_waiting=False, world_size=2, since=980.0)], NOW, {}
    )
    assert verdict.blocking_ranks == (1,)
    assert (
        "no rank is missing from a collective; rank 1 has been in step 4 for 20.0 s"
        in verdict.message
    )
    waiting = make_heartbeat(0, [(forward, "send", 9), (backward, "recv", 9)], world_size=2)
    verdict = diagnose_hang(
        [waiting, make_heartbeat(1, [], is_waiting=False, world_size=2)], NOW, {}
    )
    assert (
        "rank 1 is missing from recv #1 (9 elements) of messages from rank 1 to rank 0"
        in verdict.message
    )


def test_a_rank_that_skipped_a_collective_is_found_by_the_ones_after_it() -> None:
    sequence = [
        SUM,
        GATHER,
        (WORLD, "all_reduce", 3),
        (WORLD, "broadcast", 5),
        (WORLD, "all_reduce", 1),
    ]
    shorter_sequence = [*sequence[:2], *sequence[3:]]
    for views in (
        [
            make_heartbeat(0, sequence),
            make_heartbeat(1, shorter_sequence),
            make_heartbeat(2, sequence),
        ],
        [
            make_heartbeat(0, sequence, world_size=2),
            make_heartbeat(1, shorter_sequence, world_size=2),
        ],
    ):
        diagnosis = find_skipped_collective(views)
        assert diagnosis is not None
        assert diagnosis.blocking_ranks == (1,)
        assert "rank 1 skipped all_reduce #3 (3 elements)" in diagnosis.message
        assert "it entered broadcast" in diagnosis.message
    assert (
        find_skipped_collective(
            [
                make_heartbeat(0, sequence),
                make_heartbeat(1, sequence[:3]),
                make_heartbeat(2, sequence),
            ]
        )
        is None
    )


@pytest.mark.parametrize("skipping_rank", [0, 1])
def test_with_two_waiting_ranks_earlier_steps_show_the_one_that_skipped(
    skipping_rank: int,
) -> None:
    last = (WORLD, "all_reduce", 3)
    following = (WORLD, "broadcast", 5)
    step = [*[(WORLD, "all_gather", size) for size in range(8)], last, following]
    waiting = [*step, *step[:9]]
    skipping = [*step, *step[:8], following]
    sequences = [waiting, skipping] if skipping_rank == 1 else [skipping, waiting]
    diagnosis = find_skipped_collective(
        [
            make_heartbeat(number, sequence, world_size=2)
            for number, sequence in enumerate(sequences)
        ]
    )
    assert diagnosis is not None
    assert diagnosis.blocking_ranks == (skipping_rank,)
    assert f"rank {skipping_rank} skipped all_reduce #19 (3 elements)" in diagnosis.message


def test_missing_ranks_are_reported_to_be_on_another_machine() -> None:
    verdict = diagnose_hang([make_heartbeat(0, [SUM]), make_heartbeat(1, [SUM])], NOW, {})
    assert verdict.blocking_ranks == ()
    assert "on another machine (ranks [2])" in verdict.message
