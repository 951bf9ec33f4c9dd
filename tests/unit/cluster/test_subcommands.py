"""Subcommands of `launch`, and the former spelling with flags."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.cli.main import run
from shardwright.errors import ExitCode

SLURM = ("--nodes", "2", "--gpus-per-node", "4", "--partition", "long", "--time", "12:00:00")


@pytest.mark.parametrize(
    ("launcher", "options"),
    [
        ("slurm", SLURM),
        ("kubernetes", ("--gpus-per-node", "4", "--image", "lab/sw:1", "--namespace", "lab")),
        ("torchrun", ("--gpus-per-node", "4", "--hosts", "one,two", "--json")),
    ],
)
def test_the_flags_of_former_versions_write_the_same(
    recipe: Path, capsys: pytest.CaptureFixture[str], launcher: str, options: tuple[str, ...]
) -> None:
    assert run(["launch", launcher, str(recipe), *options]) == ExitCode.DONE
    expected = capsys.readouterr()
    for former in (
        [str(recipe), f"--{launcher}", *options],
        [*options, f"--{launcher}", str(recipe)],
    ):
        assert run(["launch", *former]) == ExitCode.DONE
        output = capsys.readouterr()
        assert output.out == expected.out
        note, _, notes = output.err.partition("\n")
        assert note.endswith(f"is now spelled `shardwright launch {launcher} RECIPE`")
        assert notes == expected.err


@pytest.mark.parametrize(
    ("launcher", "other_option"),
    [
        ("slurm", ["--hosts", "a"]),
        ("kubernetes", ["--partition", "long"]),
        ("torchrun", ["--submit"]),
    ],
)
def test_a_subcommand_has_only_its_own_options(
    recipe: Path, capsys: pytest.CaptureFixture[str], launcher: str, other_option: list[str]
) -> None:
    options = ["launch", launcher, str(recipe), "--gpus-per-node", "2", *other_option]
    assert run(options) == ExitCode.WRONG_INPUT
    assert f"No such option: {other_option[0]}" in capsys.readouterr().err
    run(["launch", launcher, "--help"])
    assert other_option[0] not in capsys.readouterr().out.split()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["slurm", "--gpus-per-node", "2", "--time", "soon"], "--time"),
        (["slurm", "--gpus-per-node", "2", "--time", "5"], "more than --save-seconds (300"),
        (["kubernetes", "--gpus-per-node", "2"], "--image"),
        (["torchrun", "--gpus-per-node", "2", "--nodes", "2"], "--hosts"),
    ],
)
def test_wrong_input_of_a_subcommand_names_the_option(
    recipe: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    launcher, *options = arguments
    assert run(["launch", launcher, str(recipe), *options]) == ExitCode.WRONG_INPUT
    assert message in capsys.readouterr().err


def test_a_misspelled_launcher_gets_a_suggestion(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["launch", "slrum", str(recipe), "--nodes", "2"]) == ExitCode.WRONG_INPUT
    assert "got slrum" in (message := capsys.readouterr().err)
    assert "Did you mean `slurm`?" in message
