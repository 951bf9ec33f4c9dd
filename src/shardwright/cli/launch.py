"""`shardwright launch`: start a recipe on Slurm, Kubernetes or torchrun."""

from __future__ import annotations

import inspect
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
from shardwright.cli.output.page_output import ShouldOverwrite, check_new_file, write_text
from shardwright.cli.verbs import VERBS
from shardwright.cluster import kubernetes, slurm, torchrun
from shardwright.cluster.job import (
    Job,
    NetworkOptions,
    build_overrides,
    count_ranks_per_node,
    find_placeholders,
    parse_environment,
    submit_job,
)
from shardwright.cluster.launcher import OptionalText, build_option
from shardwright.cluster.torchrun import split_hosts
from shardwright.config import load_recipe
from shardwright.errors import InputError, suggest_name
from shardwright.files import read_text

_LAUNCHERS = {
    "slurm": slurm.LAUNCHER,
    "kubernetes": kubernetes.LAUNCHER,
    "torchrun": torchrun.LAUNCHER,
}
"""Launchers by subcommand. A new one is a module of `cluster` and an entry here."""

NodeCountOption = Annotated[
    int | None,
    typer.Option(
        "--nodes", min=1, help="Number of nodes; default 1, or with torchrun the number of --hosts."
    ),
]
GpusPerNode = Annotated[
    int | None,
    build_option(
        "--gpus-per-node",
        "GPUs per node, one rank each; default: the recipe's `cluster`. 0 trains on CPUs.",
        min=0,
    ),
]
RanksPerNode = Annotated[
    int | None,
    build_option("--ranks-per-node", "Ranks per node, for training on CPUs; default 1.", min=1),
]
LayoutText = Annotated[
    OptionalText,
    build_option("--layout", "Replace the recipe's layout, e.g. dp_shard=16.", "DEGREES"),
]
RunDir = Annotated[
    OptionalText,
    build_option("--run-dir", "Run folder, on storage shared by all nodes; default runs/<name>."),
]
Interface = Annotated[
    OptionalText,
    build_option("--interface", "Network interface that connects the nodes, e.g. eth0.", "NAME"),
]
IbHca = Annotated[
    OptionalText, build_option("--ib-hca", "InfiniBand adapters for NCCL, e.g. mlx5.", "NAMES")
]
NoInfiniband = Annotated[bool, typer.Option("--no-infiniband", help="Disable InfiniBand in NCCL.")]
Env = Annotated[
    list[str] | None,
    build_option("--env", "Environment variable to set on every node. Repeatable.", "NAME=VALUE"),
]
Port = Annotated[
    int | None,
    build_option("--port", "Port of the rendezvous on the first node.", min=1024, max=65535),
]
Cores = Annotated[
    int | None, build_option("--cores-per-rank", "CPU cores per rank, and threads.", min=1)
]
SaveSeconds = Annotated[
    int,
    typer.Option(
        "--save-seconds",
        min=30,
        help="How many seconds before the time limit the ranks get the signal to save.",
    ),
]
LaunchOutput = Annotated[
    Path | None, build_option("--out", "Output file; default standard output.", "FILE")
]
_SUBMIT_COMMANDS = [
    launcher.submit_command[0] for launcher in _LAUNCHERS.values() if launcher.submit_command
]
Submit = Annotated[
    bool, typer.Option("--submit", help=f"Submit with {' or '.join(_SUBMIT_COMMANDS)}.")
]


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
    out: LaunchOutput = None,
    overwrite: ShouldOverwrite = False,
    submit: Submit = False,
    json_output: JsonOutput = False,
    **own_options: Any,
) -> None:
    """Write the script, manifest or commands of launcher `kind`; submit them if requested."""
    check_new_file(out, should_overwrite=overwrite)
    launcher = _LAUNCHERS[kind]
    environment = parse_environment(env or [])
    os.environ.update(environment)  # values of the recipe's ${NAME} on the nodes
    changes = tuple(overrides or ())
    if gpus_per_node == 0:
        changes += ("run.device=cpu",)
    loaded_recipe = load_recipe(recipe, build_overrides(changes, run_dir), layout)
    job = Job(
        recipe=loaded_recipe,
        recipe_path=str(recipe),
        num_nodes=nodes or len(split_hosts(own_options.get("hosts"))) or 1,
        ranks_per_node=count_ranks_per_node(loaded_recipe, gpus_per_node, ranks_per_node),
        overrides=changes,
        layout=layout,
        run_dir=run_dir,
        network=NetworkOptions(interface, ib_hca, not no_infiniband),
        environment=environment,
        save_seconds=save_seconds,
        cores_per_rank=cores,
        port=port,
    )
    if job.keeps_processes and not launcher.keeps_processes:
        others = [name for name, other in _LAUNCHERS.items() if other.keeps_processes]
        raise InputError(
            f"{kind} restarts all ranks after a loss, so no process survives",
            field="elastic.warm_restarts",
            got=True,
            allowed=f"false with launch {kind}; true with {', '.join(others)}",
            remedy="Set it, elastic.peer_copies and elastic.spare_nodes to their defaults",
        )
    text, warnings = launcher.build_text(job, own_options)
    notes = [*job.list_warnings(), *warnings]
    missing = sorted(find_placeholders(read_text(recipe)) - set(environment))
    if missing and not launcher.exports_shell:
        notes.append(
            f"the recipe reads {', '.join(missing)} from the environment: "
            "set them for the nodes with --env"
        )
    for note in notes:
        sys.stderr.write(f"note: {note}\n")
    if out is not None:
        write_text(out, text)
    reply = submit_job(launcher.submit_command, text) if submit else None
    if json_output:
        content = {"kind": kind, "text": text, "world_size": job.world_size, "notes": notes}
        print_json(content | {"out": None if out is None else str(out), "submitted": reply})
    elif reply is not None:
        sys.stdout.write(f"submitted: {reply}\n")
    elif out is None:
        sys.stdout.write(text)


