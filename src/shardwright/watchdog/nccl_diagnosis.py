"""Diagnosis of CUDA hangs, from the records of NCCL's flight recorder.

The host of a rank enqueues operations ahead of its device, so what a host has entered does not show
which rank is missing on the device. Checks, from the most to the least certain:

    1  a rank that enqueued another collective, size or dtype under the same number
    2  a rank that has not enqueued what others wait for, and waits for no rank
    3  a rank whose device has not started what the devices of others have started, or has other
       operations of the group in front of it: NCCL runs those of a rank and group one by one
    4  ranks that wait for each other; the one that enqueued its last operation first stopped first
    5  a rank without a record, if all others have enqueued what they wait for
    6  ranks that enqueued the collectives of two groups in opposite orders

Imports no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwright.watchdog.hang_diagnosis import (
    HangDiagnosis,
    describe_activity,
    diagnose_hang,
    find_silent_ranks,
    format_ranks,
)
from shardwright.watchdog.heartbeat import Heartbeat
from shardwright.watchdog.nccl_records import NcclGroup, NcclOperation, NcclRecord, NcclRecords

_UNEVEN_COLLECTIVES = ("all_to_all", "all_to_allv", "gather", "scatter", "barrier")
"""Collectives whose ranks may have different numbers of elements."""
_NUM_SHOWN_OPERATIONS = 12


@dataclass(frozen=True)
class _Wait:
    """Operation that `waiting_ranks` have enqueued or started and `late_ranks` have not."""

    operation: NcclOperation
    waiting_ranks: tuple[int, ...]
    late_ranks: tuple[int, ...]
    is_enqueued: bool
    """True if the late ranks have enqueued it, and their devices have not started it."""


def diagnose_hang_on_cuda(
    heartbeats: Sequence[Heartbeat],
    now_seconds: float,
    process_states: Mapping[int, str],
    records: NcclRecords,
) -> HangDiagnosis:
    """Find the ranks that block the others, from heartbeats and NCCL's records.

    A rank that does not run is named from its heartbeat. Otherwise NCCL's records decide; without a
    verdict of theirs the heartbeats do.
    """
    verdict = diagnose_hang(heartbeats, now_seconds, process_states)
    found = diagnose_records(records)
    if found is None:
        message = f"{verdict.message}; NCCL's records name no rank"
    elif find_silent_ranks(heartbeats):
        message = f"{verdict.message}; NCCL's records: {found.message}"
    else:
        verdict = found
        activities = [
            describe_activity(view, now_seconds)
            for view in heartbeats
            if view.rank in found.blocking_ranks
        ]
        message = "; ".join([found.message, *activities])
    unreadable = [f"rank {rank}: {reason}" for rank, reason in sorted(records.unreadable.items())]
    if unreadable:
        message += f" (no record of {'; '.join(unreadable)})"
    return HangDiagnosis(verdict.blocking_ranks, message)


def diagnose_records(records: NcclRecords) -> HangDiagnosis | None:
    """Find the ranks that block the others; None if no operation shows them."""
    by_rank = records.by_rank
    mismatch = _find_mismatch(by_rank)
    if mismatch is not None:
        return mismatch
    waits = [
        *_find_collective_waits(by_rank),
        *_find_message_waits(by_rank),
        *_find_queue_waits(by_rank),
    ]
    if not waits:
        return _find_unrecorded_rank(records) or _find_opposite_order(by_rank)
    waiting = {rank for wait in waits for rank in wait.waiting_ranks}
    blocking = [wait for wait in waits if not waiting.issuperset(wait.late_ranks)]
    if not blocking:
        return _describe_circle(waits, by_rank)
    # A device may be late because the host of another rank is.
    surest = [wait for wait in blocking if not wait.is_enqueued] or blocking
    free = tuple(sorted({rank for wait in surest for rank in wait.late_ranks} - waiting))
    first = min(surest, key=lambda wait: wait.operation.created_ns)
    return HangDiagnosis(free, _describe_wait(first, free, by_rank))


def format_records(records: NcclRecords) -> str:
    """Format the records for the report: the last finished operations and the pending ones."""
    parts = []
    for rank, record in sorted(records.by_rank.items()):
        pending = [operation for operation in record.operations if operation.is_pending]
        finished = [operation for operation in record.operations if not operation.is_pending]
        lines = [
            f"    {operation.state:9}  {operation} of {operation.group}  {operation.frame}"
            for operation in (*finished[-4:], *pending[:_NUM_SHOWN_OPERATIONS])
        ]
        if len(pending) > _NUM_SHOWN_OPERATIONS:
            lines.append(f"    and {len(pending) - _NUM_SHOWN_OPERATIONS} more")
        parts.append(
            f"\nrank {rank}, operations on its device:\n" + "\n".join(lines or ["    none"])
        )
    parts += [f"\nrank {rank}: {reason}" for rank, reason in sorted(records.unreadable.items())]
    return "\n".join(parts) + "\n"


def _find_mismatch(records: Mapping[int, NcclRecord]) -> HangDiagnosis | None:
    """Find the first number of a group under which ranks enqueued different collectives."""
    for group, by_rank in _group_collectives(records).items():
        by_number = {
            rank: {operation.sequence_number: operation for operation in operations}
            for rank, operations in by_rank.items()
        }
        numbers = [set(operations) for operations in by_number.values()]
        for number in sorted(set[int]().union(*numbers)):
            here = {
                rank: operations[number]
                for rank, operations in by_number.items()
                if number in operations
            }
            if any(operation.is_message for operation in here.values()):
                break  # a batch of messages advances the number on its own ranks only
            kinds = {rank: _get_kind(operation) for rank, operation in here.items()}
            if len(set(kinds.values())) > 1:
                return _describe_mismatch(group, here, kinds, by_number)
    return None


def _describe_mismatch(
    group: NcclGroup,
    operations: Mapping[int, NcclOperation],
    kinds: Mapping[int, Any],
    by_number: Mapping[int, Mapping[int, NcclOperation]],
) -> HangDiagnosis:
    """Name the ranks that differ from the majority.

    Of two halves, the ranks that skipped an operation: their next ones are those of the others.
    """
    counts = Counter(kinds.values()).most_common()
    usual = counts[0][0]
    if len(counts) > 1 and counts[1][1] == counts[0][1]:
        usual = max(
            (kind for kind, count in counts if count == counts[0][1]),
            key=lambda kind: _count_shifted(operations, kinds, kind, by_number),
        )
    wrong = tuple(sorted(rank for rank, kind in kinds.items() if kind != usual))
    right = tuple(sorted(rank for rank, kind in kinds.items() if kind == usual))
    expected = operations[right[0]]
    found = operations[wrong[0]]
    return HangDiagnosis(
        wrong,
        f"{format_ranks(wrong)} enqueued {found} of {group} at {found.frame}, where "
        f"{format_ranks(right)} enqueued {expected} at {expected.frame}",
    )


def _count_shifted(
    operations: Mapping[int, NcclOperation],
    kinds: Mapping[int, Any],
    kind: Any,
    by_number: Mapping[int, Mapping[int, NcclOperation]],
) -> int:
    """Count operations of the other ranks that are those of `kind`'s ranks one number later."""
    complete = next(rank for rank in kinds if kinds[rank] == kind)
    number = operations[complete].sequence_number
    return sum(
        later - 1 in by_number[other]
        and _get_kind(by_number[other][later - 1]) == _get_kind(operation)
        for other in kinds
        if kinds[other] != kind
        for later, operation in by_number[complete].items()
        if later > number
    )


