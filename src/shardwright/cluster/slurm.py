"""A recipe as a Slurm batch script.

Each task is one rank, so signals and exit codes pass without a launcher in between: Slurm sends
SIGTERM to every rank before the time limit, the ranks save and exit with code 4, and the script
requeues its job.

Slurm itself requeues the job after the loss of a node, and kills the script. So the script counts
the restarts that followed a save, in a file, and takes the others from Slurm's own count.

With `elastic.warm_restarts` each task starts the ranks of its node, and Slurm leaves job and step
alone when a node other than the first is lost.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from shardwright.cluster.job import (
    Job,
    Sweep,
    build_export_lines,
    build_loss_limit,
    build_overrides,
)
from shardwright.cluster.launcher import Image, Launcher, OptionalText, build_option
from shardwright.cluster.scheduler_variables import SLURM
from shardwright.config import load_recipe
from shardwright.config.run import NODE_TOKEN_VARIABLE
from shardwright.errors import ExitCode, InputError

_TIME_LIMIT = re.compile(r"^(\d+-)?\d+(:\d{1,2}){0,2}$")
_WORD = re.compile(r"\S+")
_DIRECTIVE = re.compile(r"^--[a-z][a-z-]*(=\S+)?$")

_EXIT_WAIT_SECONDS = 120
"""Seconds that the other ranks have to exit after the first one; a save needs less."""


@dataclass(frozen=True)
class SlurmOptions:
    """Options of the Slurm site; None uses the site's default."""

    partition: Annotated[OptionalText, build_option("--partition", "Slurm partition.")] = None
    account: Annotated[OptionalText, build_option("--account", "Slurm account.")] = None
    time: Annotated[
        OptionalText,
        build_option("--time", "Time limit: minutes, HH:MM:SS or D-HH:MM:SS.", "LIMIT"),
    ] = None
    sweep: Annotated[
        OptionalText,
        build_option(
            "--sweep",
            "Train once per value of a recipe key, as a job array.",
            "KEY=VALUE,VALUE,...",
        ),
    ] = None
    sbatch: Annotated[
        list[str] | None,
        build_option("--sbatch", "Additional sbatch option. Repeatable.", "--OPTION=VALUE"),
    ] = None
    image: Image = None

    def __post_init__(self) -> None:
        if self.time is not None and not _TIME_LIMIT.fullmatch(self.time):
            raise InputError(
                "not a time limit",
                field="--time",
                got=self.time,
                allowed="minutes, HH:MM:SS or D-HH:MM:SS",
            )
        for option, value in (
            ("--partition", self.partition),
            ("--account", self.account),
            ("--image", self.image),
        ):
            if value is not None and not _WORD.fullmatch(value):
                raise InputError(
                    "not a single word",
                    field=option,
                    got=repr(value),
                    allowed="characters other than spaces",
                )
        for directive in self.sbatch or ():
            if not _DIRECTIVE.fullmatch(directive):
                raise InputError(
                    "not an sbatch option",
                    field="--sbatch",
                    got=directive,
                    allowed="--name or --name=value",
                )


