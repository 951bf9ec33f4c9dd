"""`shardwright launch`: start a recipe on Slurm, Kubernetes or torchrun."""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from shardwright.cli.options import JsonOutput, Overrides, RecipePath
from shardwright.cli.output.json_output import print_json
from shardwright.cli.output.page_output import write_text
from shardwright.cluster.job import (
    Job,
    NetworkOptions,
    Sweep,
    count_ranks_per_node,
    find_placeholders,
    parse_environment,
    submit_job,
)
from shardwright.config import load_recipe
from shardwright.errors import InputError
from shardwright.files import read_text

OptionalText = str | None


def _build_option(name: str, help_text: str, metavar: str | None = None, **limits: Any) -> Any:
    """Build an option whose default is not shown."""
    return typer.Option(name, metavar=metavar, help=help_text, show_default=False, **limits)


NodeCountOption = Annotated[
    int | None,
    typer.Option(
        "--nodes", min=1, help="Number of nodes; default 1, for torchrun the number of --hosts."
    ),
]
GpusPerNode = Annotated[
    int | None,
    _build_option(
        "--gpus-per-node",
        "GPUs, and ranks, per node; default from the recipe's `cluster`. 0 trains on CPUs.",
        min=0,
    ),
]
RanksPerNode = Annotated[
    int | None,
    _build_option("--ranks-per-node", "Ranks per node, for training on CPUs; default 1.", min=1),
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
    OptionalText, _build_option("--time", "Time limit: minutes, HH:MM:SS or D-HH:MM:SS.", "LIMIT")
]
SweepValues = Annotated[
    OptionalText,
    _build_option(
        "--sweep",
        "Train once for each value of a recipe key, as a job array.",
        "KEY=VALUE,VALUE,...",
    ),
]
Sbatch = Annotated[
    list[str] | None,
    _build_option("--sbatch", "Additional sbatch option. Repeatable.", "--OPTION=VALUE"),
]
Image = Annotated[
    OptionalText, _build_option("--image", "Container image; on Slurm it needs Pyxis.")
]
Namespace = Annotated[OptionalText, _build_option("--namespace", "Kubernetes namespace.")]
Volume = Annotated[
    list[str] | None,
    _build_option(
        "--volume", "Volume claim of shared storage to mount. Repeatable.", "CLAIM:/PATH"
    ),
]
JobKind = Annotated[
    OptionalText,
    _build_option(
        "--job-kind",
        "Kind of job: pytorchjob (Kubeflow's training operator v1; default), trainjob (Kubeflow "
        "Trainer v2) or jobset.",
        "KIND",
    ),
]
WorkingDir = Annotated[
    OptionalText, _build_option("--working-dir", "Working directory of the ranks.")
]
Hosts = Annotated[
    OptionalText,
    _build_option(
        "--hosts", "One address per node; the first node hosts the rendezvous.", "A,B,..."
    ),
]
LaunchOutput = Annotated[
    Path | None, _build_option("--out", "Output file; default standard output.", "FILE")
]
Submit = Annotated[bool, typer.Option("--submit", help="Submit with sbatch or kubectl.")]


_OWN_OPTIONS: dict[str, tuple[str, ...]] = {
    "slurm": ("partition", "account", "time", "sweep", "sbatch", "image", "submit"),
    "kubernetes": ("job_kind", "namespace", "volume", "working_dir", "image", "submit"),
    "torchrun": ("hosts",),
}
"""Parameters of `_launch` that only some launchers have, by launcher."""


def _launch(
    kind: str,
    recipe: RecipePath,
    nodes: NodeCountOption = None,
    gpus_per_node: GpusPerNode = None,
    ranks_per_node: RanksPerNode = None,
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
    sweep: SweepValues = None,
    sbatch: Sbatch = None,
    image: Image = None,
    job_kind: JobKind = None,
    namespace: Namespace = None,
    volume: Volume = None,
    working_dir: WorkingDir = None,
    hosts: Hosts = None,
    out: LaunchOutput = None,
    submit: Submit = False,
    json_output: JsonOutput = False,
) -> None:
    """Write the script, manifest or commands of launcher `kind`; submit them if requested.

    The parameters are the options of all launchers; each subcommand has those that apply to it.
    """
    environment = parse_environment(env or [])
    os.environ.update(environment)  # values of the recipe's ${NAME} on the nodes
    changes = tuple(overrides or ())
    if gpus_per_node == 0:
        changes += ("run.device=cpu",)
    loaded_recipe = load_recipe(recipe, _build_overrides(changes, run_dir), layout)
    swept = Sweep.parse(sweep) if sweep else None
    for assignment in swept.list_assignments() if swept else ():
        load_recipe(recipe, [*_build_overrides(changes, run_dir), assignment], layout)
    addresses = [host.strip() for host in hosts.split(",")] if hosts else []
    job = Job(
        recipe=loaded_recipe,
        recipe_path=str(recipe),
        num_nodes=nodes or len(addresses) or 1,
        ranks_per_node=count_ranks_per_node(loaded_recipe, gpus_per_node, ranks_per_node),
        overrides=changes,
        layout=layout,
        run_dir=run_dir,
        network=NetworkOptions(interface, ib_hca, not no_infiniband),
        environment=environment,
        save_seconds=save_seconds,
        cores_per_rank=cores,
        port=port,
        sweep=swept,
    )
    volume_warnings: list[str] = []
    if kind == "slurm":
        text = _build_script(job, partition, account, time, image, sbatch)
    elif kind == "kubernetes":
        text, volume_warnings = _build_manifest(
            job, job_kind, image, namespace, volume, working_dir
        )
    else:
        text = _build_commands(job, addresses)
    notes = [
        *job.list_warnings(),
        *volume_warnings,
        *_list_missing_environment(recipe, environment, kind),
    ]
    _write_output(kind, text, job, notes, out=out, should_submit=submit, json_output=json_output)


