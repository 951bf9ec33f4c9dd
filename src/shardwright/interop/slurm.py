"""A recipe as a Slurm batch script.

One task is one rank, so that stop signals and exit codes need no launcher in between: Slurm sends SIGTERM to every rank before
the time limit, the ranks save and leave with 4, and the script puts itself back into the queue.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from shardwright.errors import ExitCode, InputError
from shardwright.interop.job import Job, exports

_TIME = re.compile(r"^(\d+-)?\d+(:\d{1,2}){0,2}$")
_WORD = re.compile(r"\S+")
_DIRECTIVE = re.compile(r"^--[a-z][a-z-]*(=\S+)?$")

_STRAGGLING_SECONDS = 120
"""How long the other ranks may take to leave after the first has: a save has ended on all of them by then."""


@dataclass(frozen=True)
class SlurmOptions:
    """What a site wants to know; None leaves its default."""

    partition: str | None = None
    account: str | None = None
    time: str | None = None
    image: str | None = None
    """Container image for the Pyxis plugin."""
    directives: tuple[str, ...] = ()
    """Further `#SBATCH` options, e.g. `--qos=high`."""

    def __post_init__(self) -> None:
        if self.time is not None and not _TIME.fullmatch(self.time):
            raise InputError("not a time limit", field="--time", got=self.time, allowed="minutes, HH:MM:SS or D-HH:MM:SS")
        for option, value in (("--partition", self.partition), ("--account", self.account), ("--image", self.image)):
            if value is not None and not _WORD.fullmatch(value):
                raise InputError("is not one word", field=option, got=repr(value), allowed="characters other than spaces")
        for directive in self.directives:
            if not _DIRECTIVE.fullmatch(directive):
                raise InputError("not an option of sbatch", field="--sbatch", got=directive, allowed="--name or --name=value")


def sbatch_script(job: Job, options: SlurmOptions) -> str:
    """The script that `sbatch` takes."""
    ranks = ["srun", "--kill-on-bad-exit=0", f"--wait={_STRAGGLING_SECONDS}"]
    if options.image is not None:
        ranks += [f"--container-image={options.image}"]
    command = shlex.join(ranks)
    if options.image is not None:
        command += ' --container-mounts="$PWD:$PWD" --container-workdir="$PWD"'
    lines = [
        "#!/bin/bash",
        f"# shardwright launch --slurm: {job.recipe.name}, {job.num_nodes} x {job.ranks_per_node} ranks",
        *(f"#SBATCH {directive}" for directive in _directives(job, options)),
        "",
        "set -euo pipefail",
        "",
        "# Ranks meet on the first node, at a port that two jobs on one node do not share.",
        'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        "MASTER_ADDR=${MASTER_ADDR%%$'\\n'*}",
        f"MASTER_PORT={job.port}" if job.port else "MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))",
        "export MASTER_ADDR MASTER_PORT",
        *exports(job.variables()),
        "",
        "# A job that was put back goes on from its newest whole checkpoint; a new one refuses a run folder that is in use.",
        "again=()",
        'if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then again=(--resume-if-begun); fi',
        "",
        "status=0",
        f'{command} shardwright {shlex.join(job.train_words())} "${{again[@]}}" || status=$?',
        "",
        *_ending(job),
    ]
    return "\n".join(lines) + "\n"


def _directives(job: Job, options: SlurmOptions) -> list[str]:
    found = [f"--job-name={job.recipe.name}", f"--nodes={job.num_nodes}", f"--ntasks-per-node={job.ranks_per_node}"]
    if job.on_accelerators:
        found.append(f"--gpus-per-node={job.ranks_per_node}")
    if job.cores_per_rank is not None:
        found.append(f"--cpus-per-task={job.cores_per_rank}")
    for name in ("partition", "account", "time"):
        value = getattr(options, name)
        if value is not None:
            found.append(f"--{name}={value}")
    # Without B: the signal goes to the ranks, which save at the next step, and not to this shell.
    found += [f"--signal=TERM@{job.save_seconds}", "--requeue", "--open-mode=append", f"--output={job.recipe.name}-%j.log"]
    return found + list(options.directives)


def _ending(job: Job) -> list[str]:
    """What becomes of each exit code."""
    lines = [
        'case "$status" in',
        f"  {ExitCode.DONE:d}) ;;",
        f"  {ExitCode.PREEMPTED:d}) # asked to stop, and saved: go on when there is time again",
        '    scontrol requeue "$SLURM_JOB_ID" ;;',
        f"  {ExitCode.CHECK_FAILED:d} | {ExitCode.WRONG_INPUT:d}) ;; # another try would end the same",
    ]
    if job.max_restarts:
        lines += [
            f"  *) # a rank was lost: at most {job.max_restarts} more tries (elastic.max_restarts)",
            f'    losses={shlex.quote(job.recipe.name)}-"$SLURM_JOB_ID".losses',
            '    date >> "$losses"',
            f'    if [ "$(wc -l < "$losses")" -le {job.max_restarts} ]; then scontrol requeue "$SLURM_JOB_ID"; fi ;;',
        ]
    else:
        lines.append("  *) ;; # a rank was lost; elastic.max_restarts in the recipe would try again")
    return [*lines, "esac", 'exit "$status"']
