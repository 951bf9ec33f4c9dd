"""Exit codes of the command line; --json always prints one object."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardwright.cli.main import run
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
def test_parser_errors_are_json_objects_too(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words) == ExitCode.WRONG_INPUT
    captured = capsys.readouterr()
    output = json.loads(captured.out)
    assert output["schema_version"] == 1
    assert output["error"]["exit_code"] == ExitCode.WRONG_INPUT
    assert output["error"]["message"] in captured.err


@pytest.mark.parametrize(
    ("error", "message", "code"),
    [
        (KeyboardInterrupt(), "nothing new was saved", 130),
        (ZeroDivisionError("our own"), "this is a bug in shardwright", 3),
        (OSError(5, "no path"), "this is a bug in shardwright", 3),
    ],
)
def test_unexpected_errors_exit_with_3_and_ctrl_c_with_130(
    error: BaseException,
    message: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def schema() -> None:
        raise error

    monkeypatch.setattr("shardwright.cli.schema.schema_command", schema)
    assert run(["schema"]) == code
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_a_path_without_permission_is_wrong_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def schema() -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/theirs/checkpoints")

    monkeypatch.setattr("shardwright.cli.schema.schema_command", schema)
    assert run(["schema"]) == ExitCode.WRONG_INPUT
    assert capsys.readouterr().err == (
        "error: path: cannot be opened: Permission denied (got /theirs/checkpoints). Ask its owner "
        "for access, or name another path\n"
    )


@pytest.mark.parametrize("words", [["schema"], ["schema", "--json"]])
def test_a_full_disk_behind_the_standard_output_is_no_bug(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        monkeypatch.setattr("sys.stdout", io.TextIOWrapper(full, write_through=True))
        assert run(words) == ExitCode.RUN_FAILED
    assert capsys.readouterr().err.startswith("error: a file or the standard output cannot be")


@pytest.mark.parametrize("words", [["schema"], ["--help"]])
def test_a_reader_that_ends_first_is_no_failed_check(words: list[str]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "wb") as closed:
        ended = subprocess.run(
            [sys.executable, "-m", "shardwright", *words],
            stdout=closed,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert ended.returncode == ExitCode.PIPE_CLOSED
    assert ended.stderr == b""


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("shardwright pl", "plan"),
        ("shardwright plan --cl", "--cluster"),
        ("shardwright checkpoint ve", "verify"),
    ],
)
def test_a_shell_completes_verbs_and_the_options_of_the_typed_one(
    line: str, completed: str, tmp_path: Path
) -> None:
    command = tmp_path / "shardwright"
    command.write_text(
        f"#!{sys.executable}\nfrom shardwright.cli.main import main\nmain()\n", encoding="utf-8"
    )
    command.chmod(0o755)
    script = f"""
        eval "$(shardwright --show-completion bash)"
        COMP_WORDS=({line})
        COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
        _shardwright_completion shardwright
        echo "${{COMPREPLY[@]}}"
    """
    shell = subprocess.run(
        ["bash", "-c", script],
        env={**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert shell.stdout == f"{completed}\n"


@pytest.mark.parametrize("words", [[], ["audit"], ["checkpoint"], ["launch"]])
def test_summaries_of_verbs_fit_80_columns(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    run([*words, "--help"])
    summaries = capsys.readouterr().out.split("Commands:\n")[1].splitlines()
    assert summaries
    assert [line for line in summaries if line.endswith("...")] == []


def test_an_optional_argument_has_one_pair_of_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    run(["verify", "--help"])
    assert "[OPTIONS] [RECIPE]\n" in capsys.readouterr().out


def test_schema_is_one_object_with_and_without_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schema"]) == ExitCode.DONE
    schema = json.loads(capsys.readouterr().out)
    assert run(["schema", "--json"]) == ExitCode.DONE
    line = capsys.readouterr().out
    assert line.count("\n") == 1
    assert json.loads(line) == schema
    assert schema["schema_version"] == 1


@pytest.mark.parametrize(
    "verb", [["report"], ["generate", "--prompt", "x"], ["export", "--out", "x"], ["watch"]]
)
def test_unusable_paths_are_wrong_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: list[str]
) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for path in ("a" * 5000, "a/" * 3000, str(loop)):
        assert run([verb[0], path, *verb[1:]]) == 2
        stderr = capsys.readouterr().err
        assert "bug" not in stderr
        assert len(stderr) < 1000


@pytest.mark.parametrize("verb", ["report", "watch", "convert", "plan", "data", "schedule"])
def test_no_verb_reads_a_device_file(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    assert run([verb, "/dev/zero", *(["--cluster", "8xH100-80GB"] if verb == "plan" else [])]) == 2
    assert "bug" not in capsys.readouterr().err
