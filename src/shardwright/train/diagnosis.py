"""Which rank the others wait for, read off the pulses of all of them at one moment.

Asked in this order, since each is surer than the next:

    1  who does not run at all: its heartbeat stands still while the others' go on
    2  who entered another collective than the rest under the same number: one was skipped
    3  who is waited for and waits for nobody: it has not entered what others are in
    4  who entered its last collective first: the others came further before they, too, had to wait

No torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwright.train.pulse import BEAT_SECONDS, Channel, Entered, PulseView

SILENT_SECONDS = 6 * BEAT_SECONDS
"""A heartbeat this much older than the youngest one stands still; a busy machine delays one by a beat or two."""
_COMPARED = 64
"""Collectives after a difference that tell who skipped one."""
_REMEMBERED = 8
"""Collectives before a difference by which its place in an earlier step is found."""


@dataclass(frozen=True)
class Verdict:
    """`culprits` are the ranks that the others wait for; `message` says so in one line, with the collective."""

    culprits: tuple[int, ...]
    message: str


@dataclass(frozen=True)
class Gap:
    """`ahead` have entered a collective that `behind` have not."""

    channel: Channel
    entered: Entered
    ahead: tuple[int, ...]
    behind: tuple[int, ...]


def diagnose(views: Sequence[PulseView], now: float, states: Mapping[int, str]) -> Verdict:
    """Who hangs, of the ranks on this machine.

    Args:
        views: one per rank.
        now: CLOCK_MONOTONIC.
        states: rank -> one letter for its process, as /proc has it (`T` is stopped).
    """
    gaps = list(find_gaps(views))
    youngest = max(view.alive for view in views)
    silent = tuple(view.rank for view in views if youngest - view.alive > SILENT_SECONDS)
    if silent:
        return Verdict(silent, f"{_why_silent(silent, states)}; {_missing(silent, gaps, views, now)}")
    skip = find_skip(views)
    if skip is not None:
        return skip
    waits = {(ahead, behind) for gap in gaps for ahead in gap.ahead for behind in gap.behind}
    awaited, waiting = {behind for _, behind in waits}, {ahead for ahead, _ in waits}
    if awaited:
        free = tuple(sorted(awaited - waiting)) or (_first_to_halt(views, awaited),)
        return Verdict(free, _missing(free, gaps, views, now))
    here = {view.rank for view in views}
    if len(here) < views[0].world_size:
        others = sorted(set(range(views[0].world_size)) - here)
        return Verdict((), f"no rank of this machine is missing from a collective; what is awaited is on others (ranks {others})")
    slowest = min(views, key=lambda view: view.since)
    return Verdict((slowest.rank,), f"no rank is missing from a collective; {_doing(slowest, now)}")


def find_gaps(views: Sequence[PulseView]) -> Iterator[Gap]:
    """Every channel in which some ranks have come further than others."""
    channels = {key: channel for view in views for key, channel in view.channels.items()}
    for key, channel in channels.items():
        last = {view.rank: (view, view.last_of(key)) for view in views if view.rank in channel.ranks}
        # A channel whose records have left a ring says nothing about that rank.
        numbers = {
            rank: 0 if found is None else found.number for rank, (view, found) in last.items() if found or key not in view.channels
        }
        if len(numbers) < 2:
            continue
        most = max(numbers.values())
        ahead = tuple(sorted(rank for rank, number in numbers.items() if number == most))
        behind = tuple(sorted(rank for rank, number in numbers.items() if number < most))
        view, entered = last[ahead[0]]
        assert entered is not None
        if entered.operation == "send" or (entered.operation == "recv" and view.waiting_since is None):
            continue  # nobody waits for a message that has only been sent, or for one that is only prepared for
        if behind:
            yield Gap(channel, entered, ahead, behind)


def find_skip(views: Sequence[PulseView]) -> Verdict | None:
    """The first collective of a group that one rank passed over, as the others' later ones show; None where all agree."""
    channels = {key: channel for view in views for key, channel in view.channels.items()}
    for key, channel in channels.items():
        courses = {
            view.rank: {entered.number: entered for entered in view.entered if entered.channel == key}
            for view in views
            if view.rank in channel.ranks
        }
        common = set.intersection(*(set(course) for course in courses.values())) if len(courses) > 1 else set()
        for number in sorted(common):
            found = {rank: course[number] for rank, course in courses.items()}
            if any(entered.operation in ("send", "recv") for entered in found.values()):
                break
            if len({(entered.operation, entered.elements) for entered in found.values()}) > 1:
                return _name_skip(channel, courses, found, number)
    return None


