"""`shardwright schedule`: numbers, charts, files and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwright.cli.main import run
from shardwright.errors import ExitCode


def test_a_named_schedule_is_shown_with_its_numbers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "out.svg"
    assert (
        run(["schedule", "1f1b", "--stages", "4", "--micro-batches", "8", "--svg", str(picture)])
        == ExitCode.DONE
    )
    shown = capsys.readouterr().out
    for words in (
        "no deadlock",
        "72.7%; m / (m + p - 1) = 8 / 11 = 72.7%",
        "37.5%",
        "4 3 2 1",
        "rank 3 ······F0B0",
    ):
        assert words in shown
    assert "warning" not in shown
    assert picture.read_text().startswith("<svg")


def test_too_few_micro_batches_give_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    run(["schedule", "zb_h1", "--stages", "4", "--micro-batches", "4"])
    assert (
        "warning: 4 micro-batches on 4 pipeline ranks: utilisation at most 4 / 7 = 57%"
        in capsys.readouterr().out
    )


def test_json_is_the_only_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    run(
        [
            "schedule",
            "interleaved_1f1b",
            "--stages",
            "2",
            "--micro-batches",
            "2",
            "--virtual-stages",
            "3",
            "--json",
        ]
    )
    out, err = capsys.readouterr()
    output = json.loads(out)
    assert output["schema_version"] == 1
    assert output["rank_of_stage"] == [0, 1, 0, 1, 0, 1]
    assert output["bubble"] == pytest.approx(1 / 6)
    assert "warning" in err


def test_text_survives_a_round_trip_through_a_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run(["schedule", "zbv", "--ranks", "2", "--micro-batches", "4", "--text"])
    text = capsys.readouterr().out
    path = tmp_path / "own.csv"
    path.write_text(text)
    assert run(["schedule", str(path), "--text"]) == ExitCode.DONE
    assert capsys.readouterr().out == text


def test_times_change_the_bubble(capsys: pytest.CaptureFixture[str]) -> None:
    steps = []
    for times in ("1,1,1", "1,1,1,0.5", "2,2,2"):
        run(
            [
                "schedule",
                "1f1b",
                "--stages",
                "2",
                "--micro-batches",
                "4",
                "--times",
                times,
                "--json",
            ]
        )
        steps.append(json.loads(capsys.readouterr().out)["step_time"])
    assert steps[0] < steps[1] < steps[2] == 2 * steps[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["1f1b", "--stages", "4"], "needs --ranks and --micro-batches"),
        (["2f2b", "--stages", "4", "--micro-batches", "4"], "allowed: gpipe, 1f1b"),
        (["1f1b", "--stages", "2", "--micro-batches", "4", "--times", "1,x"], "--times"),
        (["1f1b", "--stages", "2", "--micro-batches", "4", "--times", "0,0,0"], "--times"),
        (
            ["1f1b", "--stages", "2", "--micro-batches", "4", "--text", "--json"],
            "--text and --json both use standard output",
        ),
        (
            ["1f1b", "--stages", "2", "--micro-batches", "4", "--svg", "/nowhere/at/all.svg"],
            "cannot be written",
        ),
        (
            ["1f1b", "--stages", "2", "--micro-batches", "4", "--times", "1e308,1e308,1e308"],
            "--times",
        ),
        (
            ["1f1b", "--stages", "100000", "--micro-batches", "100000"],
            "too large to build and check",
        ),
        (
            [
                "interleaved_1f1b",
                "--stages",
                "4",
                "--micro-batches",
                "8",
                "--virtual-stages",
                str(10**8),
            ],
            "too large to build",
        ),
    ],
)
def test_wrong_input_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["schedule", *arguments]) == ExitCode.WRONG_INPUT
    assert message in capsys.readouterr().err


def test_an_invalid_file_is_refused_with_its_first_fault(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "broken.csv"
    path.write_text("0F0,0F1,0B1,0B0\n1F0,1B0,1F1\n")
    assert run(["schedule", str(path)]) == ExitCode.WRONG_INPUT
    assert "stage 1, micro-batch 1 has F" in capsys.readouterr().err


RECIPE = {
    "model": {
        "config": {
            "model_type": "llama",
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
        }
    },
    "tokenizer": {"kind": "character"},
    "training": {
        "sequence_length": 16,
        "micro_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "max_steps": 1,
    },
}


@pytest.mark.parametrize(
    "command",
    [["train", "--nproc", "2"], ["rehearse", "--world-size", "2"], ["plan", "--cluster", "2xH100"]],
    ids=lambda command: str(command[0]),
)
def test_a_schedule_file_that_would_deadlock_is_refused_in_a_recipe(
    command: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    schedule = tmp_path / "own.csv"
    (tmp_path / "text.txt").write_text("some words of text. " * 100)
    sections = {
        "data": {"sources": [str(tmp_path / "text.txt")]},
        "layout": {"pp": 2, "schedule": str(schedule)},
        "run": {"dir": str(tmp_path / "run"), "device": "cpu"},
    }
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(RECIPE | sections))
    # Rank 0 waits for the gradient of micro-batch 0 before it computes what rank 1 waits for.
    schedule.write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    assert run([command[0], str(recipe), *command[1:]]) == ExitCode.WRONG_INPUT
    error = capsys.readouterr().err
    assert "own.csv: deadlock: " in error
    assert "1F1 needs the message of 0F1 from rank 0 to rank 1" in error
    assert "0B0 needs the message of 1B0 from rank 1 to rank 0" in error
    assert "`shardwright schedule FILE` checks a file" in error
    assert not (tmp_path / "run").exists()
