"""Panels of one run: goodput, memory by part, expert load, generated samples."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.report.bar_chart import Bar, draw_bars
from shardwright.report.page_shell import PICTURE_SIZES, Panel, Table
from shardwright.report.recorded_run import Run
from shardwright.telemetry.event_log import MemoryEvent
from shardwright.units import GIB_BYTES, format_bytes, format_items, format_seconds

_GOODPUT_TONES = {
    "useful": "c2", "set-up": "c0", "evaluations": "c3", "checkpoints": "c5",
    "skipped steps": "c4", "withdrawn steps": "c1", "between steps": "c6", "down": "grid",
}  # fmt: skip
MEMORY_TONES = {
    "weights": "c0", "gradients": "c1", "optimizer": "c2", "activations": "c3", "logits": "c4",
    "gathered": "c5", "workspaces": "quiet", "reserve": "grid", "driver": "c6",
    "the rest of the peak": "c3",
}  # fmt: skip
_MAX_SAMPLES = 8
_MAX_SAMPLE_CHARACTERS = 2000


def build_goodput_panel(run: Run, key: str, title: str) -> Panel | None:
    """Build the panel of the wall time by use."""
    goodput = run.goodput
    if goodput.wall_seconds <= 0 or not run.steps:
        return None
    parts = {"useful": goodput.useful_seconds} | goodput.lost_seconds
    seconds = 1.0
    unit = "seconds"
    for unit_seconds, name in ((60.0, "minutes"), (3600.0, "hours")):
        if goodput.wall_seconds > 2 * unit_seconds:
            seconds = unit_seconds
            unit = name
    bar = Bar("", tuple((name, value / seconds) for name, value in parts.items()))
    note = (
        f"{goodput.share:.1%} of {format_seconds(goodput.wall_seconds)} "
        "were spent on steps that the final weights include."
    )
    pictures = draw_bars(
        [bar],
        unit=unit,
        format_value=lambda value: format_seconds(value * seconds),
        tones=_GOODPUT_TONES,
        description=f"{title}: {note}",
    )
    rows = tuple(
        (name, format_seconds(value), f"{value / goodput.wall_seconds:.1%}")
        for name, value in parts.items()
    )
    return Panel(key, title, note, pictures, Table(("use", "time", "share"), rows))


def build_memory_panel(run: Run, key: str, title: str) -> Panel | None:
    """Build the panel of the fullest rank's memory by part, predicted and measured."""
    events = [event for event in run.surviving_events if isinstance(event, MemoryEvent)]
    predicted_parts = _read_predicted_memory(run)
    if not events and not predicted_parts:
        return None
    measured_parts = _read_measured_memory(events[-1]) if events else {}
    largest = max(sum(predicted_parts.values()), sum(measured_parts.values()))
    size, unit = next(
        (pair for pair in ((GIB_BYTES, "GiB"), (2**20, "MiB")) if largest >= pair[0]),
        (2**10, "KiB"),
    )
    bars = [
        Bar(label, tuple((name, value / size) for name, value in parts.items()))
        for label, parts in (("predicted", predicted_parts), ("measured", measured_parts))
        if parts
    ]
    note = _describe_memory(events, has_prediction=bool(predicted_parts))
    pictures = draw_bars(
        bars,
        unit=unit,
        format_value=lambda value: format_bytes(value * size),
        tones=MEMORY_TONES,
        description=f"{title}: {note}",
    )
    names = list(dict.fromkeys((*predicted_parts, *measured_parts)))
    rows = [
        (
            name,
            *(
                format_bytes(parts[name]) if name in parts else ""
                for parts in (predicted_parts, measured_parts)
            ),
        )
        for name in names
    ]
    sums = tuple(
        format_bytes(sum(parts.values())) if parts else ""
        for parts in (predicted_parts, measured_parts)
    )
    return Panel(
        key,
        title,
        note.strip(),
        pictures,
        Table(("part", "predicted", "measured"), (*rows, ("all", *sums))),
    )


def _describe_memory(events: Sequence[MemoryEvent], *, has_prediction: bool) -> str:
    note = "Fullest rank. "
    if not has_prediction:
        note += "No prediction: the recipe names no cluster. "
    if events and events[-1].reserved_bytes is None:
        note += (
            "On a CPU only persistent tensors are measured; "
            "other memory of the process is not split into parts. "
        )
    if events and events[-1].offloaded_bytes is not None:
        offloaded = format_bytes(max(events[-1].offloaded_bytes))
        note += f"{offloaded} of optimizer states are offloaded, in addition to these bytes. "
    if events and events[-1].offloaded_activation_bytes is not None:
        left = format_bytes(max(events[-1].offloaded_activation_bytes))
        note += f"Up to {left} of saved tensors are offloaded, in addition to these bytes. "
    if events and events[-1].offloaded_parameter_bytes is not None:
        weights = format_bytes(max(events[-1].offloaded_parameter_bytes))
        note += f"{weights} of weights are offloaded, in addition to these bytes. "
    return note


_NOT_ON_THE_DEVICE = ("total", "capacity", "offloaded", "host", "disk")
"""Predicted bytes that are not included in the device's total."""