def _name_skip(
    channel: Channel, courses: Mapping[int, Mapping[int, Entered]], found: Mapping[int, Entered], number: int
) -> Verdict:
    """Whose course, moved on by one, is the others'; where all stand still at once, whose is not that of the steps before."""

    def agreement(rank: int, other: int) -> int:
        mine, theirs = courses[rank], courses[other]
        places = range(number, number + _COMPARED)
        return sum(mine[place].same_as(theirs[place + 1]) for place in places if place in mine and place + 1 in theirs)

    common, count = Counter((entered.operation, entered.elements) for entered in found.values()).most_common(1)[0]
    odd = [rank for rank, entered in found.items() if (entered.operation, entered.elements) != common]
    if count > len(found) / 2 and len(odd) == 1:
        rank = odd[0]
    else:
        usual = _usual_at(number, next(iter(courses.values())))
        strangers = [rank for rank, entered in found.items() if usual is not None and not entered.same_as(usual)]
        pairs = [(rank, other) for rank in found for other in found if rank != other]
        rank = max(pairs, key=lambda pair: (agreement(*pair), pair[0] in strangers))[0]
    theirs = next(entered for other, entered in found.items() if other != rank and not entered.same_as(found[rank]))
    return Verdict(
        (rank,),
        f"rank {rank} skipped {theirs} of {channel.name}: it entered {found[rank].operation} "
        f"({found[rank].elements:,} elements) in its place",
    )


def _usual_at(number: int, course: Mapping[int, Entered]) -> Entered | None:
    """What came last time after the collectives that came before `number`; None where nothing like them is remembered."""
    before = [course.get(number - back) for back in range(1, _REMEMBERED + 1)]
    for place in range(number - 1, number - _COMPARED * _REMEMBERED, -1):
        then = [course.get(place - back) for back in range(1, _REMEMBERED + 1)]
        if place in course and all(a is not None and b is not None and a.same_as(b) for a, b in zip(before, then, strict=True)):
            return course[place]
    return None


def _missing(culprits: Sequence[int], gaps: Sequence[Gap], views: Sequence[PulseView], now: float) -> str:
    """From which collective they are missing, and who waits there."""
    by_rank = {view.rank: view for view in views}
    found = [gap for gap in gaps if set(gap.behind) & set(culprits) and not set(gap.ahead) & set(culprits)]
    if not found:
        return "; ".join(_doing(by_rank[rank], now) for rank in culprits)
    gap = min(found, key=lambda gap: gap.entered.at_seconds)
    missing = [rank for rank in gap.behind if rank in culprits]
    seconds = now - gap.entered.at_seconds
    waiting = f"{_named(gap.ahead)} {'has' if len(gap.ahead) == 1 else 'have'} waited for {seconds:.1f} s"
    doing = "; ".join(_doing(by_rank[rank], now) for rank in missing)
    verb = "is" if len(missing) == 1 else "are"
    return f"{_named(missing)} {verb} missing from {gap.entered} of {gap.channel.name}, where {waiting}; {doing}"


def _doing(view: PulseView, now: float) -> str:
    last = f", its last collective was {view.entered[-1]} {now - view.entered[-1].at_seconds:.1f} s ago" if view.entered else ""
    return f"rank {view.rank} has been in {view.phase} {view.step} for {now - view.since:.1f} s{last}"


def _why_silent(ranks: Sequence[int], states: Mapping[int, str]) -> str:
    stopped = [rank for rank in ranks if states.get(rank) in ("T", "t")]
    gone = [rank for rank in ranks if states.get(rank) in ("Z", "X", "")]
    held = [rank for rank in ranks if rank not in stopped and rank not in gone]
    told = []
    if stopped:
        told.append(f"{_named(stopped)} stopped by a signal (SIGSTOP)")
    if gone:
        told.append(f"{_named(gone)} gone")
    if held:
        told.append(f"{_named(held)} running no Python: something holds its interpreter's lock, or the kernel does not let it run")
    return "; ".join(told)


def _first_to_halt(views: Sequence[PulseView], among: set[int]) -> int:
    """Of ranks that wait for each other, the one whose last collective is the oldest."""
    return min(
        (view for view in views if view.rank in among), key=lambda view: view.entered[-1].at_seconds if view.entered else view.since
    ).rank


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
