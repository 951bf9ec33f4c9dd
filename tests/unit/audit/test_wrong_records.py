"""Damaged, incomplete and unfit records: an error that names the problem, exit code 2."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwright.audit.recorder import Recorder, RecorderError
from shardwright.cli.main import run as shardwright
from shardwright.errors import ExitCode
from tests.unit.audit.simulated_trainer import Run, build_initial_model, simulate


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clean") / "audit"
    simulate(folder, Run())
    return folder


def edit(folder: Path, rank: int, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / f"step-000001/rank-{rank:05d}.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def shift_box(start: int) -> Callable[[dict[str, Any]], None]:
    def change(values: dict[str, Any]) -> None:
        info = values["parameters"]["lm_head.weight"]
        info["boxes"] = [[[0, 0], [start, 0], info["shape"]]]
        info["shape"] = [2 * info["shape"][0], info["shape"][1]]

    return change


def remove_labels(folder: Path) -> None:
    path = folder / "step-000001/rank-00000.safetensors"
    tensors = {key: t for key, t in load_file(path).items() if not key.endswith("labels")}
    save_file(tensors, path)


WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a missing rank": (
        lambda folder: (folder / "step-000001/rank-00001.json").unlink(),
        "rank 1 is missing",
    ),
    "ranks of different steps": (
        lambda folder: edit(folder, 1, lambda values: values.update(step=2)),
        "ranks recorded different steps",
    ),
    "ranks of different runs": (
        lambda folder: edit(folder, 1, lambda values: values.update(world_size=3)),
        "ranks of different runs",
    ),
    "another version": (
        lambda folder: edit(folder, 0, lambda values: values.update(format_version=99)),
        "by another version of the recorder",
    ),
    "a gap": (
        lambda folder: [edit(folder, rank, shift_box(0)) for rank in range(2)],
        "shards of lm_head.weight leave a gap",
    ),
    "an overlap": (
        lambda folder: [edit(folder, rank, shift_box(5 * rank)) for rank in range(2)],
        "shards of lm_head.weight overlap",
    ),
    "no labels": (remove_labels, "has no labels"),
    "a truncated file": (
        lambda folder: (folder / "step-000001/rank-00000.safetensors").write_bytes(b"\0" * 20),
        "rank-00000.safetensors: this file of the recorder cannot be read",
    ),
    "a file that was not copied": (
        lambda folder: (folder / "step-000001/rank-00001.safetensors").unlink(),
        "rank-00001.safetensors: this file of the recorder is missing",
    ),
    "JSON that is no mapping": (
        lambda folder: (folder / "step-000001/rank-00001.json").write_text("[]"),
        "rank-00001.json: this file of the recorder has no format_version",
    ),
    "JSON without a version": (
        lambda folder: (folder / "step-000001/rank-00001.json").write_text("{}"),
        "rank-00001.json: this file of the recorder has no format_version",
    ),
    "text in place of JSON": (
        lambda folder: (folder / "step-000001/rank-00000.json").write_text("[1"),
        "rank-00000.json: this file of the recorder cannot be read",
    ),
    "another model": (
        lambda folder: [
            edit(folder, rank, lambda values: values["config"].update(num_hidden_layers=1))
            for rank in range(2)
        ],
        "the record has a parameter",
    ),
    "no configuration": (
        lambda folder: edit(folder, 0, lambda values: values.update(config=None)),
        "has no Hugging Face configuration",
    ),
    "rows of one data rank differ": (
        lambda folder: edit(folder, 1, lambda values: values.update(data_rank=0)),
        "read different rows",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_record_is_refused(
    clean: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    change, message = WRONG[name]
    folder = tmp_path / "audit"
    shutil.copytree(clean, folder)
    change(folder)
    assert shardwright(["audit", "check", str(folder)]) == ExitCode.WRONG_INPUT
    assert message in " ".join(capsys.readouterr().err.split())


def test_options_are_checked(clean: Path, tmp_path: Path, capsys: Any) -> None:
    for arguments, message in (
        ([str(tmp_path / "absent")], "no such folder"),
        ([str(tmp_path)], "no recorded step"),
        ([str(clean), "--step", "7"], "this step is not recorded"),
        ([str(clean), "--dtype", "int8"], "unknown dtype"),
        ([str(clean), "--objective", "best"], "unknown objective"),
    ):
        assert shardwright(["audit", "check", *arguments]) == ExitCode.WRONG_INPUT
        assert message in " ".join(capsys.readouterr().err.split())


def test_a_wrong_model_folder_is_refused(clean: Path, tmp_path: Path, capsys: Any) -> None:
    model: Any = build_initial_model("llama", 0)
    for name in ("empty", "incomplete", "damaged"):
        model.save_pretrained(tmp_path / name)
    (tmp_path / "empty/model.safetensors").unlink()
    weights = load_file(tmp_path / "incomplete/model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "incomplete/model.safetensors", metadata={"format": "pt"})
    (tmp_path / "damaged/model.safetensors").write_bytes(b"\0" * 20)
    for name, message in (
        ("absent", "--model: not a Hugging Face folder"),
        ("empty", "--model: this folder's weights cannot be loaded"),
        ("incomplete", "--model: this folder lacks 1 weights, such as lm_head.weight"),
        ("damaged", "--model: this folder's weights cannot be loaded"),
    ):
        arguments = ["audit", "check", str(clean), "--model", str(tmp_path / name)]
        assert shardwright(arguments) == ExitCode.WRONG_INPUT, name
        assert message in " ".join(capsys.readouterr().err.split())


def test_the_verb_reports_and_exits(clean: Path, tmp_path: Path, capsys: Any) -> None:
    assert shardwright(["audit", "check", str(clean), "--dtype", "float64"]) == 0
    assert "equal those of one process" in capsys.readouterr().out
    wrong = tmp_path / "wrong"
    simulate(wrong, Run(("mean_of_rank_means",)))
    page = tmp_path / "page.html"
    arguments = ["audit", "check", str(wrong), "--json", "--out", str(page)]
    assert shardwright(arguments) == ExitCode.CHECK_FAILED
    report = json.loads(capsys.readouterr().out)
    assert not report["passed"]
    assert report["diagnoses"][0]["mistakes"] == ["mean_of_rank_means"]
    assert "https://github.com/huggingface/transformers/issues/34242" in str(report["diagnoses"])
    text = page.read_text()
    assert "the loss is averaged per rank" in text
    assert text.count("<rect") > 20
    # The definition of the loss is the user's: here it is what the trainer computes.
    arguments = ["audit", "check", str(wrong), "--objective", "mean_ranks", "--json"]
    shardwright(arguments)
    report = json.loads(capsys.readouterr().out)
    assert all(parameter["passed"] for parameter in report["parameters"])


def test_chosen_parameters_need_the_weights_of_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "audit"
    simulate(folder, Run(recorder={"parameters": "*.layers.0.*"}))
    assert shardwright(["audit", "check", str(folder)]) == ExitCode.WRONG_INPUT
    assert "not recorded, such as" in " ".join(capsys.readouterr().err.split())
    model = build_initial_model("llama", 0)
    model.save_pretrained(tmp_path / "model")
    assert shardwright(["audit", "check", str(folder), "--model", str(tmp_path / "model")]) == 0
    with torch.no_grad():
        changed = build_initial_model("llama", 1)
    changed.save_pretrained(tmp_path / "other")
    capsys.readouterr()
    arguments = ["audit", "check", str(folder), "--model", str(tmp_path / "other")]
    assert shardwright(arguments) == ExitCode.WRONG_INPUT
    assert "are not those of this model" in " ".join(capsys.readouterr().err.split())


def test_a_file_in_place_of_the_folder_is_refused(
    clean: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = clean / "step-000001/rank-00000.json"
    assert shardwright(["audit", "check", str(path)]) == ExitCode.WRONG_INPUT
    assert "rank-00000.json: not a folder. Give the folder" in capsys.readouterr().err


@pytest.mark.parametrize("steps", [5, "5", ["5"], [0], [1.5], [-1]])
def test_steps_that_would_record_nothing_are_refused(tmp_path: Path, steps: Any) -> None:
    with pytest.raises(RecorderError, match="give numbers of steps from 1"):
        Recorder(tmp_path, steps=steps)
