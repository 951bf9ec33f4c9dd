"""The guide is true: every command in it runs, links lead somewhere, and what is read off the code
is up to date.
"""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

from shardwright.cli.main import build_app, run

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [DOCS / "guide.md", *sorted((DOCS / "cuts").glob("*.md"))]
ALL_PAGES = [ROOT / "README.md", *sorted(DOCS.glob("**/*.md"))]
_BLOCK = re.compile(r"^```console(?P<long> long)?\n(?P<lines>.*?)^```", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Command:
    """A line of a `console` block: its words, and the exit codes that the page says it leaves
    with.
    """

    line: str
    codes: tuple[int, ...]
    long: bool

    @property
    def words(self) -> list[str]:
        return shlex.split(self.line)


def commands() -> list[Command]:
    found = []
    for page in PAGES:
        for block in _BLOCK.finditer(page.read_text(encoding="utf-8")):
            for line in block["lines"].splitlines():
                if line.startswith("$ "):
                    shown, _, remark = line.removeprefix("$ ").partition("   # exit code ")
                    codes = tuple(int(word) for word in remark.split(" or ")) if remark else (0,)
                    found.append(Command(shown, codes, bool(block["long"])))
    return list(dict.fromkeys(found))


def checkout(folder: Path) -> Path:
    """A folder that looks like the repository, where runs may be written."""
    for name in ("recipes", "docs"):
        (folder / name).symlink_to(ROOT / name)
    return folder


@pytest.mark.parametrize(
    "command",
    [command for command in commands() if not command.long],
    ids=lambda command: command.line,
)
def test_what_the_guide_shows_runs(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkout(tmp_path))
    assert command.words[0] == "shardwright"
    assert run(command.words[1:]) in command.codes


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_what_takes_longer_runs_from_top_to_bottom(tmp_path: Path) -> None:
    """In the page's order, in one folder: later lines go on with what earlier ones left."""
    folder = checkout(tmp_path)
    for command in commands():
        if command.long:
            words = [sys.executable, "-m", *command.words]
            done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
            assert done.returncode in command.codes, (
                f"{command.line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
            )


def test_pages_read_off_the_code_are_up_to_date() -> None:
    pages: dict[Path, str] = runpy.run_path(str(DOCS / "generate.py"))["pages"]()
    stale = [
        str(path.relative_to(ROOT))
        for path, text in pages.items()
        if path.read_text(encoding="utf-8") != text
    ]
    assert not stale, "run `python docs/generate.py`"


def text_of(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(
        r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )


def anchors_of(page: Path) -> set[str]:
    """What a link may name behind `#`: headings, as GitHub spells them."""
    headings = re.findall(r"^#+ +(.*)$", text_of(page), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings
    }


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        if "://" not in link:
            assert target.exists(), link
            assert not anchor or anchor in anchors_of(target), link


def parse(command: Any, words: list[str]) -> None:
    """Take a command line apart as the program would, without running it; a word that it does not
    know is its own error.
    """
    context = command.make_context("shardwright", list(words))
    if hasattr(command, "resolve_command"):
        _, called, rest = command.resolve_command(context, list(words))
        parse(called, rest)


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_that_a_page_shows_is_understood(page: Path) -> None:
    """Those outside the guide, too, which need data or a cluster to run: their verbs and options
    exist.
    """
    for line in re.findall(
        r"^ *(?:\$ |srun .*?)?shardwright ((?!is )[a-z]+ .*)$",
        page.read_text(encoding="utf-8"),
        re.MULTILINE,
    ):
        words = shlex.split(re.split(r" +# ", line)[0])
        parse(typer.main.get_command(build_app(words[0])), words)


def test_every_cut_has_a_page_with_a_picture() -> None:
    for page in PAGES[1:]:
        text = page.read_text(encoding="utf-8")
        assert "```text" in text or "](../images/" in text
    shown = {page.stem for page in PAGES[1:]}
    assert shown == {"data", "tensor", "pipeline", "context", "expert"}
    guide = PAGES[0].read_text(encoding="utf-8")
    assert all(f"(cuts/{name}.md)" in guide for name in shown)
