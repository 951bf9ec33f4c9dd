"""Stacked horizontal bar charts as SVG text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from shardwright.report.axis_scale import find_ticks, format_ticks
from shardwright.report.line_chart import NUM_COLOURS, shorten
from shardwright.report.page_shell import PICTURE_SIZES

_ROW_PIXELS = 24
_BAR_PIXELS = 16
_LEGEND_PIXELS = 18
_LABEL_PIXELS = 18
_CHARACTER_PIXELS = 7.0
"""Average width of a regular letter."""
_MARK_PIXELS = 8.0
"""Average width of a bold letter."""


@dataclass(frozen=True)
class Bar:
    """One row; negative parts are not drawn, and `mark` is a text after the bar."""

    label: str
    parts: tuple[tuple[str, float], ...]
    mark: str = ""

    @property
    def total(self) -> float:
        """Sum of the positive parts."""
        return sum(value for _, value in self.parts if value > 0)


def draw_bars(
    bars: Sequence[Bar],
    *,
    unit: str,
    format_value: Callable[[float], str],
    tones: dict[str, str] | None = None,
    description: str = "",
) -> dict[str, str]:
    """Draw the bars at every width of `PICTURE_SIZES`.

    `format_value` formats a value for its tooltip; `tones` maps parts to the page's colours, such
    as `c0` or `quiet`.
    """
    names = list(dict.fromkeys(name for bar in bars for name, _ in bar.parts))
    colours = {name: f"c{index % (NUM_COLOURS + 1)}" for index, name in enumerate(names)} | (
        tones or {}
    )
    return {
        key: _draw_at_width(bars, width, unit, format_value, colours, description)
        for key, (width, _) in PICTURE_SIZES.items()
    }


def _draw_at_width(
    bars: Sequence[Bar],
    width: int,
    unit: str,
    format_value: Callable[[float], str],
    tones: dict[str, str],
    description: str,
) -> str:
    left = 12 + _CHARACTER_PIXELS * max((len(bar.label) for bar in bars), default=0)
    is_above = left > 0.4 * width  # long labels in a narrow picture stand on a separate line
    left = 0.0 if is_above else left
    right = width - 10 - _MARK_PIXELS * max((len(bar.mark) for bar in bars), default=0)
    highest = max((bar.total for bar in bars), default=0.0) or 1.0
    scale = (right - left) / highest
    names = [
        name
        for name in tones
        if any(name == part and value > 0 for bar in bars for part, value in bar.parts)
    ]
    out, y = _draw_legend(names, tones, width)
    for bar in bars:
        label_width = width if is_above else left - 8
        label = escape(shorten(bar.label, int(label_width / _CHARACTER_PIXELS)))
        out.append(f'<text x="0" y="{y + 13}">{label}</text>')
        y += _LABEL_PIXELS if is_above else 0
        x = left
        for name, value in bar.parts:
            if value > 0:
                bar_width = value * scale
                place = (
                    f'x="{x:.1f}" y="{y}" '
                    f'width="{max(0.5, bar_width - 0.6):.1f}" height="{_BAR_PIXELS}"'
                )
                title = escape(f"{bar.label} {name}: {format_value(value)}".strip())
                out.append(
                    f'<rect style="{_format_fill(tones[name])}" {place}>'
                    f"<title>{title}</title></rect>"
                )
                x += bar_width
        if bar.mark:
            out.append(f'<text class="name" x="{x + 5:.1f}" y="{y + 13}">{escape(bar.mark)}</text>')
        y += _ROW_PIXELS
    ticks = find_ticks(0.0, highest, max(2, int((right - left) / 70)))
    for tick, text in zip(ticks, format_ticks(ticks), strict=True):
        x = left + tick * scale
        anchor = "start" if x < 4 else "middle"
        out.append(f'<path class="grid" d="M{x:.1f} {y}v4"/>')
        out.append(f'<text x="{x:.1f}" y="{y + 17}" text-anchor="{anchor}">{text}</text>')
    out.append(f'<text x="{width - 4}" y="{y + 31}" text-anchor="end">{escape(unit)}</text>')
    label = escape(description, quote=True)
    return (
        f'<svg class="plot" viewBox="0 0 {width} {y + 36}" '
        f'role="img" aria-label="{label}">{"".join(out)}</svg>'
    )


def _format_fill(tone: str) -> str:
    """Return the style of a bar; the palest colour, used for empty parts, gets an outline."""
    return f"fill:var(--{tone})" + (
        ";stroke:var(--quiet);stroke-width:.6" if tone == "grid" else ""
    )


def _draw_legend(names: Sequence[str], tones: dict[str, str], width: int) -> tuple[list[str], int]:
    """Draw the names of the parts in their colours; return them and the y of the first bar."""
    if len(names) < 2:
        return [], 4
    out: list[str] = []
    x = 0.0
    y = 12
    for name in names:
        pixels = 14 + _CHARACTER_PIXELS * len(name)
        if x and x + pixels > width:
            x, y = 0.0, y + _LEGEND_PIXELS
        out.append(
            f'<rect style="{_format_fill(tones[name])}" x="{x:.0f}" '
            f'y="{y - 9}" width="9" height="9" rx="2"/>'
        )
        out.append(f'<text x="{x + 13:.0f}" y="{y}">{escape(name)}</text>')
        x += pixels + 10
    return out, y + 12
