"""Results of `make gpu`: a folder for each step in <out>, and the page of all of them.

<out>/steps/3-speed-tiny-64/outcome.json       how a step ended, and of which code
<out>/steps/3-speed-tiny-64/one-gpu.json       what it measured
<out>/gpu.json, <out>/gpu.md                   all steps
docs/benchmarks/gpu.json, gpu.md               what is published

It imports the standard library only.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_arguments import NUM_PARTS
from benchmarks.gpu_order import hash_code, is_current, list_options, read_outcomes, read_started
from benchmarks.gpu_page import render_page
from benchmarks.gpu_steps import Step

ROOT = Path(__file__).resolve().parents[1]
SCHEMA_VERSION = 1


def write_outcome(folder: Path, outcome: dict[str, Any]) -> None:
    """Write the outcome of a step to its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "outcome.json").write_text(json.dumps(outcome, indent=1) + "\n")


def get_folder(out: Path, step: Step) -> Path:
    """Return the folder of a step. A shortened one has its own, so it replaces no whole one."""
    whole, shortened = _list_folders(out, step)
    return shortened if step.whole_command else whole


def _list_folders(out: Path, step: Step) -> tuple[Path, Path]:
    """Return the folders of the whole step and of the shortened one."""
    whole = out / "steps" / f"{step.part}-{step.name.replace(' ', '-')}"
    return whole, whole.with_name(f"{whole.name}-shortened")


def _list_answering_folders(out: Path, step: Step) -> tuple[Path, ...]:
    """Return the folder of a step and, if it is shortened, that of the whole one."""
    whole, shortened = _list_folders(out, step)
    return (shortened, whole) if step.whole_command else (whole,)


def _find_shown_folder(out: Path, step: Step) -> Path:
    """Return the folder of the whole step, or of the shortened one if only it ran this code."""
    whole, shortened = _list_folders(out, step)
    if read_started(shortened) is None:
        return whole if (whole / "outcome.json").is_file() else shortened
    outcome = read_started(whole)
    return whole if outcome is not None and outcome.get("code") == hash_code(step) else shortened


def write_results(out: Path, steps: Sequence[Step]) -> None:
    """Collect the results of all steps that have ended, in this call and before, and write them."""
    collected = []
    for step in steps:
        folder = _find_shown_folder(out, step)
        if not (folder / "outcome.json").is_file():
            collected.append({"name": step.name, "part": step.part, "status": "not run"})
            continue
        outcome = json.loads((folder / "outcome.json").read_text())
        result = folder / step.result
        if result.suffix == ".json" and result.is_file():
            try:
                outcome["result"] = json.loads(result.read_text())
            except ValueError as error:
                outcome["message"] += f"; {result.name} is damaged ({error})"
        elif result.is_file():
            outcome["result"] = {"junit": result.read_text(errors="replace")}
        collected.append(outcome)
    content = {"schema_version": SCHEMA_VERSION, "num_parts": NUM_PARTS, "steps": collected}
    for name, text in (
        ("gpu.md", render_page(content)),
        ("gpu.json", json.dumps(content, indent=1) + "\n"),
    ):
        partial = out / f"{name}.partial"
        partial.write_text(text)
        partial.replace(out / name)


def read_last_outcomes(out: Path, steps: Sequence[Step]) -> dict[str, dict[str, Any]]:
    """Read the last outcomes of the steps, in <out> or published."""
    folders = {step.name: _list_answering_folders(out, step) for step in steps}
    return read_outcomes(steps, folders, ROOT / "docs/benchmarks/gpu.json")


def has_passed(out: Path, step: Step) -> bool:
    """True if `out` has a result of the step, or of the whole one, that passed."""
    found = [read_started(folder) for folder in _list_answering_folders(out, step)]
    return any(outcome is not None and outcome["status"] == "passed" for outcome in found)


def restore_results(content: dict[str, Any], out: Path, steps: Sequence[Step]) -> None:
    """Write the outcomes and results of `gpu.json` to the folders of steps that never began.

    A shortened step does not replace the whole one of the same code.
    """
    outcomes = {outcome["name"]: outcome for outcome in content["steps"]}
    for step in steps:
        whole, shortened = _list_folders(out, step)
        outcome = outcomes.get(step.name, {})
        if "seconds" not in outcome or read_started(whole) is not None:
            continue
        if read_started(shortened) is not None and not is_current(step, outcome):
            continue
        own = list_options(step.command)
        folder = whole if outcome.get("options", own) == own else shortened
        folder.mkdir(parents=True, exist_ok=True)
        result = outcome.pop("result", None)
        if result is not None:
            text = result["junit"] if step.result.endswith(".xml") else json.dumps(result, indent=1)
            (folder / step.result).write_text(text)
        (folder / "outcome.json").write_text(json.dumps(outcome, indent=1) + "\n")


def publish(out: Path, steps: Sequence[Step]) -> int:
    """Write the page of the steps in `out` to docs/benchmarks; return the exit code.

    Steps that `out` lacks, or that never began there, keep what has been published of them.
    """
    if not (out / "steps").is_dir():
        print(f"{out / 'steps'} does not exist; run `make gpu` first", file=sys.stderr)
        return 2
    folder = ROOT / "docs/benchmarks"
    if (folder / "gpu.json").is_file():
        restore_results(json.loads((folder / "gpu.json").read_text()), out, steps)
    write_results(out, steps)
    notes = folder / "gpu.notes.md"
    if notes.is_file():
        with (out / "gpu.md").open("a") as page:
            page.write("\n" + notes.read_text())
    for name in ("gpu.json", "gpu.md"):
        shutil.copyfile(out / name, folder / name)
        print(folder / name)
    return 0