def _find_collective_waits(records: Mapping[int, NcclRecord]) -> Iterator[_Wait]:
    """Yield each group's first collective that some ranks have entered and others have not."""
    for group, by_rank in _group_collectives(records).items():
        pending = [
            operation.sequence_number
            for operations in by_rank.values()
            for operation in operations
            if operation.is_pending and not operation.is_message
        ]
        if not pending:
            continue
        number = min(pending)
        entered = {
            rank: operation
            for rank, operations in by_rank.items()
            for operation in operations
            if operation.sequence_number == number and operation.is_pending
        }
        absent = [
            rank
            for rank in group.ranks
            if rank in records
            and all(operation.sequence_number < number for operation in by_rank.get(rank, ()))
        ]
        started = [rank for rank, operation in entered.items() if operation.state == "started"]
        first = entered[min(entered)]
        if absent:
            yield _Wait(first, tuple(sorted(entered)), tuple(absent), is_enqueued=False)
        elif started and len(started) < len(entered):
            late = sorted(set(entered).difference(started))
            yield _Wait(entered[started[0]], tuple(sorted(started)), tuple(late), is_enqueued=True)


def _find_message_waits(records: Mapping[int, NcclRecord]) -> Iterator[_Wait]:
    """Yield the pending sends and receives whose other rank has not enqueued its side."""
    pairs: dict[tuple[NcclGroup, tuple[int, int]], dict[str, list[NcclOperation]]] = {}
    for record in records.values():
        for operation in record.operations:
            # The parts of a batch have no state of their own.
            for message in operation.parts or (operation,):
                if message.pair is not None:
                    sides = pairs.setdefault(
                        (operation.group, message.pair), {"send": [], "recv": []}
                    )
                    sides[message.name].append(_copy_state(message, operation))
    for (_, (sender, receiver)), sides in pairs.items():
        if sender not in records or receiver not in records:
            continue
        counts = {name: len(messages) for name, messages in sides.items()}
        if not (records[sender].is_complete and records[receiver].is_complete):
            counts = {name: sum(m.is_pending for m in messages) for name, messages in sides.items()}
        for name, waiting, late in (("send", sender, receiver), ("recv", receiver, sender)):
            pending = [message for message in sides[name] if message.is_pending]
            surplus = counts[name] - counts["recv" if name == "send" else "send"]
            if pending and surplus > 0:
                message = pending[max(0, len(pending) - surplus)]
                yield _Wait(message, (waiting,), (late,), is_enqueued=False)


