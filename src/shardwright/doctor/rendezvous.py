"""Rendezvous of the ranks with a time limit: reachability of the port and missing ranks.

The ranks connect to a TCP store at MASTER_ADDR:MASTER_PORT: the launcher's under torchrun, that
of rank 0 under srun. The store works without collectives, so ranks can report if these hang.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta

import torch.distributed as dist

from shardwright.cluster.scheduler_variables import SCHEDULERS
from shardwright.doctor.finding import Finding, format_ranks, grade_share
from shardwright.errors import CheckFailed
from shardwright.launch.rank_environment import RankEnvironment
from shardwright.launch.rank_outcome import extract_first_line
from shardwright.parallel.clock_sync import ClockOffset
from shardwright.units import format_items, format_seconds

SECTION = "peers"

_CONNECT_TIMEOUT_SECONDS = 3.0
"""Time-out of one connection attempt; attempts repeat until the time limit."""
MAX_CLOCKS_SECONDS = 10.0
"""Time after which rank 0 stops answering clock requests of further ranks."""
_WARN_LOOKUP_SECONDS = 0.05
"""A lookup in a file or by a name server that answers takes less."""
_WARN_CLOCK_SECONDS = 0.1
_FAIL_CLOCK_SECONDS = 10.0
"""Limits of a clock's offset. 0.1 s confuses the order of events of several nodes.

10 s breaks locks and file times of the data cache.
"""


class RendezvousFailed(CheckFailed):
    """Rendezvous failed; `finding` names the missing ranks, the address and a remedy."""

    def __init__(self, finding: Finding, *, is_reported_by_rank_0: bool = False) -> None:
        super().__init__(f"{finding.value}. {finding.remedy}")
        self.finding = finding
        self.is_reported_by_rank_0 = is_reported_by_rank_0


@dataclass(frozen=True)
class RankLocation:
    """Host, node and local rank; the node is the launcher's node number, else the host."""

    host: str
    node: str
    local_rank: int


