"""`model.fused_pointwise`: chosen by recipe, blocks, model and device, and logged by the run."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.architecture import HFShape, read_config
from shardwright.checkpoint.run_folder import RunFolder
from shardwright.config import Recipe, load_recipe
from shardwright.errors import RecipeError
from shardwright.launch import auto_layout
from shardwright.model.pointwise import formulas, operators
from shardwright.numerics.compilation import find_compiler_obstacle
from shardwright.placement.compilation import CompileChoice, choose_pointwise
from shardwright.telemetry.event_log import StepEvent, read_events
from shardwright.training.checks.auto_choice import agree_on_compilation
from shardwright.training.checks.run_checks import validate_run
from shardwright.training.run import train
from tests.multiprocess.models import LLAMA
from tests.unit.training.test_compile_choice import CHOSEN, CUDA, complete
from tests.unit.training.test_precision_choice import FakeRankSync, build_recipe


def build_fused_recipe(
    folder: Path, setting: str, compile: Any = "auto", **sections: Any
) -> Recipe:
    recipe = build_recipe(folder, "fp32")
    update = {"fused_pointwise": setting, "compile": compile}
    model = recipe.model.model_copy(update=update)
    document = recipe.model_copy(update={"model": model}).model_dump(mode="json")
    return Recipe.model_validate(document | sections)


@pytest.mark.parametrize(
    ("setting", "has_compiled_blocks", "can_compile", "kind", "reason"),
    [
        ("auto", False, True, "compiled", "auto: Triton compiles for the device"),
        ("auto", True, True, "none", "auto: model.compile fuses those of blocks"),
        ("auto", False, False, "none", "auto: a test says so"),
        ("auto", False, None, "none", "auto: no device is known"),
        ("compiled", False, False, "compiled", "the recipe names them"),
        ("loss", False, False, "loss", "the recipe says loss"),
        ("none", False, True, "none", "the recipe says none"),
    ],
)
def test_recipe_blocks_and_device_decide(
    setting: Any, has_compiled_blocks: bool, can_compile: bool | None, kind: str, reason: str
) -> None:
    choice = choose_pointwise(
        setting,
        read_config(LLAMA),
        has_compiled_blocks=has_compiled_blocks,
        auto_compilation=None
        if can_compile is None
        else CompileChoice(can_compile, "a test says so"),
    )
    assert (choice.kind, choice.reason) == (kind, reason)
    assert str(choice).endswith(f"({reason})")


def test_a_model_of_transformers_computes_its_own_functions() -> None:
    shape = object.__new__(HFShape)
    object.__setattr__(shape, "class_name", "OtherForCausalLM")
    rules: dict[str, Any] = {"has_compiled_blocks": False, "auto_compilation": CHOSEN}
    assert choose_pointwise("auto", shape, **rules).kind == "loss"
    not_here: dict[str, Any] = {"has_compiled_blocks": False, "auto_compilation": None}
    assert choose_pointwise("auto", shape, **not_here).kind == "none"
    with pytest.raises(RecipeError, match=r"model\.fused_pointwise.*OtherForCausalLM.*auto, loss"):
        choose_pointwise("compiled", shape, **rules)


@pytest.mark.parametrize(
    ("compile", "schedule", "kind"),
    [("auto", "zb_h1", "none"), ("auto", "1f1b", "none"), (False, "1f1b", "compiled")],
)
def test_auto_fuses_functions_where_blocks_are_not_compiled(
    tmp_path: Path, compile: Any, schedule: str, kind: str
) -> None:
    training = build_recipe(tmp_path).training.model_dump() | {"gradient_accumulation_steps": 2}
    layout = {"pp": 2, "schedule": schedule}
    recipe = build_fused_recipe(tmp_path, "auto", compile, layout=layout, training=training)
    plan = complete(recipe, 2)
    assert plan.pointwise.kind == kind
    assert plan.as_dict()["fused_pointwise"]["kind"] == kind


def test_all_ranks_fuse_functions_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "shardwright.training.checks.auto_choice.choose_compilation", lambda _device: CHOSEN
    )
    recipe = build_fused_recipe(tmp_path, "auto", compile=False)
    choice = agree_on_compilation(recipe, FakeRankSync([1.0], [0.0]), CUDA)
    assert choice == CompileChoice(False, "1 of 3 ranks cannot compile")
    both = build_fused_recipe(tmp_path, "none", compile=False)
    assert agree_on_compilation(both, FakeRankSync([1.0], [0.0]), CUDA) is None


def test_a_missing_compiler_is_an_error_that_names_the_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        auto_layout, "find_compiler_obstacle", lambda _device: "no C++ compiler is installed"
    )
    with pytest.raises(
        RecipeError, match=r"model\.fused_pointwise.*no C\+\+ compiler is installed.*auto or none"
    ):
        validate_run(build_fused_recipe(tmp_path, "compiled"), 1)
    validate_run(build_fused_recipe(tmp_path, "auto"), 1)


def test_a_run_logs_its_functions_once_and_records_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if obstacle := find_compiler_obstacle(torch.device("cpu")):
        pytest.skip(obstacle)
    monkeypatch.setattr(operators, "choose_compile_options", lambda: {"backend": "eager"})
    losses = []
    for setting, functions in (
        ("auto", "separate operations (auto: the device is a CPU)"),
        ("loss", "separate operations, the loss compiled by itself (the recipe says loss)"),
        ("compiled", "each compiled by itself (the recipe names them)"),
    ):
        caplog.clear()
        monkeypatch.setattr(operators, "compiled_formulas", {})
        (tmp_path / setting).mkdir()
        recipe = build_fused_recipe(tmp_path / setting, setting)
        with caplog.at_level(logging.INFO, "shardwright"):
            train(recipe)
        lines = [line for line in caplog.messages if line.startswith("norms, gates, rotations")]
        assert lines == [f"norms, gates, rotations, residual sums: {functions}"]
        folder = RunFolder(Path(recipe.run.dir))
        kind = "none" if setting == "auto" else setting
        assert json.loads(folder.plan_path.read_text())["fused_pointwise"]["kind"] == kind
        assert load_recipe(folder.recipe_path).model.fused_pointwise == kind
        compiled = {formula for formula, *_ in operators.compiled_formulas}
        assert (formulas.normalise_rms in compiled) == (kind == "compiled")
        assert (formulas.differentiate_token_losses in compiled) == (kind != "none")
        events = read_events(Path(recipe.run.dir) / "events.jsonl")
        losses.append([each.loss for each in events if isinstance(each, StepEvent)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == pytest.approx(losses[0], rel=1e-5)
    torch._dynamo.reset()
