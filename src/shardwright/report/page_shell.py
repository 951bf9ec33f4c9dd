"""Common parts of all pages: HTML shell, style, script, panels with pictures and tables.

`plan`, `schedule` and others write pages with `render_panel_page`; the page of a run (page.py)
uses the same shell.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import resources

from shardwright.report.line_chart import PLOT_STYLE
from shardwright.schedule.svg_chart import BARS_STYLE
from shardwright.version import __version__

PICTURE_SIZES = {"large": (1116, 380), "medium": (560, 290), "narrow": (350, 250)}
"""Width and height in pixels of the versions of each picture; the style shows one of them."""

_MAX_TILES_PER_ROW = 9
"""Tiles of a head that fit in one row of the widest page."""
_CONTENT_SECURITY_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
)


@dataclass(frozen=True)
class Table:
    """Table with the numbers of a picture."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    is_text: bool = False
    """True if the cells are text, aligned to the left."""


@dataclass(frozen=True)
class Panel:
    """Part of a page other than a line chart: pictures by width, a note and a table."""

    key: str
    """Unique key on the page."""
    title: str
    note: str = ""
    pictures: Mapping[str, str] = field(default_factory=dict)
    """SVG by the name of its width; a missing one is replaced by the next narrower."""
    table: Table | None = None
    is_wide: bool = False
    is_table_open: bool = False
    """True if the table is unfolded at first, for panels whose main content it is."""


def render_panel_page(
    title: str, lead: str, panels: Sequence[Panel], *, facts: Sequence[tuple[str, str]] = ()
) -> str:
    """Render a page of panels; `facts` are (name, value) pairs in large print."""
    body = [
        f'<h1>{escape(title)}</h1><p class="lead quiet">{escape(lead)}</p>',
        render_facts(facts),
    ]
    body += [
        '<div class="charts">',
        *(render_panel(panel) for panel in panels),
        "</div>",
        render_footer(""),
    ]
    return render_shell(title, "".join(body))


def render_shell(title: str, body: str, *, live_version: str | None = None) -> str:
    """Render a page around a body; it loads nothing.

    A live page has a version and polls its server for newer ones.
    """
    files = resources.files("shardwright.report")
    style, reader, live = (
        files.joinpath(name).read_text(encoding="utf-8")
        for name in ("page.css", "page.js", "live.js")
    )
    policy = (
        _CONTENT_SECURITY_POLICY
        if live_version is None
        else f"{_CONTENT_SECURITY_POLICY}; connect-src 'self'"
    )
    script = reader if live_version is None else reader + live
    version = "" if live_version is None else f' data-version="{escape(live_version, quote=True)}"'
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<link rel="icon" '
        f'href="data:,"><title>{escape(title)}</title>'
        f"<style>{PLOT_STYLE}{BARS_STYLE}{style}</style></head>\n"
        f"<body><main{version}>{body}</main><script>{script}</script></body></html>\n"
    )


def render_footer(source: str) -> str:
    """Render the footer with the version of shardwright."""
    return f"<footer>Made by shardwright {escape(__version__)}{escape(source)}.</footer>"


def render_facts(facts: Sequence[tuple[str, str]]) -> str:
    """Render tiles with a value and, below it, its name."""
    if not facts:
        return ""
    # No line break between a number and its unit; longer texts may wrap.
    shown = [
        (name, value.replace(" ", "\N{NO-BREAK SPACE}") if len(value) < 10 else value)
        for name, value in facts
    ]
    tiles = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
        for name, value in shown
    )
    # More than fit in one row are divided into two equal ones; else a last one would be alone.
    num_columns = len(facts) if len(facts) <= _MAX_TILES_PER_ROW else (len(facts) + 1) // 2
    return f'<div class="tiles" style="--columns:{num_columns}">{tiles}</div>'


def render_panel(panel: Panel) -> str:
    """Render a panel as HTML."""
    pictures = "".join(
        picture.replace('class="plot', f'class="plot {name}', 1)
        for name in PICTURE_SIZES
        if (picture := panel.pictures.get(name))
    )
    figure = f'<div class="figure">{pictures}</div>' if pictures else ""
    note = f"<p>{escape(panel.note)}</p>" if panel.note else ""
    table = "" if panel.table is None else render_table(panel.table, is_open=panel.is_table_open)
    return (
        f'<section class="card{" wide" if panel.is_wide else ""}" '
        f'id="{escape(panel.key, quote=True)}">'
        f"<h2>{escape(panel.title)}</h2>{note}{figure}{table}</section>"
    )


def render_table(table: Table, *, is_open: bool = False) -> str:
    """Render the table of a picture, folded unless `is_open`."""
    note = f'<p class="quiet">{escape(table.note)}</p>' if table.note else ""
    cells = render_cells(table.columns, table.rows, "words" if table.is_text else "")
    standing = ' class="standing" open' if is_open else ""
    return f"<details{standing}><summary>Table</summary>{note}{cells}</details>"


def render_cells(columns: Sequence[str], rows: Iterable[Sequence[str]], css_class: str = "") -> str:
    """Render a table that scrolls if it is wider than the page."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = "".join("<tr>" + "".join(map(_render_cell, row)) + "</tr>" for row in rows)
    css = f' class="{css_class}"' if css_class else ""
    return (
        '<div class="scroll" '
        f'tabindex="0"><table{css}><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _render_cell(cell: str) -> str:
    """Render a cell; verdicts are coloured."""
    verdict = f' class="{cell}"' if cell in ("pass", "warn", "fail") else ""
    return f"<td{verdict}>{escape(cell)}</td>"
