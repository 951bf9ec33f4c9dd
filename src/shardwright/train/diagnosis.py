"""Diagnosis of hangs: the rank that blocks the others, found from the heartbeats of all ranks.

Checks, from the most to the least certain:

    1  a rank whose heartbeat has stopped while those of other ranks go on does not run
    2  a rank that entered a different collective under the same number skipped one
    3  a rank that others wait for and that waits for no rank has not entered their collective
    4  if ranks wait for each other, the one with the oldest last collective stopped first

Imports no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwright.train.pulse import BEAT_SECONDS, Channel, Entered, PulseView

SILENT_SECONDS = 6 * BEAT_SECONDS
"""Lag behind the newest heartbeat, in seconds, after which a rank counts as silent. A busy
machine delays a heartbeat by one or two intervals."""
_COMPARED = 64
"""Collectives after a mismatch that are compared to find the rank that skipped one."""
_REMEMBERED = 8
"""Collectives before a mismatch that are used to find the same point of an earlier step."""


@dataclass(frozen=True)
class Verdict:
    """Ranks that block the others (`culprits`) and a sentence that names the collective."""

    culprits: tuple[int, ...]
    message: str


@dataclass(frozen=True)
class Gap:
    """Collective that the ranks `ahead` have entered and the ranks `behind` have not."""

    channel: Channel
    entered: Entered
    ahead: tuple[int, ...]
    behind: tuple[int, ...]


def diagnose(views: Sequence[PulseView], now: float, states: Mapping[int, str]) -> Verdict:
    """Find the ranks of this machine that block the others.

    Args:
        views: Heartbeats, one per rank.
        now: CLOCK_MONOTONIC, in seconds.
        states: Rank -> one-letter process state from /proc (`T` is stopped).
    """
    gaps = list(find_gaps(views))
    youngest = max(view.alive for view in views)
    silent = tuple(view.rank for view in views if youngest - view.alive > SILENT_SECONDS)
    if silent:
        return Verdict(
            silent, f"{_why_silent(silent, states)}; {_missing(silent, gaps, views, now)}"
        )
    skip = find_skip(views)
    if skip is not None:
        return skip
    waits = {(ahead, behind) for gap in gaps for ahead in gap.ahead for behind in gap.behind}
    awaited = {behind for _, behind in waits}
    waiting = {ahead for ahead, _ in waits}
    if awaited:
        free = tuple(sorted(awaited - waiting)) or (_first_to_halt(views, awaited),)
        return Verdict(free, _missing(free, gaps, views, now))
    here = {view.rank for view in views}
    if len(here) < views[0].world_size:
        others = sorted(set(range(views[0].world_size)) - here)
        return Verdict(
            (),
            "no rank of this machine is missing from a collective; "
            f"the blocking rank is on another machine (ranks {others})",
        )
    slowest = min(views, key=lambda view: view.since)
    return Verdict((slowest.rank,), f"no rank is missing from a collective; {_doing(slowest, now)}")


def find_gaps(views: Sequence[PulseView]) -> Iterator[Gap]:
    """Yield each collective that some ranks of its channel have entered and others have not."""
    channels = {key: channel for view in views for key, channel in view.channels.items()}
    for key, channel in channels.items():
        last = {
            view.rank: (view, view.last_of(key)) for view in views if view.rank in channel.ranks
        }
        # Records of a channel may have been overwritten in the ring; such a rank is left out.
        numbers = {
            rank: 0 if entry is None else entry.number
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
            entered.operation == "recv" and view.waiting_since is None
        ):
            continue  # sends block no rank, nor does a receive before its wait
        if behind:
            yield Gap(channel, entered, ahead, behind)


def find_skip(views: Sequence[PulseView]) -> Verdict | None:
    """Find the first collective that one rank of a group skipped; None if all ranks agree."""
    channels = {key: channel for view in views for key, channel in view.channels.items()}
    for key, channel in channels.items():
        histories = {
            view.rank: {
                entered.number: entered for entered in view.entered if entered.channel == key
            }
            for view in views
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
            if len({(entered.operation, entered.elements) for entered in entries.values()}) > 1:
                return _name_skip(channel, histories, entries, number)
    return None


def _name_skip(
    channel: Channel,
    courses: Mapping[int, Mapping[int, Entered]],
    found: Mapping[int, Entered],
    number: int,
) -> Verdict:
    """Name the rank that skipped a collective.

    It is the only rank that differs from a majority. Without a majority it is the rank whose
    sequence, shifted by one, equals another rank's; ties go to a rank that differs from earlier
    steps.
    """

    def count_matches(rank: int, other: int) -> int:
        own_history = courses[rank]
        other_history = courses[other]
        places = range(number, number + _COMPARED)
        return sum(
            own_history[place].same_as(other_history[place + 1])
            for place in places
            if place in own_history and place + 1 in other_history
        )

    common, count = Counter(
        (entered.operation, entered.elements) for entered in found.values()
    ).most_common(1)[0]
    outliers = [
        rank for rank, entered in found.items() if (entered.operation, entered.elements) != common
    ]
    if count > len(found) / 2 and len(outliers) == 1:
        rank = outliers[0]
    else:
        usual = _usual_at(number, next(iter(courses.values())))
        unusual = [
            rank
            for rank, entered in found.items()
            if usual is not None and not entered.same_as(usual)
        ]
        pairs = [(rank, other) for rank in found for other in found if rank != other]
        rank = max(pairs, key=lambda pair: (count_matches(*pair), pair[0] in unusual))[0]
    skipped = next(
        entered
        for other, entered in found.items()
        if other != rank and not entered.same_as(found[rank])
    )
    return Verdict(
        (rank,),
        f"rank {rank} skipped {skipped} of {channel.name}: it entered {found[rank].operation} "
        f"({found[rank].elements:,} elements) instead",
    )


def _usual_at(number: int, course: Mapping[int, Entered]) -> Entered | None:
    """Find the collective that followed the same ones in an earlier step, if it is recorded."""
    before = [course.get(number - back) for back in range(1, _REMEMBERED + 1)]
    for place in range(number - 1, number - _COMPARED * _REMEMBERED, -1):
        then = [course.get(place - back) for back in range(1, _REMEMBERED + 1)]
        if place in course and all(
            a is not None and b is not None and a.same_as(b)
            for a, b in zip(before, then, strict=True)
        ):
            return course[place]
    return None


def _missing(
    culprits: Sequence[int], gaps: Sequence[Gap], views: Sequence[PulseView], now: float
) -> str:
    """Describe the collective that the ranks are missing from and the ranks that wait in it."""
    by_rank = {view.rank: view for view in views}
    blocked = [
        gap
        for gap in gaps
        if set(gap.behind) & set(culprits) and not set(gap.ahead) & set(culprits)
    ]
    if not blocked:
        return "; ".join(_doing(by_rank[rank], now) for rank in culprits)
    gap = min(blocked, key=lambda gap: gap.entered.at_seconds)
    missing = [rank for rank in gap.behind if rank in culprits]
    seconds = now - gap.entered.at_seconds
    waiting = (
        f"{_named(gap.ahead)} {'has' if len(gap.ahead) == 1 else 'have'} waited for {seconds:.1f} s"
    )
    doing = "; ".join(_doing(by_rank[rank], now) for rank in missing)
    verb = "is" if len(missing) == 1 else "are"
    place = f"{gap.entered} of {gap.channel.name}"
    return f"{_named(missing)} {verb} missing from {place}, where {waiting}; {doing}"


def _doing(view: PulseView, now: float) -> str:
    last = ""
    if view.entered:
        seconds = now - view.entered[-1].at_seconds
        last = f", its last collective was {view.entered[-1]} {seconds:.1f} s ago"
    return (
        f"rank {view.rank} has been in {view.phase} {view.step} for {now - view.since:.1f} s{last}"
    )


def _why_silent(ranks: Sequence[int], states: Mapping[int, str]) -> str:
    stopped = [rank for rank in ranks if states.get(rank) in ("T", "t")]
    gone = [rank for rank in ranks if states.get(rank) in ("Z", "X", "")]
    unscheduled = [rank for rank in ranks if rank not in stopped and rank not in gone]
    parts = []
    if stopped:
        parts.append(f"{_named(stopped)} stopped by a signal (SIGSTOP)")
    if gone:
        parts.append(f"{_named(gone)} no longer running")
    if unscheduled:
        parts.append(
            f"{_named(unscheduled)} not running Python: native code holds the interpreter lock, "
            f"or the kernel does not schedule the process"
        )
    return "; ".join(parts)


def _first_to_halt(views: Sequence[PulseView], among: set[int]) -> int:
    """Return the rank with the oldest last collective, of ranks that wait for each other."""
    return min(
        (view for view in views if view.rank in among),
        key=lambda view: view.entered[-1].at_seconds if view.entered else view.since,
    ).rank


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
