"""The README agrees with the repository: recipe, verbs, make targets, links."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from shardwright.cli.main import run
from shardwright.cli.verbs import VERBS
from shardwright.errors import ExitCode

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_recipe_is_the_demo() -> None:
    shown = re.search(r"```yaml\n(.*?)```", README, re.DOTALL)
    assert shown is not None
    assert yaml.safe_load(shown[1]) == yaml.safe_load(
        (ROOT / "recipes" / "demo.yaml").read_text(encoding="utf-8")
    )


def test_every_verb_in_the_readme_exists() -> None:
    verbs = set(re.findall(r"^shardwright +(\w+)", README, re.MULTILINE))
    assert verbs
    assert verbs <= set(VERBS)


def test_the_quick_commands_of_the_readme_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHON_STDLIB", str(ROOT))
    lines = re.findall(r"^shardwright +((?:schedule|launch) [^#\n]*)", README, re.MULTILINE)
    assert {line.split()[0] for line in lines} == {"schedule", "launch"}
    for line in lines:
        assert run(shlex.split(line)) == ExitCode.DONE, line


@pytest.mark.parametrize("page", ["README.md", "docs/architecture.md"])
def test_links_have_targets(page: str) -> None:
    path = ROOT / page
    links = re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8"))
    assert links
    missing = [link for link in links if "://" not in link and not (path.parent / link).exists()]
    assert not missing


def test_every_make_target_is_documented() -> None:
    targets = set(
        re.findall(
            r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
        )
    )
    undocumented = (
        targets
        - set(re.findall(r"`make ([a-z-]+)`", README))
        - {"help", "setup", "format", "clean"}
    )
    assert not undocumented


def test_no_placeholder_is_left() -> None:
    assert "<!--" not in README
