"""What every page of ours is made of: the shell with its style and script, cards with pictures, and a table behind each.

`plan`, `schedule` and others write pages with `render_page_of`; a run's own page (page.py) uses the same shell.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import resources

from shardwright import __version__
from shardwright.report.plot import STYLE
from shardwright.schedule.svg import BARS_STYLE

WIDTHS = {"large": (1116, 380), "medium": (560, 290), "narrow": (350, 250)}
"""Pictures are drawn three times, so that text keeps its size from a phone to a desk; the page's style picks one by the room."""

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


@dataclass(frozen=True)
class Table:
    """Numbers behind a picture."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    words: bool = False
    """Whether the cells are text, set to the left."""


@dataclass(frozen=True)
class Panel:
    """A card that is no line chart: a picture for each width of `WIDTHS` that is there, how to read it, and the table behind it."""

    key: str
    """Unique on the page."""
    title: str
    note: str = ""
    pictures: Mapping[str, str] = field(default_factory=dict)
    """SVG by the name of its width; one that lacks is taken from the next narrower."""
    table: Table | None = None
    wide: bool = False
    open_table: bool = False
    """Whether the table stands open: where it is what the card is for."""


def render_page_of(title: str, lead: str, panels: Sequence[Panel], *, facts: Sequence[tuple[str, str]] = ()) -> str:
    """A whole page of cards: `facts` are pairs of a name and a value, shown large."""
    body = [f'<h1>{escape(title)}</h1><p class="lead quiet">{escape(lead)}</p>', render_facts(facts)]
    body += ['<div class="charts">', *(render_panel(panel) for panel in panels), "</div>", render_footer("")]
    return render_shell(title, "".join(body))


def render_shell(title: str, body: str, *, live_version: str | None = None) -> str:
    """The page around a body; nothing in it is fetched. A live page, of a version, asks its server for later ones."""
    files = resources.files("shardwright.report")
    style, reader, live = (files.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js", "live.js"))
    policy = _POLICY if live_version is None else f"{_POLICY}; connect-src 'self'"
    version = "" if live_version is None else f' data-version="{escape(live_version, quote=True)}"'
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{STYLE}{BARS_STYLE}{style}</style></head>\n'
        f"<body><main{version}>{body}</main><script>{reader}{live if live_version is not None else ''}</script></body></html>\n"
    )


def render_footer(source: str) -> str:
    """Who made the page."""
    return f"<footer>Made by shardwright {escape(__version__)}{escape(source)}.</footer>"


def render_facts(facts: Sequence[tuple[str, str]]) -> str:
    """Tiles: a value, and under it what it is."""
    if not facts:
        return ""
    # A number stays beside its unit; words may wrap.
    shown = [(name, value.replace(" ", "\N{NO-BREAK SPACE}") if len(value) < 10 else value) for name, value in facts]
    tiles = "".join(f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for name, value in shown)
    return f'<div class="tiles">{tiles}</div>'


def render_panel(panel: Panel) -> str:
    """A card."""
    pictures = "".join(
        picture.replace('class="plot', f'class="plot {name}', 1) for name in WIDTHS if (picture := panel.pictures.get(name))
    )
    figure = f'<div class="figure">{pictures}</div>' if pictures else ""
    note = f"<p>{escape(panel.note)}</p>" if panel.note else ""
    table = "" if panel.table is None else render_table(panel.table, open_=panel.open_table)
    return (
        f'<section class="card{" wide" if panel.wide else ""}" id="{escape(panel.key, quote=True)}">'
        f"<h2>{escape(panel.title)}</h2>{note}{figure}{table}</section>"
    )


def render_table(table: Table, *, open_: bool = False) -> str:
    """The table behind a picture, folded away unless it stands `open_`."""
    note = f'<p class="quiet">{escape(table.note)}</p>' if table.note else ""
    cells = render_cells(table.columns, table.rows, "words" if table.words else "")
    standing = ' class="standing" open' if open_ else ""
    return f"<details{standing}><summary>Table</summary>{note}{cells}</details>"


def render_cells(columns: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """A table that scrolls by itself where it is wider than the page."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = "".join("<tr>" + "".join(map(_render_cell, row)) + "</tr>" for row in rows)
    of_kind = f' class="{kind}"' if kind else ""
    return f'<div class="scroll" tabindex="0"><table{of_kind}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _render_cell(cell: str) -> str:
    """A cell; a verdict has its colour."""
    verdict = f' class="{cell}"' if cell in ("pass", "warn", "fail") else ""
    return f"<td{verdict}>{escape(cell)}</td>"
