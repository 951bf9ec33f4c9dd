"""Diagnosis of hangs: the rank that blocks the others, found from the heartbeats of all ranks.

Checks, from the most to the least certain:

    1  a rank whose heartbeat has stopped while those of other ranks continue does not run
    2  a rank that entered a different collective under the same number skipped one
    3  a rank that others wait for and that waits for no rank has not entered their collective
    4  if ranks wait for each other, the one with the oldest last collective stopped first

Imports no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwright.watchdog.heartbeat import (
    HEARTBEAT_INTERVAL_SECONDS,
    CollectiveEntry,
    CommunicationChannel,
    Heartbeat,
)

SILENT_SECONDS = 6 * HEARTBEAT_INTERVAL_SECONDS
"""Lag behind the newest heartbeat, in seconds, after which a rank counts as silent. A busy
machine delays a heartbeat by one or two intervals."""
_MAX_COMPARED_COLLECTIVES = 64
"""Collectives after a mismatch that are compared to find the rank that skipped one."""
_NUM_CONTEXT_COLLECTIVES = 8
"""Collectives before a mismatch that are used to find the same point of an earlier step."""


@dataclass(frozen=True)
class HangDiagnosis:
    """Ranks that block the others (`blocking_ranks`) and a sentence that names the collective."""

    blocking_ranks: tuple[int, ...]
    message: str


@dataclass(frozen=True)
class CollectiveGap:
    """Collective that the ranks `ahead_ranks` have entered and the ranks `behind_ranks` have
    not.
    """

    channel: CommunicationChannel
    entry: CollectiveEntry
    ahead_ranks: tuple[int, ...]
    behind_ranks: tuple[int, ...]


def diagnose_hang(
    heartbeats: Sequence[Heartbeat], now_seconds: float, process_states: Mapping[int, str]
) -> HangDiagnosis:
    """Find the ranks of this machine that block the others.

    Args:
        heartbeats: Heartbeats, one per rank.
        now_seconds: CLOCK_MONOTONIC, in seconds.
        process_states: Rank -> one-letter process state from /proc (`T` is stopped).
    """
    gaps = list(find_collective_gaps(heartbeats))
    silent = find_silent_ranks(heartbeats)
    if silent:
        return HangDiagnosis(
            silent,
            f"{_describe_silent_ranks(silent, process_states)}; "
            f"{_describe_missing_ranks(silent, gaps, heartbeats, now_seconds)}",
        )
    skip = find_skipped_collective(heartbeats)
    if skip is not None:
        return skip
    waits = {
        (ahead, behind) for gap in gaps for ahead in gap.ahead_ranks for behind in gap.behind_ranks
    }
    awaited = {behind for _, behind in waits}
    waiting = {ahead for ahead, _ in waits}
    if awaited:
        free = tuple(sorted(awaited - waiting)) or (_find_oldest_waiter(heartbeats, awaited),)
        return HangDiagnosis(free, _describe_missing_ranks(free, gaps, heartbeats, now_seconds))
    here = {view.rank for view in heartbeats}
    if len(here) < heartbeats[0].world_size:
        others = sorted(set(range(heartbeats[0].world_size)) - here)
        return HangDiagnosis(
            (),
            "no rank of this machine is missing from a collective; "
            f"the blocking rank is on another machine (ranks {others})",
        )
    slowest = min(heartbeats, key=lambda view: view.phase_start_seconds)
    return HangDiagnosis(
        (slowest.rank,),
        f"no rank is missing from a collective; {describe_activity(slowest, now_seconds)}",
    )


def find_silent_ranks(heartbeats: Sequence[Heartbeat]) -> tuple[int, ...]:
    """Return the ranks whose heartbeat has stopped while those of other ranks continue."""
    youngest = max(view.last_beat_seconds for view in heartbeats)
    return tuple(
        view.rank for view in heartbeats if youngest - view.last_beat_seconds > SILENT_SECONDS
    )


def find_collective_gaps(heartbeats: Sequence[Heartbeat]) -> Iterator[CollectiveGap]:
    """Yield each collective that some ranks of its channel have entered and others have not."""
    channels = {key: channel for view in heartbeats for key, channel in view.channels.items()}
    for key, channel in channels.items():
        last = {
            view.rank: (view, view.find_last_entry(key))
            for view in heartbeats
            if view.rank in channel.ranks
        }
        # Records of a channel may have been overwritten in the ring; such a rank is left out.
        numbers = {
            rank: 0 if entry is None else entry.sequence_number
            for rank, (view, entry) in last.items()
            if entry or key not in view.channels
        }
        if len(numbers) < 2:
            continue
        most = max(numbers.values())
        ahead = tuple(sorted(rank for rank, number in numbers.items() if number == most))
        behind = tuple(sorted(rank for rank, number in numbers.items() if number < most))
        view, entered = last[ahead[0]]
        assert entered is not None
        if entered.operation == "send" or (
            entered.operation == "recv" and view.wait_start_seconds is None
        ):
            continue  # sends block no rank, nor does a receive before its wait
        if behind:
            yield CollectiveGap(channel, entered, ahead, behind)


def find_skipped_collective(heartbeats: Sequence[Heartbeat]) -> HangDiagnosis | None:
    """Find the first collective that one rank of a group skipped; None if all ranks agree."""
    channels = {key: channel for view in heartbeats for key, channel in view.channels.items()}
    for key, channel in channels.items():
        histories = {
            view.rank: {
                entered.sequence_number: entered
                for entered in view.entries
                if entered.channel_key == key
            }
            for view in heartbeats
            if view.rank in channel.ranks
        }
        common = (
            set.intersection(*(set(history) for history in histories.values()))
            if len(histories) > 1
            else set()
        )
        for number in sorted(common):
            entries = {rank: history[number] for rank, history in histories.items()}
            if any(entered.operation in ("send", "recv") for entered in entries.values()):
                break
            if len({(entered.operation, entered.num_elements) for entered in entries.values()}) > 1:
                return _identify_skipping_rank(channel, histories, entries, number)
    return None


def _identify_skipping_rank(
    channel: CommunicationChannel,
    histories: Mapping[int, Mapping[int, CollectiveEntry]],
    entries: Mapping[int, CollectiveEntry],
    sequence_number: int,
) -> HangDiagnosis:
    """Name the rank that skipped a collective.

    It is the only rank that differs from a majority. Without a majority it is the rank whose
    sequence, shifted by one, equals another rank's; ties go to a rank that differs from earlier
    steps.
    """

    def count_matches(rank: int, other: int) -> int:
        own_history = histories[rank]
        other_history = histories[other]
        places = range(sequence_number, sequence_number + _MAX_COMPARED_COLLECTIVES)
        return sum(
            own_history[place].matches(other_history[place + 1])
            for place in places
            if place in own_history and place + 1 in other_history
        )

    common, count = Counter(
        (entered.operation, entered.num_elements) for entered in entries.values()
    ).most_common(1)[0]
    outliers = [
        rank
        for rank, entered in entries.items()
        if (entered.operation, entered.num_elements) != common
    ]
    if count > len(entries) / 2 and len(outliers) == 1:
        rank = outliers[0]
    else:
        usual = _find_usual_entry(sequence_number, next(iter(histories.values())))
        unusual = [
            rank
            for rank, entered in entries.items()
            if usual is not None and not entered.matches(usual)
        ]
        pairs = [(rank, other) for rank in entries for other in entries if rank != other]
        rank = max(pairs, key=lambda pair: (count_matches(*pair), pair[0] in unusual))[0]
    skipped = next(
        entered
        for other, entered in entries.items()
        if other != rank and not entered.matches(entries[rank])
    )
    return HangDiagnosis(
        (rank,),
        f"rank {rank} skipped {skipped} of {channel.name}: it entered {entries[rank].operation} "
        f"({entries[rank].num_elements:,} elements) instead",
    )


def _find_usual_entry(
    sequence_number: int, history: Mapping[int, CollectiveEntry]
) -> CollectiveEntry | None:
    """Find the collective that followed the same ones in an earlier step, if it is recorded."""
    before = [
        history.get(sequence_number - back) for back in range(1, _NUM_CONTEXT_COLLECTIVES + 1)
    ]
    for place in range(
        sequence_number - 1,
        sequence_number - _MAX_COMPARED_COLLECTIVES * _NUM_CONTEXT_COLLECTIVES,
        -1,
    ):
        then = [history.get(place - back) for back in range(1, _NUM_CONTEXT_COLLECTIVES + 1)]
        if place in history and all(
            a is not None and b is not None and a.matches(b)
            for a, b in zip(before, then, strict=True)
        ):
            return history[place]
    return None


def _describe_missing_ranks(
    blocking_ranks: Sequence[int],
    gaps: Sequence[CollectiveGap],
    heartbeats: Sequence[Heartbeat],
    now_seconds: float,
) -> str:
    """Describe the collective that the ranks are missing from and the ranks that wait in it."""
    by_rank = {view.rank: view for view in heartbeats}
    blocked = [
        gap
        for gap in gaps
        if set(gap.behind_ranks) & set(blocking_ranks)
        and not set(gap.ahead_ranks) & set(blocking_ranks)
    ]
    if not blocked:
        return "; ".join(describe_activity(by_rank[rank], now_seconds) for rank in blocking_ranks)
    gap = min(blocked, key=lambda gap: gap.entry.at_seconds)
    missing = [rank for rank in gap.behind_ranks if rank in blocking_ranks]
    seconds = now_seconds - gap.entry.at_seconds
    auxiliary = "has" if len(gap.ahead_ranks) == 1 else "have"
    waiting = f"{format_ranks(gap.ahead_ranks)} {auxiliary} waited for {seconds:.1f} s"
    doing = "; ".join(describe_activity(by_rank[rank], now_seconds) for rank in missing)
    verb = "is" if len(missing) == 1 else "are"
    place = f"{gap.entry} of {gap.channel.name}"
    return f"{format_ranks(missing)} {verb} missing from {place}, where {waiting}; {doing}"


def describe_activity(heartbeat: Heartbeat, now_seconds: float) -> str:
    """Describe a rank's phase and the last collective that its host entered."""
    phase_seconds = now_seconds - heartbeat.phase_start_seconds
    phase = f"{heartbeat.phase} {heartbeat.step} for {phase_seconds:.1f} s"
    last = ""
    if heartbeat.entries:
        seconds = now_seconds - heartbeat.entries[-1].at_seconds
        last = f", its last collective was {heartbeat.entries[-1]} {seconds:.1f} s ago"
    return f"rank {heartbeat.rank} has been in {phase}{last}"


def _describe_silent_ranks(ranks: Sequence[int], process_states: Mapping[int, str]) -> str:
    stopped = [rank for rank in ranks if process_states.get(rank) in ("T", "t")]
    gone = [rank for rank in ranks if process_states.get(rank) in ("Z", "X", "")]
    unscheduled = [rank for rank in ranks if rank not in stopped and rank not in gone]
    parts = []
    if stopped:
        parts.append(f"{format_ranks(stopped)} stopped by a signal (SIGSTOP)")
    if gone:
        parts.append(f"{format_ranks(gone)} no longer running")
    if unscheduled:
        parts.append(
            f"{format_ranks(unscheduled)} not running Python: "
            "native code holds the interpreter lock, or the kernel does not schedule the process"
        )
    return "; ".join(parts)


def _find_oldest_waiter(heartbeats: Sequence[Heartbeat], candidates: set[int]) -> int:
    """Return the rank with the oldest last collective, of ranks that wait for each other."""
    return min(
        (view for view in heartbeats if view.rank in candidates),
        key=lambda view: view.entries[-1].at_seconds if view.entries else view.phase_start_seconds,
    ).rank


def format_ranks(ranks: Sequence[int]) -> str:
    """Format ranks as `rank 3` or `ranks 0, 3`."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
