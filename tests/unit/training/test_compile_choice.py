"""`model.compile: auto`: chosen once, by device, model and layout, equal on all ranks, recorded."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.architecture import HFShape, read_config
from shardwright.checkpoint.run_folder import RunFolder
from shardwright.config import Recipe, load_recipe
from shardwright.errors import RecipeError
from shardwright.launch import auto_layout
from shardwright.model import Decoder
from shardwright.numerics import compilation
from shardwright.placement import place_model
from shardwright.placement.compilation import CompileChoice
from shardwright.plans import Plan, complete_plan, resolve_degrees
from shardwright.telemetry.event_log import RunStartedEvent, read_events
from shardwright.telemetry.sinks import describe_event
from shardwright.training.checks import model_checks
from shardwright.training.checks.auto_choice import agree_on_compilation
from shardwright.training.checks.run_checks import validate_run
from shardwright.training.run import train
from tests.multiprocess.models import LLAMA
from tests.unit.training import test_run_checks
from tests.unit.training.test_precision_choice import FakeRankSync, build_recipe

CHOSEN = CompileChoice(True, "a test says so")
CUDA = torch.device("cuda")


def build_compiled_recipe(folder: Path, compile: Any, **sections: Any) -> Recipe:
    recipe = build_recipe(folder, "fp32")
    model = recipe.model.model_copy(update={"compile": compile})
    document = recipe.model_copy(update={"model": model}).model_dump(mode="json")
    return Recipe.model_validate(document | sections)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return `device(**facts)`, which describes a CUDA device and the compilers on its machine."""

    def describe(
        triton: bool = True,
        c_compiler: str = "gcc",
        has_headers: bool = True,
        capability: tuple[int, int] = (9, 0),
    ) -> None:
        monkeypatch.setattr(
            compilation, "find_compiler", lambda _device: "triton" if triton else ""
        )
        monkeypatch.setattr(compilation, "_find_program", lambda *_names: c_compiler)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
        monkeypatch.setattr(compilation, "get_path", lambda _name: str(tmp_path))
        if has_headers:
            (tmp_path / "Python.h").touch()

    return describe


@pytest.mark.parametrize(
    ("facts", "is_compiled", "reason"),
    [
        ({}, True, "Triton is installed"),
        ({"triton": False}, False, "Triton is not installed"),
        ({"c_compiler": ""}, False, "no C compiler is installed"),
        ({"has_headers": False}, False, "Python's C headers are not installed"),
        ({"capability": (6, 1)}, False, "does not support compute capability 6.1"),
    ],
)
def test_a_cuda_device_compiles_if_triton_works(
    device: Any, facts: dict[str, Any], is_compiled: bool, reason: str
) -> None:
    device(**facts)
    choice = compilation.choose_compilation(CUDA)
    assert choice.is_compiled == is_compiled
    assert reason in choice.reason


def test_a_run_on_a_cpu_is_not_compiled_and_says_so_once(tmp_path: Path) -> None:
    train(build_recipe(tmp_path, "fp32"))
    plan = json.loads(RunFolder(tmp_path / "run").plan_path.read_text())
    assert (plan["compile"], plan["compile_reason"]) == (False, "the device is a CPU")
    assert load_recipe(RunFolder(tmp_path / "run").recipe_path).model.compile is False
    (started,) = read_events(tmp_path / "run").filter_by_type(RunStartedEvent)
    line = describe_event(started)
    assert line.count("blocks not compiled (compile auto: the device is a CPU)") == 1


def complete(recipe: Recipe, world_size: int, shape: Any = None) -> Plan:
    layout, batch = resolve_degrees(recipe, world_size)
    placement = place_model(shape or read_config(LLAMA), layout, batch.sequence_length)
    return complete_plan(recipe, placement, batch, None, CHOSEN)


