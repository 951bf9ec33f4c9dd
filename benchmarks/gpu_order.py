"""Order of the steps of `make gpu` in limited time: which have no result of this code, and how
long each takes. Imports the standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from benchmarks.gpu_steps import Step

ROOT = Path(__file__).resolve().parents[1]


def hash_code(step: Step) -> str:
    """Return a hash of the code that a step times, and of the module that times it.

    A hash of files needs no version control, which a copy on another machine may lack.
    """
    modules = [f"{word.replace('.', '/')}.py" for word in step.command if "benchmarks." in word]
    digest = sha256()
    for name in (*step.code, *modules):
        path = ROOT / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.relative_to(ROOT).as_posix().encode())
            digest.update(file.read_bytes() if file.is_file() else b"")
    return digest.hexdigest()[:16]


def read_outcomes(
    steps: Iterable[Step], folders: Mapping[str, Sequence[Path]], published: Path
) -> dict[str, dict[str, Any]]:
    """Read an outcome of each step by name: of its folders if it began there, or as published.

    The first of the present code and options, if there is one.
    """
    outcomes: dict[str, dict[str, Any]] = {}
    if published.is_file():
        content = json.loads(published.read_text())
        outcomes = {each["name"]: each for each in content["steps"] if "seconds" in each}
    for step in steps:
        found = [read_started(folder) for folder in folders[step.name]]
        known = [each for each in (*found, outcomes.get(step.name)) if each is not None]
        if known:
            outcomes[step.name] = next((each for each in known if is_current(step, each)), known[0])
    return outcomes


def read_started(folder: Path) -> dict[str, Any] | None:
    """Read the outcome in the folder of a step; None if the step never began."""
    file = folder / "outcome.json"
    outcome: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    return None if outcome.get("status", "no time left") == "no time left" else outcome


def list_options(command: Sequence[str]) -> list[str]:
    """List the words of a command after the interpreter, which differs between machines."""
    return list(command[1:])


def is_current(step: Step, outcome: Mapping[str, Any]) -> bool:
    """True if the code that is here now, with the options of the step, had this outcome.

    The whole step answers for the shortened one, not the reverse.
    """
    commands = [step.command, *filter(None, [step.whole_command])]
    return outcome.get("code") == hash_code(step) and outcome.get("options") in [
        list_options(command) for command in commands
    ]


def has_current_result(step: Step, outcomes: Mapping[str, Mapping[str, Any]]) -> bool:
    """True if the step passed with the code that is here now."""
    outcome = outcomes.get(step.name, {})
    return outcome.get("status") == "passed" and is_current(step, outcome)


def order_by_information(
    steps: Sequence[Step], outcomes: Mapping[str, Mapping[str, Any]]
) -> list[Step]:
    """Return first the steps without a result of the present code, else in the same order."""
    return sorted(steps, key=lambda step: has_current_result(step, outcomes))


def estimate_seconds(step: Step, outcomes: Mapping[str, Mapping[str, Any]]) -> float:
    """Return the seconds that a step took when it last passed, or at least until it was ended."""
    outcome = outcomes.get(step.name, {})
    own = list_options(step.command)
    if outcome.get("options", own) != own:  # seconds of the whole step, or of another device
        return step.estimated_seconds
    if outcome.get("status") == "passed":
        return float(outcome["seconds"])
    ended_after = outcome["seconds"] if outcome.get("status") == "timed out" else 0.0
    return max(step.estimated_seconds, float(ended_after))


def select_fitting(
    steps: Iterable[Step], outcomes: Mapping[str, Mapping[str, Any]], seconds: float
) -> list[Step]:
    """Return the steps, in order, that fit into the time one after another."""
    chosen = []
    for step in steps:
        needed = estimate_seconds(step, outcomes)
        if needed <= seconds:
            chosen.append(step)
            seconds -= needed
    return chosen
