"""Do all ranks' sequences of collectives agree? Every collective is met by all of its group, every send by its receive.

The sequences are walked together as the ranks would walk them: a collective waits for the others of its group, sends and receives
do not wait (their order within a pipeline is proven by `schedule.check`) but must meet in the order in which they were posted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwright.rehearse.collectives import Collective


@dataclass(frozen=True)
class Disagreement:
    """What does not meet, and where: `ranks` are those to look at, `place` counts each one's collectives from 0."""

    told: str
    ranks: tuple[int, ...]
    place: int

    def __str__(self) -> str:
        return self.told


def find_disagreement(sequences: Mapping[int, Sequence[Collective]]) -> Disagreement | None:
    """The first thing on which ranks disagree; None where all of them come to their ends.

    Args:
        sequences: every rank's collectives, in its order.
    """
    return _first_mismatched_exchange(sequences) or _first_stuck(sequences)


def _first_mismatched_exchange(sequences: Mapping[int, Sequence[Collective]]) -> Disagreement | None:
    """Sends and receives between each two ranks, in the order in which they were posted."""
    sent: dict[tuple[int, int], deque[tuple[int, Collective]]] = {}
    received: dict[tuple[int, int], deque[tuple[int, Collective]]] = {}
    for rank, calls in sequences.items():
        for place, call in enumerate(calls):
            if call.kind == "send":
                assert call.peer is not None
                sent.setdefault((rank, call.peer), deque()).append((place, call))
            elif call.kind == "recv":
                assert call.peer is not None
                received.setdefault((call.peer, rank), deque()).append((place, call))
    for source, target in sorted(sent.keys() | received.keys()):
        givens, takes = sent.get((source, target), deque()), received.get((source, target), deque())
        number = 0
        while givens and takes:
            (place, given), (_, taken) = givens.popleft(), takes.popleft()
            if (given.num_bytes, given.dtype) != (taken.num_bytes, taken.dtype):
                return Disagreement(
                    f"message {number} from rank {source} to rank {target}: sent {_size(given)}, received as {_size(taken)}",
                    (source, target),
                    place,
                )
            number += 1
        if givens:
            place, given = givens[0]
            return Disagreement(
                f"rank {source} sends {_size(given)} to rank {target} (its collective {place}), which never receives it",
                (source, target),
                place,
            )
        if takes:
            place, taken = takes[0]
            return Disagreement(
                f"rank {target} waits for {_size(taken)} from rank {source} (its collective {place}), which never sends it",
                (target, source),
                place,
            )
    return None


def _first_stuck(sequences: Mapping[int, Sequence[Collective]]) -> Disagreement | None:
    """Walk until nobody can go on; whoever has not come to the end waits for somebody."""
    places = dict.fromkeys(sequences, 0)
    ready = deque(sequences)
    while ready:
        rank = ready.popleft()
        calls = sequences[rank]
        while places[rank] < len(calls):
            call = calls[places[rank]]
            if call.kind in ("send", "recv"):
                places[rank] += 1
                continue
            absent = [member for member in call.ranks if member not in sequences]
            if absent:
                return Disagreement(
                    f"rank {rank} calls {_words(call)} with rank {absent[0]}, which does not run", (rank,), places[rank]
                )
            waiting = [member for member in call.ranks if not _waits_at(sequences, places, member, call)]
            if waiting:
                break
            wrong = _mismatch(sequences, places, call)
            if wrong is not None:
                return wrong
            for member in call.ranks:
                places[member] += 1
                if member != rank:
                    ready.append(member)
    return _stuck(sequences, places)


def _waits_at(sequences: Mapping[int, Sequence[Collective]], places: dict[int, int], member: int, call: Collective) -> bool:
    """Whether a rank has come to a collective of the same group; sends and receives on its way do not hold it up."""
    calls = sequences[member]
    while places[member] < len(calls) and calls[places[member]].kind in ("send", "recv"):
        places[member] += 1
    return places[member] < len(calls) and calls[places[member]].ranks == call.ranks


def _mismatch(sequences: Mapping[int, Sequence[Collective]], places: dict[int, int], call: Collective) -> Disagreement | None:
    for member in call.ranks:
        other = sequences[member][places[member]]
        same = (other.kind, other.dtype) == (call.kind, call.dtype)
        # What ranks put into an all-to-all differs by nature.
        if not same or (call.kind != "all_to_all" and other.num_bytes != call.num_bytes):
            first = call.ranks[0]
            return Disagreement(
                f"group {_some(call.ranks)}: rank {first} calls {_words(sequences[first][places[first]])}, "
                f"rank {member} calls {_words(other)}",
                (first, member),
                places[member],
            )
    return None


def _stuck(sequences: Mapping[int, Sequence[Collective]], places: dict[int, int]) -> Disagreement | None:
    waiting = [rank for rank in sequences if places[rank] < len(sequences[rank])]
    if not waiting:
        return None
    rank = waiting[0]
    call = sequences[rank][places[rank]]
    missing = [member for member in call.ranks if places[member] >= len(sequences[member])]
    if missing:
        told = f"rank {rank} waits in its collective {places[rank]}, {_words(call)}, for rank {missing[0]}, which has ended"
        return Disagreement(told, (rank, missing[0]), places[rank])
    return Disagreement(f"a circle of waits: {_circle(sequences, places, rank)}", tuple(waiting), places[rank])


def _circle(sequences: Mapping[int, Sequence[Collective]], places: dict[int, int], rank: int) -> str:
    """`rank 0 waits for 1 in ...; rank 1 waits for 0 in ...`, until it closes."""
    words: list[str] = []
    seen: set[int] = set()
    while rank not in seen:
        seen.add(rank)
        call = sequences[rank][places[rank]]
        following = next(
            member for member in call.ranks if member != rank and sequences[member][places[member]].ranks != call.ranks
        )
        words.append(f"rank {rank} waits for {following} in {_words(call)} of {_some(call.ranks)}")
        rank = following
    return "; ".join(words)


def _words(call: Collective) -> str:
    return f"{call.kind} of {_size(call)}"


def _size(call: Collective) -> str:
    return f"{call.num_bytes} bytes of {call.dtype or 'nothing'}"


def _some(ranks: tuple[int, ...], most: int = 8) -> str:
    listed = ", ".join(map(str, ranks[:most]))
    return f"({listed}{', ...' if len(ranks) > most else ''})"
