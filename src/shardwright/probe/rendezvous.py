"""Rendezvous of the ranks with a time limit: reachability of the port and missing ranks.

The ranks connect to a TCP store at MASTER_ADDR:MASTER_PORT: the launcher's under torchrun, that
of rank 0 under srun. The store works without collectives, so ranks can report if these hang.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from shardwright.errors import CheckFailed
from shardwright.probe.finding import Finding, name_ranks
from shardwright.train.outcome import first_line
from shardwright.train.ranks import RankEnvironment

SECTION = "peers"

_TRY_SECONDS = 3.0
"""Time-out of one connection attempt; attempts repeat until the time limit."""


class NotMet(CheckFailed):
    """Rendezvous failed; `finding` names the missing ranks, the address and a remedy."""

    def __init__(self, finding: Finding, *, known_to_rank_0: bool = False) -> None:
        super().__init__(f"{finding.value}. {finding.remedy}")
        self.finding = finding
        self.known_to_rank_0 = known_to_rank_0


@dataclass(frozen=True)
class Seat:
    """Host, node and local rank; the node is the launcher's node number, else the host."""

    host: str
    node: str
    local_rank: int


@dataclass(frozen=True)
class Meeting:
    """Locations of all ranks and connections to the store; `side` is the watchdog thread's."""

    rank: int
    seats: Mapping[int, Seat]
    store: dist.Store
    side: dist.Store
    where: str
    seconds: float

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.seats)

    @property
    def hosts(self) -> dict[int, str]:
        """Host names by rank."""
        return {rank: seat.host for rank, seat in self.seats.items()}

    def most_per_node(self, ranks: Iterable[int]) -> int:
        """Count the largest number of these ranks on one node."""
        nodes = [self.seats[rank].node for rank in ranks]
        return max(nodes.count(node) for node in set(nodes))


def seat_here(ranks: RankEnvironment) -> Seat:
    """Read the location of this process; node numbers are GROUP_RANK or SLURM_NODEID."""
    host = socket.gethostname()
    node = os.environ.get("GROUP_RANK") or os.environ.get("SLURM_NODEID") or host
    return Seat(host, node, ranks.local_rank)


def reach(address: str, port: int, timeout_seconds: float) -> float:
    """Wait until the port accepts a connection; return the seconds.

    Raises:
        NotMet: no connection in time: name unknown, port closed, or packets dropped.
    """
    start = time.monotonic()
    reason = ""
    remedy = ""
    while True:
        remaining = timeout_seconds - (time.monotonic() - start)
        if remaining <= 0:
            break
        try:
            with socket.create_connection((address, port), timeout=min(_TRY_SECONDS, remaining)):
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
    raise NotMet(Finding(SECTION, "rendezvous", "fail", value, remedy))


def meet(ranks: RankEnvironment, timeout_seconds: float) -> Meeting:
    """Join the rendezvous at MASTER_ADDR:MASTER_PORT; all ranks get the same list of ranks.

    Raises:
        NotMet: rank 0 cannot be reached, the port is in use, or ranks are missing.
    """
    start = time.monotonic()
    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    endpoint = f"{address}:{port}"
    is_store_host = ranks.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    timeout = timedelta(seconds=timeout_seconds)
    if not is_store_host:
        reach(address, port, timeout_seconds)

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
        raise NotMet(_not_joined(endpoint, str(error))) from error
    locations = _call_the_roll(ranks, store, timeout_seconds, endpoint)
    return Meeting(ranks.rank, locations, store, watchdog_store, endpoint, time.monotonic() - start)


def _not_joined(where: str, message: str) -> Finding:
    if "EADDRINUSE" in message:
        port = where.rpartition(":")[2]
        return Finding(
            SECTION,
            "rendezvous",
            "fail",
            f"port {port} is in use on rank 0's node",
            f"Find its user with ss -ltnp 'sport = :{port}', or set another MASTER_PORT",
        )
    value = f"another service uses {where}: {first_line(message)}"
    return Finding(SECTION, "rendezvous", "fail", value, "Set MASTER_PORT to an unused port")


def _call_the_roll(
    ranks: RankEnvironment, store: dist.Store, timeout_seconds: float, where: str
) -> dict[int, Seat]:
    location = seat_here(ranks)
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
            f"{name_ranks(missing)} of {ranks.world_size} did not reach {where} in "
            f"{timeout_seconds:g} s"
        )
        remedy = (
            f"{ranks.world_size - len(missing)} ranks connected, from {hosts}. Check that the "
            "processes of the other nodes run, and that "
            f"`nc -zv {where.replace(':', ' ')}` succeeds from there"
        )
        numbers = {"missing": missing, "where": where}
        finding = Finding(SECTION, "rendezvous", "fail", value, remedy, numbers)
        raise NotMet(finding, known_to_rank_0=True)
    return {rank: Seat(*fields) for rank, fields in enumerate(locations)}


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


def judge_meeting(meeting: Meeting) -> list[Finding]:
    """Report ranks, nodes and time of the rendezvous; warn about unequal ranks per node."""
    nodes: dict[str, list[int]] = {}
    for rank, seat in meeting.seats.items():
        nodes.setdefault(seat.node, []).append(rank)
    value = (
        f"{meeting.world_size} ranks on {len(nodes)} node{'s' * (len(nodes) != 1)} connected "
        f"at {meeting.where} in {meeting.seconds:.1f} s"
    )
    numbers = {"seconds": meeting.seconds, "nodes": len(nodes)}
    findings = [Finding(SECTION, "rendezvous", "pass", value, numbers=numbers)]
    sizes = {len(members) for members in nodes.values()}
    if len(sizes) > 1:
        value = "; ".join(
            f"{meeting.seats[members[0]].host}: {len(members)}" for members in nodes.values()
        )
        remedy = "Start equally many ranks on every node; otherwise groups span nodes unevenly"
        findings.append(Finding(SECTION, "ranks per node", "warn", value, remedy))
    return findings
