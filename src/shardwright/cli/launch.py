"""`shardwright launch`: the same recipe on Slurm, on Kubernetes, or as torchrun commands, without a script to write."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwright.cli.options import JsonOutput, Overrides, RecipePath
from shardwright.config import load_recipe
from shardwright.errors import InputError

if TYPE_CHECKING:
    from shardwright.config import Recipe
    from shardwright.interop.job import Job

SCHEMA_VERSION = 1

Text = str | None
_NONE_SHOWN: dict[str, Any] = {"show_default": False}


def launch_command(
    recipe: RecipePath,
    slurm: Annotated[bool, typer.Option("--slurm", help="An sbatch script.")] = False,
    kubernetes: Annotated[bool, typer.Option("--kubernetes", help="A PyTorchJob of Kubeflow's training operator.")] = False,
    torchrun: Annotated[bool, typer.Option("--torchrun", help="A torchrun command for each node.")] = False,
    nodes: Annotated[int | None, typer.Option("--nodes", min=1, help="Machines; default 1, or as many as --hosts.")] = None,
    gpus_per_node: Annotated[
        int | None,
        typer.Option("--gpus-per-node", min=1, help="Ranks on each; default as the recipe's `cluster` says.", **_NONE_SHOWN),
    ] = None,
    overrides: Overrides = None,
    layout: Annotated[Text, typer.Option("--layout", metavar="DEGREES", help="Replace the recipe's layout.", **_NONE_SHOWN)] = None,
    run_dir: Annotated[
        Text, typer.Option("--run-dir", help="Run folder, on storage that all nodes share; default runs/<name>.", **_NONE_SHOWN)
    ] = None,
    interface: Annotated[
        Text, typer.Option("--interface", metavar="NAME", help="Network interface that joins the nodes, e.g. eth0.", **_NONE_SHOWN)
    ] = None,
    ib_hca: Annotated[
        Text, typer.Option("--ib-hca", metavar="NAMES", help="InfiniBand adapters that NCCL may use, e.g. mlx5.", **_NONE_SHOWN)
    ] = None,
    no_infiniband: Annotated[bool, typer.Option("--no-infiniband", help="Keep NCCL off InfiniBand.")] = False,
    env: Annotated[
        list[str] | None, typer.Option("--env", metavar="NAME=VALUE", help="Export it on every node. Repeatable.", **_NONE_SHOWN)
    ] = None,
    port: Annotated[
        int | None, typer.Option("--port", min=1024, max=65535, help="On the first node, where ranks meet.", **_NONE_SHOWN)
    ] = None,
    cores: Annotated[
        int | None, typer.Option("--cores-per-rank", min=1, help="CPU cores for each rank, and threads.", **_NONE_SHOWN)
    ] = None,
    save_seconds: Annotated[
        int, typer.Option("--save-seconds", min=30, help="How long before the time limit ranks are told to save.")
    ] = 300,
    partition: Annotated[Text, typer.Option("--partition", help="Slurm.", **_NONE_SHOWN)] = None,
    account: Annotated[Text, typer.Option("--account", help="Slurm.", **_NONE_SHOWN)] = None,
    time: Annotated[
        Text, typer.Option("--time", metavar="LIMIT", help="Slurm: minutes, HH:MM:SS or D-HH:MM:SS.", **_NONE_SHOWN)
    ] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option("--sbatch", metavar="--OPTION=VALUE", help="Slurm: a further option. Repeatable.", **_NONE_SHOWN),
    ] = None,
    image: Annotated[
        Text, typer.Option("--image", help="Container image (Kubernetes, or Slurm with Pyxis).", **_NONE_SHOWN)
    ] = None,
    namespace: Annotated[Text, typer.Option("--namespace", help="Kubernetes.", **_NONE_SHOWN)] = None,
    volume: Annotated[
        list[str] | None,
        typer.Option("--volume", metavar="CLAIM:/PATH", help="Kubernetes: shared storage to mount. Repeatable.", **_NONE_SHOWN),
    ] = None,
    working_dir: Annotated[Text, typer.Option("--working-dir", help="Kubernetes: where ranks start.", **_NONE_SHOWN)] = None,
    hosts: Annotated[
        Text, typer.Option("--hosts", metavar="A,B,...", help="torchrun: an address of each node, the first first.", **_NONE_SHOWN)
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write it there.", **_NONE_SHOWN)] = None,
    submit: Annotated[bool, typer.Option("--submit", help="Hand it to sbatch or kubectl.")] = False,
    json_output: JsonOutput = False,
) -> None:
    """Print what starts a recipe on a cluster: ranks meet, save before the time limit, and go on where they were."""
    kind = _only_one(slurm=slurm, kubernetes=kubernetes, torchrun=torchrun)
    _check_belongs(
        kind,
        slurm={"--partition": partition, "--account": account, "--time": time, "--sbatch": sbatch},
        kubernetes={"--namespace": namespace, "--volume": volume, "--working-dir": working_dir},
        torchrun={"--hosts": hosts},
    )
    from shardwright.interop.job import Job, Links, parse_environment, placeholders

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
    if kind == "slurm":
        from shardwright.interop.slurm import SlurmOptions, sbatch_script

        text = sbatch_script(job, SlurmOptions(partition, account, time, image, tuple(sbatch or ())))
    elif kind == "kubernetes":
        text = _manifest(job, image, namespace, volume, working_dir)
    else:
        text = _commands(job, addresses)
    notes = job.cautions()
    missing = sorted(placeholders(recipe.read_text(encoding="utf-8")) - set(given))
    if missing and kind != "slurm":  # sbatch takes this shell's environment along
        notes.append(f"the recipe reads {', '.join(missing)} from the environment: give --env for the nodes")
    _tell(kind, text, job, notes, out=out, submitted=submit, json_output=json_output)


def _manifest(job: Job, image: Text, namespace: Text, volume: list[str] | None, working_dir: Text) -> str:
    from shardwright.interop.kubernetes import KubernetesOptions, manifest

    if image is None:
        raise InputError(
            "pods start from an image",
            field="--image",
            remedy="Name one that holds shardwright, e.g. --image registry/shardwright:1.0",
        )
    return manifest(job, KubernetesOptions(image, namespace, tuple(volume or ()), working_dir))


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
        try:
            out.write_text(text, encoding="utf-8")
        except OSError as error:
            raise InputError(f"cannot be written: {error.strerror}", field="--out", got=str(out)) from error
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


def _check_belongs(kind: str, **options: dict[str, object]) -> None:
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
