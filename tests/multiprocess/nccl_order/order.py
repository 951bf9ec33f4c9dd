"""Check of the records of all ranks under the model of NCCL in `schedule.communication_graph`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from shardwright.errors import RankFailed
from shardwright.schedule import CommunicationGraph
from tests.multiprocess.nccl_order.process_group import Issue, Record, Wait

NUM_SHOWN = 8
"""Most operations without partner that are named."""


class WrongOrder(RankFailed):
    """The ranks would wait for each other on NCCL, or an operation has no partner."""


@dataclass(frozen=True)
class _Message:
    """One collective, or one send with its receive."""

    kind: str
    group: str
    ranks: tuple[int, ...]
    number: int

    def __str__(self) -> str:
        between = "to" if self.kind == "message" else "of"
        ranks = f" {between} ".join(map(str, self.ranks)) if between == "to" else self.ranks
        return f"{self.kind} {self.number} ({between} {ranks}, group {self.group})"


@dataclass(frozen=True)
class _Wait:
    rank: int
    message: _Message

    def __str__(self) -> str:
        return f"rank {self.rank}'s work after {self.message}"


def check_order(records: Sequence[Record]) -> None:
    """Check the records of one run, by rank.

    Raises:
        WrongOrder: an operation without partner, with another one than on the other ranks, or
            that nobody waits for; or operations that wait for each other, with the cycle.
    """
    messages = [_name_messages(rank, record) for rank, record in enumerate(records)]
    _check_matched(records, messages)
    _check_waited(records, messages)
    graph = CommunicationGraph()
    for rank, record in enumerate(records):
        _add_rank(graph, rank, record, messages[rank])
    circular_wait = graph.find_circular_wait()
    if circular_wait is not None:
        raise WrongOrder("deadlock on NCCL: " + "; ".join(circular_wait))


def _name_messages(rank: int, record: Record) -> dict[int, _Message]:
    """Return the message of each issue, by its position in the record."""
    counts: Counter[tuple[str, tuple[int, ...] | None]] = Counter()
    messages = {}
    for position, event in enumerate(record):
        if isinstance(event, Issue):
            if event.peer is None or event.kind == "broadcast":
                counts[event.group, None] += 1
                messages[position] = _Message(
                    "collective", event.group, event.ranks, counts[event.group, None]
                )
                continue
            channel = (rank, event.peer) if event.kind == "send" else (event.peer, rank)
            counts[event.group, channel] += 1
            messages[position] = _Message(
                "message", event.group, channel, counts[event.group, channel]
            )
    return messages


def _check_matched(records: Sequence[Record], messages: Sequence[dict[int, _Message]]) -> None:
    """Check that each message is issued once on each of its ranks, in the same way."""
    issues: dict[_Message, dict[int, Issue]] = defaultdict(dict)
    for rank, record in enumerate(records):
        for position, message in messages[rank].items():
            issue = record[position]
            assert isinstance(issue, Issue)
            issues[message][rank] = issue
    for message, by_rank in issues.items():
        seen = {
            (issue.size, None if message.kind == "message" else (issue.kind, issue.peer))
            for issue in by_rank.values()
        }
        if len(seen) > 1:
            calls = "; ".join(
                f"rank {rank}: {issue.kind} {', '.join(issue.size)}".rstrip()
                for rank, issue in sorted(by_rank.items())
            )
            raise WrongOrder(f"{message} differs between ranks: {calls}")
    missing = [
        f"rank {rank} never calls its part of {message}, which is a {issue.kind} on rank {other}"
        for message, by_rank in issues.items()
        for rank in sorted(set(message.ranks) - set(by_rank))
        for other, issue in [min(by_rank.items())]
    ]
    if missing:
        raise WrongOrder("; ".join(missing[:NUM_SHOWN]))


def _check_waited(records: Sequence[Record], messages: Sequence[dict[int, _Message]]) -> None:
    for rank, record in enumerate(records):
        waited = {event.position for event in record if isinstance(event, Wait)}
        for position, message in messages[rank].items():
            if position not in waited:
                issue = record[position]
                assert isinstance(issue, Issue)
                raise WrongOrder(f"rank {rank} never waits for {issue.kind}: {message}")


def _add_rank(
    graph: CommunicationGraph, rank: int, record: Record, messages: dict[int, _Message]
) -> None:
    connected: set[object] = set()
    for operation in _split_operations(record):
        first = record[operation[0]]
        if isinstance(first, Wait):
            message = messages[first.position]
            graph.add_computation(rank, _Wait(rank, message), [message])
            continue
        new: dict[str, None] = {}
        for position in operation:
            message = messages[position]
            issue = record[position]
            assert isinstance(issue, Issue)
            # NCCL connects ranks at the first use, a collective's by its kind.
            kind = issue.kind if message.kind == "collective" else "message"
            new[f"the connection for {kind} of {message.ranks}, group {message.group}"] = None
        if not connected.issuperset(new):
            graph.add_connections(rank, [each for each in new if each not in connected])
            connected.update(new)
        graph.add_operation(rank, first.group, [messages[position] for position in operation])


def _split_operations(record: Record) -> Iterator[list[int]]:
    """Yield the positions of each wait and of each operation; a batch has several."""

    def get_operation(position: int) -> tuple[bool, int]:
        event = record[position]
        return (True, event.number) if isinstance(event, Issue) else (False, position)

    for _, positions in groupby(range(len(record)), get_operation):
        yield list(positions)
