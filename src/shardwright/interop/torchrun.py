"""A recipe as torchrun commands, one for each node."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from shardwright.errors import InputError
from shardwright.interop.job import Job

DEFAULT_PORT = 29500

_HOST = re.compile(r"[A-Za-z0-9._:%\[\]-]+")


def torchrun_words(job: Job) -> list[str]:
    """What every node's command ends with: the ranks of a node, and what each of them runs.

    Every start goes on where a run is there: a node that comes back must do what the others do.
    """
    return [f"--nproc-per-node={job.ranks_per_node}", "-m", "shardwright", *job.train_words(), "--resume-if-begun"]


def torchrun_commands(job: Job, hosts: Sequence[str]) -> list[str]:
    """A line of shell for each node, the first of which hosts the rendezvous.

    A node that is lost takes the ranks of all down; those that are left wait for it (torchrun's rendezvous, ten minutes), and
    everybody goes on from the newest whole checkpoint when its command is given again.

    Args:
        hosts: an address of each node, as the others reach it; none for a single node.
    """
    common = f"--max-restarts={job.max_restarts}"
    # Ranks may take this long to save after SIGTERM before torchrun kills them; its default is 30 seconds.
    told = job.variables() | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(job.save_seconds)}
    if job.num_nodes > 1:
        # A node that takes a lost one's place waits for an address that the survivors, who share a store, do not tell again.
        told["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in told.items())
    if job.num_nodes == 1 and not hosts:
        return [f"{variables} {shlex.join(['torchrun', '--standalone', common, *torchrun_words(job)])}"]
    if len(hosts) != job.num_nodes:
        raise InputError(
            "each node needs an address, by which the others reach it",
            field="--hosts",
            got=",".join(hosts) or None,
            allowed=f"{job.num_nodes} names or addresses with commas between them",
            remedy="Say --hosts node1,node2",
        )
    for host in hosts:
        if not _HOST.fullmatch(host):
            raise InputError(
                "not the address of a node", field="--hosts", got=repr(host), allowed="names or addresses, e.g. node1,node2"
            )
    endpoint = f"{hosts[0]}:{job.port or DEFAULT_PORT}"
    commands = []
    for number, host in enumerate(hosts):
        words = [
            "torchrun",
            f"--nnodes={job.num_nodes}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={endpoint}",
            f"--rdzv-id={job.recipe.name}",
            # Said, not guessed: a name that a node knows itself by need not be the address of this link.
            f"--rdzv-conf=is_host={int(number == 0)}",
            f"--local-addr={host}",
            common,
            *torchrun_words(job),
        ]
        commands.append(f"{variables} {shlex.join(words)}")
    return commands
