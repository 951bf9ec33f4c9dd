"""`model.compile_functions`: a run has the same bits with compiled functions and without."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.config import Recipe
from shardwright.errors import RecipeError
from shardwright.launch import auto_layout
from shardwright.model.products import nf4
from shardwright.numerics.compilation import find_compiler_obstacle
from shardwright.optim import one_pass_adamw
from shardwright.telemetry.event_log import StepEvent, read_events
from shardwright.training.checks.run_checks import validate_run
from shardwright.training.run import train
from tests.unit.training import test_run_checks

WIDE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "head_dim": 32}
RUNS: dict[str, dict[str, Any]] = {
    "NF4": {"adapters": {"rank": 4, "quantize": "nf4"}, "recompute": "selective"},
    "8-bit AdamW": {"optimizer": {"name": "adamw_8bit", "block_size": 64}},
    "AdamW in one pass": {"precision": {"kind": "bf16", "working_weights": True}},
}


def build_recipe(folder: Path, compile_functions: Any, **sections: Any) -> Recipe:
    config = test_run_checks.CONFIG | {"max_position_embeddings": test_run_checks.LENGTH} | WIDE
    run = f"run-{compile_functions}"
    return test_run_checks.build_recipe(
        folder,
        run=run,
        model={"config": config, "compile_functions": compile_functions},
        **sections,
    )


@pytest.mark.parametrize("name", RUNS)
def test_compiled_functions_do_not_change_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    pytest.importorskip("torchao.optim", reason="the extra `lowbit` is not installed")
    if obstacle := find_compiler_obstacle(torch.device("cpu")):
        pytest.skip(obstacle)
    monkeypatch.setattr(nf4, "_fused_unpack", {})
    monkeypatch.setitem(one_pass_adamw._MIN_ELEMENTS, "cpu", 4096)
    numbers = []
    for setting in ("auto", True):
        caplog.clear()
        recipe = build_recipe(tmp_path, setting, **RUNS[name])
        with caplog.at_level(logging.INFO, "shardwright"):
            train(recipe)
        lines = [line for line in caplog.messages if line.startswith(f"{name} (")]
        ending = "bits as uncompiled" if setting is True else "not compiled (the device is a CPU)"
        assert lines
        assert all(line.endswith(ending) for line in lines)
        events = read_events(Path(recipe.run.dir) / "events.jsonl")
        numbers.append(
            [(each.loss, each.gradient_norm) for each in events if isinstance(each, StepEvent)]
        )
    assert len(numbers[0]) == 4
    assert numbers[0] == numbers[1]


def test_a_missing_compiler_is_an_error_that_names_the_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        auto_layout, "find_compiler_obstacle", lambda _device: "no C++ compiler is installed"
    )
    with pytest.raises(
        RecipeError, match=r"model\.compile_functions.*no C\+\+ compiler is installed"
    ):
        validate_run(build_recipe(tmp_path, True), 1)
    validate_run(build_recipe(tmp_path, False), 1)
