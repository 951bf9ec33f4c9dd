"""How the command line ends: exit codes, and one object under --json whatever happens."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from shardwright.cli.main import run
from shardwright.cli.verbs import VERBS, Verb
from shardwright.errors import ExitCode


@pytest.mark.parametrize(
    "words",
    [["train", "r.yaml", "--bogus", "--json"], ["tarin", "--json"], ["checkpoint", "bogus", "x", "--json"], ["train", "--json"]],
)
def test_what_the_parser_refuses_is_an_object_too(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words) == ExitCode.WRONG_INPUT
    captured = capsys.readouterr()
    told = json.loads(captured.out)
    assert told["schema_version"] == 1
    assert told["error"]["exit_code"] == ExitCode.WRONG_INPUT
    assert told["error"]["message"] in captured.err


@pytest.mark.parametrize(
    ("raised", "said"), [(KeyboardInterrupt(), "nothing was saved"), (ZeroDivisionError("our own"), "this is a bug in shardwright")]
)
def test_what_no_verb_expects_is_exit_code_3(
    raised: BaseException, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
