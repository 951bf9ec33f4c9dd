"""The `train` verb on sparse models: sharded experts give the losses of one process, loads are
logged, wrong recipes refused.
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


def read_steps(folder: Path, run: str) -> list[StepEvent]:
    return list(select_surviving_steps(read_events(folder / run)))


def test_sharded_experts_have_the_losses_of_one_process(tmp_path: Path) -> None:
    write_recipe(
        tmp_path,
        DEEPSEEK,
        {"balance_loss_coefficient": 0.01, "capacity_factor": 1.5, "bias_update_rate": 0.01},
    )
    padded = "ep=2,zero_stage=2,expert_dispatch=padded,expert_row_limit=1"
    for run, words in (
        ("one", ["--nproc", "1"]),
        ("two", ["--nproc", "2", "--layout", padded]),
    ):
        process = train(tmp_path, run, *words)
        assert process.returncode == 0, process.stderr
    one = read_steps(tmp_path, "one")
    two = read_steps(tmp_path, "two")
    assert len(one) == len(two) == STEPS
    for one_step, other_step in zip(one, two, strict=True):
        assert other_step.loss == pytest.approx(one_step.loss, rel=1e-5)
        assert other_step.balance_loss == pytest.approx(one_step.balance_loss, rel=1e-4)
        assert other_step.expert_tokens == one_step.expert_tokens
        assert other_step.dropped_choices == one_step.dropped_choices
    warnings = [event for event in read_events(tmp_path / "two") if event.kind == "warning"]
    repeated = [event for event in warnings if "repeated with exact exchanges" in event.message]
    assert [event.step for event in repeated] == [1, 2, 3]
    assert "from now on the limit is 1.5 times" in repeated[-1].message
    counts = [step.expert_tokens for step in two]
    assert [tokens is not None for tokens in counts] == [False, True, False, True, False]
    tokens = counts[1]
    assert tokens is not None
    # One sparse layer, three experts per token.
    assert [sum(layer) for layer in tokens] == [8 * 24 * 3]
    assert two[1].expert_load == pytest.approx(max(tokens[0]) * 8 / (8 * 24 * 3))


@pytest.mark.parametrize(
    ("moe", "words", "message"),
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
def test_wrong_input_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    moe: dict[str, Any],
    words: list[str],
    message: str,
) -> None:
    write_recipe(tmp_path, MIXTRAL, moe)
    command = ["train", str(tmp_path / "recipe.yaml"), "--run-dir", str(tmp_path / "run"), *words]
    assert shardwright(command) == ExitCode.WRONG_INPUT
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
