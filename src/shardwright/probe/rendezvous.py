"""Whether the ranks find each other: the port is reachable, everybody comes, and whoever does not is named. Nothing waits for ever.

The ranks meet at a TCP store at MASTER_ADDR:MASTER_PORT: the launcher's under torchrun, rank 0's under srun. All that ranks tell
each other before (and after) collectives work goes through it, so that collectives that hang can be told, too.
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
"""One attempt to connect; what drops packets is tried again until the time is up."""


class NotMet(CheckFailed):
    """The ranks do not all meet; `finding` says who is missing, where, and what to look at."""

    def __init__(self, finding: Finding, *, known_to_rank_0: bool = False) -> None:
        super().__init__(f"{finding.value}. {finding.remedy}")
        self.finding = finding
        self.known_to_rank_0 = known_to_rank_0


@dataclass(frozen=True)
class Seat:
    """Where a rank runs: its host's name, and what tells apart nodes (the launcher's number of the node, else the name)."""

    host: str
    node: str
    local_rank: int


@dataclass(frozen=True)
class Meeting:
    """Everybody who came. `store` is this rank's line to the others; `side` another one, for a thread that watches."""

    rank: int
    seats: Mapping[int, Seat]
    store: dist.Store
    side: dist.Store
    where: str
    seconds: float

    @property
    def world_size(self) -> int:
        """Ranks."""
        return len(self.seats)

    @property
    def hosts(self) -> dict[int, str]:
        """Names of hosts by rank."""
        return {rank: seat.host for rank, seat in self.seats.items()}

    def most_per_node(self, ranks: Iterable[int]) -> int:
        """How many of some ranks share a node, at most."""
        nodes = [self.seats[rank].node for rank in ranks]
        return max(nodes.count(node) for node in set(nodes))


def seat_here(ranks: RankEnvironment) -> Seat:
    """Of this process: torchrun numbers nodes by GROUP_RANK, srun by SLURM_NODEID."""
    host = socket.gethostname()
    node = os.environ.get("GROUP_RANK") or os.environ.get("SLURM_NODEID") or host
    return Seat(host, node, ranks.local_rank)


def reach(address: str, port: int, timeout_seconds: float) -> float:
    """Seconds until something accepted a connection there.

    Raises:
        NotMet: nothing did in time; says whether the name is unknown, the port is closed, or packets are dropped.
    """
    began = time.monotonic()
    reason = ""
    advice = ""
    while True:
        left = timeout_seconds - (time.monotonic() - began)
        if left <= 0:
            break
        try:
            with socket.create_connection((address, port), timeout=min(_TRY_SECONDS, left)):
                return time.monotonic() - began
        except socket.gaierror as error:
            reason = f"the name is unknown: {error.strerror}"
            advice = f"Give MASTER_ADDR as an address, or a name that `getent hosts {address}` finds on every node"
        except ConnectionRefusedError:
            reason = "the port is closed: rank 0 is not up, or listens elsewhere"
            advice = f"See that rank 0 runs on {address} and that all ranks have the same MASTER_PORT"
        except TimeoutError:
            reason = "no answer: packets are dropped"
            advice = f"Open port {port} (and those above 1024) between the nodes: `nc -zv {address} {port}` from this one"
        except OSError as error:
            reason = error.strerror or str(error)
            advice = f"See that `ping {address}` works from this node"
        time.sleep(min(0.3, max(0.0, left)))
    told = f"rank 0 at {address}:{port} was not reached from {socket.gethostname()} in {timeout_seconds:g} s ({reason})"
    raise NotMet(Finding(SECTION, "rendezvous", "fail", told, advice))


