"""Links between pairs of ranks, each direction separately, to find a slow rank or cable.

In each round the ranks form disjoint pairs by the circle method of round-robin tournaments;
after all rounds every two ranks have been a pair. First one rank of each pair sends, then the
other. With many ranks only some of the rounds run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from shardwright.doctor.finding import Finding, Verdict, find_worst_verdict, format_ranks
from shardwright.doctor.outliers import LINK_THRESHOLDS, Outlier, find_outliers
from shardwright.doctor.probe_budget import TimeBudget
from shardwright.doctor.rates.collective_bandwidth import send_or_receive
from shardwright.doctor.rendezvous import RankLocation

SECTION = "links"

_MAX_ROUNDS = 15
_NUM_REPEATS = 4
_SMALL_SHARE = 16
"""Factor by which a first message is smaller; its time limits the number of full messages."""
_MAX_DIRECTION_SECONDS = 2.0
"""Time limit of the full messages in one direction of a link."""

RankPair = tuple[int, int]
"""Sending and receiving rank."""


@dataclass(frozen=True)
class LinkTime:
    """Seconds of a message between two ranks and of its reply, in the best of some repeats."""

    sender: int
    receiver: int
    num_bytes: int
    seconds: float


def pair_ranks(world_size: int) -> list[dict[int, int]]:
    """Pair the ranks in rounds of disjoint pairs; return each round's partner by rank.

    Of more than `_MAX_ROUNDS` rounds, that many evenly spaced ones remain.

    >>> pair_ranks(4)
    [{0: 3, 3: 0, 1: 2, 2: 1}, {0: 2, 2: 0, 3: 1, 1: 3}, {0: 1, 1: 0, 2: 3, 3: 2}]
    >>> pair_ranks(3)
    [{1: 2, 2: 1}, {0: 2, 2: 0}, {0: 1, 1: 0}]
    """
    # With an odd number, the partner of the additional last rank rests.
    ranks = list(range(world_size + world_size % 2))
    rounds = []
    for _ in range(len(ranks) - 1):
        pairs = [(ranks[i], ranks[-1 - i]) for i in range(len(ranks) // 2)]
        rounds.append(
            {a: b for pair in pairs if max(pair) < world_size for a, b in (pair, pair[::-1])}
        )
        ranks = [ranks[0], ranks[-1], *ranks[1:-1]]
    if len(rounds) > _MAX_ROUNDS:
        rounds = [rounds[i * len(rounds) // _MAX_ROUNDS] for i in range(_MAX_ROUNDS)]
    return rounds


def time_links(
    device: torch.device, num_bytes: int, budget: TimeBudget
) -> Iterator[LinkTime | None]:
    """Yield the time of each direction in which this rank sent, None if it received or rested.

    Every rank calls this. It ends early, on all ranks at once, when the budget is exhausted.
    """
    rank = dist.get_rank()
    last_seconds = 0.0
    for partners in pair_ranks(dist.get_world_size()):
        partner = partners.get(rank)
        for low_sends in (True, False):
            if not budget.can_afford(last_seconds):
                return
            dist.barrier()
            start = time.perf_counter()
            is_sender = partner is not None and (rank < partner) == low_sends
            link_time = (
                None
                if partner is None
                else _time_link(device, num_bytes, partner, is_sender=is_sender)
            )
            last_seconds = time.perf_counter() - start
            yield link_time if is_sender else None


def _time_link(device: torch.device, num_bytes: int, partner: int, *, is_sender: bool) -> LinkTime:
    """Measure one direction of a link; the sender chooses the number of full messages."""
    reply = torch.ones(1, device=device)

    def time_message(size: int) -> float:
        message = torch.ones(max(1, size // 4), device=device)
        start = time.perf_counter()
        send_or_receive(message, reply, partner, is_sender=is_sender)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    small = num_bytes // _SMALL_SHARE
    time_message(small)  # opens the connection
    small_seconds = min(time_message(small) for _ in range(2))
    repeats = torch.zeros(1, device=device)
    if is_sender:
        repeats.fill_(
            min(_NUM_REPEATS, int(_MAX_DIRECTION_SECONDS / (small_seconds * _SMALL_SHARE)))
        )
        dist.send(repeats, dst=partner)
    else:
        dist.recv(repeats, src=partner)
    full_seconds = [time_message(num_bytes) for _ in range(int(repeats))]
    pair = (dist.get_rank(), partner)
    return (
        LinkTime(*pair, num_bytes, min(full_seconds))
        if full_seconds
        else LinkTime(*pair, small, small_seconds)
    )


def judge_links(
    times: Sequence[LinkTime], locations: Mapping[int, RankLocation], device_kind: str
) -> list[Finding]:
    """Report rates within and between nodes, then slow ranks, then other slow links.

    A rank is slow if all its links in one direction are outliers.
    """
    findings = []
    for is_between_nodes in (False, True):
        rates = {
            (link_time.sender, link_time.receiver): link_time.num_bytes / link_time.seconds
            for link_time in times
            if (locations[link_time.sender].node != locations[link_time.receiver].node)
            == is_between_nodes
        }
        if not rates:
            continue
        where = "between nodes" if is_between_nodes else "within a node"
        lowest = min(rates.values()) / 1e9
        highest = max(rates.values()) / 1e9
        median_rate = median(rates.values()) / 1e9
        value = (
            f"{len(rates)} directions, {lowest:.3g} to {highest:.3g} GB/s, median {median_rate:.3g}"
        )
        rate_by_pair = {f"{a}->{b}": rate for (a, b), rate in rates.items()}
        findings.append(
            Finding(
                SECTION, f"pairs {where}", "pass", value, numbers={"bytes_per_second": rate_by_pair}
            )
        )
        findings += _judge_slow_links(
            find_outliers(rates, LINK_THRESHOLDS), rates, locations, device_kind
        )
    return findings


def _judge_slow_links(
    outliers: Sequence[Outlier[RankPair]],
    rates: Mapping[RankPair, float],
    locations: Mapping[int, RankLocation],
    device_kind: str,
) -> list[Finding]:
    findings = []
    remaining = {link.key: link for link in outliers}
    for side, verb in ((0, "sends"), (1, "receives")):
        for rank in sorted({pair[side] for pair in remaining}):
            rank_pairs = [pair for pair in rates if pair[side] == rank]
            if len(rank_pairs) > 1 and all(pair in remaining for pair in rank_pairs):
                own_links = [remaining.pop(pair) for pair in rank_pairs]
                share = max(link.share for link in own_links)
                verdict: Verdict = find_worst_verdict(link.verdict for link in own_links)
                value = (
                    f"rank {rank} ({locations[rank].host}) {verb} at {share:.0%} of the others' "
                    "rate or less on all its links"
                )
                remedy = (
                    f"Check rank {rank}'s network adapter, its slot and other processes on "
                    f"{locations[rank].host}, or exclude that node"
                )
                numbers: dict[str, float] = {"rank": rank, "share": share}
                name = f"slow {format_ranks([rank])}"
                findings.append(Finding(SECTION, name, verdict, value, remedy, numbers))
    for (sender, receiver), link in remaining.items():
        value = (
            f"{link.rate / 1e9:.3g} GB/s from rank {sender} to rank {receiver}, "
            f"{link.share:.0%} of the others' median"
        )
        sender_location = locations[sender]
        receiver_location = locations[receiver]
        hosts = f"{sender_location.host} and {receiver_location.host}"
        remedy = f"Check the cable and switch between {hosts}"
        if sender_location.node == receiver_location.node:
            remedy = f"Check other processes on {sender_location.host}, then run doctor again"
            if device_kind == "cuda":
                remedy = (
                    f"Check the connection of these GPUs on {sender_location.host}: nvidia-smi "
                    "topo -m, nvidia-smi nvlink -s"
                )
        numbers = {"sender": sender, "receiver": receiver, "share": link.share}
        findings.append(
            Finding(
                SECTION, f"slow link {sender} -> {receiver}", link.verdict, value, remedy, numbers
            )
        )
    return findings
