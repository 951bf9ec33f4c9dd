"""Pages of `plan` and `schedule`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from shardwright.hardware import Cluster
from shardwright.planner.planning_result import PlanningResult
from shardwright.planner.prediction import MemoryParts, Prediction
from shardwright.planner.uncertainty import format_probability
from shardwright.report.bar_chart import Bar, draw_bars
from shardwright.report.page_shell import PICTURE_SIZES, Panel, Table, render_panel_page
from shardwright.report.part_panels import MEMORY_TONES
from shardwright.schedule import Schedule, ScheduleStatistics, Timeline
from shardwright.schedule.svg_chart import draw_inline_svg
from shardwright.units import GIB_BYTES, format_bytes, format_count, format_seconds

_TIME_TONES = {
    "compute": "c0", "tensor": "c1", "context": "c3", "expert": "c5", "pipeline": "c4",
    "data": "c2", "bubble": "c6", "imbalance": "c6",
    "optimizer": "quiet", "reference": "ink", "overhead": "grid",
}  # fmt: skip


def render_plan(name: str, cluster: Cluster, result: PlanningResult) -> str:
    """Render the page of a plan: predicted throughput, memory, time, and rejections."""
    chosen = result.chosen
    facts = []
    if chosen is not None:
        facts = [
            ("chosen", chosen.candidate.describe()),
            ("tokens per second", format_count(chosen.tokens_per_second)),
            ("per device", format_count(chosen.tokens_per_second_per_gpu)),
            ("model FLOPs utilisation", f"{chosen.model_flops_utilisation:.1%}"),
            ("per step", format_seconds(chosen.time.step)),
            ("memory of the fullest rank", format_bytes(chosen.memory.total)),
        ]
    lead = (
        f"{cluster.num_gpus} x {cluster.accelerator.name}. "
        f"Predicted, not measured. Rates: {cluster.rates_source}."
    )
    layouts = result.predictions
    if chosen is not None and not any(layout is chosen for layout in layouts):
        layouts = (*layouts, chosen)
    panels = [
        panel
        for panel in (
            _build_layout_panel(layouts, result),
            _build_memory_panel(layouts),
            _build_time_panel(layouts),
            _build_scaling_panel(result),
        )
        if panel
    ]
    if result.rejections:
        rows = tuple((r.name, r.reason, r.change or "no known change") for r in result.rejections)
        table = Table(("layout", "reason", "change that would make it fit"), rows, is_text=True)
        panels.append(
            Panel(
                "rejected",
                "Rejected",
                "Layouts that users often try first.",
                {},
                table,
                is_wide=True,
                is_table_open=True,
            )
        )
    if result.explanation:
        reasons = Table(
            ("reason",), tuple((sentence,) for sentence in result.explanation), is_text=True
        )
        panels.append(Panel("why", "Reasons", "", {}, reasons, is_wide=True, is_table_open=True))
    if chosen is not None and chosen.warning is not None:
        lead += f" The chosen layout {chosen.warning}."
    if chosen is None:
        lead += f" Nothing fits. {result.remedy or ''}"
    return render_panel_page(f"Plan: {name}", lead, panels, facts=facts)


def _build_layout_panel(layouts: Sequence[Prediction], result: PlanningResult) -> Panel | None:
    if not layouts:
        return None
    rows = tuple(
        (
            p.candidate.describe(),
            format_count(p.tokens_per_second),
            f"{p.model_flops_utilisation:.1%}",
            format_seconds(p.time.step),
            format_bytes(p.memory.total),
            format_probability(p.fit_probability) + (" (tight)" if p.is_tight else ""),
        )
        for p in layouts
    )
    bars = [
        Bar(p.candidate.describe(), (("tokens per second", p.tokens_per_second),)) for p in layouts
    ]
    pictures = draw_bars(
        bars,
        unit="tokens per second, all devices",
        format_value=format_count,
        description="Layouts by throughput",
    )
    table = Table(("layout", "tokens/s", "MFU", "step", "memory", "fits"), rows)
    note = ""
    if result.chosen is not None and result.choice_reason:
        note = f"Chosen: {result.chosen.candidate.describe()}, {result.choice_reason}."
    return Panel("layouts", "Layouts by predicted throughput", note, pictures, table, is_wide=True)


def _build_memory_panel(layouts: Sequence[Prediction]) -> Panel | None:
    if not layouts:
        return None
    names = tuple(asdict(MemoryParts()))
    bars = [
        Bar(
            p.candidate.describe(),
            tuple((name, getattr(p.memory, name) / GIB_BYTES) for name in names),
        )
        for p in layouts
    ]
    pictures = draw_bars(
        bars,
        unit="GiB",
        format_value=lambda value: format_bytes(value * GIB_BYTES),
        tones=MEMORY_TONES,
        description="Memory by part",
    )
    rows = tuple(
        (p.candidate.describe(), *(format_bytes(getattr(p.memory, name)) for name in names))
        for p in layouts
    )
    capacity = format_bytes(layouts[0].memory_capacity_bytes)
    return Panel(
        "memory",
        "Memory by part",
        f"Fullest rank; a process may use {capacity}.",
        pictures,
        Table(("layout", *names), rows),
    )


def _build_time_panel(layouts: Sequence[Prediction]) -> Panel | None:
    if not layouts:
        return None
    is_long = max(p.time.step for p in layouts) >= 2.0
    unit, scale = ("seconds per step", 1) if is_long else ("ms per step", 1000)
    bars = [
        Bar(
            p.candidate.describe(),
            tuple((name, scale * getattr(p.time, name)) for name in _TIME_TONES),
        )
        for p in layouts
    ]
    pictures = draw_bars(
        bars,
        unit=unit,
        format_value=lambda value: format_seconds(value / scale),
        tones=_TIME_TONES,
        description="Time by part",
    )
    rows = tuple(
        (p.candidate.describe(), *(format_seconds(getattr(p.time, name)) for name in _TIME_TONES))
        for p in layouts
    )
    note = "Communication counts only where it is not overlapped with computation."
    return Panel("time", "Step time by part", note, pictures, Table(("layout", *_TIME_TONES), rows))


def _build_scaling_panel(result: PlanningResult) -> Panel | None:
    predicted = [
        (point, point.prediction) for point in result.scale_points if point.prediction is not None
    ]
    if not predicted:
        return None
    bars = [
        Bar(f"{point.num_gpus:,} devices", (("tokens per second", p.tokens_per_second),))
        for point, p in predicted
    ]
    pictures = draw_bars(
        bars,
        unit="tokens per second",
        format_value=format_count,
        description="Throughput by number of devices",
    )
    rows = tuple(
        (
            f"{point.num_gpus:,}",
            p.candidate.describe(),
            format_count(p.tokens_per_second),
            f"{point.efficiency or 0:.0%}",
        )
        for point, p in predicted
    )
    table = Table(("devices", "layout", "tokens/s", "efficiency"), rows)
    return Panel("growth", "Scaling", "", pictures, table, is_wide=True)


def render_schedule(schedule: Schedule, proof: ScheduleStatistics, timeline: Timeline) -> str:
    """Render the page of a schedule: picture, utilisation and peak activations by rank."""
    pictures = {
        name: draw_inline_svg(timeline, width) for name, (width, _) in PICTURE_SIZES.items()
    }
    step = timeline.step_seconds
    rows = tuple(
        (
            str(rank),
            " ".join(map(str, schedule.stages_of(rank))),
            f"{busy:g}",
            f"{step - busy:g}",
            f"{busy / step:.1%}",
            str(peak),
        )
        for rank, (busy, peak) in enumerate(
            zip(timeline.busy_seconds, proof.peak_activations, strict=True)
        )
    )
    columns = ("rank", "stages", "compute", "idle", "utilisation", "peak activations")
    note = (
        "One row per rank, one bar per action with the "
        "number of its micro-batch; times are in units."
    )
    facts = [
        ("utilisation", f"{timeline.utilisation:.1%}"),
        ("bubble (idle / compute)", f"{timeline.bubble_fraction:.1%}"),
        ("units of time", f"{step:g}"),
        ("messages", f"{proof.num_transfers:,}"),
    ]
    panel = Panel("schedule", "Schedule", note, pictures, Table(columns, rows), is_wide=True)
    lead = "Complete, correctly ordered, without deadlock." + (
        f" {warning}" if (warning := schedule.describe_low_utilisation()) else ""
    )
    return render_panel_page(str(schedule), lead, [panel], facts=facts)
