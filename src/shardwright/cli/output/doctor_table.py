"""Tables of the doctor's findings: remedies below their findings, traffic by message size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardwright.cli.output.console import print_table
from shardwright.units import format_bytes

if TYPE_CHECKING:
    from shardwright.doctor.finding import Finding

_VERDICT_STYLES = {"pass": "green", "warn": "yellow", "fail": "bold red"}
_NARROW_COLUMNS = 100
"""Terminal width in columns below which names are folded earlier."""
_STACKED_COLUMNS = 60
"""Terminal width in columns below which a finding's value is below its name."""
_VALUE_INDENT = 8
_TRAFFIC_NAME_COLUMNS = 25
"""Columns of verdict and collective in the traffic table."""
_TRAFFIC_SIZE_COLUMNS = 11
"""Columns of each message size in the traffic table."""


def print_findings(findings: Sequence[Finding], console: Console) -> None:
    """Print all findings, then the number of each verdict."""
    narrow = console.width < _NARROW_COLUMNS
    for section in dict.fromkeys(finding.section for finding in findings):
        members = [finding for finding in findings if finding.section == section]
        console.print(Text(section, style="bold"))
        traffic = [finding for finding in members if "bus_bytes_per_second" in finding.numbers]
        _print_lines(console, [finding for finding in members if finding not in traffic], narrow)
        if traffic:
            _print_traffic(console, traffic, narrow)
    counts = {
        verdict: sum(finding.verdict == verdict for finding in findings)
        for verdict in _VERDICT_STYLES
    }
    summary = Text("  ").join(
        Text(f"{count} {verdict}", _VERDICT_STYLES[verdict] if count else "dim")
        for verdict, count in counts.items()
    )
    console.print()
    console.print(summary)


def _print_lines(console: Console, findings: Sequence[Finding], is_narrow: bool) -> None:
    """Print verdict, name and value of each finding, with the remedy below."""
    if not findings:
        return
    if console.width < _STACKED_COLUMNS:
        _print_stacked(console, findings)
        return
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1))
    table.add_column(width=6, no_wrap=True)
    width = 20 if is_narrow else 30
    table.add_column(width=width, overflow="fold")
    table.add_column(ratio=1, overflow="fold")
    for finding in findings:
        style = _VERDICT_STYLES[finding.verdict]
        value = Text(finding.value)
        if finding.verdict != "pass":
            value.append(f"\n-> {finding.remedy}", style=style)
        table.add_row(Text(f"  {finding.verdict}", style=style), Text(finding.name), value)
    print_table(console, table, min_width=_STACKED_COLUMNS)


def _print_stacked(console: Console, findings: Sequence[Finding]) -> None:
    """Print verdict and name of each finding, and its value and remedy below, indented."""
    for finding in findings:
        style = _VERDICT_STYLES[finding.verdict]
        console.print(Text.assemble((f"  {finding.verdict}  ", style), finding.name))
        lines = [Text(finding.value)]
        if finding.verdict != "pass":
            lines.append(Text(f"-> {finding.remedy}", style=style))
        for line in lines:
            console.print(Padding(line, (0, 0, 0, _VALUE_INDENT)))


def _print_traffic(console: Console, findings: Sequence[Finding], is_narrow: bool) -> None:
    """Print one table per group: bus bandwidth in GB/s by collective and message size.

    Findings that do not pass follow below the table.
    """
    for axis in dict.fromkeys(finding.numbers["axis"] for finding in findings):
        members = [finding for finding in findings if finding.numbers["axis"] == axis]
        numbers = members[0].numbers
        per_node = numbers["ranks_per_node"]
        where = "" if per_node == numbers["num_ranks"] else f", {per_node} per node"
        peak = numbers["peak_bytes_per_second"]
        peak_note = "" if peak is None else f"; {numbers['link']} has a peak of {peak / 1e9:.3g}"
        head = Text(
            f"  over {axis}: {numbers['num_ranks']} ranks{where}; "
            f"bus bandwidth in GB/s by message size{peak_note}"
        )
        print_table(console, head, min_width=0)
        sizes, num_omitted = _select_sizes(members, console.width, has_peak_column=peak is not None)
        table = Table(box=None, pad_edge=False, padding=(0, 1))
        table.add_column("", width=6, no_wrap=True)
        table.add_column("")
        for size in sizes:
            table.add_column(format_bytes(size), justify="right", no_wrap=True)
        if peak is not None:
            table.add_column("of peak", justify="right", no_wrap=True)
        for finding in members:
            table.add_row(*_build_traffic_row(finding, sizes, peak))
        print_table(console, table, min_width=_STACKED_COLUMNS)
        if num_omitted:
            console.print(
                f"  {num_omitted} more sizes in a wider terminal, or with --json", style="dim"
            )
        _print_lines(
            console, [finding for finding in members if finding.verdict != "pass"], is_narrow
        )


def _select_sizes(
    findings: Sequence[Finding], width: int, *, has_peak_column: bool
) -> tuple[list[int], int]:
    """Return the message sizes that fit the width, and the number of omitted ones.

    Sizes at which all collectives were measured take precedence.
    """
    measured = [
        {int(size) for size in finding.numbers["bus_bytes_per_second"]} for finding in findings
    ]
    sizes = sorted(set().union(*measured))
    num_columns = max(
        2,
        (width - _TRAFFIC_NAME_COLUMNS - (_TRAFFIC_SIZE_COLUMNS if has_peak_column else 0))
        // _TRAFFIC_SIZE_COLUMNS,
    )
    if len(sizes) <= num_columns:
        return sizes, 0
    shared = sorted(set.intersection(*measured)) or sizes
    last = min(num_columns, len(shared)) - 1
    selected = sorted({shared[i * (len(shared) - 1) // max(1, last)] for i in range(last + 1)})
    return selected, len(sizes) - len(selected)


def _build_traffic_row(finding: Finding, sizes: Sequence[int], peak: float | None) -> list[Any]:
    style = _VERDICT_STYLES[finding.verdict]
    bus = {int(size): rate for size, rate in finding.numbers["bus_bytes_per_second"].items()}
    cells: list[Any] = [Text(f"  {finding.verdict}", style=style), finding.numbers["kind"]]
    cells += [f"{bus[size] / 1e9:.3g}" if size in bus else "" for size in sizes]
    if peak is not None:
        cells.append(f"{bus[max(bus)] / peak:.0%}")
    return cells
