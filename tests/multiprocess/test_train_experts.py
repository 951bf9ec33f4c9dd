"""The `train` verb on a sparse model: experts over ranks give the curve of one process, loads are
told, wrong recipes refused.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwright.cli.main import run as shardwright
from shardwright.errors import ExitCode
from shardwright.telemetry.event_log import StepEvent, read_events, select_surviving_steps
from tests import forked
from tests.multiprocess.models import DEEPSEEK, MIXTRAL

STEPS = 5


def write_recipe(folder: Path, config: dict[str, Any], moe: dict[str, Any]) -> None:
    (folder / "corpus.txt").write_text(
        "".join(f"{a} + {b} = {a + b}\n" for a in range(40) for b in range(30))
    )
    recipe = {
        "model": {
            "config": {name: value for name, value in config.items() if name != "vocab_size"}
        },
        "tokenizer": {"kind": "character"},
        "data": {
            "sources": str(folder / "corpus.txt"),
            "packing": "windows",
            "cache_dir": str(folder / "cache"),
        },
        "precision": "fp32",
        "training": {
            "sequence_length": 24,
            "global_batch_size": 8,
            "max_steps": STEPS,
            "learning_rate": 1e-2,
        },
        "moe": moe,
        "run": {"device": "cpu", "log_every_steps": 2},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))


def train(folder: Path, run: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "shardwright",
        "train",
        str(folder / "recipe.yaml"),
        "--run-dir",
        str(folder / run),
        *words,
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return forked.run(command, capture_output=True, text=True, timeout=550, env=environment)


def steps_of(folder: Path, run: str) -> list[StepEvent]:
    return list(select_surviving_steps(read_events(folder / run)))


def test_experts_over_ranks_give_the_curve_of_one_process(tmp_path: Path) -> None:
    write_recipe(
        tmp_path,
        DEEPSEEK,
        {"balance_loss_coefficient": 0.01, "capacity_factor": 1.5, "bias_update_rate": 0.01},
    )
    for run, words in (
        ("one", ["--nproc", "1"]),
        ("two", ["--nproc", "2", "--layout", "ep=2,zero_stage=2"]),
    ):
        done = train(tmp_path, run, *words)
        assert done.returncode == 0, done.stderr
    one = steps_of(tmp_path, "one")
    two = steps_of(tmp_path, "two")
    assert len(one) == len(two) == STEPS
    for alone, together in zip(one, two, strict=True):
        assert together.loss == pytest.approx(alone.loss, rel=1e-5)
        assert together.balance_loss == pytest.approx(alone.balance_loss, rel=1e-4)
        assert together.expert_tokens == alone.expert_tokens
        assert together.dropped_choices == alone.dropped_choices
    told = [step.expert_tokens for step in two]
    assert [tokens is not None for tokens in told] == [False, True, False, True, False]
    tokens = told[1]
    assert tokens is not None
    assert [sum(layer) for layer in tokens] == [
        8 * 24 * 3
    ]  # one sparse layer, three experts a token
    assert two[1].expert_load == pytest.approx(max(tokens[0]) * 8 / (8 * 24 * 3))


@pytest.mark.parametrize(
    ("moe", "words", "told"),
    [
        (
            {"bias_update_rate": 0.1},
            [],
            "moe.bias_update_rate: a mixtral model has no balance biases to update",
        ),
        (
            {},
            ["--nproc", "3", "--layout", "ep=3", "--set", "training.global_batch_size=9"],
            "4 experts do not divide evenly over 3",
        ),
    ],
)
def test_wrong_input(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    moe: dict[str, Any],
    words: list[str],
    told: str,
) -> None:
    write_recipe(tmp_path, MIXTRAL, moe)
    command = ["train", str(tmp_path / "recipe.yaml"), "--run-dir", str(tmp_path / "run"), *words]
    assert shardwright(command) == ExitCode.WRONG_INPUT
    assert told in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
