"""SVG drawing of a simulated schedule, self-contained and readable on light and dark pages."""

from __future__ import annotations

from html import escape

from shardwright.schedule.actions import ACTION_KINDS
from shardwright.schedule.simulation import Timeline

_LEFT_PIXELS = 58
_RIGHT_PIXELS = 14
_TOP_PIXELS = 44
_ROW_PIXELS = 26
_BAR_PIXELS = 22
_MIN_LABEL_PIXELS = 11
"""Pixels of width below which an action has no number."""

_MIN_FULL_LEGEND_PIXELS = 480
"""Pixels of width below which the legend has letters in place of words."""

BARS_STYLE = """
.schedule .n{font-size:11px;fill:#111;text-anchor:middle}
.schedule .g{stroke:#8886;stroke-width:1}
.schedule .p{fill:#8882}
.schedule .h{font-weight:600}
.schedule .F0{fill:#9ecbff}.schedule .F1{fill:#5fa8f0}\
.schedule .B0{fill:#8fdcb0}.schedule .B1{fill:#4fbf85}
.schedule .I0{fill:#b9ecc9}.schedule .I1{fill:#7fd6a2}\
.schedule .W0{fill:#ffd98a}.schedule .W1{fill:#eebb4d}
"""
"""CSS that a page with an inline drawing needs besides its own text style."""

_STYLE = f"""
text{{font:12px system-ui,-apple-system,"Segoe UI",sans-serif;fill:#333}}{BARS_STYLE}
@media (prefers-color-scheme:dark){{text{{fill:#ddd}}}}
"""


def draw_inline_svg(
    timeline: Timeline, width: int, *, until: float | None = None, unit: str = "units of time"
) -> str:
    """Draw the schedule for a page that has `BARS_STYLE`: without own style, heading or ids.

    Args:
        until: end of the time axis, so that two drawings share it; default the last action's
            end.
    """
    schedule = timeline.schedule
    total = max(timeline.step_seconds, until or 0.0)
    scale = (width - _LEFT_PIXELS - _RIGHT_PIXELS) / total
    height = _TOP_PIXELS + _ROW_PIXELS * schedule.num_ranks + 40
    utilisation = f"ranks compute {timeline.utilisation:.1%} of"
    description = f"{schedule}: {utilisation} {timeline.step_seconds:.4g} {unit}"
    out = [
        f'<svg class="plot schedule" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(description, quote=True)}">',
        _draw_end_text(width, 18, f"{utilisation} the step"),
        *_draw_legend(timeline, is_short=width < _MIN_FULL_LEGEND_PIXELS),
    ]
    for rank in range(schedule.num_ranks):
        out += _draw_bars(timeline, rank, scale)
    return "".join([*out, *_draw_axis(schedule.num_ranks, total, scale, width, unit), "</svg>"])


def draw_svg(timeline: Timeline) -> str:
    """Draw the schedule as an SVG file: a row per rank, a bar per action, time on the x axis.

    Each bar has the number of its micro-batch.
    """
    schedule = timeline.schedule
    total = timeline.step_seconds
    width = 960
    scale = (width - _LEFT_PIXELS - _RIGHT_PIXELS) / total
    height = _TOP_PIXELS + _ROW_PIXELS * schedule.num_ranks + 40
    description = (
        f"{schedule}. The step takes {total:g} units of time; ranks compute "
        f"{timeline.utilisation:.1%} of it. "
        "A row per rank, a bar per action with the number of its micro-batch."
    )
    out = [
        '<svg class="schedule" xmlns="http://www.w3.org/2000/svg" '
        f'viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="img" aria-labelledby="t d">',
        f'<title id="t">{escape(str(schedule))}</title><desc id="d">{escape(description)}</desc>'
        f"<style>{_STYLE}</style>",
        f'<text class="h" x="{_LEFT_PIXELS}" y="18">{escape(str(schedule))}</text>',
        _draw_end_text(width, 18, f"utilisation {timeline.utilisation:.1%}"),
        *_draw_legend(timeline),
    ]
    for rank in range(schedule.num_ranks):
        out += _draw_bars(timeline, rank, scale)
    out += _draw_axis(schedule.num_ranks, total, scale, width, "units of time")
    return "\n".join([*out, "</svg>"]) + "\n"


