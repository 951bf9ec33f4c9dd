"""Checks before a run: frozen parameters, padding of rows, ranks of adapters."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from shardwright.architecture import read_config
from shardwright.architecture.frozen_names import match_frozen
from shardwright.config import Recipe
from shardwright.config.data import DataSource
from shardwright.errors import RecipeError
from shardwright.telemetry.event_log import RunFinishedEvent, StepEvent, WarningEvent, read_events
from shardwright.training.checks.run_checks import validate_run
from shardwright.training.run import train
from tests.unit.training.finished import ALPHABET, CONFIG


def test_frozen_patterns_must_match_some_but_not_all_parameters() -> None:
    shape = read_config(CONFIG | {"vocab_size": 26})
    names = {spec.name for spec in shape.list_parameters()}
    norms = match_frozen(("*norm.weight",), shape)
    assert norms == {name for name in names if name.endswith("norm.weight")}
    assert norms
    for patterns in (("*.biass",), ("*",)):
        with pytest.raises(RecipeError, match=r"model\.freeze"):
            match_frozen(patterns, shape)


LENGTH = 32
ROWS = 8
EXPERTS = {
    "model_type": "qwen3_moe",
    "max_position_embeddings": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "norm_topk_prob": True,
}


def build_recipe(folder: Path, *, run: str = "run", **sections: Any) -> Recipe:
    """Build a recipe over documents of different lengths, one per row."""
    texts = [(ALPHABET * 3)[: 10 + 6 * (n % 4)] for n in range(24)]
    (folder / "texts.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )
    sources = [str(folder / "texts.jsonl")]
    defaults: dict[str, Any] = {
        "model": {"config": CONFIG | {"max_position_embeddings": LENGTH}},
        "tokenizer": {"kind": "character"},
        "data": {"sources": sources, "packing": "none", "cache_dir": str(folder / "cache")},
        "precision": {"kind": "fp32"},
        "training": {
            "sequence_length": LENGTH,
            "global_batch_size": ROWS,
            "micro_batch_size": 2,
            "max_steps": 4,
            "learning_rate": 1e-2,
        },
        "run": {"dir": str(folder / run), "device": "cpu"},
    }
    return Recipe.model_validate(
        {name: value | sections.get(name, {}) for name, value in defaults.items()}
        | {name: value for name, value in sections.items() if name not in defaults}
    )


@pytest.mark.parametrize(
    ("sections", "ranks", "expected", "reason"),
    [
        ({}, 1, 8, ""),
        ({"data": {"pad_to_multiple_of": 3}, "layout": {"cp": 2}}, 2, 12, ""),
        ({"data": {"padding": "max_length"}}, 1, None, ""),
        ({"data": {"packing": "documents"}}, 1, 8, ""),
        ({"model": {"compile": True}}, 1, 8, ""),
        ({"model": {"compile": True}, "layout": {"cp": 2}}, 2, 8, ""),
        ({"model": {"compile": True}, "layout": {"tp": 2}}, 2, 8, ""),
        (
            {"model": {"config": CONFIG | EXPERTS}, "moe": {"capacity_factor": 1.0}},
            1,
            None,
            "experts",
        ),
    ],
    ids=[
        "default",
        "sharded",
        "fixed",
        "packed",
        "compiled",
        "compiled-cp",
        "compiled-tp",
        "experts",
    ],
)
def test_rows_are_padded_to_the_expected_multiple(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    sections: dict[str, Any],
    ranks: int,
    expected: int | None,
    reason: str,
) -> None:
    with caplog.at_level(logging.INFO, logger="shardwright.training.checks.row_lengths"):
        plan = validate_run(build_recipe(tmp_path, **sections), ranks).plan
    assert plan.batch.row_multiple == expected
    assert ("all rows are padded" in caplog.text) == bool(reason)
    assert reason in caplog.text


@pytest.mark.parametrize(
    ("packing", "layout", "is_padded", "waits"),
    [
        ("none", {"dp_replicate": 2}, True, False),
        ("none", {"zero_stage": 1}, True, False),
        ("none", {"zero_stage": 3}, True, True),
        ("documents", {"zero_stage": 2}, False, True),
    ],
)
def test_rows_are_assigned_by_work_if_requested(
    tmp_path: Path, packing: str, layout: dict[str, Any], is_padded: bool, waits: bool
) -> None:
    sections: dict[str, Any] = {"data": {"packing": packing, "assignment": "work"}}
    run = validate_run(build_recipe(tmp_path, layout=layout, **sections), 2)
    balance = run.plan.batch.balance
    assert balance is not None
    assert (balance.is_padded, balance.waits_each_micro_batch) == (is_padded, waits)
    assert balance.work_per_key > 0
    assert validate_run(build_recipe(tmp_path), 2).plan.batch.balance is None


def test_windows_are_not_assigned_by_work(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="all windows need the same amount of work"):
        build_recipe(tmp_path, data={"packing": "windows", "assignment": "work"})
    recipe = build_recipe(tmp_path, data={"packing": "auto", "assignment": "work"})
    text = tmp_path / "plain.txt"
    text.write_text(ALPHABET * 30)
    sources = recipe.data.model_copy(update={"sources": (DataSource(path=str(text)),)})
    with pytest.raises(
        RecipeError, match=r"data\.assignment: all windows need the same amount of work"
    ):
        validate_run(recipe.model_copy(update={"data": sources}), 2)


@pytest.mark.parametrize("packing", ["none", "documents"])
def test_only_rows_of_documents_are_split_by_work(tmp_path: Path, packing: str) -> None:
    layout = {"cp": 2, "cp_method": "ring", "cp_split": "work"}
    recipe = build_recipe(tmp_path, layout=layout, data={"packing": packing})
    if packing == "documents":
        assert validate_run(recipe, 2).plan.layout.cp_split == "work"
        return
    with pytest.raises(RecipeError, match=r"layout\.cp_split: .*data\.packing: documents"):
        validate_run(recipe, 2)


def test_a_run_with_short_rows_has_equal_losses_with_fewer_tokens(tmp_path: Path) -> None:
    runs = []
    for padding in ("longest", "max_length"):
        train(build_recipe(tmp_path, run=padding, data={"padding": padding}))
        runs.append(read_events(tmp_path / padding).filter_by_type(StepEvent))
    short, full = runs
    assert [step.supervised_tokens for step in short] == [step.supervised_tokens for step in full]
    assert {step.tokens for step in full} == {ROWS * LENGTH}
    assert all(step.tokens < 0.8 * ROWS * LENGTH for step in short)
    assert [step.loss for step in short] == pytest.approx([step.loss for step in full], rel=2e-6)
    (ended,) = read_events(tmp_path / "longest").filter_by_type(RunFinishedEvent)
    assert ended.total_tokens == sum(step.tokens for step in short)
    assert [step.gradient_norm for step in short] == pytest.approx(
        [step.gradient_norm for step in full], rel=1e-5
    )


@pytest.mark.parametrize(
    ("attention", "sections", "ranks", "message"),
    [
        ("flex", {}, 1, "no backward pass of FlexAttention on cpu"),
        ("varlen", {}, 1, "no kernel on cpu"),
        ("sdpa", {"layout": {"cp": 2, "cp_method": "ring"}}, 2, "layout.cp_method: ulysses"),
    ],
)
def test_an_attention_kernel_that_cannot_be_used_is_an_error_before_the_run(
    tmp_path: Path, attention: str, sections: dict[str, Any], ranks: int, message: str
) -> None:
    recipe = build_recipe(tmp_path, model={"attention": attention}, **sections)
    with pytest.raises(RecipeError, match=message) as error:
        validate_run(recipe, ranks)
    assert error.value.field == "model.attention"


def test_an_adapter_rank_beyond_the_matrix_is_reported(tmp_path: Path) -> None:
    for rank, num_warnings in ((4, 0), (9, 1)):
        train(
            build_recipe(
                tmp_path,
                run=str(rank),
                adapters={"rank": rank, "targets": ["k_proj"]},
                training={"max_steps": 1},
            )
        )
        warnings = [
            event.message
            for event in read_events(tmp_path / str(rank)).filter_by_type(WarningEvent)
        ]
        assert len(warnings) == num_warnings
        assert all(
            "adapters.rank 9 exceeds the rank of model.layers.0.self_attn.k_proj.weight (8 x 16)"
            in text
            for text in warnings
        )
