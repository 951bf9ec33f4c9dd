"""Page of `doctor`: problems with remedies, then results and rates by section."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from shardwright.report.bar_chart import Bar, draw_bars
from shardwright.report.page_shell import Panel, Table, render_panel_page
from shardwright.units import format_bytes, format_flops_per_second

_VERDICT_TONES = {"pass": "c2", "warn": "c1", "fail": "c4"}


class DiagnosisLine(Protocol):
    """One finding of `doctor` (`probe.finding.Finding`, which this layer cannot import)."""

    @property
    def section(self) -> str:
        """Area that was examined."""

    @property
    def name(self) -> str:
        """Name of the check."""

    @property
    def verdict(self) -> str:
        """pass, warn or fail."""

    @property
    def value(self) -> str:
        """Result of the check."""

    @property
    def remedy(self) -> str:
        """Advice for a check that does not pass."""

    @property
    def numbers(self) -> Mapping[str, Any]:
        """Result in base units."""


def render_diagnosis(title: str, lead: str, lines: Sequence[DiagnosisLine]) -> str:
    """Render the page: checks that do not pass first, then each section."""
    counts = [
        (verdict, str(sum(line.verdict == verdict for line in lines))) for verdict in _VERDICT_TONES
    ]
    panels = [_build_remedy_panel(lines)]
    for section in dict.fromkeys(line.section for line in lines):
        section_lines = [line for line in lines if line.section == section]
        traffic = [line for line in section_lines if "bus_bytes_per_second" in line.numbers]
        for axis in dict.fromkeys(line.numbers["axis"] for line in traffic):
            panels.append(
                _build_traffic_panel(
                    f"traffic-{len(panels)}",
                    axis,
                    [line for line in traffic if line.numbers["axis"] == axis],
                )
            )
        if others := [line for line in section_lines if line not in traffic]:
            panels.append(_build_section_panel(section, others))
    return render_panel_page(title, lead, panels, facts=counts)


def _build_remedy_panel(lines: Sequence[DiagnosisLine]) -> Panel:
    rows = tuple(
        (line.verdict, f"{line.section}: {line.name}", line.value, line.remedy)
        for verdict in ("fail", "warn")
        for line in lines
        if line.verdict == verdict
    )
    if not rows:
        return Panel("to-do", "All checks pass", "Nothing to do.", is_wide=True)
    table = Table(("", "check", "result", "to do"), rows, is_text=True)
    return Panel("to-do", "To do", "Failures first.", {}, table, is_wide=True, is_table_open=True)


def _build_section_panel(section: str, lines: Sequence[DiagnosisLine]) -> Panel:
    """Build the panel of a section with all its lines, and a bar per rank for rates by rank."""
    rows = tuple((line.verdict, line.name, line.value) for line in lines)
    rates = [
        (f"{line.name.removeprefix('products, ')}, rank {rank}", line.verdict, rate)
        for line in lines
        for rank, rate in line.numbers.get("flops_per_second", {}).items()
    ]
    pictures = {}
    if rates:
        scale, unit = (
            (1e12, "TFLOP/s") if max(rate for *_, rate in rates) >= 1e12 else (1e9, "GFLOP/s")
        )
        bars = [Bar(name, ((verdict, rate / scale),)) for name, verdict, rate in rates]
        pictures = draw_bars(
            bars,
            unit=f"{unit} of matrix products",
            format_value=lambda rate: format_flops_per_second(rate * scale),
            tones=_VERDICT_TONES,
            description="Matrix product rates by rank",
        )
    table = Table(("", "check", "result"), rows, is_text=True)
    return Panel(
        f"section-{section}",
        section.capitalize(),
        "",
        pictures,
        table,
        is_wide=bool(rates),
        is_table_open=True,
    )


def _build_traffic_panel(key: str, axis: str, lines: Sequence[DiagnosisLine]) -> Panel:
    """Build the panel of collectives over one mesh axis: bus bandwidth by message size."""
    rates = [
        {int(size): rate for size, rate in line.numbers["bus_bytes_per_second"].items()}
        for line in lines
    ]
    numbers = lines[0].numbers
    peak = numbers["peak_bytes_per_second"]
    bars = []
    for line, bus in zip(lines, rates, strict=True):
        largest = max(bus)
        mark = "" if peak is None else f"{bus[largest] / peak:.0%}"
        bars.append(Bar(line.numbers["kind"], ((line.verdict, bus[largest] / 1e9),), mark))
    title = f"Collectives over {axis}"
    pictures = draw_bars(
        bars,
        unit="GB/s, bus bandwidth",
        format_value="{:.3g} GB/s".format,
        tones=_VERDICT_TONES,
        description=title,
    )
    sizes = sorted(set().union(*rates))
    rows = tuple(
        (line.numbers["kind"], *(f"{bus[size] / 1e9:.3g}" if size in bus else "" for size in sizes))
        for line, bus in zip(lines, rates, strict=True)
    )
    table = Table(("GB/s by message size", *map(format_bytes, sizes)), rows)
    share = (
        ""
        if peak is None
        else f" In percent: share of the {peak / 1e9:.3g} GB/s of {numbers['link']}."
    )
    note = (
        f"{numbers['num_ranks']} ranks; bus bandwidth of each collective's largest message.{share}"
    )
    return Panel(key, title, note, pictures, table, is_wide=True)
