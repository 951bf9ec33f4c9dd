"""Ranks of a verification compile what a run would compile on this machine, or say why not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.multiprocess.models import LLAMA, build_recipe
from tests.unit.model.hf_models import HF_CONFIGS

from shardwright.architecture import read_config
from shardwright.config.model import ModelSection
from shardwright.errors import RecipeError
from shardwright.model.hf.hf_decoder import build_decoder
from shardwright.model.hf.hf_model import read_model_shape
from shardwright.placement.compilation import CompileChoice
from shardwright.training.checks.model_checks import check_hf_model
from shardwright.verification import compiled_code
from shardwright.verification.cases import VERIFICATION_DTYPES
from shardwright.verification.compiled_code import (
    CompiledCode,
    check_compilation,
    choose_compiled_code,
    count_graphs,
    prepare_compilation,
)

CUDA_COMPILES = CompileChoice(True, "the device is CUDA's")


@pytest.fixture(autouse=True)
def _torch_2_13(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_code, "find_compiler_obstacle", lambda _device: None)
    monkeypatch.setattr(compiled_code, "compiles_wide_attention", lambda: True)


def choose(**model: Any) -> CompiledCode:
    recipe = build_recipe(LLAMA, model=model)
    return choose_compiled_code(recipe, read_config(LLAMA), VERIFICATION_DTYPES)


@pytest.mark.parametrize(
    ("setting", "has_cuda", "line"),
    [
        (True, False, "blocks compiled: yes (model.compile: true)"),
        (False, True, "blocks compiled: no (model.compile: false)"),
        (
            "auto",
            True,
            "blocks compiled: yes (auto: the device is CUDA's; every comparison takes many times "
            "as long: add --set model.compile=false for one of the layout alone)",
        ),
        ("auto", False, "blocks compiled: no (auto: the device is a CPU; add --set model.compile"),
    ],
)
def test_blocks_are_compiled_as_a_run_compiles_them(
    monkeypatch: pytest.MonkeyPatch, setting: Any, has_cuda: bool, line: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    if has_cuda:
        monkeypatch.setattr(compiled_code, "choose_compilation", lambda _device: CUDA_COMPILES)
    code = choose(compile=setting)
    assert str(code).startswith(line)
    assert code.dtypes == (VERIFICATION_DTYPES if ": yes" in line else ())


def test_functions_are_compiled_where_blocks_are_not() -> None:
    assert choose(fused_pointwise="compiled").pointwise.kind == "compiled"
    assert choose(compile=True).pointwise.kind == "none"


def test_fp64_runs_uncompiled_where_torch_cannot_compile_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiled_code, "compiles_wide_attention", lambda: False)
    code = choose(compile=True)
    assert code.dtypes == ("float32",)
    assert str(code).startswith("blocks compiled: in float32 only (torch ")
    only_fp64 = choose_compiled_code(
        build_recipe(LLAMA, model={"compile": True}), read_config(LLAMA), ["float64"]
    )
    assert str(only_fp64).startswith("blocks compiled: no (torch ")


def test_a_missing_compiler_is_an_error_if_the_recipe_names_compilation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiled_code, "find_compiler_obstacle", lambda _device: "no compiler")
    with pytest.raises(RecipeError, match="no compiler") as caught:
        choose(compile=True)
    assert caught.value.field == "model.compile"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(compiled_code, "choose_compilation", lambda _device: CUDA_COMPILES)
    assert str(choose()).startswith("blocks compiled: no (auto: no compiler")


def test_blocks_of_transformers_classes_are_refused_before_ranks_start() -> None:
    config = HF_CONFIGS["opt"]
    shape = read_model_shape(config, ModelSection(config=config, dropout="off"))
    recipe = build_recipe(config, model={"compile": True})
    with torch.device("meta"):
        decoder = build_decoder(shape)
    for refuse in (
        lambda: choose_compiled_code(recipe, shape, VERIFICATION_DTYPES),
        lambda: check_hf_model(recipe, shape),
        decoder.compile_blocks,
    ):
        with pytest.raises(
            RecipeError,
            match=r"model.compile: blocks of transformers' OPTForCausalLM are not compiled",
        ):
            refuse()


def test_blocks_that_were_not_compiled_fail() -> None:
    prepare_compilation()
    before = count_graphs()
    assert not check_compilation(before).passed
    torch.compile(torch.neg, backend="eager")(torch.ones(2))
    assert check_compilation(before).passed
