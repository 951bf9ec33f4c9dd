"""Summary of a run for the terminal: aligned lines and sparklines of the loss."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardwright.report.downsampling import FloatArray, compute_bin_means
from shardwright.report.recorded_run import Run
from shardwright.report.run_settings import SETTINGS
from shardwright.telemetry.sinks import describe_event
from shardwright.units import (
    format_bytes,
    format_count,
    format_flops_per_second,
    format_items,
    format_seconds,
)

_SPARKLINE_BLOCKS = "▁▂▃▄▅▆▇█"
_SPARKLINE_WIDTH = 40
"""Characters of a sparkline."""
_MAX_COLUMNS = 100
"""Columns after which the text of a fact continues in the next line."""


def draw_sparkline(values: FloatArray) -> str:
    """Draw values as blocks of eight heights; values that are not finite are left out.

    >>> draw_sparkline(np.array([8.0, 4.0, 1.0, 1.0]))
    '█▄▁▁'
    """
    finite = values[np.isfinite(values)]
    if not len(finite):
        return ""
    _, means = compute_bin_means(np.arange(len(finite), dtype=np.float64), finite, _SPARKLINE_WIDTH)
    low = means.min()
    high = means.max()
    heights = (
        np.zeros(len(means))
        if high == low
        else (means - low) / (high - low) * (len(_SPARKLINE_BLOCKS) - 1)
    )
    return "".join(_SPARKLINE_BLOCKS[int(height)] for height in heights)


def describe_run(run: Run, summary: dict[str, Any]) -> list[str]:
    """Format the summary of a run as lines for the terminal."""
    facts: list[tuple[str, str | None]] = [
        (
            "layout",
            f"{summary['layout']} on {summary['world_size']} x "
            f"{_find_first_device(summary['devices'])}"
            if summary["layout"]
            else None,
        ),
        *((name, summary[name]) for name in SETTINGS),
        (
            "steps",
            f"{summary['steps']:,}"
            + (f" of {summary['total_steps']:,}" if summary["total_steps"] else ""),
        ),
        ("tokens", format_count(summary["tokens"])),
        ("training loss", _format_with_sparkline(run.smooth_loss, summary["training_loss"])),
        (
            "validation loss",
            _format_with_sparkline(
                np.array([e.loss for e in run.evaluations]), summary["validation_loss"]
            ),
        ),
        ("best validation", _format_best(summary)),
        ("reward margin", _format_values(run.build_curve(lambda s: s.reward_margin))),
        ("reward accuracy", _format_values(run.build_curve(lambda s: s.reward_accuracy))),
        ("speed", _format_speed(summary)),
        ("time per step", _format_parts(summary)),
        ("memory", _format_memory(summary["peak_memory_bytes"])),
        ("time", _format_time(summary)),
        ("history", _format_history(summary)),
    ]
    lines = [f"{summary['name']}  ({summary['status']})"]
    for name, text in facts:
        if text is not None:
            lines += _wrap_fact(name, text)
    lines += [f"  {describe_event(event)}" for event in run.interruptions]
    lines += [f"  note: {problem}" for problem in summary["problems"]]
    return lines


def _wrap_fact(name: str, text: str) -> list[str]:
    """Format a name and its text; the text continues below itself after `_MAX_COLUMNS`."""
    return textwrap.wrap(
        text,
        _MAX_COLUMNS,
        initial_indent=f"  {name:<16}",
        subsequent_indent=" " * 18,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _find_first_device(devices: Sequence[str]) -> str:
    return devices[0] if devices else "device"


def _format_with_sparkline(values: FloatArray, last: float | None) -> str | None:
    return None if last is None else f"{last:.4f}  {draw_sparkline(values)}"


def _format_values(values: FloatArray) -> str | None:
    """Format the last finite value, with a sparkline of all; None if there is none."""
    finite = values[np.isfinite(values)]
    return _format_with_sparkline(finite, finite[-1]) if len(finite) else None


def _format_best(summary: dict[str, Any]) -> str | None:
    loss = summary["best_validation_loss"]
    return None if loss is None else f"{loss:.4f} at step {summary['best_validation_step']:,}"


def _format_speed(summary: dict[str, Any]) -> str | None:
    if summary["tokens_per_second"] is None:
        return None
    text = f"{format_count(summary['tokens_per_second'])} tokens/s"
    if summary["model_flops_per_second"] is not None:
        text += f", {format_flops_per_second(summary['model_flops_per_second'])}"
    return text + (f", MFU {summary['mfu']:.1%}" if summary["mfu"] is not None else "")


def _format_parts(summary: dict[str, Any]) -> str | None:
    if summary["step_seconds"] is None:
        return None
    known = [
        f"{part} {format_seconds(seconds)}"
        for part, seconds in summary["part_seconds"].items()
        if seconds is not None
    ]
    return format_seconds(summary["step_seconds"]) + (f"  ({', '.join(known)})" if known else "")


def _format_time(summary: dict[str, Any]) -> str:
    text = f"{format_seconds(summary['wall_seconds'])}, goodput {summary['useful_share']:.0%}"
    largest = sorted(summary["lost_seconds"].items(), key=lambda pair: -pair[1])[:3]
    lost = [
        f"{name} {format_seconds(seconds)}"
        for name, seconds in largest
        if seconds >= 0.01 * summary["wall_seconds"]
    ]
    return text + (f" (lost: {', '.join(lost)})" if lost else "")


def _format_memory(peaks: Sequence[int]) -> str | None:
    if not peaks:
        return None
    high = format_bytes(max(peaks))
    low = format_bytes(min(peaks))
    return f"{high} per rank" + (f" at most, {low} at least" if low != high else "")


def _format_history(summary: dict[str, Any]) -> str | None:
    names = (
        *("checkpoints", "restarts", "resumes", "memory_resumes", "layout_changes", "lost_steps"),
        *("skipped_steps", "withdrawn_steps"),
    )
    counts = [
        format_items(count, name.replace("_", " ").removesuffix("s"))
        for name in names
        if (count := summary[name])
    ]
    return ", ".join(counts) or None
