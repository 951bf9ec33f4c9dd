"""Do collectives give the right numbers? Known inputs whose exact results only the right dtype can hold, compared bit for bit.

Element i of member m is `1 + step * ((m + i) % 4)`, with the smallest step for which all sums over the members are exact (for whole
numbers: a large one, beyond what a float could hold). A sum made in a narrower dtype, a byte taken from the wrong place, a rank
left out or counted twice: each changes the result. All comparisons are of equality.
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

_LENGTH, _LEAST_LENGTH = 48, 4
_MOST_ELEMENTS = 2**14
"""Each rank sends each other one 48 elements; in large groups fewer, so that all make up about as many."""

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64)


@dataclass(frozen=True)
class Wrong:
    """A collective whose result on one rank is not what it must be."""

    kind: str
    dtype: str
    axis: str
    rank: int
    problem: str


@dataclass(frozen=True)
class Checked:
    """How many results one rank has compared, and those that were wrong."""

    num_checked: int
    wrong: tuple[Wrong, ...]


def pattern(member: int, length: int, dtype: torch.dtype, num_members: int) -> Tensor:
    """What a member of a group gives, `[length]`: all sums over members are exact in `dtype`, and not in a narrower one.

    Where the dtype cannot hold sums of so many (bf16 beyond 64 members), only every so many of them gives anything but zeros.
    """
    steps = (torch.arange(length, dtype=torch.int64) + member) % 4
    if not dtype.is_floating_point:
        return 2**60 + 7 * steps + member  # sums of many wrap around, alike on every device
    capacity = 2.0 / torch.finfo(dtype).eps  # whole numbers up to here are exact
    step = torch.finfo(dtype).eps
    while step < 1.0 and num_members / step + 3 * num_members > capacity:
        step *= 2.0
    if member % max(1, math.ceil(4 * num_members / capacity)):
        return torch.zeros(length, dtype=dtype)
    return (1.0 + steps.to(torch.float64) * step).to(dtype)


def check_collectives(
    axis: str, group: dist.ProcessGroup, ranks: Sequence[int], device: torch.device, dtype: torch.dtype
) -> Checked:
    """Check every collective over one group in one dtype; `ranks` are the group's members in order."""
    me, wrong = dist.get_rank(), []
    size = len(ranks)
    length = max(_LEAST_LENGTH, min(_LENGTH, _MOST_ELEMENTS // size))
    given = [pattern(member, length * size, dtype, size) for member in range(size)]
    for kind, run in _RUNS.items():
        got, wanted = run(given, list(ranks).index(me), ranks, group, device)
        problem = _compare(got.cpu(), wanted)
        if problem:
            wrong.append(Wrong(kind, str(dtype).removeprefix("torch."), axis, me, problem))
    return Checked(len(_RUNS), tuple(wrong))


def _compare(got: Tensor, wanted: Tensor) -> str:
    """What is wrong with a result; empty where nothing is."""
    if got.dtype != wanted.dtype:
        return f"came as {str(got.dtype).removeprefix('torch.')}"
    differing = (got != wanted).nonzero().flatten().tolist()
    if not differing:
        return ""
    at = differing[0]
    return (
        f"{len(differing)} of {wanted.numel()} elements differ; the first, {at}, is {got[at].item()!r}, not {wanted[at].item()!r}"
    )


_Run = Callable[[list[Tensor], int, Sequence[int], dist.ProcessGroup, torch.device], tuple[Tensor, Tensor]]


def _sum(given: list[Tensor]) -> Tensor:
    wide = torch.float64 if given[0].dtype.is_floating_point else torch.int64
    return torch.stack([one.to(wide) for one in given]).sum(0).to(given[0].dtype)


def _all_reduce(
    given: list[Tensor], me: int, ranks: Sequence[int], group: dist.ProcessGroup, device: torch.device
) -> tuple[Tensor, Tensor]:
    mine = given[me].to(device, copy=True)
    dist.all_reduce(mine, group=group)
    return mine, _sum(given)


def _all_gather(
    given: list[Tensor], me: int, ranks: Sequence[int], group: dist.ProcessGroup, device: torch.device
) -> tuple[Tensor, Tensor]:
    whole = torch.empty(given[0].numel() * len(given), dtype=given[0].dtype, device=device)
    all_gather_single(whole, given[me].to(device), group=group)
    return whole, torch.cat(given)


def _reduce_scatter(
    given: list[Tensor], me: int, ranks: Sequence[int], group: dist.ProcessGroup, device: torch.device
) -> tuple[Tensor, Tensor]:
    length = given[0].numel() // len(given)
    part = torch.empty(length, dtype=given[0].dtype, device=device)
    reduce_scatter_single(part, given[me].to(device), group=group)
    return part, _sum(given)[me * length : (me + 1) * length]


def _all_to_all(
    given: list[Tensor], me: int, ranks: Sequence[int], group: dist.ProcessGroup, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Uneven: a rank keeps one element of its share for each rank before the receiver, as experts' rows come."""
    length = given[0].numel() // len(given)
    sent = [[length - (sender + receiver) % 3 for receiver in range(len(given))] for sender in range(len(given))]
    starts = [receiver * length for receiver in range(len(given))]
    mine = torch.cat([given[me][start : start + size] for start, size in zip(starts, sent[me], strict=True)]).to(device)
    sizes = [sent[sender][me] for sender in range(len(given))]
    got = torch.empty(sum(sizes), dtype=mine.dtype, device=device)
    dist.all_to_all_single(got, mine, output_split_sizes=sizes, input_split_sizes=sent[me], group=group)
    return got, torch.cat([one[starts[me] : starts[me] + size] for one, size in zip(given, sizes, strict=True)])


def _broadcast(
    given: list[Tensor], me: int, ranks: Sequence[int], group: dist.ProcessGroup, device: torch.device
) -> tuple[Tensor, Tensor]:
    last = len(given) - 1
    mine = given[me].to(device, copy=True)
    dist.broadcast(mine, src=ranks[last], group=group)
    return mine, given[last]


def _send(
    given: list[Tensor], me: int, ranks: Sequence[int], group: dist.ProcessGroup, device: torch.device
) -> tuple[Tensor, Tensor]:
    """To the next member, from the one before."""
    before, after = (me - 1) % len(given), (me + 1) % len(given)
    got = torch.empty_like(given[before], device=device)
    mine = given[me].to(device)
    operations = [dist.P2POp(dist.isend, mine, ranks[after], group), dist.P2POp(dist.irecv, got, ranks[before], group)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return got, given[before]


_RUNS: dict[str, _Run] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "send and receive": _send,
}


def judge_correctness(checked: Mapping[int, Sequence[Checked]]) -> list[Finding]:
    """Results of all ranks: one line where all are right, else one for each collective and dtype that is wrong."""
    total = sum(item.num_checked for items in checked.values() for item in items)
    wrong = [one for items in checked.values() for item in items for one in item.wrong]
    if not total:
        return []
    if not wrong:
        dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        told = f"{total} results of {len(_RUNS)} collectives in {dtypes} are right to the bit"
        return [Finding(SECTION, "collectives' results", "pass", told, numbers={"num_checked": total})]
    findings = []
    for kind, axis in dict.fromkeys((one.kind, one.axis) for one in wrong):
        alike = [one for one in wrong if (one.kind, one.axis) == (kind, axis)]
        dtypes = ", ".join(dict.fromkeys(one.dtype for one in alike))
        first = alike[0]
        told = f"wrong on {name_ranks(one.rank for one in alike)} in {dtypes} (rank {first.rank}, {first.dtype}: {first.problem})"
        remedy = (
            "Do not train on these ranks: leave out the node that is wrong, compare NCCL and driver versions, try NCCL_ALGO=Ring"
        )
        numbers = {"ranks": sorted({one.rank for one in alike})}
        findings.append(Finding(SECTION, f"{kind} over {axis}", "fail", told, remedy, numbers))
    return findings
