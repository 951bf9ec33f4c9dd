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

from shardwright.parallel.collectives import all_gather_single, reduce_scatter_single
from shardwright.probe.finding import Finding, name_ranks

SECTION = "correctness"

_LENGTH = 48
_LEAST_LENGTH = 4
_MOST_ELEMENTS = 2**14
"""Each rank sends 48 elements to each other rank, fewer in large groups to limit the total."""

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64)


@dataclass(frozen=True)
class Wrong:
    """Wrong result of a collective on one rank."""

    kind: str
    dtype: str
    axis: str
    rank: int
    problem: str


@dataclass(frozen=True)
class Checked:
    """Number of results that one rank compared, and the wrong ones."""

    num_checked: int
    wrong: tuple[Wrong, ...]


def pattern(member: int, length: int, dtype: torch.dtype, num_members: int) -> Tensor:
    """Build a member's input, `[length]`; sums are exact in `dtype`, not in narrower ones.

    If the dtype cannot represent the sum of all members (bf16 beyond 64 members), most members
    give zeros.
    """
    steps = (torch.arange(length, dtype=torch.int64) + member) % 4
    if not dtype.is_floating_point:
        return 2**60 + 7 * steps + member  # large sums wrap around, equally on every device
    capacity = 2.0 / torch.finfo(dtype).eps  # integers up to this are exact
    step = torch.finfo(dtype).eps
    while step < 1.0 and num_members / step + 3 * num_members > capacity:
        step *= 2.0
    if member % max(1, math.ceil(4 * num_members / capacity)):
        return torch.zeros(length, dtype=dtype)
    return (1.0 + steps.to(torch.float64) * step).to(dtype)


