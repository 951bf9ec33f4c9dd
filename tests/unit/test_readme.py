"""What the README shows is what is there: the recipe, the verbs, the make targets, the links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from shardwright.cli.verbs import VERBS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_recipe_is_the_demo() -> None:
    shown = re.search(r"```yaml\n(.*?)```", README, re.DOTALL)
    assert shown is not None
    assert yaml.safe_load(shown[1]) == yaml.safe_load(
        (ROOT / "recipes" / "demo.yaml").read_text(encoding="utf-8")
    )


def test_every_verb_that_is_typed_exists() -> None:
    typed = set(re.findall(r"^shardwright +(\w+)", README, re.MULTILINE))
    assert typed
    assert typed <= set(VERBS)


@pytest.mark.parametrize("page", ["README.md", "docs/architecture.md"])
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    links = re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8"))
    assert links
    missing = [link for link in links if "://" not in link and not (path.parent / link).exists()]
    assert not missing


def test_every_make_target_is_told() -> None:
    targets = set(
        re.findall(
            r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
        )
    )
    untold = (
        targets
        - set(re.findall(r"`make ([a-z-]+)`", README))
        - {"help", "setup", "format", "clean"}
    )
    assert not untold


def test_nothing_was_left_to_fill_in() -> None:
    assert "<!--" not in README
