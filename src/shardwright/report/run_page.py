"""Report of runs as one self-contained HTML page, readable without its script."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from html import escape
from typing import Any

import yaml

from shardwright.report.chart_data import Chart, thin_for_hover
from shardwright.report.charts import build_charts
from shardwright.report.event_timeline import draw_timeline, list_history
from shardwright.report.line_chart import NUM_COLOURS, draw_curves
from shardwright.report.page_shell import (
    PICTURE_SIZES,
    Panel,
    render_cells,
    render_facts,
    render_footer,
    render_panel,
    render_shell,
    render_table,
)
from shardwright.report.part_panels import (
    build_expert_panel,
    build_goodput_panel,
    build_memory_panel,
    build_sample_panel,
)
from shardwright.report.pipeline_panels import build_pipeline_panels
from shardwright.report.rank_panel import build_rank_panel
from shardwright.report.recorded_run import RUNNING_STATUS, Run, summarise_run
from shardwright.report.run_settings import describe_settings, list_settings
from shardwright.telemetry.event_log import SkippedStepEvent, WarningEvent
from shardwright.telemetry.sinks import describe_event
from shardwright.units import (
    format_bytes,
    format_count,
    format_flops_per_second,
    format_items,
    format_seconds,
)

_MAX_LISTED_WARNINGS = 40
"""Largest number of folded warnings listed above the charts."""


def render_page(runs: Sequence[Run], *, live_version: str | None = None) -> str:
    """Render the page of one run, or of several in the same charts.

    With a version it is live: see `page_shell.render_shell`.
    """
    title = (
        runs[0].name
        if len(runs) == 1
        else f"{len(runs)} runs: " + ", ".join(run.name for run in runs)
    )
    summaries = [summarise_run(run) for run in runs]
    body = [
        _render_run_head(runs[0], summaries[0])
        if len(runs) == 1
        else _render_runs_head(runs, summaries),
        *(_render_notices(run, should_name_run=len(runs) > 1) for run in runs),
        '<div class="charts">',
        *(_render_chart(chart) for chart in build_charts(runs)),
        *(
            render_panel(panel)
            for index, run in enumerate(runs)
            for panel in build_panels(run, index, is_single_run=len(runs) == 1)
        ),
        "</div>",
        *(_render_history(run, should_name_run=len(runs) > 1) for run in runs),
        *(_render_setup(run, should_name_run=len(runs) > 1) for run in runs),
        render_footer(" from events.jsonl"),
    ]
    return render_shell(title, "".join(body), live_version=live_version)


def build_panels(run: Run, index: int, *, is_single_run: bool) -> list[Panel]:
    """Build the panels of one run other than line charts, in reading order."""

    def build_title(text: str) -> str:
        return text if is_single_run else f"{text}: {run.name}"

    panels = [
        build_rank_panel(run, f"ranks-{index}", build_title("Ranks")),
        build_memory_panel(run, f"memory-parts-{index}", build_title("Memory by part")),
        build_expert_panel(run, f"experts-{index}", build_title("Expert load")),
        build_goodput_panel(run, f"goodput-{index}", build_title("Goodput")),
        *build_pipeline_panels(run, f"pipeline-{index}", build_title("Pipeline")),
        build_sample_panel(run, f"samples-{index}", build_title("Samples")),
    ]
    return [panel for panel in panels if panel is not None]


def _render_run_head(run: Run, summary: dict[str, Any]) -> str:
    start = run.start
    lead = "no run_started event was recorded"
    if start is not None:
        lead = (
            f"{format_count(start.num_parameters)} parameters · layout {start.layout} · "
            + "".join(f"{setting} · " for setting in list_settings(summary))
            + f"{format_items(start.world_size, 'rank')} on {start.host}"
        )
    folder = run.path.resolve().name
    if folder != run.name:
        lead = f"{folder} · {lead}"
    status = summary["status"]
    if (
        status == RUNNING_STATUS and run.log.events
    ):  # the age of the last event lets the reader decide between the two
        last = datetime.fromtimestamp(run.log.events[-1].time, UTC)
        lead += f" · last event at {last:%Y-%m-%d %H:%M:%S} UTC"
    return (
        f'<h1>{escape(run.name)}<span class="status '
        f'{escape(status.split()[0])}">{escape(status)}</span></h1>'
        f'<p class="lead quiet">{escape(lead)}</p>' + render_facts(_list_facts(summary))
    )


def _list_facts(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the main numbers as (name, value); unknown ones are left out."""
    total = summary["total_steps"]
    best_at = (
        f"best validation loss, step {summary['best_validation_step']:,}"
        if summary["best_validation_step"] is not None
        else ""
    )
    peak = max(summary["peak_memory_bytes"], default=None)
    facts: list[tuple[str, str | None]] = [
        (best_at, _format_loss(summary["best_validation_loss"])),
        ("training loss", _format_loss(summary["training_loss"])),
        (f"of {total:,} steps" if total else "steps", f"{summary['steps']:,}"),
        ("tokens seen", format_count(summary["tokens"])),
        ("tokens per second", _format_optional(summary["tokens_per_second"], format_count)),
        ("MFU", _format_optional(summary["mfu"], lambda share: f"{share:.1%}")),
        ("peak memory of a rank", _format_optional(peak, format_bytes)),
        ("wall time", format_seconds(summary["wall_seconds"]) if summary["wall_seconds"] else None),
        ("remaining at this speed", _format_remaining_time(summary)),
        ("goodput", f"{summary['useful_share']:.0%}" if summary["useful_share"] else None),
    ]
    return [(name, value) for name, value in facts if value is not None]


