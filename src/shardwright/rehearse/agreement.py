"""Check that the ranks' sequences of collectives match.

The sequences are executed together: a collective blocks until all ranks of its group call it.
Sends and receives do not block (`schedule.check` proves their order within a pipeline), but
between two ranks they must match in the order in which they are posted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwright.rehearse.collectives import Collective


@dataclass(frozen=True)
class Disagreement:
    """First mismatch: message, ranks involved, and index of the collective, from 0."""

    told: str
    ranks: tuple[int, ...]
    place: int

    def __str__(self) -> str:
        return self.told


def find_disagreement(sequences: Mapping[int, Sequence[Collective]]) -> Disagreement | None:
    """Return the first mismatch between ranks; None if every rank finishes its sequence.

    Args:
        sequences: the collectives of every rank, in the order of its calls.
    """
    return _first_mismatched_exchange(sequences) or _first_stuck(sequences)


def _first_mismatched_exchange(
    sequences: Mapping[int, Sequence[Collective]],
) -> Disagreement | None:
    """Match sends with receives between every two ranks, in the order of posting."""
    sends: dict[tuple[int, int], deque[tuple[int, Collective]]] = {}
    receives: dict[tuple[int, int], deque[tuple[int, Collective]]] = {}
    for rank, calls in sequences.items():
        for place, call in enumerate(calls):
            if call.kind == "send":
                assert call.peer is not None
                sends.setdefault((rank, call.peer), deque()).append((place, call))
            elif call.kind == "recv":
                assert call.peer is not None
                receives.setdefault((call.peer, rank), deque()).append((place, call))
    for source, target in sorted(sends.keys() | receives.keys()):
        pair_sends = sends.get((source, target), deque())
        pair_receives = receives.get((source, target), deque())
        number = 0
        while pair_sends and pair_receives:
            place, send = pair_sends.popleft()
            _, receive = pair_receives.popleft()
            if (send.num_bytes, send.dtype) != (receive.num_bytes, receive.dtype):
                return Disagreement(
                    f"message {number} from rank {source} to rank {target}: sent "
                    f"{_size(send)}, received as {_size(receive)}",
                    (source, target),
                    place,
                )
            number += 1
        if pair_sends:
            place, send = pair_sends[0]
            return Disagreement(
                f"rank {source} sends {_size(send)} to rank {target} (its collective {place}), "
                f"but rank {target} never receives it",
                (source, target),
                place,
            )
        if pair_receives:
            place, receive = pair_receives[0]
            return Disagreement(
                f"rank {target} waits for {_size(receive)} from rank {source} "
                f"(its collective {place}), but rank {source} never sends it",
                (target, source),
                place,
            )
    return None


def _first_stuck(sequences: Mapping[int, Sequence[Collective]]) -> Disagreement | None:
    """Execute all sequences until no rank can continue; unfinished ranks are blocked."""
    positions = dict.fromkeys(sequences, 0)
    ready = deque(sequences)
    while ready:
        rank = ready.popleft()
        calls = sequences[rank]
        while positions[rank] < len(calls):
            call = calls[positions[rank]]
            if call.kind in ("send", "recv"):
                positions[rank] += 1
                continue
            missing = [member for member in call.ranks if member not in sequences]
            if missing:
                return Disagreement(
                    f"rank {rank} calls {_words(call)} with rank {missing[0]}, which does not "
                    "exist",
                    (rank,),
                    positions[rank],
                )
            late = [
                member for member in call.ranks if not _waits_at(sequences, positions, member, call)
            ]
            if late:
                break
            mismatch = _mismatch(sequences, positions, call)
            if mismatch is not None:
                return mismatch
            for member in call.ranks:
                positions[member] += 1
                if member != rank:
                    ready.append(member)
    return _stuck(sequences, positions)


def _waits_at(
    sequences: Mapping[int, Sequence[Collective]],
    places: dict[int, int],
    member: int,
    call: Collective,
) -> bool:
    """Advance `member` past its sends and receives; return True if it waits for this group."""
    calls = sequences[member]
    while places[member] < len(calls) and calls[places[member]].kind in ("send", "recv"):
        places[member] += 1
    return places[member] < len(calls) and calls[places[member]].ranks == call.ranks


def _mismatch(
    sequences: Mapping[int, Sequence[Collective]], places: dict[int, int], call: Collective
) -> Disagreement | None:
    for member in call.ranks:
        other = sequences[member][places[member]]
        is_same = (other.kind, other.dtype) == (call.kind, call.dtype)
        # The ranks of an all-to-all may send different amounts.
        if not is_same or (call.kind != "all_to_all" and other.num_bytes != call.num_bytes):
            first = call.ranks[0]
            return Disagreement(
                f"group {_some(call.ranks)}: rank {first} calls "
                f"{_words(sequences[first][places[first]])}, "
                f"rank {member} calls {_words(other)}",
                (first, member),
                places[member],
            )
    return None


def _stuck(
    sequences: Mapping[int, Sequence[Collective]], places: dict[int, int]
) -> Disagreement | None:
    waiting = [rank for rank in sequences if places[rank] < len(sequences[rank])]
    if not waiting:
        return None
    rank = waiting[0]
    call = sequences[rank][places[rank]]
    missing = [member for member in call.ranks if places[member] >= len(sequences[member])]
    if missing:
        message = (
            f"rank {rank} waits in its collective {places[rank]}, {_words(call)}, for rank "
            f"{missing[0]}, which has finished"
        )
        return Disagreement(message, (rank, missing[0]), places[rank])
    cycle = _circle(sequences, places, rank)
    return Disagreement(f"deadlock: {cycle}", tuple(waiting), places[rank])


def _circle(
    sequences: Mapping[int, Sequence[Collective]], places: dict[int, int], rank: int
) -> str:
    """Format a cycle of blocked ranks: `rank 0 waits for 1 in ...; rank 1 waits for 0 ...`."""
    parts: list[str] = []
    seen: set[int] = set()
    while rank not in seen:
        seen.add(rank)
        call = sequences[rank][places[rank]]
        blocking_rank = next(
            member
            for member in call.ranks
            if member != rank and sequences[member][places[member]].ranks != call.ranks
        )
        parts.append(
            f"rank {rank} waits for {blocking_rank} in {_words(call)} over ranks "
            f"{_some(call.ranks)}"
        )
        rank = blocking_rank
    return "; ".join(parts)


def _words(call: Collective) -> str:
    return f"{call.kind} of {_size(call)}"


def _size(call: Collective) -> str:
    return f"{call.num_bytes} bytes" + (f" of {call.dtype}" if call.dtype else "")


def _some(ranks: tuple[int, ...], most: int = 8) -> str:
    listed = ", ".join(map(str, ranks[:most]))
    return f"({listed}{', ...' if len(ranks) > most else ''})"
