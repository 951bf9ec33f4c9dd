"""`shardwright audit` on released trainers: every row of docs/audit/findings.md, on two CPU ranks.

    python -m benchmarks.audit_findings                 all rows whose packages are installed
    python -m benchmarks.audit_findings --row NAME      one row; repeatable
    python -m benchmarks.audit_findings --list          names of the rows and their commands
    python -m benchmarks.audit_findings --publish       write docs/audit/findings.md

A row runs a worked example of docs/audit under torchrun in a new folder, and checks what it
recorded. Its result goes to `<out>/NAME.json`, from which the page's numbers come. The causes are
written by hand (`audit_rows.py`); a row whose verdict or diagnosis is not the one that its cause
explains is an error. Packages: see `make bench`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.audit_rows import INTRODUCTION, ROWS, FindingRow

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "docs" / "audit"
PAGE = EXAMPLES / "findings.md"
TIME_LIMIT_SECONDS = 600
"""Of one row; the first row of DeepSpeed compiles its communication for CPUs."""


class RowFailed(RuntimeError):
    """A row whose example or check did not run, or whose result is not the explained one."""


@dataclass(frozen=True)
class FindingResult:
    """Output of `shardwright audit check --json` for a row, and where and when it was run."""

    row: FindingRow
    report: dict[str, Any]
    versions: dict[str, str]
    date: str

    @property
    def worst_parameter(self) -> dict[str, Any]:
        """The parameter with the largest error in multiples of the allowed one."""
        worst: dict[str, Any] = self.report["parameters"][0]
        return worst


def run_row(row: FindingRow, folder: Path) -> FindingResult:
    """Run a row's example and check in a folder.

    Raises:
        RowFailed: the example or the check ended with an error, or the result is another one.
    """
    paths = (str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", ""))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "OMP_NUM_THREADS": "1",
    }
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = str(EXAMPLES / f"{row.example}.py")
    _call(row, [*launch, script, *row.arguments], folder, environment)
    check = "from shardwright.cli import main; main()"
    command = [sys.executable, "-c", check, "audit", "check", "audit", *row.check, "--json"]
    output = _call(row, command, folder, environment, (0, 1))
    report = json.loads(output)
    found = tuple(report["diagnoses"][0]["mistakes"]) if report["diagnoses"] else ()
    if found != row.expected or report["passed"] != (not row.expected):
        raise RowFailed(
            f"{row.name}: passed is {report['passed']} with diagnosis {found}; the row explains "
            f"{row.expected or 'a pass'}"
        )
    return FindingResult(row, report, row.read_versions(), f"{datetime.now(UTC):%Y-%m-%d}")


def _call(
    row: FindingRow,
    command: list[str],
    folder: Path,
    environment: dict[str, str],
    allowed: tuple[int, ...] = (0,),
) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_SECONDS,
        check=False,
    )
    if done.returncode not in allowed:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise RowFailed(f"{row.name}: exit code {done.returncode} of {command[-1]}\n{tail}")
    return done.stdout


def load_result(row: FindingRow, folder: Path) -> FindingResult:
    """Read a row's kept result.

    Raises:
        RowFailed: the row has not been run.
    """
    path = folder / f"{row.name}.json"
    if not path.is_file():
        raise RowFailed(f"{row.name} has no result in {folder}; run it with --row {row.name}")
    content = json.loads(path.read_text(encoding="utf-8"))
    return FindingResult(row, content["report"], content["versions"], content["date"])


def save_result(result: FindingResult, folder: Path) -> None:
    """Keep a row's result for the page."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"versions": result.versions, "date": result.date, "report": result.report}
    (folder / f"{result.row.name}.json").write_text(json.dumps(content), encoding="utf-8")


def format_page(results: list[FindingResult]) -> str:
    """Return the page of all results."""
    lines = [
        "# What released trainers compute",
        "",
        "<!-- written by python -m benchmarks.audit_findings --publish -->",
        "",
        INTRODUCTION.strip(),
        "",
        "| row | trainer | setting | gradients | residual | worst parameter: error (allowed) "
        "| diagnosis: residual after it | explanation |",
        "|---|---|---|---|---|---|---|---|",
        *(_format_row(result) for result in results),
        "",
        "## What these rows do not compare",
        "",
    ]
    reasons = sorted({reason for result in results for reason in result.report["unchecked"]})
    for reason in reasons:
        names = [f"`{r.row.name}`" for r in results if reason in r.report["unchecked"]]
        lines.append(f"- {reason}: {', '.join(names)}")
    lines += [
        "",
        "## Commands",
        "",
        "`python -m benchmarks.audit_findings --row NAME` repeats a row. By hand, in an empty "
        "folder, with the path to this repository before `docs`:",
        "",
        "| row | training | check | run on, with |",
        "|---|---|---|---|",
    ]
    for result in results:
        versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
        row = result.row
        lines.append(
            f"| `{row.name}` | `{row.command}` | `{row.check_command}` "
            f"| {result.date}, {versions} |"
        )
    return "\n".join([*lines, ""])


def _format_row(result: FindingResult) -> str:
    report = result.report
    worst = result.worst_parameter
    diagnosis = report["diagnoses"][0] if report["diagnoses"] else None
    named = "none"
    if diagnosis is not None:
        titles = "; ".join(diagnosis["titles"])
        named = f"{titles}: {diagnosis['residual_after']:.1e}"
    version = result.versions.get(result.row.package, "this version")
    cells = (
        f"`{result.row.name}`",
        f"{result.row.trainer} {version}",
        result.row.setting,
        "equal" if report["passed"] else result.row.verdict,
        f"{report['residual']:.1e}",
        f"`{worst['name']}`: {worst['error']:.1e} ({worst['allowed']:.0e})",
        named,
        result.row.cause,
    )
    return f"| {' | '.join(cells)} |"


def main() -> int:
    """Run the chosen rows, or write the page; print one line for each row."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--row", action="append", choices=[row.name for row in ROWS])
    parser.add_argument("--list", action="store_true", dest="is_list")
    parser.add_argument("--publish", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "audit-findings")
    options = parser.parse_args()
    chosen = [row for row in ROWS if options.row is None or row.name in options.row]
    if options.publish:
        page = format_page([load_result(row, options.out) for row in ROWS])
        PAGE.write_text(page, encoding="utf-8")
        return 0
    for row in chosen:
        if options.is_list:
            print(f"{row.name}: {row.command} && {row.check_command}")
            continue
        missing = row.list_missing_packages()
        if missing:
            print(f"{row.name}: skipped, {', '.join(missing)} is not installed")
            continue
        with tempfile.TemporaryDirectory() as folder:
            result = run_row(row, Path(folder))
        save_result(result, options.out)
        verdict = "equal" if result.report["passed"] else f"differs: {', '.join(row.expected)}"
        print(f"{row.name}: {verdict}, residual {result.report['residual']:.2e}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
