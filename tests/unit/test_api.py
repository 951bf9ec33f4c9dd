"""The public Python API: `import shardwright as sw`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import shardwright as sw
from shardwright.errors import InputError, RecipeError
from shardwright.telemetry.event_table import build_event_table
from shardwright.telemetry.event_types import EvaluationEvent

ROOT = Path(__file__).parents[2]


def build_recipe(folder: Path) -> dict[str, Any]:
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    return {
        "name": "tiny",
        "model": {
            "config": {
                "model_type": "llama",
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "max_position_embeddings": 64,
            }
        },
        "tokenizer": {"kind": "character"},
        "data": {
            "sources": str(text),
            "validation_fraction": 0.05,
            "validation_split": "tail",
            "cache_dir": str(folder / "cache"),
        },
        "training": {
            "sequence_length": 32,
            "max_steps": 3,
            "learning_rate": 0.01,
            "micro_batch_size": 2,
        },
        "evaluation": {"every_steps": 3},
        "run": {"dir": str(folder / "run"), "device": "cpu"},
    }


def test_the_package_imports_neither_torch_nor_pydantic() -> None:
    code = (
        "import sys, shardwright as sw; sw.__all__\n"
        "heavy = {'torch', 'transformers', 'pydantic', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "sw.load_recipe; sw.plan; sw.train\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_exists_and_is_documented() -> None:
    page = (ROOT / "docs/python.md").read_text(encoding="utf-8")
    for name in sw.__all__:
        assert getattr(sw, name).__doc__, name
        assert name in page
    assert set(sw.__all__) <= set(dir(sw))
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        sw.trian  # noqa: B018


def test_public_names_survive_the_import_of_all_modules() -> None:
    code = (
        "import importlib, pkgutil, shardwright as sw\n"
        "for module in pkgutil.iter_modules(sw.__path__):\n"
        "    if module.name != '__main__':\n"
        "        importlib.import_module('shardwright.' + module.name)\n"
        "from types import ModuleType\n"
        "assert not [name for name in sw.__all__ if isinstance(getattr(sw, name), ModuleType)]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_recipe_is_a_path_a_mapping_or_a_recipe(tmp_path: Path) -> None:
    document = build_recipe(tmp_path)
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(document))
    recipe = sw.load_recipe(document)
    assert sw.load_recipe(path) == sw.load_recipe(str(path)) == sw.load_recipe(recipe) == recipe
    overrides = ["training.max_steps=7"]
    for source in (document, path, recipe):
        changed = sw.load_recipe(source, overrides=overrides, layout="dp_shard=2,zero_stage=3")
        assert changed.training.max_steps == 7
        assert changed.layout.zero_stage == 3
    assert document["training"]["max_steps"] == 3
    with pytest.raises(RecipeError, match="learning_rate"):
        sw.load_recipe(document | {"training": document["training"] | {"learning_rte": 1}})


def test_plan_returns_the_predictions_that_the_command_prints() -> None:
    result = sw.plan(ROOT / "recipes/llama3-8b.yaml", "8xH100-80GB", num_layouts=3)
    assert len(result.predictions) == 3
    assert result.chosen is not None
    speed = f"{result.chosen.tokens_per_second:,.0f}"
    lines = repr(result).splitlines()
    assert len(lines) == 4
    (starred,) = [line for line in lines[1:] if line.endswith("*")]
    assert speed in starred
    shorter = sw.plan(ROOT / "recipes/llama3-8b.yaml", "8xH100-80GB", num_layouts=1)
    lines = repr(shorter).splitlines()
    assert len(lines) == 3
    assert lines[-1].startswith("chosen:")
    assert speed in lines[-1]
    with pytest.raises(InputError, match="missing cluster"):
        sw.plan(ROOT / "recipes/llama3-8b.yaml")
    with pytest.raises(InputError, match="not a precision"):
        sw.plan(ROOT / "recipes/llama3-8b.yaml", "8xH100-80GB", precision="int3")


def test_training_generating_exporting_and_reading_the_run(tmp_path: Path) -> None:
    run = sw.train(build_recipe(tmp_path))
    assert run is not None
    assert repr(run).startswith(f"run tiny ({tmp_path / 'run'}), completed: step 3 of 3, ")
    steps = run.table()
    assert steps["step"] == (1, 2, 3)
    assert steps["loss"] == tuple(run.loss)
    assert [row["step"] for row in sw.load_run(tmp_path / "run").table("step").iterate_rows()] == [
        1,
        2,
        3,
    ]
    assert len(run.table("evaluation")) == 1
    parts: list[str] = []
    completion = sw.generate(run.path, "the", max_new_tokens=5, seed=3, on_text=parts.append)
    assert "".join(parts) == "the" + completion.text
    assert "new_ids" not in repr(completion)
    exported = sw.export(run.path, tmp_path / "model", should_check=False)
    assert (tmp_path / "model/config.json").is_file()
    assert exported.num_parameters > 0
    assert sw.generate(run.path, "the", max_new_tokens=5, seed=3, checkpoint=3) == completion
    again = sw.generate(tmp_path / "model", "the", max_new_tokens=5, seed=3)
    assert again.text == completion.text


def test_a_rehearsal_needs_no_devices(tmp_path: Path) -> None:
    recipe = build_recipe(tmp_path)
    recipe["model"]["config"]["vocab_size"] = 64
    recipe["precision"] = "fp32"
    rehearsal = sw.rehearse(recipe, 1)
    assert rehearsal.disagreement is None
    assert repr(rehearsal).endswith("all collectives match")
    assert rehearsal.device == rehearsal.as_dict()["device"]


def test_a_rehearsal_on_a_missing_device_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    recipe = build_recipe(tmp_path) | {"run": {"device": "cuda"}, "precision": "fp32"}
    with pytest.raises(InputError, match=r"--device: torch finds no CUDA device.*\(got cuda"):
        sw.rehearse(recipe, 1, device="cuda")
    with pytest.raises(InputError, match=r"--device: not a device type"):
        sw.rehearse(recipe, 1, device="gpu")  # type: ignore[arg-type]
    recipe["model"]["config"]["vocab_size"] = 64
    rehearsal = sw.rehearse(recipe, 1)
    assert rehearsal.device == "cpu"
    assert any("--device cuda" in line for line in rehearsal.assumptions)
    assert not any("offload" in line for line in rehearsal.assumptions)
    recipe |= {"run": {"device": "auto"}, "offload": {"optimizer": "host"}}
    assert any("ranks run on GPUs" in line for line in sw.rehearse(recipe, 1).assumptions)
    recipe |= {"offload": {"optimizer": "disk", "parameters": "disk"}}
    (role,) = sw.rehearse(recipe, 1).as_dict()["roles"]
    assert role["disk_bytes"] == role["offloaded_bytes"] + role["offloaded_parameter_bytes"]
    assert min(role["offloaded_bytes"], role["offloaded_parameter_bytes"]) > role["host_bytes"] == 0


def test_event_tables(tmp_path: Path) -> None:
    events = [
        EvaluationEvent(step=s, loss=1.0 / s, perplexity=2.0, tokens=5, seconds=0.1, best=True)
        for s in range(1, 14)
    ]
    table = build_event_table(events, "evaluation")
    assert table["step"] == tuple(range(1, 14))
    lines = repr(table).splitlines()
    assert lines[0] == "evaluation events: 13"
    assert len(lines) == 2 + 10 + 1
    assert "reward_chosen" not in lines[1]
    with pytest.raises(InputError, match=r"no such column.*Did you mean `loss`"):
        table["los"]
    with pytest.raises(InputError, match="unknown event kind"):
        build_event_table(events, "evaluations")
    assert len(build_event_table(events, "step")) == 0


def test_one_text_stands_for_a_list_of_it(tmp_path: Path) -> None:
    document = build_recipe(tmp_path)
    assert sw.load_recipe(document, overrides="training.max_steps=7").training.max_steps == 7
    with pytest.raises(InputError, match=r"--layout zero_stage: not an allowed value \(got 9"):
        sw.verify(document, "zero_stage=9")
    with pytest.raises(InputError, match=r"got float33"):
        sw.verify(document, dtypes="float33")
    with pytest.raises(InputError, match=r"--fix: not a setting that tuning changes \(got batch"):
        sw.tune(document, fixed="batch")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda recipe: sw.load_recipe(3), r"recipe: not a recipe \(got 3; allowed: the path"),
        (lambda recipe: sw.load_recipe(None), r"recipe: not a recipe \(got None"),
        (
            lambda recipe: sw.load_recipe(recipe, layout={"tp": 2}),
            r"layout: not text \(got {'tp': 2}",
        ),
        (
            lambda recipe: sw.plan(recipe, 8),
            r"cluster: not the name of devices \(got 8; allowed: e",
        ),
        (lambda recipe: sw.plan(recipe, "2xcpu", num_layouts=-1), r"num_layouts: too small"),
        (lambda recipe: sw.load_recipe(recipe, overrides=[3]), r"overrides: not texts \(got \[3\]"),
        (lambda recipe: sw.verify(recipe, [3]), r"layouts: not texts \(got \[3\]"),
        (lambda recipe: sw.verify(recipe, dtypes=4), r"dtypes: not texts \(got 4;"),
        (lambda recipe: sw.verify(recipe, max_ranks="2"), r"max_ranks: not a whole number"),
        (lambda recipe: sw.train(recipe, num_ranks="2"), r"num_ranks: not a whole number"),
        (lambda recipe: sw.rehearse(recipe, "4"), r"world_size: not a whole number \(got '4'"),
        (lambda recipe: sw.generate("run", 5), r"prompt: not text \(got 5"),
        (lambda recipe: sw.plan(recipe, "2xcpu", lora_rank=0), r"lora_rank: too small \(got 0; "),
    ],
)
def test_arguments_of_another_type_or_size_are_refused(
    tmp_path: Path, call: Callable[[dict[str, Any]], object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        call(build_recipe(tmp_path))
