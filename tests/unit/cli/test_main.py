"""How the command line ends: exit codes, and one object under --json whatever happens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwright.cli.main import run
from shardwright.cli.verbs import VERBS, Verb
from shardwright.errors import ExitCode


@pytest.mark.parametrize(
    "words",
    [
        ["train", "r.yaml", "--bogus", "--json"],
        ["tarin", "--json"],
        ["checkpoint", "bogus", "x", "--json"],
        ["train", "--json"],
    ],
)
def test_what_the_parser_refuses_is_an_object_too(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words) == ExitCode.WRONG_INPUT
    captured = capsys.readouterr()
    told = json.loads(captured.out)
    assert told["schema_version"] == 1
    assert told["error"]["exit_code"] == ExitCode.WRONG_INPUT
    assert told["error"]["message"] in captured.err


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (KeyboardInterrupt(), "nothing was saved"),
        (ZeroDivisionError("our own"), "this is a bug in shardwright"),
        (OSError(5, "no path"), "this is a bug in shardwright"),
    ],
)
def test_what_no_verb_expects_is_exit_code_3(
    raised: BaseException,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def load() -> Callable[..., None]:
        def verb() -> None:
            raise raised

        return verb

    monkeypatch.setitem(VERBS, "schema", Verb("Raises.", load))
    assert run(["schema"]) == ExitCode.RUN_FAILED
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""


def test_schema_is_one_object_either_way(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schema"]) == ExitCode.DONE
    for_people = json.loads(capsys.readouterr().out)
    assert run(["schema", "--json"]) == ExitCode.DONE
    line = capsys.readouterr().out
    assert line.count("\n") == 1
    assert json.loads(line) == for_people
    assert for_people["schema_version"] == 1


@pytest.mark.parametrize(
    "verb", [["report"], ["generate", "--prompt", "x"], ["export", "--out", "x"], ["watch"]]
)
def test_paths_that_cannot_be_followed_are_wrong_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: list[str]
) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for path in ("a" * 5000, "a/" * 3000, str(loop)):
        assert run([verb[0], path, *verb[1:]]) == 2
        told = capsys.readouterr().err
        assert "bug" not in told
        assert len(told) < 1000


@pytest.mark.parametrize("verb", ["report", "watch", "convert", "plan", "data", "schedule"])
def test_a_device_is_no_file_of_any_verb(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    assert run([verb, "/dev/zero", *(["--cluster", "8xH100-80GB"] if verb == "plan" else [])]) == 2
    assert "bug" not in capsys.readouterr().err
