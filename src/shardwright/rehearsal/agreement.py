"""Check that the ranks' sequences of collectives match.

The sequences are executed together: a collective blocks until all ranks of its group call it.
Sends and receives do not block (`schedule.check_schedule` proves their order within a pipeline),
but between two ranks they must match in the order in which they are posted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwright.rehearsal.collective_recorder import Collective


@dataclass(frozen=True)
class Disagreement:
    """First mismatch: message, ranks involved, and index of the collective, from 0."""

    message: str
    ranks: tuple[int, ...]
    position: int

    def __str__(self) -> str:
        return self.message


def find_disagreement(sequences: Mapping[int, Sequence[Collective]]) -> Disagreement | None:
    """Return the first mismatch between ranks; None if every rank finishes its sequence.

    Args:
        sequences: the collectives of every rank, in the order of its calls.
    """
    return _find_mismatched_exchange(sequences) or _find_stuck(sequences)


def _find_mismatched_exchange(sequences: Mapping[int, Sequence[Collective]]) -> Disagreement | None:
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
                    f"{_describe_size(send)}, received as {_describe_size(receive)}",
                    (source, target),
                    place,
                )
            number += 1
        if pair_sends:
            place, send = pair_sends[0]
            return Disagreement(
                f"rank {source} sends {_describe_size(send)} to rank {target} "
                f"(its collective {place}), but rank {target} never receives it",
                (source, target),
                place,
            )
        if pair_receives:
            place, receive = pair_receives[0]
            return Disagreement(
                f"rank {target} waits for {_describe_size(receive)} from rank {source} "
                f"(its collective {place}), but rank {source} never sends it",
                (target, source),
                place,
            )
    return None


def _find_stuck(sequences: Mapping[int, Sequence[Collective]]) -> Disagreement | None:
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
                    f"rank {rank} calls {_describe_call(call)} with rank {missing[0]}, "
                    "which does not exist",
                    (rank,),
                    positions[rank],
                )
            late = [
                member
                for member in call.ranks
                if not _is_waiting_at(sequences, positions, member, call)
            ]
            if late:
                break
            mismatch = _find_mismatch(sequences, positions, call)
            if mismatch is not None:
                return mismatch
            for member in call.ranks:
                positions[member] += 1
                if member != rank:
                    ready.append(member)
    return _describe_stuck(sequences, positions)


def _is_waiting_at(
    sequences: Mapping[int, Sequence[Collective]],
    positions: dict[int, int],
    member: int,
    call: Collective,
) -> bool:
    """Advance `member` past its sends and receives; return True if it waits for this group."""
    calls = sequences[member]
    while positions[member] < len(calls) and calls[positions[member]].kind in ("send", "recv"):
        positions[member] += 1
    return positions[member] < len(calls) and calls[positions[member]].ranks == call.ranks


def _find_mismatch(
    sequences: Mapping[int, Sequence[Collective]], positions: dict[int, int], call: Collective
) -> Disagreement | None:
    for member in call.ranks:
        other = sequences[member][positions[member]]
        is_same = (other.kind, other.dtype) == (call.kind, call.dtype)
        # The ranks of an all-to-all may send different amounts.
        if not is_same or (call.kind != "all_to_all" and other.num_bytes != call.num_bytes):
            first = call.ranks[0]
            return Disagreement(
                f"group {_format_ranks(call.ranks)}: rank {first} calls "
                f"{_describe_call(sequences[first][positions[first]])}, "
                f"rank {member} calls {_describe_call(other)}",
                (first, member),
                positions[member],
            )
    return None


def _describe_stuck(
    sequences: Mapping[int, Sequence[Collective]], positions: dict[int, int]
) -> Disagreement | None:
    waiting = [rank for rank in sequences if positions[rank] < len(sequences[rank])]
    if not waiting:
        return None
    rank = waiting[0]
    call = sequences[rank][positions[rank]]
    missing = [member for member in call.ranks if positions[member] >= len(sequences[member])]
    if missing:
        message = (
            f"rank {rank} waits in its collective {positions[rank]}, {_describe_call(call)}, "
            f"for rank {missing[0]}, which has finished"
        )
        return Disagreement(message, (rank, missing[0]), positions[rank])
    cycle = _describe_cycle(sequences, positions, rank)
    return Disagreement(f"deadlock: {cycle}", tuple(waiting), positions[rank])


def _describe_cycle(
    sequences: Mapping[int, Sequence[Collective]], positions: dict[int, int], rank: int
) -> str:
    """Format a cycle of blocked ranks: `rank 0 waits for 1 in ...; rank 1 waits for 0 ...`."""
    parts: list[str] = []
    seen: set[int] = set()
    while rank not in seen:
        seen.add(rank)
        call = sequences[rank][positions[rank]]
        blocking_rank = next(
            member
            for member in call.ranks
            if member != rank and sequences[member][positions[member]].ranks != call.ranks
        )
        parts.append(
            f"rank {rank} waits for {blocking_rank} in {_describe_call(call)} over ranks "
            f"{_format_ranks(call.ranks)}"
        )
        rank = blocking_rank
    return "; ".join(parts)


def _describe_call(call: Collective) -> str:
    return f"{call.kind} of {_describe_size(call)}"


def _describe_size(call: Collective) -> str:
    return f"{call.num_bytes} bytes" + (f" of {call.dtype}" if call.dtype else "")


_MAX_SHOWN_RANKS = 8


def _format_ranks(ranks: tuple[int, ...]) -> str:
    listed = ", ".join(map(str, ranks[:_MAX_SHOWN_RANKS]))
    return f"({listed}{', ...' if len(ranks) > _MAX_SHOWN_RANKS else ''})"