def _find_queue_waits(records: Mapping[int, NcclRecord]) -> Iterator[_Wait]:
    """Yield first pending messages whose other side has other operations in front of it."""
    queues: dict[tuple[int, NcclGroup], list[NcclOperation]] = {}
    for rank, record in records.items():
        for operation in record.operations:
            if operation.is_pending:
                queues.setdefault((rank, operation.group), []).append(operation)
    for (rank, group), queue in queues.items():
        for message in queue[0].parts or queue[:1]:
            if message.pair is None:
                continue
            other = message.pair[1] if message.pair[0] == rank else message.pair[0]
            place = next(
                (
                    place
                    for place, operation in enumerate(queues.get((other, group), ()))
                    for counterpart in operation.parts or (operation,)
                    if counterpart.pair == message.pair and counterpart.name != message.name
                ),
                0,
            )
            if place > 0:
                yield _Wait(message, (rank,), (other,), is_enqueued=True)


def _find_opposite_order(records: Mapping[int, NcclRecord]) -> HangDiagnosis | None:
    """Find two ranks whose first pending collectives of two groups have opposite orders."""
    heads: dict[int, dict[tuple[NcclGroup, int], NcclOperation]] = {}
    for rank, record in sorted(records.items()):
        seen: set[NcclGroup] = set()
        heads[rank] = {}
        for operation in record.operations:
            if operation.is_pending and not operation.is_message and operation.group not in seen:
                seen.add(operation.group)
                heads[rank][operation.group, operation.sequence_number] = operation
    for rank, own in heads.items():
        for other, others in heads.items():
            common = [key for key in own if key in others]
            order = [key for key in others if key in own]
            if rank < other and common != order:
                first = own[common[0]]
                second = others[order[0]]
                return HangDiagnosis(
                    (rank, other),
                    f"ranks {rank} and {other} enqueued collectives in opposite orders: rank "
                    f"{rank} begins with {first} of {first.group} at {first.frame}, rank {other} "
                    f"with {second} of {second.group} at {second.frame}",
                )
    return None


