"""Line charts as SVG text, without library or script; CSS variables set light and dark themes.

`draw_curves` draws one chart. Inline charts use the page's style; `standalone=True` includes the
style, for a README.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from html import escape
from itertools import count, pairwise
from typing import Literal

import numpy as np

from shardwright.report.axis_scale import AxisScale, find_ticks, format_ticks, pad_range
from shardwright.report.downsampling import FloatArray, thin_points
from shardwright.report.name_shortening import shorten, shorten_distinctly

NUM_COLOURS = 6
GREY = -1
"""Colour outside the palette, for the remainder."""

PLOT_STYLE = """
:root{--c0:#1f5fbf;--c1:#b3500a;--c2:#0f766e;--c3:#7c3aab;--c4:#b42348;--c5:#5c6800;--c6:#6b7480;
--ink:#1b1f24;--quiet:#57606a;--grid:#e3e6ea;--paper:#ffffff}
.plot{font:12px system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
@media (prefers-color-scheme:dark){
:root{--c0:#79b0ff;--c1:#ffab6b;--c2:#5ccfbb;--c3:#cda2ff;--c4:#ff8fa6;--c5:#c8d35a;
--c6:#98a1ad;
--ink:#e6e9ee;--quiet:#9aa4b2;--grid:#2b313a;--paper:#14171c}}
.plot text{fill:var(--quiet)}.plot .name{fill:var(--ink);font-weight:600}
.plot .grid{stroke:var(--grid);stroke-width:1}.plot .rule{stroke:var(--quiet);stroke-dasharray:3 3}
.plot .mark{stroke:var(--quiet);stroke-dasharray:1 3}
.plot path{fill:none;stroke-linejoin:round;stroke-linecap:round}
.plot .line{stroke-width:1.8}.plot .faint{stroke-width:1;opacity:.28}
.plot .dashed{stroke-width:1.8;stroke-dasharray:5 4}
.plot .area{stroke:none;opacity:.8}.plot .dot{stroke:var(--paper);stroke-width:1}
""" + "".join(
    f".plot .s{i}{{stroke:var(--c{i})}}.plot .f{i}{{fill:var(--c{i})}}.plot "
    f"text.f{i}{{fill:var(--c{i});font-weight:600}}"
    for i in range(NUM_COLOURS + 1)
)

_MARGIN_PIXELS = 12
"""Margin in pixels left, right and below a standalone chart; pages have their own margins."""

_CHARACTER_PIXELS = 7.4
"""Average advance of a semibold 12 px system font, for the layout of labels."""


@dataclass(frozen=True)
class Series:
    """One curve. `colour` is an index into the palette, modulo its size."""

    name: str
    x: FloatArray
    y: FloatArray
    colour: int = 0
    style: Literal["line", "faint", "dashed", "dots", "area"] = "line"
    """`faint` is for raw values, `dots` have a dashed line, each `area` is stacked on the last."""
    is_labelled: bool = True

    @property
    def palette_index(self) -> int:
        """Index of the colour in the palette."""
        return NUM_COLOURS if self.colour == GREY else self.colour % NUM_COLOURS


@dataclass(frozen=True)
class ChartFrame:
    """Size, axes, reference lines and labels of a chart."""

    width: int = 720
    height: int = 320
    x_label: str = "step"
    y_label: str = ""
    is_y_log: bool = False
    should_start_at_zero: bool = False
    is_y_whole: bool = False
    """Ticks at whole numbers only, for counts; the axis then reaches at least 1."""
    y_range: tuple[float, float] | None = None
    """Default: range of the data. The chart's note should mention clipped values."""
    rules: tuple[tuple[float, str], ...] = ()
    """Horizontal reference lines: value, label."""
    marks: tuple[tuple[float, str], ...] = ()
    """Vertical lines: x, label."""
    labels: Literal["direct", "legend"] = "direct"
    """Names at the ends of the curves, or in rows above a narrow chart."""
    key: str = "plot"
    """Unique key on a page, for the clip path."""
    description: str = ""
    """Text for screen readers."""


@dataclass
class _Canvas:
    """Pixel bounds, scales and SVG parts of one drawing."""

    frame: ChartFrame
    left: float
    right: float
    top: float
    bottom: float
    x: AxisScale
    y: AxisScale
    legend_top: float
    legend_rows: list[list[str]]
    """Names above the chart; empty if they are at the ends of the curves."""
    parts: list[str] = field(default_factory=list)


def draw_curves(
    series: Sequence[Series],
    frame: ChartFrame = ChartFrame(),
    *,
    title: str = "",
    is_standalone: bool = False,
) -> str:
    """Draw a chart as SVG text.

    Args:
        series: curves in drawing order; areas are stacked in that order.
        frame: size, axes, reference lines.
        title: title above a standalone chart; an inline chart has a heading on its page.
        is_standalone: make a complete file with style, background and namespace.
    """
    if is_standalone:
        frame = replace(
            frame, width=frame.width - 2 * _MARGIN_PIXELS, height=frame.height - _MARGIN_PIXELS
        )
    drawn = [s for s in _stack_areas(series) if np.isfinite(s.y).any()]
    canvas = _layout_canvas(drawn, frame, title if is_standalone else "")
    _draw_axes(canvas)
    _draw_marks(canvas)
    canvas.parts.append(
        f'<clipPath id="{frame.key}-clip"><rect x="{canvas.left:.0f}" y="{canvas.top - 2:.0f}" '
        f'width="{canvas.right - canvas.left + 4:.0f}" '
        f'height="{canvas.bottom - canvas.top + 3:.0f}"/></clipPath>'
        f'<g clip-path="url(#{frame.key}-clip)">'
    )
    below: Series | None = None
    for item in drawn:
        canvas.parts.append(_draw_series(canvas, item, below))
        below = item if item.style == "area" else below
    canvas.parts.append("</g>")
    _draw_names(canvas, drawn)
    if not drawn:
        canvas.parts.append(
            f'<text x="{(canvas.left + canvas.right) / 2:.0f}" '
            f'y="{frame.height / 2:.0f}" text-anchor="middle">no data</text>'
        )
    return _wrap_svg(canvas, title, is_standalone)


def _wrap_svg(canvas: _Canvas, title: str, is_standalone: bool) -> str:
    frame = canvas.frame
    description = escape(frame.description or title or frame.y_label, quote=True)
    # The page's script uses this to convert a pointer position to an x value.
    geometry = (canvas.x.low, canvas.x.high, canvas.left, canvas.right, canvas.top, canvas.bottom)
    margin = _MARGIN_PIXELS if is_standalone else 0
    width = frame.width + 2 * margin
    height = frame.height + margin
    head = (
        f'<svg class="plot" viewBox="{-margin} 0 {width} '
        f'{height}" role="img" aria-label="{description}" '
        f'data-x="{" ".join(f"{value:.10g}" for value in geometry)}"'
    )
    if not is_standalone:
        return f"{head}>{''.join(canvas.parts)}</svg>"
    background = (
        f'<rect x="{-margin}" width="{width}" height="{height}" rx="8" style="fill:var(--paper)"/>'
    )
    heading = (
        f'<text class="name" x="4" y="26" style="font-size:15px">{escape(title)}</text>'
        if title
        else ""
    )
    return (
        f'{head} xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}">'
        f"<style>{PLOT_STYLE}</style>{background}{heading}{''.join(canvas.parts)}</svg>"
    )


def _stack_areas(series: Sequence[Series]) -> list[Series]:
    """Replace the values of areas with running sums over the areas."""
    stacked: list[Series] = []
    total: FloatArray | None = None
    for item in series:
        if item.style == "area":
            total = item.y if total is None else total + item.y
            item = Series(item.name, item.x, total, item.colour, item.style, item.is_labelled)
        stacked.append(item)
    return stacked


def _layout_canvas(visible_series: list[Series], frame: ChartFrame, title: str) -> _Canvas:
    xs = (
        np.concatenate([s.x[np.isfinite(s.y)] for s in visible_series])
        if visible_series
        else np.array([0.0, 1.0])
    )
    ys = (
        np.concatenate([s.y[np.isfinite(s.y)] for s in visible_series])
        if visible_series
        else np.array([0.0, 1.0])
    )
    x_low = float(xs.min())
    x_high = float(xs.max())
    if x_high <= x_low:
        x_low, x_high = x_low - 0.5, x_high + 0.5
    if frame.y_range is not None:
        low, high = frame.y_range
    else:
        values = [float(ys.min()), float(ys.max()), *(value for value, _ in frame.rules)]
        if frame.is_y_log:
            values = [value for value in values if value > 0] or [1.0]
            positive = ys[ys > 0]
            values.append(float(positive.min()) if len(positive) else 1.0)
        low, high = pad_range(min(values), max(values), is_log=frame.is_y_log)
        if frame.should_start_at_zero or any(s.style == "area" for s in visible_series):
            # Some space above: a constant line at the very top would look like a border.
            low, high = 0.0, max(high, 1.04 * max(values), 1e-12)
    if frame.is_y_whole:
        high = max(high, 1.0)
    names = [s.name for s in visible_series if s.is_labelled]
    is_direct = frame.labels == "direct" and bool(names)
    right = frame.width - (
        min(0.28 * frame.width, 14 + _CHARACTER_PIXELS * max(map(len, names))) if is_direct else 12
    )
    legend_top = 36.0 if title else 0.0
    rows = [] if is_direct else _layout_legend(names, frame.width - 8)
    # Many names make the picture taller, so that the curves keep their height.
    frame = replace(frame, height=frame.height + 18 * max(0, len(rows) - 2))
    top = legend_top + 18 * len(rows) + 28
    bottom = frame.height - 34.0
    ticks = format_ticks(find_ticks(low, high, 5, is_log=frame.is_y_log, is_whole=frame.is_y_whole))
    left = 16 + _CHARACTER_PIXELS * max((len(tick) for tick in ticks), default=1)
    x_scale = AxisScale(x_low, x_high, left, right)
    y_scale = AxisScale(low, high, bottom, top, frame.is_y_log)
    return _Canvas(frame, left, right, top, bottom, x_scale, y_scale, legend_top, rows)


def _draw_axes(canvas: _Canvas) -> None:
    frame = canvas.frame
    out = canvas.parts
    y_ticks = find_ticks(
        canvas.y.low,
        canvas.y.high,
        5 if frame.height >= 200 else 3,
        is_log=frame.is_y_log,
        is_whole=frame.is_y_whole,
    )
    for tick, text in zip(y_ticks, format_ticks(y_ticks), strict=True):
        y = canvas.y(tick)
        out.append(f'<path class="grid" d="M{canvas.left:.1f} {y:.1f}H{canvas.right:.1f}"/>')
        out.append(
            f'<text x="{canvas.left - 7:.1f}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
        )
    num_ticks = max(2, min(8, int((canvas.right - canvas.left) / 64)))
    x_ticks = find_ticks(canvas.x.low, canvas.x.high, num_ticks, is_whole=frame.x_label == "step")
    for tick, text in zip(x_ticks, format_ticks(x_ticks), strict=True):
        x = canvas.x(tick)
        out.append(f'<path class="grid" d="M{x:.1f} {canvas.bottom:.1f}v4"/>')
        half = _CHARACTER_PIXELS * len(text) / 2
        x = min(x, frame.width - 2 - half)  # keep the last one inside the picture
        out.append(
            f'<text x="{x:.1f}" y="{canvas.bottom + 17:.1f}" text-anchor="middle">{text}</text>'
        )
    scale_note = ", log scale" if frame.is_y_log else ""
    out.append(f'<text x="4" y="{canvas.top - 12:.0f}">{escape(frame.y_label)}{scale_note}</text>')
    out.append(
        f'<text x="{canvas.right:.1f}" y="{canvas.bottom + 31:.1f}" '
        f'text-anchor="end">{escape(frame.x_label)}</text>'
    )


def _draw_marks(canvas: _Canvas) -> None:
    for value, label in canvas.frame.rules:
        y = canvas.y(value)
        if canvas.top <= y <= canvas.bottom:
            canvas.parts.append(
                f'<path class="rule" d="M{canvas.left:.1f} {y:.1f}H{canvas.right:.1f}"/>'
            )
            canvas.parts.append(
                f'<text x="{canvas.right - 4:.1f}" y="{y - 5:.1f}" '
                f'text-anchor="end">{escape(label)}</text>'
            )
    labels: list[tuple[int, float, float]] = []  # row, left and right end of each
    for value, label in canvas.frame.marks:
        x = canvas.x(value)
        if canvas.left <= x <= canvas.right:
            anchor, shift = ("end", -4) if x > (canvas.left + canvas.right) / 2 else ("start", 4)
            width = len(label) * _CHARACTER_PIXELS
            left = x + shift - (width if anchor == "end" else 0.0)
            used_rows = {row for row, start, end in labels if start < left + width and left < end}
            row = next(row for row in count() if row not in used_rows)
            labels.append((row, left, left + width))
            canvas.parts.append(
                f'<path class="mark" d="M{x:.1f} {canvas.top:.1f}V{canvas.bottom:.1f}"/>'
            )
            canvas.parts.append(
                f'<text x="{x + shift:.1f}" y="{canvas.top + 9 + 14 * row:.1f}" '
                f'text-anchor="{anchor}">{escape(label)}</text>'
            )


def _draw_series(canvas: _Canvas, item: Series, below: Series | None) -> str:
    buckets = max(20, int((canvas.right - canvas.left) / 2.5))
    if item.style == "area":
        points = list(_compute_points(canvas, item.x, item.y))
        base = (
            list(_compute_points(canvas, below.x, below.y))
            if below is not None
            else [(x, canvas.bottom) for x, _ in points]
        )
        if len(points) == 1:  # a bar: an area of no width cannot be seen
            points, base = (
                [(x + shift, y) for x, y in place for shift in (-6.0, 6.0)]
                for place in (points, base)
            )
        return (
            f'<path class="area f{item.palette_index}" style="fill:var(--c{item.palette_index})" '
            f'd="{_format_path(points + base[::-1])}Z"/>'
        )
    x, y = thin_points(item.x, item.y, buckets)
    points = _compute_points(canvas, x, y)
    if item.style == "dots":
        dots = _draw_dots(points[:: max(1, len(points) // 60)], item.palette_index)
        return f'<path class="dashed s{item.palette_index}" d="{_format_path(points)}"/>{dots}'
    if len(points) == 1:  # a line of no length cannot be seen
        return _draw_dots(points, item.palette_index)
    # When the palette repeats, dashes distinguish the curves.
    style = "dashed" if item.style == "line" and item.colour >= NUM_COLOURS else item.style
    return f'<path class="{style} s{item.palette_index}" d="{_format_path(points)}"/>'


def _draw_dots(points: list[tuple[float, float]], colour: int) -> str:
    return "".join(
        f'<circle class="dot f{colour}" cx="{x:.1f}" cy="{y:.1f}" r="3.2"/>' for x, y in points
    )


def _compute_points(canvas: _Canvas, x: FloatArray, y: FloatArray) -> list[tuple[float, float]]:
    # Limiting points far outside the chart keeps the numbers short.
    low = canvas.top - 500
    high = canvas.bottom + 500
    return [
        (canvas.x(a), min(high, max(low, canvas.y(b))))
        for a, b in zip(x.tolist(), y.tolist(), strict=True)
    ]


def _format_path(points: list[tuple[float, float]]) -> str:
    """Format a path with relative moves in tenths of a pixel, half as long as absolute ones."""
    if not points:
        return ""
    tenths = [(round(x * 10), round(y * 10)) for x, y in points]
    moves = "".join(
        f"{(b[0] - a[0]) / 10:g},{(b[1] - a[1]) / 10:g} " for a, b in pairwise(tenths) if a != b
    )
    head = f"M{tenths[0][0] / 10:g},{tenths[0][1] / 10:g}"
    return f"{head}l{moves.strip()}" if moves else f"{head}h0.1"


def _draw_names(canvas: _Canvas, visible_series: list[Series]) -> None:
    labelled = [s for s in visible_series if s.is_labelled]
    if canvas.legend_rows:
        tones = {s.name: s.palette_index for s in labelled}
        for row, names in enumerate(canvas.legend_rows):
            x = 4.0
            y = canvas.legend_top + 13 + 18 * row
            for name in names:
                canvas.parts.append(
                    f'<text class="f{tones[name]}" x="{x:.0f}" '
                    f'y="{y:.0f}">{escape(shorten(name, 40))}</text>'
                )
                x += _measure_legend(name)
        return
    positions = []
    below: float = canvas.bottom
    for item in labelled:
        finite = np.flatnonzero(np.isfinite(item.y))
        y = min(canvas.bottom, max(canvas.top, canvas.y(float(item.y[finite[-1]]))))
        if item.style == "area":  # its name is in the middle of its band
            y, below = (y + below) / 2, y
        positions.append((y, item))
    positions.sort(key=lambda pair: pair[0])
    max_characters = int((canvas.frame.width - canvas.right - 8) / _CHARACTER_PIXELS)
    short_names = shorten_distinctly([item.name for item in labelled], max_characters)
    label_ys = _spread_positions([y for y, _ in positions], 15, canvas.top, canvas.bottom)
    for y, (_, item) in zip(label_ys, positions, strict=True):
        canvas.parts.append(
            f'<text class="f{item.palette_index}" x="{canvas.right + 8:.1f}" '
            f'y="{y + 4:.1f}">{escape(short_names[item.name])}</text>'
        )


def _spread_positions(positions: list[float], gap: float, top: float, bottom: float) -> list[float]:
    """Move ascending positions as little as possible so that they are `gap` apart and inside.

    >>> _spread_positions([10.0, 11.0, 50.0], 15, 0, 100)
    [10.0, 25.0, 50.0]
    """
    placed = list(positions)
    for index in range(1, len(placed)):
        placed[index] = max(placed[index], placed[index - 1] + gap)
    if placed and placed[-1] > bottom:
        placed[-1] = bottom
        for index in range(len(placed) - 2, -1, -1):
            placed[index] = min(placed[index], placed[index + 1] - gap)
    return placed


def _layout_legend(names: list[str], width: float) -> list[list[str]]:
    rows: list[list[str]] = []
    used = 0.0
    for name in dict.fromkeys(names):
        needed = _measure_legend(name)
        if not rows or used + needed > width:
            rows.append([])
            used = 0.0
        rows[-1].append(name)
        used += needed
    return rows


def _measure_legend(name: str) -> float:
    return _CHARACTER_PIXELS * min(40, len(name)) + 16
