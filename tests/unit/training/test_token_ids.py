"""Data of token ids and a model without a tokenizer: everything works that needs no text."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.architecture import read_config
from shardwright.checkpoint.run_folder import RunFolder
from shardwright.cli.main import run
from shardwright.config import Recipe
from shardwright.config.recipe_loading import validate_recipe
from shardwright.data.model_data import prepare_for_model
from shardwright.errors import DataError, RecipeError, TokenizerError
from shardwright.inference.model_source import open_model_source
from shardwright.model.hf.hf_folder import write_hf_folder
from shardwright.model.weight_init import initialise_parameter
from shardwright.training.checks.run_checks import validate_run
from shardwright.training.run import train
from tests.unit.training.finished import CONFIG, make_run

VOCABULARY = 300
SPECIAL = {"bos_token_id": 1, "eos_token_id": [2, 5], "pad_token_id": 0}
MODEL = CONFIG | {"vocab_size": VOCABULARY}


def make_ids(number: int) -> list[int]:
    """Make a document with special ids where a tokenizer would add them."""
    return [1, *((number * 7 + place * 3) % (VOCABULARY - 6) + 6 for place in range(9)), 2]


def write_ids(path: Path, documents: list[list[int]]) -> str:
    path.write_text("".join(json.dumps({"input_ids": document}) + "\n" for document in documents))
    return str(path)


def build_recipe(
    folder: Path, model: dict[str, Any], documents: list[list[int]] | None = None, **sections: Any
) -> Recipe:
    data = {
        "sources": write_ids(
            folder / "ids.jsonl", documents or [make_ids(number) for number in range(40)]
        ),
        "cache_dir": str(folder / "cache"),
        "validation_fraction": 0.2,
    }
    training = {"sequence_length": 16, "micro_batch_size": 2, "max_steps": 2, "learning_rate": 1e-2}
    return validate_recipe(
        {
            "model": model,
            "data": data | sections.pop("data", {}),
            "training": training | sections.pop("training", {}),
            "run": {"dir": str(folder / "run"), "device": "cpu"},
            **sections,
        }
    )


def write_model_folder(path: Path, **config: Any) -> str:
    """Write a folder of weights without a tokenizer."""
    shape = read_config(MODEL | config)
    specs = {spec.name: spec for spec in shape.list_parameters()}
    write_hf_folder(
        path, shape, lambda name: initialise_parameter(specs[name], 1, dtype=torch.float32)
    )
    assert not list(path.glob("tokenizer*"))
    return str(path)


def test_training_evaluation_resume_and_export_work_with_ids(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    model = {"path": write_model_folder(tmp_path / "base", **SPECIAL)}
    first = train(build_recipe(tmp_path, model))
    assert first is not None
    assert math.isfinite(first["validation_loss"])
    resumed = train(build_recipe(tmp_path, model, training={"max_steps": 3}), resume=True)
    assert resumed is not None
    assert (resumed["steps"], resumed["status"]) == (3, "completed")
    assert not (tmp_path / "run" / "tokenizer").exists()

    assert (
        run(["export", str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--dtype", "fp32"])
        == 0
    )
    assert "has no tokenizer: the folder is written without one" in caplog.text
    for name in ("config.json", "generation_config.json"):
        written = json.loads((tmp_path / "out" / name).read_text())
        assert {key: written[key] for key in SPECIAL} == SPECIAL

    for source in ("run", "out"):
        assert run(["generate", str(tmp_path / source), "--prompt", "once"]) == 2
        assert (
            "this model has no tokenizer, which text input and output need"
            in capsys.readouterr().err
        )


def test_a_run_keeps_the_generation_config_of_its_model(tmp_path: Path) -> None:
    """It is exported, and it ends texts, also after the model's folder was removed."""
    base = Path(write_model_folder(tmp_path / "base"))
    generation = {"eos_token_id": [2, 5], "temperature": 0.6, "do_sample": True}
    (base / "generation_config.json").write_text(json.dumps(generation))
    train(build_recipe(tmp_path, {"path": str(base)}))
    shutil.rmtree(base)
    assert open_model_source(tmp_path / "run").generation_config == generation
    out = tmp_path / "out"
    assert run(["export", str(tmp_path / "run"), "--out", str(out), "--no-check"]) == 0
    assert json.loads((out / "generation_config.json").read_text()) == generation