def _format_remaining_time(summary: dict[str, Any]) -> str | None:
    """Format the time for the remaining steps of a run that may still be running."""
    total = summary["total_steps"]
    step_seconds = summary["step_seconds"]
    if (
        summary["status"] != RUNNING_STATUS
        or not total
        or not step_seconds
        or summary["steps"] >= total
    ):
        return None
    return format_seconds((total - summary["steps"]) * step_seconds)


def _format_optional(value: float | None, format_value: Any) -> str | None:
    return None if value is None else str(format_value(value))


def _format_loss(value: float | None) -> str | None:
    return None if value is None else f"{value:.4f}"


def _render_runs_head(runs: Sequence[Run], summaries: Sequence[dict[str, Any]]) -> str:
    columns = (
        "run", "status", "layout", "settings", "steps", "training loss", "best validation",
        "tokens/s", "MFU", "peak memory", "time",
    )  # fmt: skip
    rows = []
    for index, (run, s) in enumerate(zip(runs, summaries, strict=True)):
        cells = (
            s["status"], s["layout"] or "", ", ".join(list_settings(s)), f"{s['steps']:,}",
            _format_loss(s["training_loss"]) or "",
            _format_loss(s["best_validation_loss"]) or "",
            _format_optional(s["tokens_per_second"], format_count) or "",
            _format_optional(s["mfu"], lambda share: f"{share:.1%}") or "",
            _format_optional(max(s["peak_memory_bytes"], default=None), format_bytes) or "",
            format_seconds(s["total_seconds"]),
        )  # fmt: skip
        chip = f'<i style="background:var(--c{index % NUM_COLOURS})"></i>'
        rest = "".join(
            f"<td{_format_alignment(column)}>{escape(cell)}</td>"
            for column, cell in zip(columns[1:], cells, strict=True)
        )
        rows.append(f"<tr><td{_format_alignment('run')}>{chip}{escape(run.name)}</td>{rest}</tr>")
    head = "".join(
        f'<th scope="col"{_format_alignment(column)}>{escape(column)}</th>' for column in columns
    )
    return (
        f'<h1>{len(runs)} runs</h1><p class="lead quiet">All '
        "runs share the charts, with one colour per run.</p>"
        '<div class="card"><div class="scroll plot-colours"><table '
        f'class="runs"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div></div>"
    )


def _format_alignment(column: str) -> str:
    """Return the class of left-aligned columns, which contain text; settings wrap."""
    if column == "settings":
        return ' class="text wrap"'
    return ' class="text"' if column in ("run", "status", "layout") else ""


def _render_notices(run: Run, *, should_name_run: bool) -> str:
    """Render failures, restarts, skipped steps, read problems and warnings.

    A failure that did not end the run is no alarm. Of more than three warnings, all but two
    are folded.
    """
    name = f"{run.name}: " if should_name_run else ""
    lines = [
        (
            "notice bad" if run.status == "failed" and event is run.interruptions[-1] else "notice",
            describe_event(event),
        )
        for event in run.interruptions
    ]
    skipped = sum(isinstance(event, SkippedStepEvent) for event in run.surviving_events)
    if skipped:
        lines.append(
            (
                "notice",
                (
                    f"{skipped:,} step{'s were' if skipped > 1 else ' was'} "
                    "skipped: the gradient was not finite"
                ),
            )
        )
    lines += [("notice", problem) for problem in run.log.problems]
    if not run.log.events and not run.log.missing_reason:
        lines.append(("notice", "the event file has no readable events yet"))
    warnings = list(
        dict.fromkeys(describe_event(event) for event in run.log.filter_by_type(WarningEvent))
    )
    num_shown = 2 if len(warnings) > 3 else len(warnings)
    lines += [("notice", line) for line in warnings[:num_shown]]
    paragraphs = [f'<p class="{kind}">{escape(name + line)}</p>' for kind, line in lines]
    if more := warnings[num_shown:]:
        folded = "".join(
            f'<p class="notice">{escape(name + line)}</p>' for line in more[:_MAX_LISTED_WARNINGS]
        )
        rest = (
            (
                f'<p class="notice">and {len(more) - _MAX_LISTED_WARNINGS} '
                "others: see the table of the timeline</p>"
            )
            if len(more) > _MAX_LISTED_WARNINGS
            else ""
        )
        summary = f"{escape(name)}{len(more)} more warnings"
        paragraphs.append(
            f'<details class="notices"><summary>{summary}</summary>{folded}{rest}</details>'
        )
    return "".join(paragraphs)


