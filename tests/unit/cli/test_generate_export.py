"""The verbs `generate` and `export`: output and exit codes. tests/reference compares exports with
transformers.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.cli.main import run as shardwright
from shardwright.errors import ExitCode
from shardwright.inference.model_source import open_model_source
from tests.unit.training.finished import make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "made").path


def test_text_goes_to_standard_output(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        shardwright(["generate", str(run), "--prompt", "abc", "--max-new-tokens", "7"])
        == ExitCode.DONE
    )
    captured = capsys.readouterr()
    assert captured.out.startswith("abc")
    assert len(captured.out) == 3 + 7 + 1
    assert "7 tokens" in captured.err
    assert "--max-new-tokens reached" in captured.err


def test_generate_json_is_one_object(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "generate",
        str(run),
        "--prompt",
        "abc",
        "--max-new-tokens",
        "100",
        "--checkpoint",
        "best",
        "--json",
    ]
    assert shardwright(words) == ExitCode.DONE
    output = json.loads(capsys.readouterr().out)
    assert (output["schema_version"], output["step"], output["prompt"], output["stopped"]) == (
        1,
        2,
        "abc",
        "positions",
    )
    assert len(output["text"]) == output["num_new_tokens"] == 24 + 1 - 3
    assert shardwright([*words, "--slide"]) == ExitCode.DONE
    assert json.loads(capsys.readouterr().out)["num_new_tokens"] == 100


def test_an_exported_run_generates_the_same_text(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert (
        shardwright(
            ["export", str(run), "--out", str(out), "--dtype", "fp32", "--no-check", "--json"]
        )
        == ExitCode.DONE
    )
    output = json.loads(capsys.readouterr().out)
    assert (output["schema_version"], output["step"], output["dtype"], output["checked"]) == (
        1,
        3,
        "fp32",
        False,
    )
    texts = []
    for source in (run, out):
        assert (
            shardwright(["generate", str(source), "--prompt", "abc", "--seed", "5", "--json"])
            == ExitCode.DONE
        )
        texts.append(json.loads(capsys.readouterr().out)["text"])
    assert texts[0] == texts[1]


def test_export_prints_its_own_lines_only(run: Path, tmp_path: Path) -> None:
    """In a log it ended with a progress bar, and began with torchao's warnings about itself."""
    command = [
        sys.executable,
        "-m",
        "shardwright",
        "export",
        str(run),
        "--out",
        str(tmp_path / "m"),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = ended.stderr.splitlines()
    assert len(lines) == 3, ended.stderr
    assert lines[0].startswith("attention: ")
    assert lines[1].startswith("logits of transformers differ by")
    assert lines[2].endswith("loaded with transformers, logits agree")
    assert ended.stdout == ""


def test_export_uses_the_precision_of_the_training(run: Path, tmp_path: Path) -> None:
    assert (
        shardwright(["export", str(run), "--out", str(tmp_path / "out"), "--no-check"])
        == ExitCode.DONE
    )
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "RUN", "--prompt", "abcX"], "has no id for a character"),
        (["generate", "RUN", "--prompt", "a" * 25], "longer than the model's maximum length"),
        (["generate", "RUN", "--prompt", ""], "the prompt is empty"),
        (["generate", "RUN", "--prompt", "a", "--checkpoint", "9"], "no such checkpoint"),
        (["generate", "RUN", "--prompt", "a", "--dtype", "int4"], "unknown precision"),
        (["generate", "nowhere", "--prompt", "a"], "no model in this folder"),
        (["export", "RUN", "--out", "OCCUPIED"], "--out: the folder is not empty"),
        (["export", "RUN", "--out", "x", "--max-shard-gb", "0"], "max-shard-gb"),
        (["export", "RUN", "--out", "x", "--quantise", "int4"], "fp8-block, fp8-row"),
        (
            ["export", "RUN", "--out", "x", "--quantise", "fp8-block"],
            "not a multiple of the block size 128",
        ),
        (["export", "RUN", "--out", "x", "--quantise-exclude", "*"], "nothing is quantised"),
    ],
)
def test_wrong_input_is_refused(
    run: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    words = [{"RUN": str(run), "OCCUPIED": str(run)}.get(word, word) for word in words]
    assert shardwright(words) == ExitCode.WRONG_INPUT
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
    assert "Traceback" not in captured.err


def test_export_never_replaces_the_checkpoints_of_a_run(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(path for path in run.rglob("*"))
    for out in (run, run / "checkpoints"):
        words = ["export", str(run), "--out", str(out), "--overwrite", "--no-check"]
        assert shardwright(words) == ExitCode.WRONG_INPUT
        assert "Name another folder" in capsys.readouterr().err
    assert sorted(path for path in run.rglob("*")) == before


def test_export_checks_its_folder_before_it_reads_weights(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("the source was opened")

    monkeypatch.setattr("shardwright.inference.model_source.open_model_source", fail)
    (tmp_path / "notes.txt").write_text("mine")
    words = ["export", str(run), "--out", str(tmp_path)]
    assert shardwright(words) == ExitCode.WRONG_INPUT


def test_export_never_replaces_the_base_of_adapters(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
    opened = replace(open_model_source(run), base=str(base))
    monkeypatch.setattr("shardwright.inference.model_source.open_model_source", lambda *_: opened)
    words = ["export", str(run), "--out", str(base), "--overwrite", "--no-check"]
    assert shardwright(words) == ExitCode.WRONG_INPUT
    assert (base / "config.json").read_text() == "{}"