def test_an_inline_model_trains_on_ids(tmp_path: Path) -> None:
    """Special ids absent from the config are exported as null, not as the family's defaults."""
    trained = train(build_recipe(tmp_path, {"config": MODEL}))
    assert trained is not None
    assert run(["export", str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--no-check"]) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {key: config[key] for key in SPECIAL} == dict.fromkeys(SPECIAL)


def test_an_inline_model_without_a_vocabulary_size_is_refused(tmp_path: Path) -> None:
    model = {"config": {key: value for key, value in MODEL.items() if key != "vocab_size"}}
    with pytest.raises(TokenizerError, match="the vocabulary size is unknown") as caught:
        prepare_for_model(build_recipe(tmp_path, model))
    assert caught.value.field == "model.config.vocab_size"


@pytest.mark.parametrize(
    ("vocab_size", "wrong"), [(VOCABULARY, VOCABULARY), (VOCABULARY, 70_000), (70_000, 80_000)]
)
def test_an_id_outside_the_vocabulary_is_named_with_its_record(
    tmp_path: Path, vocab_size: int, wrong: int
) -> None:
    documents = [make_ids(number) for number in range(40)]
    documents[6][4] = wrong
    with pytest.raises((DataError, TokenizerError)) as caught:
        prepare_for_model(
            build_recipe(tmp_path, {"config": MODEL | {"vocab_size": vocab_size}}, documents)
        )
    message = str(caught.value)
    assert f"token id {wrong} in ids.jsonl:7" in message
    assert "ids below" in message
    assert str(vocab_size) in message


def test_features_that_need_text_are_refused(tmp_path: Path) -> None:
    model = {"config": MODEL}
    with pytest.raises(RecipeError, match="samples are text and need a tokenizer") as refused:
        validate_run(build_recipe(tmp_path, model, evaluation={"num_samples": 2}), 1)
    assert refused.value.field == "evaluation.num_samples"
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }}")
    with pytest.raises(TokenizerError, match="a chat template needs a tokenizer") as caught:
        validate_run(build_recipe(tmp_path, model, data={"chat_template": str(template)}), 1)
    assert caught.value.field == "data.chat_template"
    (tmp_path / "text.jsonl").write_text('{"text": "some text"}\n')
    mixed = [write_ids(tmp_path / "ids.jsonl", [make_ids(1)]), str(tmp_path / "text.jsonl")]
    with pytest.raises(TokenizerError, match="no tokenizer is set"):
        validate_run(build_recipe(tmp_path, model, data={"sources": mixed}), 1)


def test_a_missing_tokenizer_of_the_recipe_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(TokenizerError, match="the folder has no tokenizer"):
        validate_run(
            build_recipe(tmp_path, {"config": MODEL}, tokenizer={"path": str(tmp_path / "empty")}),
            1,
        )


def test_the_data_verb_shows_ids_instead_of_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(build_recipe(tmp_path, {"config": MODEL}).model_dump(mode="json")))
    assert run(["data", str(recipe), "--samples", "1"]) == 0
    shown = capsys.readouterr().out
    assert "no tokenizer: samples are token ids, vocabulary of 300" in shown
    assert run(["data", str(recipe), "--samples", "1", "--json"]) == 0
    message = json.loads(capsys.readouterr().out)
    shown_ids = [
        int(word) for span in message["samples"][0]["spans"] for word in span["text"].split()
    ]
    documents = [make_ids(number) for number in range(40)]
    assert shown_ids[: len(documents[0])] in documents


def test_a_run_with_a_removed_tokenizer_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_folder = make_run(tmp_path / "run", steps=(1,), best=None)
    for file in run_folder.tokenizer_path.iterdir():
        file.unlink()
    assert (
        run(["export", str(RunFolder(tmp_path / "run").path), "--out", str(tmp_path / "out")]) == 2
    )
    assert "the folder has no tokenizer" in capsys.readouterr().err
