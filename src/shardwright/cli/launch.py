"""`shardwright launch`: start a recipe on Slurm, Kubernetes or torchrun."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwright.cli.options import JsonOutput, Overrides, RecipePath
from shardwright.cli.page_output import write_text
from shardwright.cluster.job import Job, NetworkOptions, find_placeholders, parse_environment
from shardwright.config import load_recipe
from shardwright.errors import InputError
from shardwright.files import read_text

if TYPE_CHECKING:
    from shardwright.config import Recipe

SCHEMA_VERSION = 1

OptionalText = str | None


def _build_option(name: str, help_text: str, metavar: str | None = None, **limits: Any) -> Any:
    """Build an option whose default is not shown."""
    return typer.Option(name, metavar=metavar, help=help_text, show_default=False, **limits)


Slurm = Annotated[bool, typer.Option("--slurm", help="Write an sbatch script.")]
Kubernetes = Annotated[
    bool, typer.Option("--kubernetes", help="Write a PyTorchJob for Kubeflow's training operator.")
]
Torchrun = Annotated[bool, typer.Option("--torchrun", help="Write one torchrun command per node.")]
NodeCountOption = Annotated[
    int | None,
    typer.Option("--nodes", min=1, help="Number of nodes; default 1, or the number of --hosts."),
]
GpusPerNode = Annotated[
    int | None,
    _build_option("--gpus-per-node", "Ranks per node; default from the recipe's `cluster`.", min=1),
]
LayoutText = Annotated[
    OptionalText,
    _build_option("--layout", "Replace the recipe's layout, e.g. dp_shard=16.", "DEGREES"),
]
RunDir = Annotated[
    OptionalText,
    _build_option("--run-dir", "Run folder, on storage shared by all nodes; default runs/<name>."),
]
Interface = Annotated[
    OptionalText,
    _build_option("--interface", "Network interface that connects the nodes, e.g. eth0.", "NAME"),
]
IbHca = Annotated[
    OptionalText, _build_option("--ib-hca", "InfiniBand adapters for NCCL, e.g. mlx5.", "NAMES")
]
NoInfiniband = Annotated[bool, typer.Option("--no-infiniband", help="Disable InfiniBand in NCCL.")]
Env = Annotated[
    list[str] | None,
    _build_option("--env", "Environment variable to set on every node. Repeatable.", "NAME=VALUE"),
]
Port = Annotated[
    int | None,
    _build_option("--port", "Port of the rendezvous on the first node.", min=1024, max=65535),
]
Cores = Annotated[
    int | None, _build_option("--cores-per-rank", "CPU cores, and threads, per rank.", min=1)
]
SaveSeconds = Annotated[
    int,
    typer.Option(
        "--save-seconds",
        min=30,
        help="Seconds before the time limit at which ranks are signalled to save.",
    ),
]
Partition = Annotated[OptionalText, _build_option("--partition", "Slurm partition.")]
Account = Annotated[OptionalText, _build_option("--account", "Slurm account.")]
TimeLimit = Annotated[
    OptionalText,
    _build_option("--time", "Slurm time limit: minutes, HH:MM:SS or D-HH:MM:SS.", "LIMIT"),
]
Sbatch = Annotated[
    list[str] | None,
    _build_option("--sbatch", "Additional sbatch option. Repeatable.", "--OPTION=VALUE"),
]
Image = Annotated[
    OptionalText, _build_option("--image", "Container image (Kubernetes, or Slurm with Pyxis).")
]
Namespace = Annotated[OptionalText, _build_option("--namespace", "Kubernetes namespace.")]
Volume = Annotated[
    list[str] | None,
    _build_option(
        "--volume", "Kubernetes volume claim of shared storage to mount. Repeatable.", "CLAIM:/PATH"
    ),
]
WorkingDir = Annotated[
    OptionalText, _build_option("--working-dir", "Kubernetes: working directory of the ranks.")
]
Hosts = Annotated[
    OptionalText,
    _build_option(
        "--hosts", "torchrun: one address per node; the first node hosts the rendezvous.", "A,B,..."
    ),
]
LaunchOutput = Annotated[
    Path | None, _build_option("--out", "Output file; default standard output.", "FILE")
]
Submit = Annotated[bool, typer.Option("--submit", help="Submit with sbatch or kubectl.")]


def launch_command(
    recipe: RecipePath,
    slurm: Slurm = False,
    kubernetes: Kubernetes = False,
    torchrun: Torchrun = False,
    nodes: NodeCountOption = None,
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
    out: LaunchOutput = None,
    submit: Submit = False,
    json_output: JsonOutput = False,
) -> None:
    """Print a script, manifest or commands that start a recipe on a cluster.

    The ranks find each other, save before the time limit, and resume when the job restarts.
    """
    kind = _choose_launcher(slurm=slurm, kubernetes=kubernetes, torchrun=torchrun)
    slurm_options = {
        "--partition": partition,
        "--account": account,
        "--time": time,
        "--sbatch": sbatch,
    }
    kubernetes_options = {
        "--namespace": namespace,
        "--volume": volume,
        "--working-dir": working_dir,
    }
    _check_options(
        kind, slurm=slurm_options, kubernetes=kubernetes_options, torchrun={"--hosts": hosts}
    )
    environment = parse_environment(env or [])
    os.environ.update(environment)  # values of the recipe's ${NAME} on the nodes
    loaded_recipe = load_recipe(recipe, _build_overrides(overrides, run_dir), layout)
    addresses = [host.strip() for host in hosts.split(",")] if hosts else []
    job = Job(
        recipe=loaded_recipe,
        recipe_path=str(recipe),
        num_nodes=nodes or len(addresses) or 1,
        ranks_per_node=gpus_per_node or _count_ranks_per_node(loaded_recipe),
        overrides=tuple(overrides or ()),
        layout=layout,
        run_dir=run_dir,
        network=NetworkOptions(interface, ib_hca, not no_infiniband),
        environment=environment,
        save_seconds=save_seconds,
        cores_per_rank=cores,
        port=port,
    )
    volume_warnings: list[str] = []
    if kind == "slurm":
        text = _build_script(job, partition, account, time, image, sbatch)
    elif kind == "kubernetes":
        text, volume_warnings = _build_manifest(job, image, namespace, volume, working_dir)
    else:
        text = _build_commands(job, addresses)
    notes = [
        *job.list_warnings(),
        *volume_warnings,
        *_list_missing_environment(recipe, environment, kind),
    ]
    _write_output(kind, text, job, notes, out=out, should_submit=submit, json_output=json_output)


def _list_missing_environment(recipe: Path, environment: dict[str, str], kind: str) -> list[str]:
    """Return a note on variables that the recipe reads and nodes lack; sbatch exports this
    shell's."""
    missing = sorted(find_placeholders(read_text(recipe)) - set(environment))
    if not missing or kind == "slurm":
        return []
    return [
        f"the recipe reads {', '.join(missing)} from the environment: "
        "set them for the nodes with --env"
    ]