def check_collectives(
    axis: str,
    group: dist.ProcessGroup,
    ranks: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
) -> Checked:
    """Check every collective over one group in one dtype; `ranks` are its members in order."""
    rank = dist.get_rank()
    wrong = []
    size = len(ranks)
    length = max(_LEAST_LENGTH, min(_LENGTH, _MOST_ELEMENTS // size))
    inputs = [pattern(member, length * size, dtype, size) for member in range(size)]
    for kind, run_collective in _RUNS.items():
        actual, expected = run_collective(inputs, list(ranks).index(rank), ranks, group, device)
        problem = _compare(actual.cpu(), expected)
        if problem:
            wrong.append(Wrong(kind, str(dtype).removeprefix("torch."), axis, rank, problem))
    return Checked(len(_RUNS), tuple(wrong))


def _compare(got: Tensor, wanted: Tensor) -> str:
    """Describe the error of a result; empty if it is right."""
    if got.dtype != wanted.dtype:
        return f"has dtype {str(got.dtype).removeprefix('torch.')}"
    differing = (got != wanted).nonzero().flatten().tolist()
    if not differing:
        return ""
    at = differing[0]
    return (
        f"{len(differing)} of {wanted.numel()} elements are wrong; "
        f"the first, {at}, is {got[at].item()!r} instead of {wanted[at].item()!r}"
    )


_Run = Callable[
    [list[Tensor], int, Sequence[int], dist.ProcessGroup, torch.device], tuple[Tensor, Tensor]
]


def _sum(given: list[Tensor]) -> Tensor:
    wide = torch.float64 if given[0].dtype.is_floating_point else torch.int64
    return torch.stack([tensor.to(wide) for tensor in given]).sum(0).to(given[0].dtype)


def _all_reduce(
    given: list[Tensor],
    me: int,
    ranks: Sequence[int],
    group: dist.ProcessGroup,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    tensor = given[me].to(device, copy=True)
    dist.all_reduce(tensor, group=group)
    return tensor, _sum(given)


def _all_gather(
    given: list[Tensor],
    me: int,
    ranks: Sequence[int],
    group: dist.ProcessGroup,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    whole = torch.empty(given[0].numel() * len(given), dtype=given[0].dtype, device=device)
    all_gather_single(whole, given[me].to(device), group=group)
    return whole, torch.cat(given)


def _reduce_scatter(
    given: list[Tensor],
    me: int,
    ranks: Sequence[int],
    group: dist.ProcessGroup,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    length = given[0].numel() // len(given)
    part = torch.empty(length, dtype=given[0].dtype, device=device)
    reduce_scatter_single(part, given[me].to(device), group=group)
    return part, _sum(given)[me * length : (me + 1) * length]


def _all_to_all(
    given: list[Tensor],
    me: int,
    ranks: Sequence[int],
    group: dist.ProcessGroup,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Exchange parts of uneven length, as expert parallelism does."""
    length = given[0].numel() // len(given)
    send_sizes = [
        [length - (sender + receiver) % 3 for receiver in range(len(given))]
        for sender in range(len(given))
    ]
    starts = [receiver * length for receiver in range(len(given))]
    tensor = torch.cat(
        [
            given[me][start : start + size]
            for start, size in zip(starts, send_sizes[me], strict=True)
        ]
    ).to(device)
    receive_sizes = [send_sizes[sender][me] for sender in range(len(given))]
    received = torch.empty(sum(receive_sizes), dtype=tensor.dtype, device=device)
    dist.all_to_all_single(
        received,
        tensor,
        output_split_sizes=receive_sizes,
        input_split_sizes=send_sizes[me],
        group=group,
    )
    return received, torch.cat(
        [
            part[starts[me] : starts[me] + size]
            for part, size in zip(given, receive_sizes, strict=True)
        ]
    )


def _broadcast(
    given: list[Tensor],
    me: int,
    ranks: Sequence[int],
    group: dist.ProcessGroup,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    last = len(given) - 1
    tensor = given[me].to(device, copy=True)
    dist.broadcast(tensor, src=ranks[last], group=group)
    return tensor, given[last]


def _send(
    given: list[Tensor],
    me: int,
    ranks: Sequence[int],
    group: dist.ProcessGroup,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Send to the next member and receive from the previous one."""
    previous = (me - 1) % len(given)
    following = (me + 1) % len(given)
    received = torch.empty_like(given[previous], device=device)
    tensor = given[me].to(device)
    operations = [
        dist.P2POp(dist.isend, tensor, ranks[following], group),
        dist.P2POp(dist.irecv, received, ranks[previous], group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received, given[previous]


_RUNS: dict[str, _Run] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "send and receive": _send,
}


def judge_correctness(checked: Mapping[int, Sequence[Checked]]) -> list[Finding]:
    """Judge the results of all ranks: a line per wrong collective and axis, else one line."""
    total = sum(item.num_checked for items in checked.values() for item in items)
    wrong = [result for items in checked.values() for item in items for result in item.wrong]
    if not total:
        return []
    if not wrong:
        dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        value = f"{total} results of {len(_RUNS)} collectives in {dtypes} are exact"
        return [
            Finding(SECTION, "collectives' results", "pass", value, numbers={"num_checked": total})
        ]
    findings = []
    for kind, axis in dict.fromkeys((result.kind, result.axis) for result in wrong):
        failures = [result for result in wrong if (result.kind, result.axis) == (kind, axis)]
        dtypes = ", ".join(dict.fromkeys(result.dtype for result in failures))
        first = failures[0]
        value = (
            f"wrong on {name_ranks(result.rank for result in failures)} in {dtypes} (rank "
            f"{first.rank}, {first.dtype}: {first.problem})"
        )
        remedy = (
            "Do not train on these ranks: exclude the faulty node, compare NCCL and driver "
            "versions, try NCCL_ALGO=Ring"
        )
        numbers = {"ranks": sorted({result.rank for result in failures})}
        findings.append(Finding(SECTION, f"{kind} over {axis}", "fail", value, remedy, numbers))
    return findings
