"""`shardwright launch`: the same recipe on Slurm, on Kubernetes, or as torchrun commands, without a script to write."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwright.cli.options import JsonOutput, Overrides, RecipePath
from shardwright.cli.pages import write_text
from shardwright.config import load_recipe
from shardwright.errors import InputError
from shardwright.files import read_text
from shardwright.interop.job import Job, Links, parse_environment, placeholders

if TYPE_CHECKING:
    from shardwright.config import Recipe

SCHEMA_VERSION = 1

Text = str | None


def _option(name: str, about: str, metavar: str | None = None, **limits: Any) -> Any:
    """An option without a default that is worth showing."""
    return typer.Option(name, metavar=metavar, help=about, show_default=False, **limits)


Slurm = Annotated[bool, typer.Option("--slurm", help="An sbatch script.")]
Kubernetes = Annotated[bool, typer.Option("--kubernetes", help="A PyTorchJob of Kubeflow's training operator.")]
Torchrun = Annotated[bool, typer.Option("--torchrun", help="A torchrun command for each node.")]
Nodes = Annotated[int | None, typer.Option("--nodes", min=1, help="Machines; default 1, or as many as --hosts.")]
GpusPerNode = Annotated[int | None, _option("--gpus-per-node", "Ranks on each; default as the recipe's `cluster` says.", min=1)]
LayoutText = Annotated[Text, _option("--layout", "Replace the recipe's layout.", "DEGREES")]
RunDir = Annotated[Text, _option("--run-dir", "Run folder, on storage that all nodes share; default runs/<name>.")]
Interface = Annotated[Text, _option("--interface", "Network interface that joins the nodes, e.g. eth0.", "NAME")]
IbHca = Annotated[Text, _option("--ib-hca", "InfiniBand adapters that NCCL may use, e.g. mlx5.", "NAMES")]
NoInfiniband = Annotated[bool, typer.Option("--no-infiniband", help="Keep NCCL off InfiniBand.")]
Env = Annotated[list[str] | None, _option("--env", "Export it on every node. Repeatable.", "NAME=VALUE")]
Port = Annotated[int | None, _option("--port", "On the first node, where ranks meet.", min=1024, max=65535)]
Cores = Annotated[int | None, _option("--cores-per-rank", "CPU cores for each rank, and threads.", min=1)]
SaveSeconds = Annotated[int, typer.Option("--save-seconds", min=30, help="How long before the time limit ranks are told to save.")]
Partition = Annotated[Text, _option("--partition", "Slurm.")]
Account = Annotated[Text, _option("--account", "Slurm.")]
TimeLimit = Annotated[Text, _option("--time", "Slurm: minutes, HH:MM:SS or D-HH:MM:SS.", "LIMIT")]
Sbatch = Annotated[list[str] | None, _option("--sbatch", "Slurm: a further option. Repeatable.", "--OPTION=VALUE")]
Image = Annotated[Text, _option("--image", "Container image (Kubernetes, or Slurm with Pyxis).")]
Namespace = Annotated[Text, _option("--namespace", "Kubernetes.")]
Volume = Annotated[list[str] | None, _option("--volume", "Kubernetes: shared storage to mount. Repeatable.", "CLAIM:/PATH")]
WorkingDir = Annotated[Text, _option("--working-dir", "Kubernetes: where ranks start.")]
Hosts = Annotated[Text, _option("--hosts", "torchrun: an address of each node, the first first.", "A,B,...")]
Out = Annotated[Path | None, _option("--out", "Write it there.", "FILE")]
Submit = Annotated[bool, typer.Option("--submit", help="Hand it to sbatch or kubectl.")]


def launch_command(
    recipe: RecipePath,
    slurm: Slurm = False,
    kubernetes: Kubernetes = False,
    torchrun: Torchrun = False,
    nodes: Nodes = None,
    gpus_per_node: GpusPerNode = None,
    overrides: Overrides = None,
    layout: LayoutText = None,
    run_dir: RunDir = None,
    interface: Interface = None,
    ib_hca: IbHca = None,
    no_infiniband: NoInfiniband = False,
    env: Env = None,
    port: Port = None,
    cores: Cores = None,
    save_seconds: SaveSeconds = 300,
    partition: Partition = None,
    account: Account = None,
    time: TimeLimit = None,
    sbatch: Sbatch = None,
    image: Image = None,
    namespace: Namespace = None,
    volume: Volume = None,
    working_dir: WorkingDir = None,
    hosts: Hosts = None,
    out: Out = None,
    submit: Submit = False,
    json_output: JsonOutput = False,
) -> None:
    """Print what starts a recipe on a cluster: ranks meet, save before the time limit, and go on where they were."""
    kind = _only_one(slurm=slurm, kubernetes=kubernetes, torchrun=torchrun)
    of_slurm = {"--partition": partition, "--account": account, "--time": time, "--sbatch": sbatch}
    of_kubernetes = {"--namespace": namespace, "--volume": volume, "--working-dir": working_dir}
    _check_belongs(kind, slurm=of_slurm, kubernetes=of_kubernetes, torchrun={"--hosts": hosts})
    given = parse_environment(env or [])
    os.environ.update(given)  # what the recipe's ${NAME} stand for there
    checked = load_recipe(recipe, _changes(overrides, run_dir), layout)
    addresses = [host.strip() for host in hosts.split(",")] if hosts else []
    job = Job(
        recipe=checked,
        recipe_path=str(recipe),
        num_nodes=nodes or len(addresses) or 1,
        ranks_per_node=gpus_per_node or _ranks_of(checked),
        overrides=tuple(overrides or ()),
        layout=layout,
        run_dir=run_dir,
        links=Links(interface, ib_hca, not no_infiniband),
        environment=given,
        save_seconds=save_seconds,
        cores_per_rank=cores,
        port=port,
    )
    unshared: list[str] = []
    if kind == "slurm":
        text = _script(job, partition, account, time, image, sbatch)
    elif kind == "kubernetes":
        text, unshared = _manifest(job, image, namespace, volume, working_dir)
    else:
        text = _commands(job, addresses)
    notes = [*job.cautions(), *unshared, *_unsaid(recipe, given, kind)]
    _tell(kind, text, job, notes, out=out, submitted=submit, json_output=json_output)


def _unsaid(recipe: Path, given: dict[str, str], kind: str) -> list[str]:
    """What the recipe reads from the environment and nodes would not have; sbatch takes this shell's along."""
    missing = sorted(placeholders(read_text(recipe)) - set(given))
    if not missing or kind == "slurm":
        return []
    return [f"the recipe reads {', '.join(missing)} from the environment: give --env for the nodes"]


