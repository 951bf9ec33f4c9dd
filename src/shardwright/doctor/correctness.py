"""Correctness of collectives: known inputs and bitwise comparison with the exact results.

Element i of member m is `1 + step * ((m + i) % 4)`, with the smallest step at which all sums
over the members are exact; integers are too large for a float. A sum in a narrower dtype, a
byte from the wrong place, or a rank that is missing or counted twice changes the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.doctor.finding import Finding, format_ranks
from shardwright.parallel.direct_collectives import all_gather_single, reduce_scatter_single

SECTION = "correctness"

_NUM_ELEMENTS = 48
_MIN_NUM_ELEMENTS = 4
_MAX_TOTAL_ELEMENTS = 2**14
"""Each rank sends 48 elements to each other rank, fewer in large groups to limit the total."""

CHECKED_DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64)


@dataclass(frozen=True)
class WrongCollectiveResult:
    """Wrong result of a collective on one rank."""

    kind: str
    dtype: str
    axis: str
    rank: int
    problem: str


@dataclass(frozen=True)
class CollectiveCheck:
    """Number of results that one rank compared, and the wrong ones."""

    num_checked: int
    wrong_results: tuple[WrongCollectiveResult, ...]


def build_pattern(member: int, length: int, dtype: torch.dtype, group_size: int) -> Tensor:
    """Build a member's input, `[length]`; sums are exact in `dtype`, not in narrower ones.

    If the dtype cannot represent the sum of all members (bf16 beyond 64 members), most members
    give zeros.
    """
    steps = (torch.arange(length, dtype=torch.int64) + member) % 4
    if not dtype.is_floating_point:
        return 2**60 + 7 * steps + member  # large sums wrap around, equally on every device
    capacity = 2.0 / torch.finfo(dtype).eps  # integers up to this are exact
    step = torch.finfo(dtype).eps
    while step < 1.0 and group_size / step + 3 * group_size > capacity:
        step *= 2.0
    if member % max(1, math.ceil(4 * group_size / capacity)):
        return torch.zeros(length, dtype=dtype)
    return (1.0 + steps.to(torch.float64) * step).to(dtype)


def check_collectives(
    axis: str,
    group: dist.ProcessGroup,
    ranks: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
) -> CollectiveCheck:
    """Check every collective over one group in one dtype; `ranks` are its members in order."""
    rank = dist.get_rank()
    wrong = []
    size = len(ranks)
    length = max(_MIN_NUM_ELEMENTS, min(_NUM_ELEMENTS, _MAX_TOTAL_ELEMENTS // size))
    inputs = [build_pattern(index, length * size, dtype, size) for index in range(size)]
    member = _GroupMember(inputs, list(ranks).index(rank), ranks, group, device)
    for kind, run_collective in _COLLECTIVES.items():
        actual, expected = run_collective(member)
        problem = _compare(actual.cpu(), expected)
        if problem:
            wrong.append(
                WrongCollectiveResult(kind, str(dtype).removeprefix("torch."), axis, rank, problem)
            )
    return CollectiveCheck(len(_COLLECTIVES), tuple(wrong))


def _compare(actual: Tensor, expected: Tensor) -> str:
    """Describe the error of a result; empty if it is right."""
    if actual.dtype != expected.dtype:
        return f"has dtype {str(actual.dtype).removeprefix('torch.')}"
    differing = (actual != expected).nonzero().flatten().tolist()
    if not differing:
        return ""
    at = differing[0]
    return (
        f"{len(differing)} of {expected.numel()} elements are wrong; "
        f"the first, {at}, is {actual[at].item()!r} instead of {expected[at].item()!r}"
    )


@dataclass(frozen=True)
class _GroupMember:
    """Member of a group that runs a collective: its position, and the inputs of all members."""

    inputs: list[Tensor]
    position: int
    ranks: Sequence[int]
    group: dist.ProcessGroup
    device: torch.device


def _sum_exactly(inputs: list[Tensor]) -> Tensor:
    wide = torch.float64 if inputs[0].dtype.is_floating_point else torch.int64
    return torch.stack([tensor.to(wide) for tensor in inputs]).sum(0).to(inputs[0].dtype)


def _run_all_reduce(member: _GroupMember) -> tuple[Tensor, Tensor]:
    tensor = member.inputs[member.position].to(member.device, copy=True)
    dist.all_reduce(tensor, group=member.group)
    return tensor, _sum_exactly(member.inputs)


def _run_all_gather(member: _GroupMember) -> tuple[Tensor, Tensor]:
    expected = torch.cat(member.inputs)
    whole = torch.empty_like(expected, device=member.device)
    part = member.inputs[member.position].to(member.device)
    all_gather_single(whole, part, group=member.group)
    return whole, expected


def _run_reduce_scatter(member: _GroupMember) -> tuple[Tensor, Tensor]:
    inputs = member.inputs
    length = inputs[0].numel() // len(inputs)
    part = torch.empty(length, dtype=inputs[0].dtype, device=member.device)
    reduce_scatter_single(part, inputs[member.position].to(member.device), group=member.group)
    return part, _sum_exactly(inputs)[member.position * length : (member.position + 1) * length]


def _run_all_to_all(member: _GroupMember) -> tuple[Tensor, Tensor]:
    """Exchange parts of uneven length, as expert parallelism does."""
    inputs = member.inputs
    length = inputs[0].numel() // len(inputs)
    send_sizes = [
        [length - (sender + receiver) % 3 for receiver in range(len(inputs))]
        for sender in range(len(inputs))
    ]
    starts = [receiver * length for receiver in range(len(inputs))]
    tensor = torch.cat(
        [
            inputs[member.position][start : start + size]
            for start, size in zip(starts, send_sizes[member.position], strict=True)
        ]
    ).to(member.device)
    receive_sizes = [send_sizes[sender][member.position] for sender in range(len(inputs))]
    received = torch.empty(sum(receive_sizes), dtype=tensor.dtype, device=member.device)
    dist.all_to_all_single(
        received,
        tensor,
        output_split_sizes=receive_sizes,
        input_split_sizes=send_sizes[member.position],
        group=member.group,
    )
    return received, torch.cat(
        [
            part[starts[member.position] : starts[member.position] + size]
            for part, size in zip(inputs, receive_sizes, strict=True)
        ]
    )


def _run_broadcast(member: _GroupMember) -> tuple[Tensor, Tensor]:
    inputs = member.inputs
    last = len(inputs) - 1
    tensor = inputs[member.position].to(member.device, copy=True)
    dist.broadcast(tensor, src=member.ranks[last], group=member.group)
    return tensor, inputs[last]


def _send_to_next(member: _GroupMember) -> tuple[Tensor, Tensor]:
    """Send to the next member and receive from the previous one."""
    inputs = member.inputs
    previous = (member.position - 1) % len(inputs)
    following = (member.position + 1) % len(inputs)
    received = torch.empty_like(inputs[previous], device=member.device)
    tensor = inputs[member.position].to(member.device)
    operations = [
        dist.P2POp(dist.isend, tensor, member.ranks[following], member.group),
        dist.P2POp(dist.irecv, received, member.ranks[previous], member.group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received, inputs[previous]


_COLLECTIVES: dict[str, Callable[[_GroupMember], tuple[Tensor, Tensor]]] = {
    "all_reduce": _run_all_reduce,
    "all_gather": _run_all_gather,
    "reduce_scatter": _run_reduce_scatter,
    "all_to_all": _run_all_to_all,
    "broadcast": _run_broadcast,
    "send and receive": _send_to_next,
}


def judge_correctness(checks: Mapping[int, Sequence[CollectiveCheck]]) -> list[Finding]:
    """Judge the results of all ranks: a line per wrong collective and axis, else one line."""
    total = sum(item.num_checked for items in checks.values() for item in items)
    wrong = [result for items in checks.values() for item in items for result in item.wrong_results]
    if not total:
        return []
    if not wrong:
        dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in CHECKED_DTYPES)
        value = f"{total} results of {len(_COLLECTIVES)} collectives in {dtypes} are exact"
        return [
            Finding(SECTION, "collectives' results", "pass", value, numbers={"num_checked": total})
        ]
    findings = []
    for kind, axis in dict.fromkeys((result.kind, result.axis) for result in wrong):
        failures = [result for result in wrong if (result.kind, result.axis) == (kind, axis)]
        dtypes = ", ".join(dict.fromkeys(result.dtype for result in failures))
        first = failures[0]
        value = (
            f"wrong on {format_ranks(result.rank for result in failures)} in {dtypes} (rank "
            f"{first.rank}, {first.dtype}: {first.problem})"
        )
        remedy = (
            "Do not train on these ranks: exclude the faulty node, compare NCCL and driver "
            "versions, try NCCL_ALGO=Ring"
        )
        numbers = {"ranks": sorted({result.rank for result in failures})}
        findings.append(Finding(SECTION, f"{kind} over {axis}", "fail", value, remedy, numbers))
    return findings
