"""Panels of parts: memory as predicted and as measured, what the run's time went into, experts, samples."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.report.bars import Bar, draw_bars
from shardwright.report.runs import Run
from shardwright.report.shell import WIDTHS, Panel, Table
from shardwright.telemetry.events import Memory
from shardwright.units import GIB_BYTES, format_bytes, format_seconds

_LOST_TONES = {
    "useful": "c2", "set-up": "c0", "evaluations": "c3", "checkpoints": "c5", "skipped steps": "c4", "withdrawn steps": "c1",
    "between steps": "c6", "down": "grid",
}  # fmt: skip
MEMORY_TONES = {
    "weights": "c0", "gradients": "c1", "optimizer": "c2", "activations": "c3", "logits": "c4", "gathered": "c5",
    "workspaces": "quiet", "reserve": "grid", "driver": "c6", "the rest of the peak": "c3",
}  # fmt: skip
_SAMPLES = 8
_SAMPLE_CHARACTERS = 2000


def panel_of_goodput(run: Run, key: str, title: str) -> Panel | None:
    """What the wall time went into."""
    goodput = run.goodput
    if goodput.wall_seconds <= 0 or not run.steps:
        return None
    parts = {"useful": goodput.useful_seconds} | goodput.lost_seconds
    seconds, unit = 1.0, "seconds"
    for size, name in ((60.0, "minutes"), (3600.0, "hours")):
        if goodput.wall_seconds > 2 * size:
            seconds, unit = size, name
    bar = Bar("", tuple((name, value / seconds) for name, value in parts.items()))
    note = f"{goodput.share:.1%} of {format_seconds(goodput.wall_seconds)} were steps that are in the weights."
    pictures = draw_bars(
        [bar], unit=unit, write=lambda value: format_seconds(value * seconds), tones=_LOST_TONES, description=f"{title}: {note}"
    )
    rows = tuple((name, format_seconds(value), f"{value / goodput.wall_seconds:.1%}") for name, value in parts.items())
    return Panel(key, title, note, pictures, Table(("went into", "time", "share"), rows))


def panel_of_memory(run: Run, key: str, title: str) -> Panel | None:
    """Memory of the fullest rank by part, predicted beside measured."""
    measured = [event for event in run.survivors if isinstance(event, Memory)]
    predicted = _predicted_memory(run)
    if not measured and not predicted:
        return None
    found = _measured_memory(measured[-1]) if measured else {}
    largest = max(sum(predicted.values()), sum(found.values()))
    size, unit = next((pair for pair in ((GIB_BYTES, "GiB"), (2**20, "MiB")) if largest >= pair[0]), (2**10, "KiB"))
    bars = [
        Bar(label, tuple((name, value / size) for name, value in parts.items()))
        for label, parts in (("predicted", predicted), ("measured", found))
        if parts
    ]
    note = "Fullest rank. "
    if not predicted:
        note += "Nothing was predicted: the recipe names no cluster. "
    if measured and measured[-1].reserved_bytes is None:
        note += "On a CPU the tensors that stay are measured; what the process holds beside them is not told apart. "
    pictures = draw_bars(
        bars, unit=unit, write=lambda value: format_bytes(value * size), tones=MEMORY_TONES, description=f"{title}: {note}"
    )
    names = list(dict.fromkeys((*predicted, *found)))
    rows = [(name, *(format_bytes(parts[name]) if name in parts else "" for parts in (predicted, found))) for name in names]
    sums = tuple(format_bytes(sum(parts.values())) if parts else "" for parts in (predicted, found))
    return Panel(key, title, note.strip(), pictures, Table(("part", "predicted", "measured"), (*rows, ("all", *sums))))


def _predicted_memory(run: Run) -> dict[str, float]:
    told = run.prediction.get("memory_bytes")
    if not isinstance(told, dict):
        return {}
    return {str(n): float(v) for n, v in told.items() if n not in ("total", "capacity") and isinstance(v, int | float) and v > 0}


def _measured_memory(event: Memory) -> dict[str, float]:
    """Of the rank with the highest peak, which holds activations, logits and what lives for a moment beside the three."""
    rank = int(np.argmax(event.peak_bytes))
    found = {name: float(getattr(event, f"{name}_bytes")[rank]) for name in ("weights", "gradients", "optimizer")}
    if event.reserved_bytes is not None:
        found["the rest of the peak"] = max(0.0, event.peak_bytes[rank] - sum(found.values()))
        found["reserve"] = float(event.reserved_bytes[rank] - event.peak_bytes[rank])
        if event.driver_bytes is not None:
            found["driver"] = float(event.driver_bytes[rank])
    return found


def panel_of_experts(run: Run, key: str, title: str) -> Panel | None:
    """A row per sparse layer, a field per expert: its share of the tokens over the even one, over the last steps that tell."""
    told = [step.expert_tokens for step in run.steps if step.expert_tokens]
    if not told:
        return None
    last = told[-20:]
    if len({tuple(map(len, table)) for table in last}) > 1:
        last = last[-1:]
    tokens_LE = np.mean(np.array(last, dtype=np.float64), axis=0)
    load_LE = tokens_LE / np.maximum(tokens_LE.mean(axis=1, keepdims=True), 1e-9)
    worst = np.unravel_index(int(load_LE.argmax()), load_LE.shape)
    unused = int((tokens_LE == 0).sum())
    note = (
        f"Tokens of an expert over its even share, mean of the last {len(last)} steps that tell. Busiest: expert {worst[1]} of "
        f"sparse layer {worst[0]} with {load_LE.max():.2f} x. Orange is above the even share, blue below."
        + (f" {unused} expert{'s' if unused > 1 else ''} got none." if unused else "")
    )
    pictures = {name: _draw_heat(load_LE, width, f"{title}: {note}") for name, (width, _) in WIDTHS.items()}
    rows = tuple(
        (str(layer), f"{int(row.argmax())}", f"{row.max():.2f}", f"{int(row.argmin())}", f"{row.min():.2f}", f"{row.std():.2f}")
        for layer, row in enumerate(load_LE)
    )
    columns = ("sparse layer", "busiest expert", "its load", "least busy", "its load", "standard deviation")
    return Panel(key, title, note, pictures, Table(columns, rows))


def _draw_heat(load_LE: Any, width: int, description: str) -> str:
    layers, experts = load_LE.shape
    left, pitch = 30.0, max(3.0, min(20.0, 320.0 / layers))
    field = (width - left - 4) / experts
    out = []
    for layer in range(layers):
        y = 4 + layer * pitch
        if pitch >= 11 or layer % 5 == 0:
            out.append(f'<text x="{left - 6}" y="{y + pitch / 2 + 4:.1f}" text-anchor="end">{layer}</text>')
        for expert in range(experts):
            load = float(load_LE[layer, expert])
            # Above the even share in one colour, below in another: deeper is further away.
            tone, depth = ("c1", min(1.0, (load - 1) / 2)) if load >= 1 else ("c0", min(1.0, 1 - load))
            out.append(
                f'<rect style="fill:var(--{tone});opacity:{0.08 + 0.92 * depth:.2f}" x="{left + expert * field:.1f}" y="{y:.1f}" '
                f'width="{max(0.5, field - 0.8):.1f}" height="{pitch - 0.8:.1f}"><title>layer {layer}, expert {expert}: '
                f"{load:.2f} x</title></rect>"
            )
    bottom = 4 + layers * pitch
    out.append(f'<text x="{left}" y="{bottom + 16:.0f}">expert 0 to {experts - 1}, a row for each sparse layer</text>')
    label = escape(description, quote=True)
    return f'<svg class="plot" viewBox="0 0 {width} {bottom + 24:.0f}" role="img" aria-label="{label}">{"".join(out)}</svg>'


def panel_of_samples(run: Run, key: str, title: str) -> Panel | None:
    """What the model wrote: the newest texts of the run folder's `samples/`."""
    try:
        files = sorted((run.path / "samples").glob("*.txt"), key=lambda path: path.stat().st_mtime)[-_SAMPLES:]
        texts = [(path.stem, _read_start(path)) for path in files]
    except OSError:
        return None
    if not texts:
        return None
    table = Table(("sample", "text"), tuple(texts), words=True)
    return Panel(key, title, "The newest texts in the run folder's samples/.", {}, table, wide=True, open_table=True)


def _read_start(path: Path) -> str:
    with path.open(encoding="utf-8", errors="replace") as file:
        text = file.read(_SAMPLE_CHARACTERS + 1)
    return text if len(text) <= _SAMPLE_CHARACTERS else text[:_SAMPLE_CHARACTERS] + " …"