def build_sbatch_script(job: Job, options: SlurmOptions) -> str:
    """Return the script for `sbatch`.

    Raises:
        InputError: the recipe is wrong with a value of the sweep, or the time limit leaves no time
            to train.
    """
    _check_time(options.time, job.save_seconds)
    if options.sweep:
        job = _add_sweep(job, Sweep.parse(options.sweep))
    # 0 waits without limit: the run continues without the processes of a node.
    wait_seconds = 0 if job.keeps_processes else _EXIT_WAIT_SECONDS
    srun = ["srun", "--kill-on-bad-exit=0", f"--wait={wait_seconds}"]
    if job.keeps_processes:
        srun.append("--no-kill")
    folders: list[str] = []
    if options.image is not None:
        srun += [f"--container-image={options.image}"]
        folders = _list_container_folders(job)
    command = shlex.join(srun)
    if options.image is not None:
        mounts = "".join(f",{shlex.quote(f'{folder}:{folder}')}" for folder in folders)
        command += f' --container-mounts="$PWD:$PWD"{mounts} --container-workdir="$PWD"'
    arguments = shlex.join(job.build_train_arguments())
    lines = [
        "#!/bin/bash",
        f"# shardwright launch slurm: {job.recipe.name}, "
        f"{job.num_nodes} x {job.ranks_per_node} ranks",
        *(f"#SBATCH {directive}" for directive in _build_directives(job, options)),
        "",
        "set -euo pipefail",
        "",
        *build_loss_limit(job, SLURM),
        "",
        "# The ranks' rendezvous is on the first node; the port differs between jobs on a node.",
        'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        "MASTER_ADDR=${MASTER_ADDR%%$'\\n'*}",
        f"MASTER_PORT={job.port}" if job.port else "MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))",
        "export MASTER_ADDR MASTER_PORT",
        *_build_token(job),
        *build_export_lines(job.build_environment()),
        "# Since Slurm 22.05, srun does not read the cores of a task from the job.",
        'if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then',
        '  export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"',
        "fi",
        "",
        "# A requeued job resumes from its newest complete checkpoint; "
        "a new job refuses a run folder",
        "# that is in use.",
        "again=()",
        'if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then again=(--resume-if-begun); fi',
        *([] if job.sweep is None else ["", *_build_sweep_choice(job, job.sweep)]),
        *_build_run_folder(job, folders),
        "",
        "status=0",
        f"{command} shardwright {arguments} "
        + ('"${sweep[@]}" ' if job.sweep else "")
        + '"${again[@]}" || status=$?',
        "",
        *_build_exit_handling(job),
    ]
    return "\n".join(lines) + "\n"


def _list_container_folders(job: Job) -> list[str]:
    """List the folders that a container needs besides the working folder: of the absolute paths in
    recipe and job. A run folder without a mount would be lost with the container.

    Raises:
        InputError: Pyxis cannot mount one of them.
    """
    paths = [job.run_folder, job.recipe_path, *_list_strings(job.recipe.model_dump(mode="json"))]
    folders = set()
    for path in map(Path, paths):
        if path.is_absolute():
            folders.add(str(path.parent if path.is_file() else path))
    for folder in sorted(folders):
        if "," in folder or ":" in folder:
            raise InputError(
                f"a container needs this folder, and Pyxis separates mounts by commas and colons: "
                f"{folder}",
                field="--image",
                got=folder,
                allowed="folders without commas and colons",
                remedy="Rename it, or name a symbolic link to it",
            )
    return sorted(folders)