def _read_predicted_memory(run: Run) -> dict[str, float]:
    parts = run.prediction.get("memory_bytes")
    if not isinstance(parts, dict):
        return {}
    return {
        str(n): float(v)
        for n, v in parts.items()
        if n not in _NOT_ON_THE_DEVICE and isinstance(v, int | float) and v > 0
    }


def _read_measured_memory(event: MemoryEvent) -> dict[str, float]:
    """Return bytes by part on the rank with the highest peak.

    The rest of the peak is activations, logits and temporary tensors.
    """
    rank = int(np.argmax(event.peak_bytes))
    parts = {
        name: float(getattr(event, f"{name}_bytes")[rank])
        for name in ("weights", "gradients", "optimizer")
    }
    if event.reserved_bytes is not None:
        parts["the rest of the peak"] = max(0.0, event.peak_bytes[rank] - sum(parts.values()))
        parts["reserve"] = float(event.reserved_bytes[rank] - event.peak_bytes[rank])
        if event.driver_bytes is not None:
            parts["driver"] = float(event.driver_bytes[rank])
    return parts


def build_expert_panel(run: Run, key: str, title: str) -> Panel | None:
    """Build the heat map of expert load (tokens / even share) by layer and expert."""
    recorded = [step.expert_tokens for step in run.steps if step.expert_tokens]
    if not recorded:
        return None
    last = recorded[-20:]
    if len({tuple(map(len, table)) for table in last}) > 1:
        last = last[-1:]
    tokens_LE = np.mean(np.array(last, dtype=np.float64), axis=0)
    load_LE = tokens_LE / np.maximum(tokens_LE.mean(axis=1, keepdims=True), 1e-9)
    worst = np.unravel_index(int(load_LE.argmax()), load_LE.shape)
    num_unused = int((tokens_LE == 0).sum())
    note = (
        "Tokens of an expert / even share, mean of the last "
        f"{len(last)} recorded steps. Busiest: expert {worst[1]} of "
        f"sparse layer {worst[0]} with {load_LE.max():.2f} "
        "x. Orange is above the even share, blue below."
        + (f" {format_items(num_unused, 'expert')} received none." if num_unused else "")
    )
    pictures = {
        name: _draw_heat_map(load_LE, width, f"{title}: {note}")
        for name, (width, _) in PICTURE_SIZES.items()
    }
    rows = tuple(
        (
            str(layer),
            f"{int(row.argmax())}",
            f"{row.max():.2f}",
            f"{int(row.argmin())}",
            f"{row.min():.2f}",
            f"{row.std():.2f}",
        )
        for layer, row in enumerate(load_LE)
    )
    columns = (
        "sparse layer",
        "busiest expert",
        "its load",
        "least busy",
        "its load",
        "standard deviation",
    )
    return Panel(key, title, note, pictures, Table(columns, rows))


def _draw_heat_map(load_LE: Any, width: int, description: str) -> str:
    layers, experts = load_LE.shape
    left = 30.0
    pitch = max(3.0, min(20.0, 320.0 / layers))
    field = (width - left - 4) / experts
    out = []
    for layer in range(layers):
        y = 4 + layer * pitch
        if pitch >= 11 or layer % 5 == 0:
            out.append(
                f'<text x="{left - 6}" y="{y + pitch / 2 + 4:.1f}" text-anchor="end">{layer}</text>'
            )
        for expert in range(experts):
            load = float(load_LE[layer, expert])
            # One colour above the even share, another below; stronger is farther from it.
            tone, depth = (
                ("c1", min(1.0, (load - 1) / 2)) if load >= 1 else ("c0", min(1.0, 1 - load))
            )
            out.append(
                f'<rect style="fill:var(--{tone});opacity:{0.08 + 0.92 * depth:.2f}" '
                f'x="{left + expert * field:.1f}" y="{y:.1f}" '
                f'width="{max(0.5, field - 0.8):.1f}" '
                f'height="{pitch - 0.8:.1f}"><title>layer {layer}, expert {expert}: '
                f"{load:.2f} x</title></rect>"
            )
    bottom = 4 + layers * pitch
    out.append(
        f'<text x="{left}" y="{bottom + 16:.0f}">expert 0 '
        f"to {experts - 1}, one row per sparse layer</text>"
    )
    label = escape(description, quote=True)
    return (
        f'<svg class="plot" viewBox="0 0 {width} {bottom + 24:.0f}" '
        f'role="img" aria-label="{label}">{"".join(out)}</svg>'
    )


def build_sample_panel(run: Run, key: str, title: str) -> Panel | None:
    """Build the panel of the newest generated texts in the run folder's `samples/`."""
    try:
        files = sorted((run.path / "samples").glob("*.txt"), key=lambda path: path.stat().st_mtime)[
            -_MAX_SAMPLES:
        ]
        texts = [(path.stem, _read_start(path)) for path in files]
    except OSError:
        return None
    if not texts:
        return None
    table = Table(("sample", "text"), tuple(texts), is_text=True)
    return Panel(
        key,
        title,
        "The newest texts in the run folder's samples/.",
        {},
        table,
        is_wide=True,
        is_table_open=True,
    )


def _read_start(path: Path) -> str:
    with path.open(encoding="utf-8", errors="replace") as file:
        text = file.read(_MAX_SAMPLE_CHARACTERS + 1)
    return text if len(text) <= _MAX_SAMPLE_CHARACTERS else text[:_MAX_SAMPLE_CHARACTERS] + " …"
