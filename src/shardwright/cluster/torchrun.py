"""A recipe as torchrun commands, one per node."""

from __future__ import annotations

import re
import secrets
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from shardwright.cluster.job import Job
from shardwright.cluster.launcher import Launcher, OptionalText, build_option
from shardwright.config.run import NODE_TOKEN_VARIABLE
from shardwright.errors import InputError

DEFAULT_PORT = 29500

_HOST_WITH_PORT = re.compile(r"([^:]*|\[.*\]):[0-9]+")
"""One colon and a number, or anything in brackets; an IPv6 address has two colons or more."""
_HOST = re.compile(r"[A-Za-z0-9._:%\[\]-]+")


@dataclass(frozen=True)
class TorchrunOptions:
    """Addresses of the nodes; None for a single node."""

    hosts: Annotated[
        OptionalText,
        build_option(
            "--hosts", "One address per node; the first node hosts the rendezvous.", "A,B,..."
        ),
    ] = None


def split_hosts(hosts: str | None) -> list[str]:
    """Split the value of `--hosts` into addresses."""
    return [host.strip() for host in hosts.split(",")] if hosts else []


def build_torchrun_script(job: Job, options: TorchrunOptions) -> str:
    """Return the command of a single node, or one per node below a comment with its address."""
    addresses = split_hosts(options.hosts)
    commands = build_torchrun_commands(job, addresses)
    if len(commands) == 1:
        return commands[0] + "\n"
    lines = []
    for host, command in zip(addresses, commands, strict=True):
        lines += [f"# on {host}", command]
    return "\n".join(lines) + "\n"


def build_torchrun_arguments(job: Job) -> list[str]:
    """Return the last arguments of every node's command: number of ranks, and what each runs.

    Every start resumes an existing run, so that a restarted node does the same as the others.
    """
    return [
        f"--nproc-per-node={job.ranks_per_node}",
        "-m",
        "shardwright",
        *job.build_train_arguments(),
        "--resume-if-begun",
    ]


def _check_hosts(hosts: Sequence[str], num_nodes: int) -> None:
    if len(hosts) != num_nodes:
        raise InputError(
            "every node needs an address that the others can reach",
            field="--hosts",
            got=",".join(hosts) or None,
            allowed=f"{num_nodes} comma-separated names or addresses",
            remedy="Set --hosts node1,node2",
        )
    for number, host in enumerate(hosts):
        if not _HOST.fullmatch(host):
            raise InputError(
                "not a node address",
                field="--hosts",
                got=repr(host),
                allowed="names or addresses, e.g. node1,node2",
            )
        if _HOST_WITH_PORT.fullmatch(host):
            raise InputError(
                "an address with a port",
                field="--hosts",
                got=repr(host),
                allowed="names or addresses, e.g. node1,node2",
                remedy="Set --port; all nodes use the port of the first",
            )
        if host in hosts[:number]:
            raise InputError(
                "this node is listed twice; its two commands would use the same GPUs",
                field="--hosts",
                got=repr(host),
                allowed="each node once",
            )


def build_torchrun_commands(job: Job, hosts: Sequence[str]) -> list[str]:
    """Return one line of shell per node; the first node hosts the rendezvous.

    The loss of a node ends the ranks of all nodes. The others wait for it (torchrun's
    rendezvous, ten minutes); when its command is started again, all resume from the newest
    complete checkpoint.

    With `elastic.warm_restarts` the commands are without torchrun, which would end the processes of
    all nodes. The loss of a node other than the first leaves the others' processes; its command may
    be started again at any time.

    Args:
        hosts: an address of each node that the others can reach; empty for a single node.
    """
    common = f"--max-restarts={job.max_restarts}"
    # Ranks may take this long to save after SIGTERM before torchrun kills them; its default is
    # 30 seconds.
    environment = job.build_environment() | {
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(job.save_seconds)
    }
    if job.num_nodes > 1:
        # With a shared store, the surviving nodes do not announce the address again that a
        # replacement node waits for.
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        if job.keeps_processes:
            environment[NODE_TOKEN_VARIABLE] = secrets.token_hex(16)
    variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in environment.items())
    if job.num_nodes == 1 and not hosts and job.keeps_processes:
        return [
            f"{variables} shardwright {shlex.join(job.build_train_arguments())} --resume-if-begun"
        ]
    if job.num_nodes == 1 and not hosts:
        command = ["torchrun", "--standalone", common, *build_torchrun_arguments(job)]
        return [f"{variables} {shlex.join(command)}"]
    _check_hosts(hosts, job.num_nodes)
    if job.keeps_processes:
        return [
            f"{variables} {_build_place(job, hosts[0], number)} "
            f"shardwright {shlex.join(job.build_train_arguments())} --resume-if-begun"
            for number in range(job.num_nodes)
        ]
    endpoint = f"{hosts[0]}:{job.port or DEFAULT_PORT}"
    commands = []
    for number, host in enumerate(hosts):
        command = [
            "torchrun",
            f"--nnodes={job.num_nodes}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={endpoint}",
            f"--rdzv-id={job.recipe.name}",
            # Explicit, because a node's own hostname may not resolve to this address.
            f"--rdzv-conf=is_host={int(number == 0)}",
            f"--local-addr={host}",
            common,
            *build_torchrun_arguments(job),
        ]
        commands.append(f"{variables} {shlex.join(command)}")
    return commands


def _build_place(job: Job, first_host: str, number: int) -> str:
    """Return the variables that tell one process per node its place, by torchrun's names."""
    place = {
        "RANK": str(number),
        "WORLD_SIZE": str(job.num_nodes),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": first_host,
        "MASTER_PORT": str(job.port or DEFAULT_PORT),
    }
    return " ".join(f"{name}={value}" for name, value in place.items())


LAUNCHER = Launcher(
    "one torchrun command per node that starts a recipe",
    TorchrunOptions,
    build_torchrun_script,
    keeps_processes=True,
)
