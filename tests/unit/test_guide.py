"""Every command of the guide runs, every link has a target, and generated pages are up to date."""

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
PAGES = [DOCS / "guide.md", *sorted((DOCS / "parallelism").glob("*.md"))]
ALL_PAGES = [ROOT / "README.md", *sorted(DOCS.glob("**/*.md"))]
_BLOCK = re.compile(r"^```console(?P<long> long)?\n(?P<lines>.*?)^```", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Command:
    """A command line of a `console` block, and the exit codes that the page gives for it."""

    line: str
    codes: tuple[int, ...]
    long: bool

    @property
    def words(self) -> list[str]:
        return shlex.split(self.line)


def list_commands() -> list[Command]:
    listed = []
    for page in PAGES:
        for block in _BLOCK.finditer(page.read_text(encoding="utf-8")):
            for line in block["lines"].splitlines():
                if line.startswith("$ "):
                    shown, _, remark = line.removeprefix("$ ").partition("   # exit code ")
                    codes = tuple(int(word) for word in remark.split(" or ")) if remark else (0,)
                    listed.append(Command(shown, codes, bool(block["long"])))
    return list(dict.fromkeys(listed))


def link_checkout(folder: Path) -> Path:
    """Link the repository's recipes and docs into a folder that runs may write to."""
    for name in ("recipes", "docs"):
        (folder / name).symlink_to(ROOT / name)
    return folder


@pytest.mark.parametrize(
    "command",
    [command for command in list_commands() if not command.long],
    ids=lambda command: command.line,
)
def test_the_short_commands_of_the_guide_run(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(link_checkout(tmp_path))
    assert command.words[0] == "shardwright"
    assert run(command.words[1:]) in command.codes


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_long_commands_of_the_guide_run_in_order(tmp_path: Path) -> None:
    """Run in the page's order and in one folder: later lines use the files of earlier ones."""
    folder = link_checkout(tmp_path)
    for command in list_commands():
        if command.long:
            words = [sys.executable, "-m", *command.words]
            completed = subprocess.run(
                words, cwd=folder, capture_output=True, text=True, check=False
            )
            assert completed.returncode in command.codes, (
                f"{command.line}\n{completed.stdout[-2000:]}\n{completed.stderr[-2000:]}"
            )


def test_generated_pages_are_up_to_date() -> None:
    pages: dict[Path, str] = runpy.run_path(str(DOCS / "generate.py"))["pages"]()
    stale = [
        str(path.relative_to(ROOT))
        for path, text in pages.items()
        if path.read_text(encoding="utf-8") != text
    ]
    assert not stale, "run `python docs/generate.py`"


def read_prose(page: Path) -> str:
    """Return a page without its code blocks."""
    return re.sub(
        r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )


def list_anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, in GitHub's spelling."""
    headings = re.findall(r"^#+ +(.*)$", read_prose(page), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings
    }


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_targets(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", read_prose(page)):
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        if "://" not in link:
            assert target.exists(), link
            assert not anchor or anchor in list_anchors(target), link


def parse_command(command: Any, words: list[str]) -> None:
    """Parse a command line as the program does, without running it."""
    context = command.make_context("shardwright", list(words))
    if hasattr(command, "resolve_command"):
        _, subcommand, rest = command.resolve_command(context, list(words))
        parse_command(subcommand, rest)


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_on_a_page_parses(page: Path) -> None:
    """Commands that need data or a cluster are only parsed: their verbs and options exist."""
    for line in re.findall(
        r"^ *(?:\$ |srun .*?)?shardwright ((?!is )[a-z]+ .*)$",
        page.read_text(encoding="utf-8"),
        re.MULTILINE,
    ):
        words = shlex.split(re.split(r" +# ", line)[0])
        parse_command(typer.main.get_command(build_app(words[0])), words)


def test_every_kind_of_parallelism_has_a_page_with_a_picture() -> None:
    for page in PAGES[1:]:
        text = page.read_text(encoding="utf-8")
        assert "```text" in text or "](../images/" in text
    shown = {page.stem for page in PAGES[1:]}
    assert shown == {"data", "tensor", "pipeline", "context", "expert"}
    guide = PAGES[0].read_text(encoding="utf-8")
    assert all(f"(parallelism/{name}.md)" in guide for name in shown)
