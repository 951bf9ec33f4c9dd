"""`shardwright plan`: tables, JSON, scaling, reasons and refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest

from shardwright.cli.main import run
from shardwright.config import load_recipe
from shardwright.config.recipe_loading import validate_recipe
from shardwright.errors import ExitCode, LayoutError, RecipeError
from shardwright.hardware import MeasuredProfile, save_profile
from shardwright.hardware.catalog_loading import parse_cluster
from shardwright.launch.auto_layout import resolve_auto_layout
from shardwright.layout import resolve_layout
from shardwright.planner.auto_layout import build_cluster, choose_layout
from shardwright.planner.search.result import EQUAL_STEP_SHARE
from shardwright.planner.uncertainty import ErrorCause, ErrorSpread, ErrorSpreads
from tests.unit.planner import models

RECIPE: dict[str, Any] = {
    "name": "thirteen",
    "model": {"config": models.LLAMA2_13B},
    "data": {"sources": "nowhere"},
    "training": {
        "sequence_length": 4096,
        "global_batch_size": 64,
        "max_steps": 100,
        "learning_rate": 1e-5,
    },
    "precision": "bf16",
}
A100 = ["--cluster", "8xA100-80GB"]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(RECIPE), encoding="utf-8")
    return path


def read_json_output(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_the_cluster_of_the_recipe_is_planned_for_by_default(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", str(recipe), "--json"]) == ExitCode.WRONG_INPUT
    assert "Give it, or set `cluster` in the recipe" in capsys.readouterr().err
    assert run(["plan", str(recipe), "--set", "cluster=8xA100-80GB", "--json"]) == ExitCode.DONE
    assert read_json_output(capsys)["cluster"]["name"] == "8xA100-80GB-SXM"


def test_the_best_layouts_of_a_13b_model_on_eight_gpus(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", str(recipe), *A100, "--top", "5", "--json"]) == ExitCode.DONE
    output = read_json_output(capsys)
    assert output["schema_version"] == 1
    assert [layout["fits"] for layout in output["layouts"]] == [True] * 5
    speeds = [layout["tokens_per_second"] for layout in output["layouts"]]
    assert speeds == sorted(speeds, reverse=True)
    chosen = output["chosen"]
    assert chosen["tokens_per_second"] >= speeds[0] / (1 + EQUAL_STEP_SHARE)
    assert chosen["memory_bytes"]["total"] <= chosen["memory_bytes"]["capacity"]
    parts = chosen["step_seconds"]
    exposed = sum(
        value
        for part, value in parts.items()
        if part not in ("total", "low", "high") and not part.startswith("hidden_")
    )
    assert parts["low"] < parts["total"] < parts["high"]
    assert chosen["memory_bytes"]["low"] < chosen["memory_bytes"]["total"]
    assert re.match(r"measured runs: [1-9]\d* of shardwright, ", output["evidence"])
    assert exposed == pytest.approx(parts["total"])
    assert chosen["days"] == pytest.approx(100 * parts["total"] / 86400)
    assert chosen["gpu_hours"] == pytest.approx(100 * parts["total"] * 8 / 3600)


@pytest.mark.parametrize(
    ("num_cores", "warning"),
    [(4.0, ""), (None, ""), (1.5, "4 ranks share the 1.5 cores of a host (measured profile)")],
)
def test_a_plan_warns_of_cpu_ranks_that_share_cores(
    recipe: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    num_cores: float | None,
    warning: str,
) -> None:
    profile = MeasuredProfile("x86_64", "EPYC-9654", "now", 2**34, 1e10, num_cores=num_cores)
    save_profile(profile, tmp_path / "here.json")
    cluster = ["--cluster", "4xCPU", "--profile", str(tmp_path / "here.json")]
    small = models.CONFIGS["llama"] | {"max_position_embeddings": 4096}
    recipe.write_text(json.dumps(RECIPE | {"model": {"config": small}}), encoding="utf-8")
    assert run(["plan", str(recipe), *cluster, "--json"]) == ExitCode.DONE
    assert ("warning: 4 ranks" in (printed := capsys.readouterr().err)) == bool(warning)
    assert warning in printed


@pytest.mark.parametrize(
    ("words", "rates"),
    [
        ([], "guessed from the"),
        (["--nodes", "2"], "data sheet of EPYC-9654, a whole socket for each rank (`cpu` means"),
    ],
)
def test_a_plan_for_cpus_states_the_source_of_rates(
    recipe: Path, capsys: pytest.CaptureFixture[str], words: list[str], rates: str
) -> None:
    small = models.CONFIGS["llama"] | {"max_position_embeddings": 4096}
    recipe.write_text(json.dumps(RECIPE | {"model": {"config": small}}), encoding="utf-8")
    assert run(["plan", str(recipe), "--cluster", "2xcpu", *words, "--json"]) == ExitCode.DONE
    assert f"rates: {rates}" in capsys.readouterr().err


def test_a_plan_counts_frozen_parameters(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", str(recipe), *A100, "--top", "1", "--json"]

    def plan(*more: str) -> dict[str, Any]:
        assert run([*words, *more]) == ExitCode.DONE
        return read_json_output(capsys)

    whole = plan()
    freeze = ("--set", 'model.freeze=["model.embed_tokens.weight", "model.layers.0.*"]')
    frozen = plan(*freeze)
    assert whole["omissions"] == frozen["omissions"] == []
    for key in ("memory_bytes", "step_seconds"):
        assert frozen["chosen"][key]["total"] < whole["chosen"][key]["total"]
    assert plan(*freeze, "--lora", "8")["chosen"] == plan("--lora", "8")["chosen"]


def test_a_plan_with_adapters_says_that_freeze_changes_nothing(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", str(recipe), *A100, "--top", "1", "--lora", "8"]
    words += ["--set", 'model.freeze=["model.layers.0.*"]']
    assert run([*words, "--json"]) == ExitCode.DONE
    (omission,) = read_json_output(capsys)["omissions"]
    assert omission.startswith("model.freeze: adapters freeze all")
    assert run(words) == ExitCode.DONE
    assert omission in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("dropout", "starts"),
    [
        ({}, ["model.dropout: the model's config drops weights of attention"]),
        ({"attn_pdrop": 0.0}, ["model.dropout: predictions leave out the masks"]),
        ({"attn_pdrop": 0.0, "resid_pdrop": 0.0}, []),
    ],
)
def test_a_plan_says_that_it_leaves_out_dropout(
    recipe: Path, capsys: pytest.CaptureFixture[str], dropout: dict[str, float], starts: list[str]
) -> None:
    sizes = {"vocab_size": 1000, "n_embd": 256, "n_layer": 2, "n_head": 4, "n_positions": 8192}
    config = json.dumps({"model_type": "gpt2", **sizes, **dropout})
    words = ["plan", str(recipe), *A100, "--top", "1", "--json", "--set", f"model.config={config}"]
    for setting, expected in (("config", starts), ("off", [])):
        assert run([*words, "--set", f"model.dropout={setting}"]) == ExitCode.DONE
        omissions = read_json_output(capsys)["omissions"]
        assert len(omissions) == len(expected)
        assert all(map(str.startswith, omissions, expected)), omissions


def test_a_plan_refuses_a_pattern_of_frozen_parameters_that_matches_none(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", str(recipe), *A100, "--set", 'model.freeze=["layers.0.*"]']
    assert run(words) == ExitCode.WRONG_INPUT
    error = " ".join(capsys.readouterr().err.split())
    assert "model.freeze: matches no parameter (got layers.0.*; " in error


def test_tight_layouts_are_marked_and_not_chosen(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", str(recipe), "--cluster", "4xA100-80GB", "--json"]) == ExitCode.DONE
    output = read_json_output(capsys)
    assert output["layouts"][0]["tight"]
    assert not output["chosen"]["tight"]
    assert output["warning"] is None
    memory = output["chosen"]["memory_bytes"]
    assert memory["total"] * (1 + output["memory_error_share"]) <= memory["capacity"]
    assert run(["plan", str(recipe), "--cluster", "4xA100-80GB", "--explain"]) == ExitCode.DONE
    shown = " ".join(capsys.readouterr().out.split())
    assert "%! " in shown
    assert "!: tight: fits as predicted, but with a probability below 90%" in shown
    assert "which fits with a probability of 9" in shown


def test_indistinguishable_layouts_are_marked_and_the_simplest_is_chosen(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", str(recipe), *A100, "--json"]) == ExitCode.DONE
    output = read_json_output(capsys)
    alternatives = output["alternatives"]
    assert output["chosen"]["describe"] in alternatives
    assert len(alternatives) > 1
    fastest = min(layout["step_seconds"]["total"] for layout in output["layouts"])
    for layout in output["layouts"]:
        is_near = layout["step_seconds"]["total"] <= fastest * (1 + EQUAL_STEP_SHARE)
        is_alternative = layout["describe"] in alternatives
        assert is_alternative == (is_near and layout["fit_probability"] >= 0.9)
    assert run(["plan", str(recipe), *A100]) == ExitCode.DONE
    shown = " ".join(capsys.readouterr().out.split())
    assert f": the simplest of {len(alternatives)} indistinguishable layouts (~)" in shown
    assert "its 80% intervals: step " in shown


def test_offloaded_parts_are_planned_by_tier(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = RECIPE | {
        "adapters": {"rank": 8},
        "offload": {"parameters": "disk", "activations": "host"},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(document), encoding="utf-8")
    # More devices would have many times as many layouts.
    assert run(["plan", str(path), "--cluster", "2xA100-80GB", "--json"]) == ExitCode.DONE
    shown = capsys.readouterr()
    assert shown.err == ""
    chosen = json.loads(shown.out)["chosen"]
    assert chosen["parameter_offload"] == "disk"
    memory = chosen["memory_bytes"]
    assert min(memory["host"], memory["disk"]) > 0
    assert memory["offloaded"] == memory["host"] + memory["disk"]


def test_a_tight_choice_gives_a_warning(
    recipe: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(
        "shardwright.planner.predictor.load_error_spreads",
        lambda: ErrorSpreads(
            {
                "time": dict.fromkeys(get_args(ErrorCause), ErrorSpread(0.1, 0.1)),
                "memory": dict.fromkeys(get_args(ErrorCause), ErrorSpread(0.1, 3.0)),
            }
        ),
    )
    assert run(["plan", str(recipe), *A100]) == ExitCode.DONE
    assert "warning: the chosen layout may run out of memory: " in " ".join(
        capsys.readouterr().out.split()
    )
    assert run(["plan", str(recipe), *A100, "--json"]) == ExitCode.DONE
    shown = capsys.readouterr()
    assert "warning: the chosen layout may run out of memory: " in shown.err
    assert json.loads(shown.out)["warning"].startswith("the chosen layout may run out of memory: ")
    assert json.loads(shown.out)["chosen"]["tight"]
    document = RECIPE | {"layout": "auto", "cluster": "8xA100-80GB"}
    with caplog.at_level("WARNING"):
        assert not resolve_auto_layout(validate_recipe(document), 8).layout.auto
    assert (
        "no layout fits with memory to spare; the chosen one may run out of memory" in caplog.text
    )


def test_rejected_textbook_layouts_have_a_reason_and_a_remedy(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(["plan", str(recipe), *A100, "--json"])
    rejected = {entry["name"]: entry for entry in read_json_output(capsys)["rejected"]}
    assert {"one GPU", "DDP"} <= set(rejected)
    num = 13_015_864_320
    assert rejected["DDP"]["needed_bytes"] > 16 * num
    assert rejected["DDP"]["reason"].startswith("needs ")
    assert "zero_stage" in rejected["DDP"]["change"]
    assert rejected["DDP"]["changed"]["fits"]


def test_tables_fit_eighty_columns(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["plan", str(recipe), *A100, "--gpus", "4,8,16", "--explain"]) == ExitCode.DONE
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    for words in (
        "layouts that fit",
        "memory per GPU, GiB",
        "time per step, seconds",
        "rejected",
        "scaling",
        "why",
        "chosen: ",
    ):
        assert words in text
    assert "Low-rank adapters (rank 16)" in text


def test_adapters_and_other_precisions_can_be_planned(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(["plan", str(recipe), *A100, "--json", "--top", "1"])
    full = read_json_output(capsys)["layouts"][0]
    run(["plan", str(recipe), *A100, "--json", "--top", "1", "--lora", "16"])
    lora = read_json_output(capsys)["layouts"][0]
    run(
        [
            "plan",
            str(recipe),
            "--cluster",
            "8xH100-80GB",
            "--json",
            "--top",
            "1",
            "--precision",
            "fp8",
        ]
    )
    fp8 = read_json_output(capsys)["layouts"][0]
    assert lora["tokens_per_second"] > full["tokens_per_second"]
    assert lora["adapter"]["rank"] == 16
    assert fp8["runnable"]
    assert fp8["precision"] == "fp8"


@pytest.mark.parametrize(
    ("cluster", "kind", "reason"),
    [
        ("8xH100-80GB", "bf16", "H100-80GB-SXM multiplies bf16 natively"),
        ("8xV100-32GB", "fp32", "V100-32GB-SXM has no bf16 units"),
    ],
)
def test_precision_auto_follows_the_planned_hardware(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cluster: str, kind: str, reason: str
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        json.dumps({key: value for key, value in RECIPE.items() if key != "precision"}),
        encoding="utf-8",
    )
    run(["plan", str(path), "--cluster", cluster, "--json", "--top", "1", "--lora", "16"])
    output = read_json_output(capsys)
    assert {layout["precision"] for layout in output["layouts"]} == {kind}
    assert output["precision_reason"] == reason
    run(["plan", str(path), "--cluster", cluster, "--top", "1", "--lora", "16"])
    assert f"(precision auto: {reason})" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cluster", "8xH10-80GB"], "closest: "),
        (
            ["--cluster", "8xA100-80GB", "--nodes", "2", "--link", "ib4000"],
            "this link is not in the catalogue",
        ),
        (["--cluster", "8xA100-80GB", "--precision", "int3"], "not a precision"),
        (["--cluster", "8xA100-80GB", "--precision", "fp8"], "no hardware support for fp8"),
        (["--cluster", "8xA100-80GB", "--gpus", "eight"], "expected numbers of GPUs"),
        (["--cluster", "8xA100-80GB", "--gpus", "12"], "allowed: 8 or 16"),
        (["--cluster", "8xA100-80GB", "--gpus", "\u00b2"], "expected numbers of GPUs"),
        (["--cluster", "8xA100-80GB", "--gpus", "9" * 5000], "expected numbers of GPUs"),
        (["--cluster", "8xA100-80GB", "--nodes", "1000000"], "allowed: at most 262,144"),
        (["--cluster", "99999999999999999999xA100-80GB"], "allowed: at most 262,144"),
        (
            ["--cluster", "8xA100-80GB", "--set", f"training.global_batch_size={10**17}"],
            "too many sequences to plan",
        ),
        (
            ["--cluster", "8xA100-80GB", "--set", "model.config.num_hidden_layers=9999"],
            "too many layers to plan",
        ),
        (["--cluster", "8xA100-80GB", "--quantised"], "Add --lora RANK"),
        (
            ["--cluster", "8xA100-80GB", "--set", "model.config.num_attention_heads=null"],
            "num_attention_heads",
        ),
    ],
)
def test_wrong_input_is_refused_with_the_allowed_values(
    recipe: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", str(recipe), *words]) == ExitCode.WRONG_INPUT
    assert message in capsys.readouterr().err


def test_a_config_without_its_vocabulary_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {key: value for key, value in models.LLAMA2_13B.items() if key != "vocab_size"}
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(RECIPE | {"model": {"config": config}}), encoding="utf-8")
    assert run(["plan", str(path), *A100]) == ExitCode.WRONG_INPUT
    assert "--set model.config.vocab_size=" in capsys.readouterr().err


def test_if_nothing_fits_a_sufficient_number_of_gpus_is_given(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", str(recipe), "--cluster", "2xA100-40GB"]) == ExitCode.WRONG_INPUT
    error = capsys.readouterr().err
    assert "no layout fits on 2xA100-40GB" in error
    assert "of these GPUs would be enough" in error


def test_layout_auto_puts_the_choice_into_the_recipe() -> None:
    recipe = validate_recipe(RECIPE | {"layout": "auto", "cluster": "8xA100-80GB"})
    assert recipe.layout.auto
    assert recipe.cluster is not None
    with pytest.raises(LayoutError, match="cannot resolve `layout: auto`"):
        resolve_layout(recipe.layout, 8)
    planned = choose_layout(recipe, build_cluster(recipe.cluster, 8), 8)
    chosen = planned.recipe
    prediction = planned.prediction
    assert not chosen.layout.auto
    layout = resolve_layout(chosen.layout, 8)
    assert layout == prediction.candidate.layout
    assert chosen.recompute == prediction.candidate.recompute
    assert chosen.training.micro_batch_size == prediction.candidate.micro_batch_size
    assert prediction.candidate.is_runnable


def test_layout_auto_keeps_the_settings_of_the_recipe() -> None:
    training = RECIPE["training"] | {"micro_batch_size": 1}
    recipe = validate_recipe(RECIPE | {"layout": "auto", "recompute": "full", "training": training})
    chosen = choose_layout(recipe, parse_cluster("8xA100-80GB"), 8).recipe
    assert (chosen.training.micro_batch_size, chosen.recompute) == (1, "full")


def test_layout_auto_and_degrees_contradict_each_other(recipe: Path) -> None:
    with pytest.raises(RecipeError, match="`auto` already chooses `tp`"):
        validate_recipe(RECIPE | {"layout": {"auto": True, "tp": 2}})
    assert load_recipe(recipe, [], "auto").layout.auto


def test_a_recipe_with_an_impossible_layout_gets_a_reason(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run(["plan", str(recipe), *A100, "--set", "layout.pp=1000", "--top", "1", "--json"])
        == ExitCode.DONE
    )
    output = read_json_output(capsys)
    assert output["as_the_recipe_has_it"] is None
    assert "1000 does not divide 8 ranks" in output["why_not_as_the_recipe_has_it"]


def test_an_unusable_number_of_gpus_names_the_nearest_usable_ones(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run(["plan", str(recipe), "--cluster", "7xA100-80GB", "--nodes", "11"])
        == ExitCode.WRONG_INPUT
    )
    error = capsys.readouterr().err
    assert "no layout is possible on 11 x 7xA100-80GB-SXM" in error
    assert "multiply to 77; 76 or 78 GPUs would work" in error, (
        "11 divides neither heads nor batch, and there are fewer than 7 x 11 layers"
    )


def test_times_are_predicted_with_the_rows_of_the_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One record in sixteen is long; rows end with the longest of their micro-batch."""
    lines = [
        json.dumps({"input_ids": [number] * (200 if number % 16 == 0 else 20)})
        for number in range(64)
    ]
    (tmp_path / "records.jsonl").write_text("\n".join(lines), encoding="utf-8")
    recipe = {
        "model": {"config": models.CONFIGS["llama"]},
        "data": {
            "sources": str(tmp_path / "records.jsonl"),
            "packing": "none",
            "cache_dir": str(tmp_path / "cache"),
        },
        "training": {
            "sequence_length": 256,
            "global_batch_size": 16,
            "max_steps": 100,
            "learning_rate": 1e-5,
        },
        "layout": {"dp_replicate": 2},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(recipe), encoding="utf-8")
    words = ["plan", str(path), "--cluster", "2xA100-80GB"]
    assert run([*words, "--json"]) == ExitCode.DONE
    full = read_json_output(capsys)
    assert run([*words, "--data", "--json"]) == ExitCode.DONE
    real = read_json_output(capsys)
    assert full["rows"] is None
    assert full["context_splits"] == []
    assert full["chosen"]["step_tokens"] == 16 * 256
    assert real["rows"].startswith("rows of the data: 256 of the first steps, 1")
    # Four of 64 rows are long: of sixteen rows in a step, one on average.
    assert 16 * 24 < real["chosen"]["step_tokens"] < 16 * 256 / 2
    assert real["chosen"]["step_seconds"]["total"] < full["chosen"]["step_seconds"]["total"]
    own = real["as_the_recipe_has_it"]
    assert own["step_seconds"]["imbalance"] > 0
    assert own["memory_bytes"] == full["as_the_recipe_has_it"]["memory_bytes"]
    steps = [layout["step_seconds"]["total"] for layout in real["layouts"]]
    assert steps == sorted(steps)
    assert run([*words, "--data"]) == ExitCode.DONE
    shown = capsys.readouterr().out
    assert real["rows"] in " ".join(shown.split())