def _list_strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _list_strings(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _list_strings(item)


def _build_run_folder(job: Job, folders: Collection[str]) -> list[str]:
    """Build the line that creates the run folder, which a container can mount only then."""
    if job.run_folder not in folders:
        return []
    return ["", f"mkdir -p {shlex.quote(job.run_folder)}"]


def parse_time_limit(text: str) -> int | None:
    """Return the seconds of a Slurm time limit; None for 0, which is no limit.

    >>> parse_time_limit("90"), parse_time_limit("1:30"), parse_time_limit("2-12")
    (5400, 90, 216000)
    """
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    # Slurm reads one number as minutes, two as minutes and seconds; after days, hours come first.
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    seconds = sum(part * unit for part, unit in zip(parts, units, strict=False))
    return 86400 * int(days or 0) + seconds or None


def _check_time(limit: str | None, save_seconds: int) -> None:
    """Refuse a limit at which the ranks get the signal to save as soon as they start: the job
    would be requeued without end."""
    seconds = None if limit is None else parse_time_limit(limit)
    if seconds is not None and seconds <= save_seconds:
        raise InputError(
            f"the ranks get the signal to save {save_seconds} seconds before the time limit, "
            "so they would never train",
            field="--time",
            got=f"{limit} ({seconds} seconds)",
            allowed=f"more than --save-seconds ({save_seconds} seconds)",
            remedy="Raise it, or lower --save-seconds",
        )


def _add_sweep(job: Job, sweep: Sweep) -> Job:
    job = replace(job, sweep=sweep)
    for assignment in sweep.list_assignments():
        changes = [*build_overrides(job.overrides, job.run_dir), assignment]
        load_recipe(Path(job.recipe_path), changes, job.layout)
    return job


def _build_token(job: Job) -> list[str]:
    """Return lines that draw the secret by which the launcher knows the job's nodes."""
    if not job.keeps_processes or job.num_nodes == 1:
        return []
    return [
        f"{NODE_TOKEN_VARIABLE}=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')",
        f"export {NODE_TOKEN_VARIABLE}",
    ]


def _build_directives(job: Job, options: SlurmOptions) -> list[str]:
    directives = [
        f"--job-name={job.recipe.name}",
        f"--nodes={job.num_nodes}",
        f"--ntasks-per-node={1 if job.keeps_processes else job.ranks_per_node}",
    ]
    if job.keeps_processes:
        directives.append("--no-kill")
    if job.has_accelerators:
        directives.append(f"--gpus-per-node={job.ranks_per_node}")
    if job.cores_per_rank is not None:
        ranks_per_task = job.ranks_per_node if job.keeps_processes else 1
        directives.append(f"--cpus-per-task={job.cores_per_rank * ranks_per_task}")
    for name in ("partition", "account", "time"):
        value = getattr(options, name)
        if value is not None:
            directives.append(f"--{name}={value}")
    if job.sweep is not None:
        directives.append(f"--array=0-{len(job.sweep.values) - 1}")
    # Without `B:`, the signal goes to the ranks, which save at the next step, not to this
    # shell.
    directives += [
        f"--signal=TERM@{job.save_seconds}",
        "--requeue",
        "--open-mode=append",
        f"--output={job.recipe.name}-{'%A_%a' if job.sweep else '%j'}.log",
    ]
    return directives + list(options.sbatch or ())


def _build_sweep_choice(job: Job, sweep: Sweep) -> list[str]:
    """Return the lines that choose the value and the folders of this task of the array."""
    names = shlex.join(sweep.list_folder_names())
    lines = [
        "# Each task of the array trains with one value, in a folder of its own.",
        f"values=({shlex.join(sweep.values)})",
        f"names=({names})",
        "name=${names[SLURM_ARRAY_TASK_ID]}",
        f'sweep=(--set {shlex.quote(sweep.key + "=")}"${{values[SLURM_ARRAY_TASK_ID]}}" '
        f'--run-dir {shlex.quote(job.run_folder + "/")}"$name")',
    ]
    if job.recipe.checkpoint.dir is not None:
        location = shlex.quote(f"checkpoint.dir={job.recipe.checkpoint.dir}/")
        lines.append(f'sweep+=(--set {location}"$name")')
    return lines


def _build_exit_handling(job: Job) -> list[str]:
    """Return the lines that handle the exit code: requeue, or exit with it."""
    # It fails, and says so, if Slurm does not requeue this job or has done so by itself.
    requeue = 'scontrol requeue "$SLURM_JOB_ID" || true'
    lines = [
        'case "$status" in',
        f"  {ExitCode.DONE:d} | {ExitCode.CHECK_FAILED:d} | {ExitCode.WRONG_INPUT:d}) ;; "
        "# done, or a retry would fail again",
        f"  {ExitCode.PREEMPTED:d}) # stopped and saved: requeue",
        '    date >> "$saves"',
        f"    {requeue} ;;",
        "  *) # failure; srun passes on the number of a signal, or its own status",
        '    echo "shardwright: srun ended with status $status" >&2',
        f"    status={ExitCode.RUN_FAILED:d}",
    ]
    if job.max_restarts:
        lines += [
            f"    # at most {job.max_restarts} restarts (elastic.max_restarts)",
            f'    if [ "$losses" -lt {job.max_restarts} ]; then',
            f"      {requeue}",
            "    fi ;;",
        ]
    else:
        lines.append("    ;; # set elastic.max_restarts in the recipe for restarts")
    return [*lines, "esac", 'exit "$status"']


LAUNCHER = Launcher(
    "an sbatch script that starts a recipe on Slurm",
    SlurmOptions,
    build_sbatch_script,
    submit_command=("sbatch", "--parsable"),
    exports_shell=True,
    keeps_processes=True,
)