def _build_script(
    job: Job,
    partition: OptionalText,
    account: OptionalText,
    time: OptionalText,
    image: OptionalText,
    sbatch: list[str] | None,
) -> str:
    from shardwright.cluster.slurm import SlurmOptions, build_sbatch_script

    return build_sbatch_script(
        job, SlurmOptions(partition, account, time, image, tuple(sbatch or ()))
    )


def _build_manifest(
    job: Job,
    image: OptionalText,
    namespace: OptionalText,
    volume: list[str] | None,
    working_dir: OptionalText,
) -> tuple[str, list[str]]:
    from shardwright.cluster.kubernetes import (
        KubernetesOptions,
        build_manifest,
        list_volume_warnings,
    )

    if not image:
        raise InputError(
            "pods need a container image",
            field="--image",
            remedy="Name an image with shardwright, e.g. --image registry/shardwright:1.0",
        )
    options = KubernetesOptions(image, namespace, tuple(volume or ()), working_dir)
    return build_manifest(job, options), list_volume_warnings(job, options)


def _build_commands(job: Job, addresses: list[str]) -> str:
    from shardwright.cluster.torchrun import build_torchrun_commands

    commands = build_torchrun_commands(job, addresses)
    if len(commands) == 1:
        return commands[0] + "\n"
    lines = []
    for host, command in zip(addresses, commands, strict=True):
        lines += [f"# on {host}", command]
    return "\n".join(lines) + "\n"


def _write_output(
    kind: str,
    text: str,
    job: Job,
    notes: list[str],
    *,
    out: Path | None,
    should_submit: bool,
    json_output: bool,
) -> None:
    from shardwright.cluster.submit import submit

    for note in notes:
        sys.stderr.write(f"note: {note}\n")
    if out is not None:
        write_text(out, text)
    reply = submit(kind, text) if should_submit else None
    if json_output:
        content = {
            "schema_version": SCHEMA_VERSION,
            "kind": kind,
            "text": text,
            "world_size": job.world_size,
            "notes": notes,
        }
        sys.stdout.write(
            json.dumps(content | {"out": None if out is None else str(out), "submitted": reply})
            + "\n"
        )
    elif reply is not None:
        sys.stdout.write(f"submitted: {reply}\n")
    elif out is None:
        sys.stdout.write(text)


def _choose_launcher(**launchers: bool) -> str:
    chosen = [kind for kind, is_chosen in launchers.items() if is_chosen]
    allowed = "one of --slurm, --kubernetes and --torchrun"
    if len(chosen) != 1:
        raise InputError(
            "choose one launcher",
            field="launch",
            got=" ".join(f"--{kind}" for kind in chosen) or None,
            allowed=allowed,
        )
    return chosen[0]


def _check_options(kind: str, **options: Mapping[str, object]) -> None:
    """Refuse options of other launchers, which would have no effect."""
    for owner, values in options.items():
        for option, value in values.items():
            if owner != kind and value:
                raise InputError(
                    f"applies to --{owner} only and has no effect with --{kind}",
                    field=option,
                    got=str(value),
                    remedy="Remove it",
                )


def _build_overrides(overrides: list[str] | None, run_dir: OptionalText) -> list[str]:
    return [*(overrides or []), *([] if run_dir is None else [f"run.dir={json.dumps(run_dir)}"])]


def _count_ranks_per_node(recipe: Recipe) -> int:
    """Return the accelerators per node of the recipe's cluster."""
    if recipe.cluster is None:
        raise InputError(
            "the number of ranks per node is unknown",
            field="--gpus-per-node",
            remedy="Set it, or name the node type in the recipe (`cluster: 8xH100-80GB`)",
        )
    from shardwright.hardware.catalog_loading import parse_cluster

    return parse_cluster(recipe.cluster.node).gpus_per_node