def _find_unrecorded_rank(records: NcclRecords) -> HangDiagnosis | None:
    """Find a rank without a record in a collective that all its other ranks have enqueued."""
    for group, by_rank in _group_collectives(records.by_rank).items():
        pending = [
            operation
            for operations in by_rank.values()
            for operation in operations
            if operation.is_pending
        ]
        suspects = tuple(rank for rank in group.ranks if rank in records.unreadable)
        if pending and suspects:
            first = min(pending, key=lambda operation: operation.sequence_number)
            return HangDiagnosis(
                suspects,
                f"{format_ranks(suspects)} wrote no readable record, and all other ranks with one "
                f"have enqueued {first} of {group}, where they wait at {first.frame}",
            )
    return None


def _describe_circle(waits: Sequence[_Wait], records: Mapping[int, NcclRecord]) -> HangDiagnosis:
    """Name the rank that stopped first, of ranks that wait for each other.

    A receive posted ahead is pending too, though its rank does not wait for it.
    """
    ranks = sorted({rank for wait in waits for rank in wait.waiting_ranks})
    first = min(ranks, key=lambda rank: records[rank].operations[-1].created_ns)
    shown = "; ".join(
        f"{format_ranks(wait.waiting_ranks)} in {wait.operation} of {wait.operation.group} for "
        f"{format_ranks(wait.late_ranks)} (at {wait.operation.frame})"
        for wait in waits[:4]
    )
    last = records[first].operations[-1]
    return HangDiagnosis(
        (first,),
        f"{format_ranks(ranks)} wait for each other: {shown}; rank {first} stopped first, "
        f"its last operation is {last} of {last.group} at {last.frame}",
    )


def _describe_wait(wait: _Wait, free: Sequence[int], records: Mapping[int, NcclRecord]) -> str:
    missing = [rank for rank in wait.late_ranks if rank in free]
    verb = "is" if len(missing) == 1 else "are"
    waits = "waits" if len(wait.waiting_ranks) == 1 else "wait"
    how = "not started on the device" if wait.is_enqueued else "not enqueued by the host"
    last = []
    for rank in missing:
        done = [
            operation
            for operation in records[rank].operations
            if not (wait.is_enqueued and operation.is_pending)
        ]
        last.append(
            f"the last operation of rank {rank} is {done[-1]} of {done[-1].group} "
            f"({done[-1].state}) at {done[-1].frame}"
            if done
            else f"rank {rank} has no operation before it"
        )
    return (
        f"{format_ranks(missing)} {verb} missing from {wait.operation} of {wait.operation.group} "
        f"({how}), where {format_ranks(wait.waiting_ranks)} {waits} at {wait.operation.frame}; "
        f"{'; '.join(last)}"
    )


def _group_collectives(
    records: Mapping[int, NcclRecord],
) -> dict[NcclGroup, dict[int, list[NcclOperation]]]:
    """Group collectives by group and rank; batches of messages are included as such."""
    groups: dict[NcclGroup, dict[int, list[NcclOperation]]] = {}
    for rank, record in records.items():
        for operation in record.operations:
            if operation.pair is None:
                groups.setdefault(operation.group, {}).setdefault(rank, []).append(operation)
    return groups


def _get_kind(operation: NcclOperation) -> tuple[Any, ...]:
    """Return what all ranks of a collective have in common."""
    if operation.parts:
        return (operation.name, *(_get_kind(part) for part in operation.parts))
    if operation.name in _UNEVEN_COLLECTIVES:
        return (operation.name,)
    sizes = (operation.input_elements, operation.output_elements)
    return (operation.name, *sizes, operation.dtypes)


def _copy_state(message: NcclOperation, batch: NcclOperation) -> NcclOperation:
    return message if message is batch else replace(message, state=batch.state)
