"""The words of source, tests and docs, and the uniqueness of public class names."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architecture import language


@pytest.mark.parametrize("name", language.CHECKED)
def test_the_language_is_plain(name: str) -> None:
    violations = list(language.find_violations([language.REPOSITORY / name]))
    assert not violations, "\n".join(map(str, violations))


def test_the_architecture_page_names_code_that_exists() -> None:
    page = (language.REPOSITORY / "docs/architecture.md").read_text(encoding="utf-8")
    assert language.find_missing_names(page) == []
    assert language.find_missing_names("see `_ROLES_OF_A_FORMER_VERSION`, `ModelShape`") == [
        "_ROLES_OF_A_FORMER_VERSION"
    ]


def test_public_class_names_are_unique() -> None:
    assert not language.find_duplicate_classes()


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("def told(x):\n    return x\n", "banned word 'told' in a name"),
        ("def written(x):\n    return x\n", "function named by a participle"),
        ("def of_step(x):\n    return x\n", "function name is no verb phrase"),
        ('def run(x):\n    """What a rank does."""\n', "docstring opens with 'What'"),
        ('def read_file(x):\n    """Read the file."""\n', "docstring restates the name"),
        ('SIZE = 1\n"""Of this rank."""\n', "attribute docstring is a bare preposition phrase"),
        ("# a model is cut over ranks\n", "banned phrase 'is cut'"),
        ("# the run goes on\n", "banned phrase 'goes on'"),
        ("# see `report.no_such_module`\n", "reference to nothing"),
        ("# see `report.charts.no_such_name`\n", "reference to nothing"),
        ("a, b = 1, 2\n", "packed tuple assignment"),
        ("import logging\nlog = logging.getLogger(__name__)\n", "logger not called `logger`"),
        (f"x = '{'a' * 100}'\n", "line over 100 characters"),
    ],
)
def test_every_rule_finds_its_violation(tmp_path: Path, text: str, rule: str) -> None:
    path = tmp_path / "module.py"
    path.write_text(text)
    assert rule in {violation.rule for violation in language.find_violations([path])}


def test_plain_code_and_fixed_names_pass(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        "import logging\n\nlogger = logging.getLogger(__name__)\n\n\n"
        'def split_rows(overlong):\n    """Return `cut` or drop, as `overlong: cut` says."""\n'
        "    left, right = overlong\n    left, right = right, left\n    return left\n"
        "# `report.charts.build_charts`, `schedule.Schedule`, `training.max_steps`\n"
    )
    assert not list(language.find_violations([path]))
