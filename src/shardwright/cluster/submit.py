"""Submission of a script or a manifest with the scheduler's own command."""

from __future__ import annotations

import shutil
import subprocess

from shardwright.errors import InputError, RunFailed

_SUBMIT_COMMANDS = {
    "slurm": ["sbatch", "--parsable"],
    "kubernetes": ["kubectl", "apply", "-f", "-"],
}


def submit(scheduler: str, text: str) -> str:
    """Submit the text; return the scheduler's reply: the job id from Slurm.

    Raises:
        InputError: the launcher has no scheduler, or its command is not installed.
        RunFailed: the scheduler's command failed; contains its message.
    """
    if scheduler not in _SUBMIT_COMMANDS:
        raise InputError(
            "this launcher has no scheduler",
            field="--submit",
            got=f"--{scheduler}",
            allowed="--slurm or --kubernetes",
        )
    command = _SUBMIT_COMMANDS[scheduler]
    if shutil.which(command[0]) is None:
        raise InputError(
            f"{command[0]} is not installed on this machine",
            field="--submit",
            remedy=f"Write the file with --out FILE and submit it on a machine with {command[0]}",
        )
    result = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RunFailed(
            f"{command[0]} failed: "
            f"{result.stderr.strip() or result.stdout.strip() or f'status {result.returncode}'}"
        )
    return result.stdout.strip()