def _draw_axis(num_ranks: int, total: float, scale: float, width: int, unit: str) -> list[str]:
    bottom = _TOP_PIXELS + _ROW_PIXELS * num_ranks
    out = []
    ticks = _choose_ticks(total)
    for tick in ticks[:: -(-len(ticks) * 40 // width)]:
        x = _LEFT_PIXELS + tick * scale
        out.append(
            f'<path class="g" d="M{x:.1f} {bottom}v5"/>'
            f'<text x="{x:.1f}" y="{bottom + 19}" text-anchor="middle">{tick:g}</text>'
        )
    return [*out, _draw_end_text(width, bottom + 35, escape(unit))]


def _draw_end_text(width: int, y: int, text: str) -> str:
    """Draw a text that ends where the bars end."""
    return f'<text x="{width - _RIGHT_PIXELS}" y="{y}" text-anchor="end">{text}</text>'


def _draw_bars(timeline: Timeline, rank: int, scale: float) -> list[str]:
    top = _TOP_PIXELS + _ROW_PIXELS * rank
    stages = timeline.schedule.stages_of(rank)
    out = [
        f'<text x="0" y="{top + 15}">rank {rank}</text>',
        f'<rect class="p" x="{_LEFT_PIXELS}" y="{top}" '
        f'width="{timeline.step_seconds * scale:.1f}" height="{_BAR_PIXELS}"/>',
    ]
    for action, start, end in zip(
        timeline.schedule.rows[rank], timeline.starts[rank], timeline.ends[rank], strict=True
    ):
        x = _LEFT_PIXELS + start * scale
        length = (end - start) * scale
        out.append(
            f'<rect class="{action.kind}{stages.index(action.stage) % 2}" x="{x:.1f}" y="{top}" '
            f'width="{max(length - 0.8, 0.4):.1f}" height="{_BAR_PIXELS}" rx="2">'
            f"<title>{action}: {start:.6g} to {end:.6g}</title></rect>"
        )
        if length >= _MIN_LABEL_PIXELS * (0.5 + 0.5 * len(str(action.micro_batch))):
            out.append(
                f'<text class="n" x="{x + length / 2:.1f}" y="{top + 15}">'
                f"{action.micro_batch}</text>"
            )
    return out


def _draw_legend(timeline: Timeline, *, is_short: bool = False) -> list[str]:
    """Draw a swatch per kind that occurs; two if ranks have several stages."""
    schedule = timeline.schedule
    out = []
    x = _LEFT_PIXELS
    shades = 2 if schedule.num_stages > schedule.num_ranks else 1
    for kind, label in (
        (kind, kind if is_short else label) for kind, label in ACTION_KINDS.items()
    ):
        if any(action.kind == kind for row in schedule.rows for action in row):
            out += [
                f'<rect class="{kind}{shade}" x="{x + 13 * shade}" y="26" width="12" '
                'height="10" rx="2"/>'
                for shade in range(shades)
            ]
            out.append(f'<text x="{x + 13 * shades + 4}" y="35">{label}</text>')
            x += 13 * shades + 24 + 7 * len(label)
    if shades == 2 and not is_short:
        out.append(f'<text x="{x}" y="35">darker: a rank\'s second, fourth, ... stage</text>')
    return out


def _choose_ticks(total: float) -> list[float]:
    """Choose about ten round numbers from 0 to the end."""
    step = 1.0
    while total / step > 14:
        step *= 10
    while total / step < 1.4:
        step /= 10
    step = next(step * part for part in (0.1, 0.2, 0.5, 1.0) if total / (step * part) <= 14)
    return [number * step for number in range(int(total / step + 1e-9) + 1)]