def _build_command(
    function: Callable[..., None], kinds: Iterable[str], *, has_flags: bool = False
) -> Callable[..., None]:
    """Return `function` as typer reads it: with the options that any of the launchers has.

    Args:
        function: Function of the options by name.
        kinds: Launchers to choose from.
        has_flags: Add a boolean option for each launcher.
    """

    def command(**options: Any) -> None:
        function(**options)

    common = inspect.signature(_launch, eval_str=True).parameters
    parameters = {
        name: parameter.replace(kind=parameter.KEYWORD_ONLY)
        for name, parameter in common.items()
        if name != "kind" and parameter.kind is not parameter.VAR_KEYWORD
    }
    for kind in kinds:
        parameters |= {option.name: option for option in _LAUNCHERS[kind].list_parameters()}
        if has_flags:
            flag = typer.Option(f"--{kind}", help=f"Same as `launch {kind} RECIPE`.")
            parameters[kind] = inspect.Parameter(
                kind,
                inspect.Parameter.KEYWORD_ONLY,
                default=False,
                annotation=Annotated[bool, flag],
            )
    for name in ("out", "overwrite", "submit", "json_output"):  # the help lists them last
        parameters[name] = parameters.pop(name)
    if not any(_LAUNCHERS[kind].submit_command for kind in kinds):
        del parameters["submit"]
    signature = inspect.Signature(list(parameters.values()))
    command.__signature__ = signature  # type: ignore[attr-defined]
    return command


def _launch_with_flags(**options: Any) -> None:
    """Run the former spelling, `launch RECIPE --slurm`, which has the options of all launchers."""
    chosen = [kind for kind in _LAUNCHERS if options.pop(kind)]
    if len(chosen) != 1:
        raise InputError(
            "choose one launcher",
            field="launch",
            got=" ".join(f"--{kind}" for kind in chosen) or None,
            allowed=" or ".join(_LAUNCHERS),
            remedy="Write it before the recipe: `shardwright launch slurm RECIPE`",
        )
    (kind,) = chosen
    sys.stderr.write(
        f"note: `launch RECIPE --{kind}` is now spelled `shardwright launch {kind} RECIPE`\n"
    )
    _launch(kind, **_remove_options_of_others(kind, options))


def _remove_options_of_others(kind: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a launcher.

    Raises:
        InputError: an option is set that only other launchers have; it would have no effect.
    """
    owners: dict[str, list[str]] = {}
    for name, launcher in _LAUNCHERS.items():
        own = [option.name for option in launcher.list_parameters()]
        for option in [*own, *(["submit"] if launcher.submit_command else [])]:
            owners.setdefault(option, []).append(name)
    others = {name: owner for name, owner in owners.items() if kind not in owner}
    for name, names in others.items():
        if options[name]:
            raise InputError(
                f"applies to {' and '.join(f'--{owner}' for owner in names)} only and has no "
                f"effect with --{kind}",
                field=f"--{name.replace('_', '-')}",
                got=str(options[name]),
                remedy="Remove it",
            )
    return {name: value for name, value in options.items() if name not in others}


class _LaunchGroup(TyperGroup):
    """Subcommands, and the former spelling with the launcher as an option."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        """Parse a subcommand, or else the former spelling."""
        if not args or args[0] in (*self.commands, "--help"):
            return super().make_context(info_name, args, parent, **extra)
        if not {"--help", *(f"--{kind}" for kind in _LAUNCHERS)} & set(args):
            raise InputError(
                "the first word must be a launcher",
                field="launch",
                got=args[0],
                allowed=" or ".join(_LAUNCHERS),
                remedy=suggest_name(args[0], _LAUNCHERS)
                or "Write it before the recipe: `shardwright launch slurm RECIPE`",
            )
        former = typer.Typer(add_completion=False, rich_markup_mode=None)
        former.command(
            help="Former spelling with the options of all launchers; prefer the subcommands."
        )(_build_command(_launch_with_flags, _LAUNCHERS, has_flags=True))
        command = typer.main.get_command(former)
        return command.make_context(info_name, args, parent, **extra)


app = typer.Typer(
    cls=_LaunchGroup, help=VERBS["launch"], no_args_is_help=True, rich_markup_mode=None
)
for _kind, _launcher in _LAUNCHERS.items():
    app.command(
        _kind,
        help=f"Print {_launcher.output}.\n\n"
        "The ranks find each other, save before the time limit, and resume when the job restarts.",
    )(_build_command(partial(_launch, _kind), [_kind]))