def _script(job: Job, partition: Text, account: Text, time: Text, image: Text, sbatch: list[str] | None) -> str:
    from shardwright.interop.slurm import SlurmOptions, sbatch_script

    return sbatch_script(job, SlurmOptions(partition, account, time, image, tuple(sbatch or ())))


def _manifest(job: Job, image: Text, namespace: Text, volume: list[str] | None, working_dir: Text) -> tuple[str, list[str]]:
    from shardwright.interop.kubernetes import KubernetesOptions, manifest, unshared

    if not image:
        raise InputError(
            "pods start from an image",
            field="--image",
            remedy="Name one that holds shardwright, e.g. --image registry/shardwright:1.0",
        )
    options = KubernetesOptions(image, namespace, tuple(volume or ()), working_dir)
    return manifest(job, options), unshared(job, options)


def _commands(job: Job, addresses: list[str]) -> str:
    from shardwright.interop.torchrun import torchrun_commands

    commands = torchrun_commands(job, addresses)
    if len(commands) == 1:
        return commands[0] + "\n"
    lines = []
    for host, command in zip(addresses, commands, strict=True):
        lines += [f"# on {host}", command]
    return "\n".join(lines) + "\n"


def _tell(kind: str, text: str, job: Job, notes: list[str], *, out: Path | None, submitted: bool, json_output: bool) -> None:
    from shardwright.interop.submit import submit

    for note in notes:
        sys.stderr.write(f"note: {note}\n")
    if out is not None:
        write_text(out, text)
    answer = submit(kind, text) if submitted else None
    if json_output:
        told = {"schema_version": SCHEMA_VERSION, "kind": kind, "text": text, "world_size": job.world_size, "notes": notes}
        sys.stdout.write(json.dumps(told | {"out": None if out is None else str(out), "submitted": answer}) + "\n")
    elif answer is not None:
        sys.stdout.write(f"submitted: {answer}\n")
    elif out is None:
        sys.stdout.write(text)


def _only_one(**kinds: bool) -> str:
    chosen = [kind for kind, wanted in kinds.items() if wanted]
    allowed = "one of --slurm, --kubernetes and --torchrun"
    if len(chosen) != 1:
        raise InputError(
            "say where it is to run", field="launch", got=" ".join(f"--{kind}" for kind in chosen) or None, allowed=allowed
        )
    return chosen[0]


def _check_belongs(kind: str, **options: Mapping[str, object]) -> None:
    """Refuse an option of one launcher that was given to another: it would do nothing."""
    for owner, given in options.items():
        for option, value in given.items():
            if owner != kind and value:
                raise InputError(
                    f"is for --{owner} and does nothing with --{kind}", field=option, got=str(value), remedy="Leave it out"
                )


def _changes(overrides: list[str] | None, run_dir: Text) -> list[str]:
    return [*(overrides or []), *([] if run_dir is None else [f"run.dir={json.dumps(run_dir)}"])]


def _ranks_of(recipe: Recipe) -> int:
    """Accelerators of a node, as the recipe's cluster has them."""
    if recipe.cluster is None:
        raise InputError(
            "how many ranks a node has is not said",
            field="--gpus-per-node",
            remedy="Give it, or name the machine in the recipe (`cluster: 8xH100-80GB`)",
        )
    from shardwright.hardware.load import parse_cluster

    return parse_cluster(recipe.cluster.node).gpus_per_node
