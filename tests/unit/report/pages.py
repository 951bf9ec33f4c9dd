"""Rendering and parsing of report pages in tests."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

from shardwright.report.recorded_run import load_runs
from shardwright.report.run_page import render_page

VOID = {"meta", "link"}


class PageParser(HTMLParser):
    """HTML parser that fails on unbalanced tags and collects ids and links."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attributes:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "srcset", "action", "xlink:href"):
                self.links.append(value or "")

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag


def render(*paths: Path) -> str:
    return render_page(load_runs(paths))
