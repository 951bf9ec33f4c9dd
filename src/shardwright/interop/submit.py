"""Hand a script or a manifest to the scheduler's own command."""

from __future__ import annotations

import shutil
import subprocess

from shardwright.errors import InputError, RunFailed

_COMMANDS = {"slurm": ["sbatch", "--parsable"], "kubernetes": ["kubectl", "apply", "-f", "-"]}


def submit(kind: str, text: str) -> str:
    """Submit; returns what the scheduler says: a job's number from Slurm.

    Raises:
        InputError: nothing can be submitted there, or the scheduler's command is not on this machine.
        RunFailed: the scheduler refused, in its own words.
    """
    if kind not in _COMMANDS:
        raise InputError(
            "there is no scheduler to hand it to", field="--submit", got=f"--{kind}", allowed="--slurm or --kubernetes"
        )
    command = _COMMANDS[kind]
    if shutil.which(command[0]) is None:
        raise InputError(
            f"{command[0]} is not on this machine",
            field="--submit",
            remedy=f"Write it with --out FILE, and give it to {command[0]} where that is",
        )
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunFailed(f"{command[0]} refused: {done.stderr.strip() or done.stdout.strip() or f'status {done.returncode}'}")
    return done.stdout.strip()
