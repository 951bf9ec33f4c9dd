"""Links between pairs of ranks, each direction by itself, so that the odd rank or cable can be named.

In a round the ranks form pairs (the circle method of round-robin tournaments, so that after all rounds each has met each other
one); first one side of every pair sends, then the other. Many ranks play some of the rounds only.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from shardwright.probe.bandwidth import send_or_receive
from shardwright.probe.budget import Budget
from shardwright.probe.finding import Finding, Verdict, name_ranks, worst
from shardwright.probe.outliers import LINK_LIMITS, Odd, find_odd
from shardwright.probe.rendezvous import Seat

SECTION = "links"

_MOST_ROUNDS = 15
_REPEATS = 4
_SMALL_SHARE = 16
"""A link is tried with a message smaller by this factor, which says how many whole ones it can take."""
_LONGEST_SECONDS = 2.0
"""Of the whole messages in one direction of a link."""

Pair = tuple[int, int]
"""From, to."""


@dataclass(frozen=True)
class LinkTime:
    """Seconds that a message took from one rank to another, and its answer back, in the best of some repeats."""

    sender: int
    receiver: int
    num_bytes: int
    seconds: float


def pairings(world_size: int, most: int = _MOST_ROUNDS) -> list[dict[int, int]]:
    """Rounds of disjoint pairs, partner by rank; of many rounds `most`, spread evenly.

    >>> pairings(4)
    [{0: 3, 3: 0, 1: 2, 2: 1}, {0: 2, 2: 0, 3: 1, 1: 3}, {0: 1, 1: 0, 2: 3, 3: 2}]
    >>> pairings(3)
    [{1: 2, 2: 1}, {0: 2, 2: 0}, {0: 1, 1: 0}]
    """
    seats = list(range(world_size + world_size % 2))  # with an odd number, who meets the last seat rests
    rounds = []
    for _ in range(len(seats) - 1):
        pairs = [(seats[i], seats[-1 - i]) for i in range(len(seats) // 2)]
        rounds.append({a: b for pair in pairs if max(pair) < world_size for a, b in (pair, pair[::-1])})
        seats = [seats[0], seats[-1], *seats[1:-1]]
    if len(rounds) > most:
        rounds = [rounds[i * len(rounds) // most] for i in range(most)]
    return rounds


def time_links(device: torch.device, num_bytes: int, budget: Budget) -> Iterator[LinkTime | None]:
    """Yield, direction by direction, what this rank sent its partner; None where it received or rested.

    Every rank of the world calls this. It ends early, on all ranks alike, when the budget is spent.
    """
    me = dist.get_rank()
    last_seconds = 0.0
    for partners in pairings(dist.get_world_size()):
        partner = partners.get(me)
        for low_sends in (True, False):
            if not budget.affords(last_seconds):
                return
            dist.barrier()
            began = time.perf_counter()
            sends = partner is not None and (me < partner) == low_sends
            found = None if partner is None else _time_link(device, num_bytes, partner, sends=sends)
            last_seconds = time.perf_counter() - began
            yield found if sends else None


def _time_link(device: torch.device, num_bytes: int, partner: int, *, sends: bool) -> LinkTime:
    """Time one direction of a link; the sender tells how many whole messages it takes, at least none."""
    answer = torch.ones(1, device=device)

    def time_message(size: int) -> float:
        message = torch.ones(max(1, size // 4), device=device)
        began = time.perf_counter()
        send_or_receive(message, answer, partner, sends=sends)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    small = num_bytes // _SMALL_SHARE
    time_message(small)  # opens the connection
    small_seconds = min(time_message(small) for _ in range(2))
    repeats = torch.zeros(1, device=device)
    if sends:
        repeats.fill_(min(_REPEATS, int(_LONGEST_SECONDS / (small_seconds * _SMALL_SHARE))))
        dist.send(repeats, dst=partner)
    else:
        dist.recv(repeats, src=partner)
    whole = [time_message(num_bytes) for _ in range(int(repeats))]
    peers = (dist.get_rank(), partner)
    return LinkTime(*peers, num_bytes, min(whole)) if whole else LinkTime(*peers, small, small_seconds)


def judge_links(times: Sequence[LinkTime], seats: Mapping[int, Seat], device_kind: str) -> list[Finding]:
    """The usual rate within and between nodes, then each odd rank, else each odd link.

    A rank whose every link (out, or in) is odd is named itself; a link is named where its ranks' others are as they should be.
    """
    findings = []
    for crosses in (False, True):
        rates = {
            (one.sender, one.receiver): one.num_bytes / one.seconds
            for one in times
            if (seats[one.sender].node != seats[one.receiver].node) == crosses
        }
        if not rates:
            continue
        where = "between nodes" if crosses else "within a node"
        least = min(rates.values()) / 1e9
        most = max(rates.values()) / 1e9
        middle = median(rates.values()) / 1e9
        told = f"{len(rates)} directions, {least:.3g} to {most:.3g} GB/s, median {middle:.3g}"
        told_rates = {f"{a}->{b}": rate for (a, b), rate in rates.items()}
        findings.append(Finding(SECTION, f"pairs {where}", "pass", told, numbers={"bytes_per_second": told_rates}))
        findings += _name_odd(find_odd(rates, LINK_LIMITS), rates, seats, device_kind)
    return findings


def _name_odd(odd: Sequence[Odd[Pair]], rates: Mapping[Pair, float], seats: Mapping[int, Seat], device_kind: str) -> list[Finding]:
    findings = []
    left = {one.key: one for one in odd}
    for side, verb in ((0, "sends"), (1, "receives")):
        for rank in sorted({pair[side] for pair in left}):
            all_of_rank = [pair for pair in rates if pair[side] == rank]
            if len(all_of_rank) > 1 and all(pair in left for pair in all_of_rank):
                mine = [left.pop(pair) for pair in all_of_rank]
                share = max(one.share for one in mine)
                verdict: Verdict = worst(one.verdict for one in mine)
                told = f"rank {rank} ({seats[rank].host}) {verb} at {share:.0%} of the others' rate or less, to whomever"
                remedy = f"Look at rank {rank}'s adapter, its slot and what else runs on {seats[rank].host}; or leave that node out"
                findings.append(
                    Finding(SECTION, f"slow {name_ranks([rank])}", verdict, told, remedy, {"rank": rank, "share": share})
                )
    for (sender, receiver), one in left.items():
        told = f"{one.rate / 1e9:.3g} GB/s from rank {sender} to rank {receiver}, {one.share:.0%} of the others' median"
        here = seats[sender]
        there = seats[receiver]
        remedy = f"Look at the cable and switch between {here.host} and {there.host}"
        if here.node == there.node:
            remedy = f"Look at what else runs on {here.host}, then examine again"
            if device_kind == "cuda":
                remedy = f"Look at what joins them on {here.host}: nvidia-smi topo -m, nvidia-smi nvlink -s"
        numbers = {"sender": sender, "receiver": receiver, "share": one.share}
        findings.append(Finding(SECTION, f"slow link {sender} -> {receiver}", one.verdict, told, remedy, numbers))
    return findings
