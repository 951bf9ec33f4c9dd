"""Files that verbs write: what they replace, and what they leave."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml

from shardwright.cli.main import run
from shardwright.cli.output.page_output import write_page
from shardwright.errors import ExitCode
from tests.unit.test_api import build_recipe

DEEPSPEED = {"train_batch_size": 16, "zero_optimization": {"stage": 2}}


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "ds.json").write_text(json.dumps(DEEPSPEED))
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(build_recipe(tmp_path)))
    return path


@pytest.mark.parametrize(
    "words",
    [
        ["convert", "ds.json"],
        ["launch", "torchrun", "recipe.yaml", "--ranks-per-node", "2", "--gpus-per-node", "0"],
        ["launch", "slurm", "recipe.yaml", "--ranks-per-node", "2", "--gpus-per-node", "0"],
        ["launch", "recipe.yaml", "--torchrun", "--ranks-per-node", "2", "--gpus-per-node", "0"],
        [
            *("plan", "recipe.yaml", "--cluster", "2xcpu", "--emit", "deepspeed"),
            *("--set", "model.config.vocab_size=64"),
        ],
    ],
    ids=["convert", "launch torchrun", "launch slurm", "former launch", "plan --emit"],
)
def test_an_edited_file_is_replaced_only_with_overwrite(
    recipe: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    out = recipe.parent / "out.txt"
    out.write_text("edited by hand\n")
    assert run([*words, "--out", "out.txt"]) == ExitCode.WRONG_INPUT
    assert "--out: the file exists (got out.txt; allowed: a new file)" in capsys.readouterr().err
    assert out.read_text() == "edited by hand\n"
    assert run([*words, "--out", "out.txt", "--overwrite"]) == ExitCode.DONE
    assert out.read_text() != "edited by hand\n"
    assert not list(recipe.parent.glob("*.partial"))
    assert run([*words, "--overwrite"]) == ExitCode.WRONG_INPUT
    assert "--overwrite: there is no file to replace" in capsys.readouterr().err


def test_tune_does_not_replace_its_own_recipe(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = recipe.read_text()
    assert run(["tune", "recipe.yaml", "--out", "recipe.yaml"]) == ExitCode.WRONG_INPUT
    assert "--out: the file exists" in capsys.readouterr().err
    assert recipe.read_text() == text


def test_a_pipe_is_written_into_and_stays(recipe: Path) -> None:
    pipe = recipe.parent / "pipe"
    os.mkfifo(pipe)
    received: list[str] = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_text()))
    reader.start()
    write_page(pipe, "<html>é</html>")
    reader.join(timeout=10)
    assert received == ["<html>é</html>"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_standard_output_in_a_file_is_no_file_that_exists(recipe: Path) -> None:
    words = [sys.executable, "-m", "shardwright", "convert", "ds.json", "--out", "/dev/stdout"]
    out = recipe.parent / "out.yaml"
    out.write_text("# mine\n")
    with out.open("a") as stream:
        subprocess.run(words, stdout=stream, check=True)
    assert out.read_text().startswith("# mine\n# From ds.json (deepspeed)")
    subprocess.run([*words[:-1], "/dev/fd/1"], stdout=subprocess.DEVNULL, check=True)


def test_a_link_and_the_mode_of_its_target_stay(recipe: Path) -> None:
    target = recipe.parent / "job.sh"
    target.write_text("old")
    target.chmod(0o755)
    link = recipe.parent / "link.sh"
    link.symlink_to(target)
    words = ["launch", "slurm", "recipe.yaml", "--ranks-per-node", "2", "--gpus-per-node", "0"]
    assert run([*words, "--out", str(link), "--overwrite"]) == ExitCode.DONE
    assert link.is_symlink()
    assert target.read_text().startswith("#!")
    assert stat.S_IMODE(target.stat().st_mode) == 0o755


def test_a_folder_is_refused_as_an_output_file(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (recipe.parent / "folder").mkdir()
    words = ["convert", "ds.json", "--out", "folder"]
    assert run(words) == ExitCode.WRONG_INPUT
    assert run([*words, "--overwrite"]) == ExitCode.WRONG_INPUT
    assert "--out: cannot be written: Is a directory" in capsys.readouterr().err
    assert (recipe.parent / "folder").is_dir()