def meet(ranks: RankEnvironment, timeout_seconds: float) -> Meeting:
    """Come together at MASTER_ADDR:MASTER_PORT; every rank gets the same list of who came.

    Raises:
        NotMet: this rank reaches nobody, the port is taken, or ranks are missing.
    """
    began = time.monotonic()
    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    where = f"{address}:{port}"
    hosts_store = ranks.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    patience = timedelta(seconds=timeout_seconds)
    if not hosts_store:
        reach(address, port, timeout_seconds)

    def connect(*, is_master: bool) -> dist.Store:
        store = dist.TCPStore(address, port, is_master=is_master, timeout=patience, wait_for_workers=False, multi_tenant=True)
        return dist.PrefixStore("shardwright-doctor", store)

    try:
        store = connect(is_master=hosts_store)
        side = connect(is_master=False)
    except dist.DistError as error:
        raise NotMet(_not_joined(where, str(error))) from error
    seats = _call_the_roll(ranks, store, timeout_seconds, where)
    return Meeting(ranks.rank, seats, store, side, where, time.monotonic() - began)


def _not_joined(where: str, message: str) -> Finding:
    if "EADDRINUSE" in message:
        port = where.rpartition(":")[2]
        return Finding(
            SECTION,
            "rendezvous",
            "fail",
            f"port {port} is in use on rank 0's node",
            f"ss -ltnp 'sport = :{port}', or another MASTER_PORT",
        )
    return Finding(
        SECTION, "rendezvous", "fail", f"{where} speaks another language: {first_line(message)}", "Choose a MASTER_PORT of your own"
    )


def _call_the_roll(ranks: RankEnvironment, store: dist.Store, timeout_seconds: float, where: str) -> dict[int, Seat]:
    seat = seat_here(ranks)
    store.set(f"here/{ranks.rank}", json.dumps([seat.host, seat.node, seat.local_rank]))
    if ranks.rank == 0:
        missing = wait_for_keys(store, {rank: f"here/{rank}" for rank in range(ranks.world_size)}, timeout_seconds)
        present = [None if rank in missing else json.loads(store.get(f"here/{rank}")) for rank in range(ranks.world_size)]
        store.set("roll", json.dumps(present))
    else:
        # Rank 0 may have begun to wait as late as this rank's own time ends.
        store.wait(["roll"], timedelta(seconds=2 * timeout_seconds + 10))
    roll = json.loads(store.get("roll"))
    missing = [rank for rank, words in enumerate(roll) if words is None]
    if missing:
        came = sorted({words[0] for words in roll if words is not None})
        told = f"{name_ranks(missing)} of {ranks.world_size} did not come to {where} in {timeout_seconds:g} s"
        remedy = (
            f"There were {ranks.world_size - len(missing)}, from {', '.join(came)}. See that the other nodes' processes run, and "
            f"that `nc -zv {where.replace(':', ' ')}` succeeds from there"
        )
        numbers = {"missing": missing, "where": where}
        raise NotMet(Finding(SECTION, "rendezvous", "fail", told, remedy, numbers), known_to_rank_0=True)
    return {rank: Seat(*words) for rank, words in enumerate(roll)}


def wait_for_keys(store: dist.Store, keys: Mapping[int, str], timeout_seconds: float) -> list[int]:
    """Ranks whose key has not come after the time."""
    deadline = time.monotonic() + timeout_seconds
    missing = []
    for rank, key in keys.items():
        left = deadline - time.monotonic()
        try:
            if left <= 0:
                if not store.check([key]):
                    missing.append(rank)
            else:
                store.wait([key], timedelta(seconds=left))
        except dist.DistError:
            missing.append(rank)
    return missing


def judge_meeting(meeting: Meeting) -> list[Finding]:
    """That everybody came, and from where."""
    nodes: dict[str, list[int]] = {}
    for rank, seat in meeting.seats.items():
        nodes.setdefault(seat.node, []).append(rank)
    nodes_told = f"{len(nodes)} node{'s' * (len(nodes) != 1)}"
    told = f"{meeting.world_size} ranks on {nodes_told} met at {meeting.where} in {meeting.seconds:.1f} s"
    findings = [Finding(SECTION, "rendezvous", "pass", told, numbers={"seconds": meeting.seconds, "nodes": len(nodes)})]
    sizes = {len(members) for members in nodes.values()}
    if len(sizes) > 1:
        shown = "; ".join(f"{meeting.seats[members[0]].host}: {len(members)}" for members in nodes.values())
        remedy = "Start as many ranks on every node: groups cross nodes unevenly"
        findings.append(Finding(SECTION, "ranks per node", "warn", shown, remedy))
    return findings