def test_both_splits_of_packed_rows_are_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Records of 20 and 200 tokens share rows of 256; two context ranks share the rows."""
    lines = [
        json.dumps({"input_ids": [number] * (200 if number % 16 == 0 else 20)})
        for number in range(128)
    ]
    (tmp_path / "records.jsonl").write_text("\n".join(lines), encoding="utf-8")
    recipe = {
        "model": {"config": models.CONFIGS["llama"], "attention": "explicit"},
        "data": {
            "sources": str(tmp_path / "records.jsonl"),
            "packing": "documents",
            "cache_dir": str(tmp_path / "cache"),
        },
        "training": {
            "sequence_length": 256,
            "global_batch_size": 2,
            "max_steps": 100,
            "learning_rate": 1e-5,
        },
        "layout": {"cp": 2, "cp_method": "ring", "zero_stage": 3},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(recipe), encoding="utf-8")
    words = ["plan", str(path), "--cluster", "2xA100-80GB"]
    assert run([*words, "--data", "--json"]) == ExitCode.DONE
    planned = read_json_output(capsys)
    own = planned["as_the_recipe_has_it"]
    name = "cp 2, ZeRO-3 over 2, ring"
    split = next(each for each in planned["context_splits"] if each["layout"] == name)
    assert split["zigzag_load"] > split["work_load"] >= 1.0
    assert split["zigzag_seconds"] == own["step_seconds"]["total"]
    assert split["work_seconds"] < split["zigzag_seconds"]
    assert run([*words, "--data", "--set", "layout.cp_split=work", "--json"]) == ExitCode.DONE
    own = read_json_output(capsys)["as_the_recipe_has_it"]
    assert own["step_seconds"]["total"] == split["work_seconds"]
    assert run([*words, "--data"]) == ExitCode.DONE
    assert f"{name}: attention of the busiest context rank" in capsys.readouterr().out