@pytest.mark.parametrize(
    ("setting", "schedule", "is_compiled", "reason"),
    [
        ("auto", "1f1b", True, "a test says so"),
        ("auto", "zb_h1", True, "a test says so"),
        (True, "1f1b", True, None),
        (False, "1f1b", False, None),
    ],
)
def test_auto_compiles_under_every_schedule(
    tmp_path: Path, setting: Any, schedule: str, is_compiled: bool, reason: str | None
) -> None:
    layout = {"pp": 2, "schedule": schedule}
    training = build_recipe(tmp_path).training.model_dump() | {"gradient_accumulation_steps": 2}
    plan = complete(build_compiled_recipe(tmp_path, setting, layout=layout, training=training), 2)
    assert plan.is_compiled == is_compiled
    assert plan.compile_reason is None if reason is None else reason in str(plan.compile_reason)


def test_a_model_of_transformers_is_not_compiled(tmp_path: Path) -> None:
    recipe = build_compiled_recipe(tmp_path, "auto")
    layout, batch = resolve_degrees(recipe, 1)
    placement = place_model(read_config(LLAMA), layout, batch.sequence_length)
    shape = object.__new__(HFShape)
    object.__setattr__(shape, "class_name", "OtherForCausalLM")
    object.__setattr__(placement, "shape", shape)
    plan = complete_plan(recipe, placement, batch, None, CHOSEN)
    assert not plan.is_compiled
    assert plan.compile_reason == "the model runs through transformers' OtherForCausalLM"


def test_explicit_compilation_without_a_compiler_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        auto_layout, "find_compiler_obstacle", lambda _device: "no C++ compiler is installed"
    )
    with pytest.raises(RecipeError, match=r"model\.compile.*no C\+\+ compiler is installed"):
        validate_run(build_compiled_recipe(tmp_path, True), 1)


@pytest.mark.parametrize("is_supported", [False, True])
@pytest.mark.parametrize(
    ("kind", "obstacle"),
    [
        ("bf16", None),
        ("fp8", "leaves out casts to 16 bits in compiled code of a CPU"),
        ("fp32", None),
        ("fp64", "cannot compile fp64 attention for a CPU"),
    ],
)
def test_blocks_are_compiled_for_a_cpu_if_torch_compiles_them_right(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    obstacle: str | None,
    is_supported: bool,
) -> None:
    monkeypatch.setattr(model_checks, "compiles_wide_attention", lambda: is_supported)
    monkeypatch.setattr(model_checks, "rounds_casts_on_cpu", lambda: is_supported)
    monkeypatch.setattr(auto_layout, "find_compiler_obstacle", lambda _device: None)
    recipe = build_compiled_recipe(tmp_path, True, precision=kind)
    is_refused = obstacle is not None and not is_supported
    message = rf"model\.compile: torch .* {obstacle}"
    with pytest.raises(RecipeError, match=message) if is_refused else nullcontext():
        validate_run(recipe, 1)


@pytest.mark.parametrize(
    ("others", "is_compiled", "reason"),
    [
        ([[1.0], [1.0]], True, "a test says so"),
        ([[1.0], [0.0]], False, "1 of 3 ranks cannot compile"),
    ],
)
def test_all_ranks_compile_or_none(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    others: list[list[float]],
    is_compiled: bool,
    reason: str,
) -> None:
    monkeypatch.setattr(
        "shardwright.training.checks.auto_choice.choose_compilation", lambda _device: CHOSEN
    )
    choice = agree_on_compilation(
        build_compiled_recipe(tmp_path, "auto"), FakeRankSync(*others), CUDA
    )
    assert choice == CompileChoice(is_compiled, reason)


@pytest.mark.parametrize(("padding", "dynamic"), [("longest", True), ("max_length", None)])
def test_rows_of_different_lengths_are_compiled_for_any_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, padding: str, dynamic: bool | None
) -> None:
    recipe = test_run_checks.build_recipe(tmp_path, data={"padding": padding})
    model = recipe.model.model_copy(update={"compile": True})
    options: list[dict[str, Any]] = []
    monkeypatch.setattr(auto_layout, "find_compiler_obstacle", lambda _device: None)
    monkeypatch.setattr(Decoder, "compile_blocks", lambda _self, **named: options.append(named))
    train(recipe.model_copy(update={"model": model}))
    assert options == [{"dynamic": dynamic}]