@dataclass(frozen=True)
class Rendezvous:
    """Locations of all ranks and connections to the store; `watchdog_store` is the watchdog
    thread's.
    """

    rank: int
    locations: Mapping[int, RankLocation]
    store: dist.Store
    watchdog_store: dist.Store
    endpoint: str
    seconds: float
    lookup_seconds: float = 0.0
    """Time on rank 0's node to look up the name of an address; measured by rank 0 only."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.locations)

    @property
    def hosts(self) -> dict[int, str]:
        """Host names by rank."""
        return {rank: seat.host for rank, seat in self.locations.items()}

    def count_max_per_node(self, ranks: Iterable[int]) -> int:
        """Count the largest number of these ranks on one node."""
        nodes = [self.locations[rank].node for rank in ranks]
        return max(nodes.count(node) for node in set(nodes))


def read_location(ranks: RankEnvironment) -> RankLocation:
    """Read the location of this process; without a node number, the host name is used instead."""
    host = socket.gethostname()
    numbers = [os.environ.get(scheduler.node) for scheduler in SCHEDULERS]
    return RankLocation(host, next(filter(None, numbers), host), ranks.local_rank)


def wait_for_port(address: str, port: int, timeout_seconds: float) -> float:
    """Wait until the port accepts a connection; return the seconds.

    Raises:
        RendezvousFailed: no connection in time: name unknown, port closed, or packets dropped.
    """
    start = time.monotonic()
    reason = ""
    remedy = ""
    while True:
        remaining = timeout_seconds - (time.monotonic() - start)
        if remaining <= 0:
            break
        try:
            with socket.create_connection(
                (address, port), timeout=min(_CONNECT_TIMEOUT_SECONDS, remaining)
            ):
                return time.monotonic() - start
        except socket.gaierror as error:
            reason = f"the name is unknown: {error.strerror}"
            remedy = (
                f"Set MASTER_ADDR to an IP address, or to a name that `getent hosts {address}` "
                "resolves on every node"
            )
        except ConnectionRefusedError:
            reason = "the port is closed: rank 0 does not run, or listens elsewhere"
            remedy = f"Check that rank 0 runs on {address} with the same MASTER_PORT"
        except TimeoutError:
            reason = "no answer: packets are dropped"
            remedy = (
                f"Open port {port} and those above 1024 between the nodes; test with `nc -zv "
                f"{address} {port}` from this one"
            )
        except OSError as error:
            reason = error.strerror or str(error)
            remedy = f"Check that `ping {address}` works from this node"
        time.sleep(min(0.3, max(0.0, remaining)))
    value = (
        f"rank 0 at {address}:{port} was not reached from {socket.gethostname()} in "
        f"{timeout_seconds:g} s ({reason})"
    )
    raise RendezvousFailed(Finding(SECTION, "rendezvous", "fail", value, remedy))


def join_rendezvous(ranks: RankEnvironment, timeout_seconds: float) -> Rendezvous:
    """Join the rendezvous at MASTER_ADDR:MASTER_PORT; all ranks get the same list of ranks.

    Raises:
        RendezvousFailed: rank 0 cannot be reached, the port is in use, or ranks are missing.
    """
    address = os.environ["MASTER_ADDR"]
    lookup_seconds = measure_name_lookup(address) if ranks.rank == 0 else 0.0
    start = time.monotonic()
    port = int(os.environ["MASTER_PORT"])
    endpoint = f"{address}:{port}"
    is_store_host = ranks.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    timeout = timedelta(seconds=timeout_seconds)
    if not is_store_host:
        wait_for_port(address, port, timeout_seconds)

    def connect(*, is_master: bool) -> dist.Store:
        store = dist.TCPStore(
            address,
            port,
            is_master=is_master,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )
        return dist.PrefixStore("shardwright-doctor", store)

    try:
        store = connect(is_master=is_store_host)
        watchdog_store = connect(is_master=False)
    except dist.DistError as error:
        raise RendezvousFailed(_build_store_finding(endpoint, str(error))) from error
    try:
        locations = _gather_locations(ranks, store, timeout_seconds, endpoint)
    except RendezvousFailed as error:
        if lookup_seconds > _WARN_LOOKUP_SECONDS:
            slow = judge_name_lookup(lookup_seconds, ranks.world_size)
            remedy = f"{slow.value}. {slow.remedy}. {error.finding.remedy}"
            error.finding = replace(error.finding, remedy=remedy)
        raise
    return Rendezvous(
        ranks.rank,
        locations,
        store,
        watchdog_store,
        endpoint,
        time.monotonic() - start,
        lookup_seconds,
    )


def measure_name_lookup(address: str) -> float:
    """Return the seconds to look up the name of an address; 0 if the address is unknown.

    torch's store does so for every connection, one after the other, before it answers.
    """
    try:
        peer = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][-1]
        start = time.monotonic()
        with contextlib.suppress(OSError):
            socket.getnameinfo(peer, 0)
    except OSError:
        return 0.0
    return time.monotonic() - start


def _build_store_finding(endpoint: str, message: str) -> Finding:
    if "EADDRINUSE" in message:
        port = endpoint.rpartition(":")[2]
        return Finding(
            SECTION,
            "rendezvous",
            "fail",
            f"port {port} is in use on rank 0's node",
            f"Find its user with ss -ltnp 'sport = :{port}', or set another MASTER_PORT",
        )
    value = f"another service uses {endpoint}: {extract_first_line(message)}"
    return Finding(SECTION, "rendezvous", "fail", value, "Set MASTER_PORT to an unused port")


def _gather_locations(
    ranks: RankEnvironment, store: dist.Store, timeout_seconds: float, endpoint: str
) -> dict[int, RankLocation]:
    location = read_location(ranks)
    fields = [location.host, location.node, location.local_rank]
    store.set(f"location/{ranks.rank}", json.dumps(fields))
    if ranks.rank == 0:
        keys = {rank: f"location/{rank}" for rank in range(ranks.world_size)}
        missing = wait_for_keys(store, keys, timeout_seconds)
        present = [
            None if rank in missing else json.loads(store.get(key)) for rank, key in keys.items()
        ]
        store.set("locations", json.dumps(present))
    else:
        # Rank 0 may have started to wait just before this rank's time-out.
        store.wait(["locations"], timedelta(seconds=2 * timeout_seconds + 10))
    locations = json.loads(store.get("locations"))
    missing = [rank for rank, fields in enumerate(locations) if fields is None]
    if missing:
        hosts = ", ".join(sorted({fields[0] for fields in locations if fields is not None}))
        value = (
            f"{format_ranks(missing)} of {ranks.world_size} did not reach {endpoint} in "
            f"{timeout_seconds:g} s"
        )
        remedy = (
            f"{ranks.world_size - len(missing)} ranks connected, from {hosts}. Check that the "
            "processes of the other nodes run, and that "
            f"`nc -zv {endpoint.replace(':', ' ')}` succeeds from there"
        )
        numbers = {"missing": missing, "where": endpoint}
        finding = Finding(SECTION, "rendezvous", "fail", value, remedy, numbers)
        raise RendezvousFailed(finding, is_reported_by_rank_0=True)
    return {rank: RankLocation(*fields) for rank, fields in enumerate(locations)}


def wait_for_keys(store: dist.Store, keys: Mapping[int, str], timeout_seconds: float) -> list[int]:
    """Wait for keys; return the ranks whose key is missing after the time limit."""
    deadline = time.monotonic() + timeout_seconds
    missing = []
    for rank, key in keys.items():
        remaining = deadline - time.monotonic()
        try:
            if remaining <= 0:
                if not store.check([key]):
                    missing.append(rank)
            else:
                store.wait([key], timedelta(seconds=remaining))
        except dist.DistError:
            missing.append(rank)
    return missing


def judge_rendezvous(rendezvous: Rendezvous) -> list[Finding]:
    """Report ranks, nodes and time of the rendezvous; warn about unequal ranks per node."""
    nodes: dict[str, list[int]] = {}
    for rank, seat in rendezvous.locations.items():
        nodes.setdefault(seat.node, []).append(rank)
    value = (
        f"{rendezvous.world_size} ranks on {format_items(len(nodes), 'node')} connected "
        f"at {rendezvous.endpoint} in {format_seconds(rendezvous.seconds)}"
    )
    numbers = {"seconds": rendezvous.seconds, "nodes": len(nodes)}
    findings = [Finding(SECTION, "rendezvous", "pass", value, numbers=numbers)]
    if rendezvous.lookup_seconds > _WARN_LOOKUP_SECONDS:
        findings.append(judge_name_lookup(rendezvous.lookup_seconds, rendezvous.world_size))
    sizes = {len(members) for members in nodes.values()}
    if len(sizes) > 1:
        value = "; ".join(
            f"{rendezvous.locations[members[0]].host}: {len(members)}" for members in nodes.values()
        )
        remedy = "Start equally many ranks on every node; otherwise groups span nodes unevenly"
        findings.append(Finding(SECTION, "ranks per node", "warn", value, remedy))
    return findings


def judge_name_lookup(seconds: float, world_size: int) -> Finding:
    """Warn about name lookups that delay the rendezvous of all ranks."""
    return Finding(
        SECTION,
        "name lookup",
        "warn",
        f"rank 0's node takes {format_seconds(seconds)} to look up the name of its own address. "
        f"torch looks up every rank's, one after the other: {world_size} times as long",
        "Write the addresses of all nodes to /etc/hosts, or repair the name servers of "
        "/etc/resolv.conf",
        {"seconds": seconds},
    )


def judge_clocks(offsets: Mapping[int, ClockOffset], hosts: Mapping[int, str]) -> list[Finding]:
    """Judge offsets by rank, less the errors of their estimates; `hosts` has every rank."""
    if not offsets:
        return []
    certain = {
        rank: max(0.0, abs(offset.seconds) - offset.error_seconds)
        for rank, offset in offsets.items()
    }
    large = {rank: seconds for rank, seconds in certain.items() if seconds > _WARN_CLOCK_SECONDS}
    numbers = {"offset_seconds": {rank: offset.seconds for rank, offset in offsets.items()}}
    if not large:
        rank = max(offsets, key=lambda number: certain[number])
        error = max(offset.error_seconds for offset in offsets.values())
        value = f"within {format_seconds(max(certain[rank], error))} of rank 0's"
        if len(offsets) < len(hosts) - 1:
            value += (
                f" on {len(offsets)} of {len(hosts) - 1} ranks, all that answered within "
                f"{MAX_CLOCKS_SECONDS:g} s"
            )
        return [Finding(SECTION, "clocks", "pass", value, numbers=numbers)]
    rank = max(large, key=lambda number: large[number])
    direction = "ahead of" if offsets[rank].seconds > 0 else "behind"
    offset = format_seconds(abs(offsets[rank].seconds))
    value = f"{format_ranks(large)}: the clock of {hosts[rank]} is {offset} {direction} rank 0's"
    verdict = grade_share(
        1 / large[rank], warn_below=1 / _WARN_CLOCK_SECONDS, fail_below=1 / _FAIL_CLOCK_SECONDS
    )
    remedy = f"Synchronise {hosts[rank]}: chronyc tracking, systemctl restart chronyd"
    return [Finding(SECTION, "clocks", verdict, value, remedy, numbers)]
