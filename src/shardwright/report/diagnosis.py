"""The page of an examination: what `doctor` found, with what to do first, and the rates that it measured against each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from shardwright.report.bars import Bar, draw_bars
from shardwright.report.shell import Panel, Table, render_page_of
from shardwright.units import format_bytes, format_flops_per_second

_VERDICT_TONES = {"pass": "c2", "warn": "c1", "fail": "c4"}


class Line(Protocol):
    """One line of the doctor's answer (`probe.finding.Finding`, which this room does not know)."""

    @property
    def section(self) -> str:
        """What was looked at."""

    @property
    def name(self) -> str:
        """Which check."""

    @property
    def verdict(self) -> str:
        """pass, warn or fail."""

    @property
    def value(self) -> str:
        """What was found."""

    @property
    def remedy(self) -> str:
        """What to do about it."""

    @property
    def numbers(self) -> Mapping[str, Any]:
        """The same in base units."""


def render_diagnosis(title: str, lead: str, lines: Sequence[Line]) -> str:
    """The page: what does not pass first, then each section with its picture, where it has numbers to draw."""
    counts = [(verdict, str(sum(line.verdict == verdict for line in lines))) for verdict in _VERDICT_TONES]
    panels = [_to_do(lines)]
    for section in dict.fromkeys(line.section for line in lines):
        own = [line for line in lines if line.section == section]
        traffic = [line for line in own if "bus_bytes_per_second" in line.numbers]
        for axis in dict.fromkeys(line.numbers["axis"] for line in traffic):
            panels.append(_traffic(f"traffic-{len(panels)}", axis, [line for line in traffic if line.numbers["axis"] == axis]))
        if rest := [line for line in own if line not in traffic]:
            panels.append(_section(section, rest))
    return render_page_of(title, lead, panels, facts=counts)


def _to_do(lines: Sequence[Line]) -> Panel:
    rows = tuple(
        (line.verdict, f"{line.section}: {line.name}", line.value, line.remedy)
        for verdict in ("fail", "warn")
        for line in lines
        if line.verdict == verdict
    )
    if not rows:
        return Panel("to-do", "Everything passes", "Nothing is left to do.", wide=True)
    table = Table(("", "what", "found", "to do"), rows, words=True)
    return Panel("to-do", "To do", "What fails stands first.", {}, table, wide=True, open_table=True)


def _section(section: str, lines: Sequence[Line]) -> Panel:
    """Every line, and of rates by rank a bar for each rank."""
    rows = tuple((line.verdict, line.name, line.value) for line in lines)
    rates = [
        (f"{line.name.removeprefix('products, ')}, rank {rank}", line.verdict, rate)
        for line in lines
        for rank, rate in line.numbers.get("flops_per_second", {}).items()
    ]
    pictures = {}
    if rates:
        scale, unit = (1e12, "TFLOP/s") if max(rate for *_, rate in rates) >= 1e12 else (1e9, "GFLOP/s")
        bars = [Bar(name, ((verdict, rate / scale),)) for name, verdict, rate in rates]
        pictures = draw_bars(
            bars,
            unit=f"{unit} of products",
            write=lambda rate: format_flops_per_second(rate * scale),
            tones=_VERDICT_TONES,
            description="Products by rank",
        )
    table = Table(("", "what", "found"), rows, words=True)
    return Panel(f"section-{section}", section.capitalize(), "", pictures, table, wide=bool(rates), open_table=True)


def _traffic(key: str, axis: str, lines: Sequence[Line]) -> Panel:
    """Bus bandwidth of each collective over one way of cutting the ranks: its largest message drawn, every size in the table."""
    rates = [{int(size): rate for size, rate in line.numbers["bus_bytes_per_second"].items()} for line in lines]
    numbers = lines[0].numbers
    peak, bars = numbers["peak_bytes_per_second"], []
    for line, bus in zip(lines, rates, strict=True):
        largest = max(bus)
        mark = "" if peak is None else f"{bus[largest] / peak:.0%}"
        bars.append(Bar(line.numbers["kind"], ((line.verdict, bus[largest] / 1e9),), mark))
    about = f"Traffic over {axis}"
    pictures = draw_bars(bars, unit="GB/s of the bus", write="{:.3g} GB/s".format, tones=_VERDICT_TONES, description=about)
    sizes = sorted(set().union(*rates))
    rows = tuple(
        (line.numbers["kind"], *(f"{bus[size] / 1e9:.3g}" if size in bus else "" for size in sizes))
        for line, bus in zip(lines, rates, strict=True)
    )
    table = Table(("GB/s by message", *map(format_bytes, sizes)), rows)
    beside = "" if peak is None else f" Beside a bar its share of {numbers['link']}, which carries {peak / 1e9:.3g} GB/s."
    note = f"{numbers['num_ranks']} ranks; bus bandwidth of each one's largest message.{beside}"
    return Panel(key, about, note, pictures, table, wide=True)