def _list_missing_environment(recipe: Path, environment: dict[str, str], kind: str) -> list[str]:
    """List a note on variables that nodes lack; sbatch exports those of this shell."""
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
    job_kind: OptionalText,
    image: OptionalText,
    namespace: OptionalText,
    volume: list[str] | None,
    working_dir: OptionalText,
) -> tuple[str, list[str]]:
    from shardwright.cluster.kubernetes import DEFAULT_JOB_KIND, build_manifest
    from shardwright.cluster.pods import KubernetesOptions, list_volume_warnings

    if not image:
        raise InputError(
            "pods need a container image",
            field="--image",
            remedy="Name an image with shardwright, e.g. --image registry/shardwright:1.0",
        )
    options = KubernetesOptions(image, namespace, tuple(volume or ()), working_dir)
    text = build_manifest(job, options, job_kind or DEFAULT_JOB_KIND)
    return text, list_volume_warnings(job, options)


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
    for note in notes:
        sys.stderr.write(f"note: {note}\n")
    if out is not None:
        write_text(out, text)
    reply = submit_job(kind, text) if should_submit else None
    if json_output:
        content = {"kind": kind, "text": text, "world_size": job.world_size, "notes": notes}
        print_json(content | {"out": None if out is None else str(out), "submitted": reply})
    elif reply is not None:
        sys.stdout.write(f"submitted: {reply}\n")
    elif out is None:
        sys.stdout.write(text)


def _build_overrides(overrides: Iterable[str], run_dir: OptionalText) -> list[str]:
    return [*overrides, *([] if run_dir is None else [f"run.dir={json.dumps(run_dir)}"])]


def _build_command(
    function: Callable[..., None], *, without: set[str], flags: tuple[str, ...] = ()
) -> Callable[..., None]:
    """Return `function` as typer reads it: with the options of `_launch` except `without`.

    Args:
        function: Function of the options by name.
        without: Parameters of `_launch` to leave out.
        flags: Boolean options to add.
    """

    def command(**options: Any) -> None:
        function(**options)

    parameters = inspect.signature(_launch, eval_str=True).parameters.values()
    added = [
        inspect.Parameter(
            flag,
            inspect.Parameter.KEYWORD_ONLY,
            default=False,
            annotation=Annotated[
                bool, typer.Option(f"--{flag}", help=f"Same as `launch {flag} RECIPE`.")
            ],
        )
        for flag in flags
    ]
    chosen = [parameter for parameter in parameters if parameter.name not in {"kind", *without}]
    command.__signature__ = inspect.Signature([*chosen, *added])  # type: ignore[attr-defined]
    return command


def _launch_with_flags(*, slurm: bool, kubernetes: bool, torchrun: bool, **options: Any) -> None:
    """Run the former spelling, `launch RECIPE --slurm`, which has the options of all launchers."""
    launchers = {"slurm": slurm, "kubernetes": kubernetes, "torchrun": torchrun}
    chosen = [kind for kind, is_chosen in launchers.items() if is_chosen]
    if len(chosen) != 1:
        raise InputError(
            "choose one launcher",
            field="launch",
            got=" ".join(f"--{kind}" for kind in chosen) or None,
            allowed="slurm, kubernetes or torchrun",
            remedy="Write it before the recipe: `shardwright launch slurm RECIPE`",
        )
    (kind,) = chosen
    _check_options(kind, options)
    sys.stderr.write(
        f"note: `launch RECIPE --{kind}` is now spelled `shardwright launch {kind} RECIPE`\n"
    )
    _launch(kind, **options)


def _check_options(kind: str, options: Mapping[str, object]) -> None:
    """Refuse options of other launchers, which would have no effect."""
    for owner, names in _OWN_OPTIONS.items():
        for name in names:
            is_shared = sum(name in others for others in _OWN_OPTIONS.values()) > 1
            if owner != kind and not is_shared and options[name]:
                raise InputError(
                    f"applies to --{owner} only and has no effect with --{kind}",
                    field=f"--{name.replace('_', '-')}",
                    got=str(options[name]),
                    remedy="Remove it",
                )


class _LaunchGroup(TyperGroup):
    """Subcommands, and the former spelling with the launcher as an option."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        """Parse a subcommand, or else the former spelling."""
        if not args or args[0] in (*self.commands, "--help"):
            return super().make_context(info_name, args, parent, **extra)
        former = typer.Typer(add_completion=False, rich_markup_mode=None)
        former.command(help="Launch with the options of all launchers; prefer the subcommands.")(
            _build_command(_launch_with_flags, without=set(), flags=tuple(_OWN_OPTIONS))
        )
        command = typer.main.get_command(former)
        return command.make_context(info_name, args, parent, **extra)


app = typer.Typer(
    cls=_LaunchGroup,
    help="Start a recipe on Slurm, Kubernetes or torchrun.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
for _kind, _output in (
    ("slurm", "an sbatch script that starts a recipe on Slurm"),
    ("kubernetes", "a PyTorchJob, TrainJob or JobSet that starts a recipe on Kubernetes"),
    ("torchrun", "one torchrun command per node that starts a recipe"),
):
    _others = set().union(*_OWN_OPTIONS.values()) - set(_OWN_OPTIONS[_kind])
    app.command(
        _kind,
        help=f"Print {_output}.\n\n"
        "The ranks find each other, save before the time limit, and resume when the job restarts.",
    )(_build_command(partial(_launch, _kind), without=_others))
