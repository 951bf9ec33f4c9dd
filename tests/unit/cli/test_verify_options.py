"""Options of `verify` that would have no effect are refused."""

from __future__ import annotations

import pytest

from shardwright.cli.main import run
from shardwright.errors import ExitCode


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["recipe.yaml", "--all"], "RECIPE: has no effect with --all"),
        (["--all", "--layout", "zero_stage=3"], "--layout: has no effect with --all"),
        (["--all", "--set", "seed=1"], "--set: has no effect with --all"),
        (["--all", "--nproc", "2"], "--nproc: has no effect with --all"),
        (["--all", "--dtype", "float64"], "--dtype: has no effect with --all"),
        (["--all", "--num-layers", "2"], "--num-layers: has no effect with --all"),
        (["--all", "--hidden-size", "8"], "--hidden-size: has no effect with --all"),
        (["--all", "--sequence-length", "8"], "--sequence-length: has no effect with --all"),
        (["--all", "--full"], "--full: has no effect with --all"),
        (["recipe.yaml", "--max-ranks", "8"], "--max-ranks: applies to --all only (got 8)"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_without_effect_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["verify", *words]) == ExitCode.WRONG_INPUT
    assert message in capsys.readouterr().err