def _render_chart(chart: Chart) -> str:
    sizes = (
        PICTURE_SIZES
        if chart.is_wide
        else {name: size for name, size in PICTURE_SIZES.items() if name != "large"}
    )
    pictures = []
    for name, (width, height) in sizes.items():
        is_crowded = name == "narrow" or (name == "medium" and len(chart.readable_series) > 8)
        frame = replace(
            chart.frame, width=width, height=height,
            labels="legend" if is_crowded else "direct", key=f"{chart.key}-{name}",
            description=_describe_chart(chart),
        )  # fmt: skip
        pictures.append(
            draw_curves(chart.series, frame).replace('class="plot"', f'class="plot {name}"', 1)
        )
    # A pointer resolves far fewer points than the data has: its values are thinned out and
    # rounded.
    hover = {
        "x": chart.frame.x_label,
        "series": [
            {
                "name": s.name if len(chart.readable_series) > 1 else "",
                "tone": s.palette_index,
                "x": _round_values(t.x),
                "y": _round_values(t.y),
                "gap": _compute_hover_gap(t.x),
            }
            for s in chart.readable_series
            for t in (thin_for_hover(s),)
        ],
    }
    wide_class = " wide" if chart.is_wide else ""
    return (
        f'<section class="card{wide_class}" '
        f'id="{chart.key}"><h2>{escape(chart.title)}</h2><p>{escape(chart.note)}</p>'
        f'<div class="figure" data-chart="{chart.key}-data">{"".join(pictures)}</div>'
        f'<script type="application/json" id="{chart.key}-data">'
        f"{_encode_script_json(hover)}</script>"
        f"{render_table(chart.table)}</section>"
    )


def _describe_chart(chart: Chart) -> str:
    """Describe title, axes, first and last values of a chart for screen readers."""
    ends = []
    for series in chart.readable_series[:8]:
        finite = [value for value in series.y.tolist() if math.isfinite(value)]
        if finite:
            ends.append(f"{series.name} from {finite[0]:.4g} to {finite[-1]:.4g}")
    return f"{chart.title}, {chart.frame.y_label} over {chart.frame.x_label}: " + "; ".join(ends)


def _round_values(values: Any) -> list[float]:
    return [float(f"{value:.6g}") for value in values.tolist() if math.isfinite(value)]


def _compute_hover_gap(x: Any) -> float:
    """Return half the widest gap between points: the reach of the pointer."""
    return float((x[1:] - x[:-1]).max() / 2) if len(x) > 1 else 0.0


def _encode_script_json(value: Any) -> str:
    """Encode JSON for a script element, which it cannot close."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _render_history(run: Run, *, should_name_run: bool) -> str:
    if not run.log.events:
        return ""
    title = f"Timeline: {run.name}" if should_name_run else "Timeline"
    strips = "".join(
        draw_timeline(run, width).replace('class="plot"', f'class="plot {name}"', 1)
        for name, (width, _) in PICTURE_SIZES.items()
    )
    rows = list_history(run)
    shown = rows if len(rows) <= 400 else rows[:200] + rows[-200:]
    note = f"The first and last 200 of {len(rows):,} events." if len(rows) > 400 else ""
    table = render_cells(("after", "kind", "event"), shown, "words")
    return (
        f'<section class="card history"><h2>{escape(title)}</h2><div '
        f'class="figure">{strips}</div>'
        "<details><summary>Table</summary><p "
        f'class="quiet">{note}</p>{table}</details></section>'
    )


def _render_setup(run: Run, *, should_name_run: bool) -> str:
    start = run.start
    if start is None:
        return ""
    facts = {
        "run folder": str(run.path),
        "host": start.host,
        "devices": ", ".join(dict.fromkeys(start.devices)),
        "layout": start.layout,
        **{name: text or "not recorded" for name, text in describe_settings(start).items()},
        "batch": f"{start.global_batch_tokens:,} tokens per step",
        "parameters": f"{start.num_parameters:,}",
        "model FLOPs per token": format_count(start.flops_per_token)
        if start.flops_per_token
        else "not recorded",
        "matmul ceiling": f"{format_flops_per_second(start.matmul_flops_per_second)} per device"
        if start.matmul_flops_per_second
        else "not measured",
        "versions": ", ".join(f"{name} {version}" for name, version in start.versions.items()),
        "data hash": start.data_hash,
    }
    listed = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items()
    )
    title = f"Set-up: {run.name}" if should_name_run else "Set-up"
    recipe = yaml.safe_dump(start.recipe, sort_keys=False, allow_unicode=True)
    plan = yaml.safe_dump(start.plan, sort_keys=False, allow_unicode=True)
    return (
        f'<section class="card"><h2>{escape(title)}</h2><dl class="facts">{listed}</dl>'
        f"<details><summary>Recipe</summary><pre>{escape(recipe)}</pre></details>"
        f"<details><summary>Plan</summary><pre>{escape(plan)}</pre></details></section>"
    )
