"""Frozen names; how far rows are filled up."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from shardwright.config import Recipe
from shardwright.errors import RecipeError
from shardwright.telemetry.event_log import RunFinishedEvent, StepEvent, WarningEvent, read_events
from shardwright.train.run import train
from shardwright.train.run_checks import match_frozen, validate_run
from tests.unit.train.finished import ALPHABET, CONFIG


def test_frozen_patterns_must_match() -> None:
    names = ["h.0.weight", "h.0.bias", "ln.bias"]
    assert match_frozen(("*.bias",), names) == {"h.0.bias", "ln.bias"}
    for patterns in (("*.biass",), ("*",)):
        with pytest.raises(RecipeError, match=r"model\.freeze"):
            match_frozen(patterns, names)


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


def recipe_of_rows(folder: Path, *, run: str = "run", **sections: Any) -> Recipe:
    """Documents of different lengths, a row each."""
    texts = [(ALPHABET * 3)[: 10 + 6 * (n % 4)] for n in range(24)]
    (folder / "texts.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )
    sources = [str(folder / "texts.jsonl")]
    given: dict[str, Any] = {
        "model": {"config": CONFIG | {"max_position_embeddings": LENGTH}},
        "tokenizer": {"kind": "character"},
        "data": {"sources": sources, "packing": "none", "cache_dir": str(folder / "cache")},
        "precision": {"kind": "fp32"},
        "training": {"sequence_length": LENGTH, "global_batch_size": ROWS, "micro_batch_size": 2, "max_steps": 4,
                     "learning_rate": 1e-2},
        "run": {"dir": str(folder / run), "device": "cpu"},
    }  # fmt: skip
    return Recipe.model_validate(
        {name: value | sections.get(name, {}) for name, value in given.items()}
        | {name: value for name, value in sections.items() if name not in given}
    )


@pytest.mark.parametrize(
    ("sections", "ranks", "expected", "told"),
    [
        ({}, 1, 8, ""),
        ({"data": {"pad_to_multiple_of": 3}, "layout": {"cp": 2}}, 2, 12, ""),
        ({"data": {"padding": "max_length"}}, 1, None, ""),
        ({"data": {"packing": "documents"}}, 1, 8, ""),
        ({"model": {"compile": True}}, 1, None, "model.compile"),
        ({"model": {"config": CONFIG | EXPERTS}, "moe": {"capacity_factor": 1.0}}, 1, None, "experts"),
    ],
    ids=["default", "cut", "fixed", "packed", "compiled", "experts"],
)  # fmt: skip
def test_what_rows_are_filled_up_to(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    sections: dict[str, Any],
    ranks: int,
    expected: int | None,
    told: str,
) -> None:
    with caplog.at_level(logging.INFO, logger="shardwright.train.run_checks"):
        plan = validate_run(recipe_of_rows(tmp_path, **sections), ranks).plan
    assert plan.batch.row_multiple == expected
    assert ("all rows are padded" in caplog.text) == bool(told)
    assert told in caplog.text


def test_a_run_learns_the_same_from_fewer_tokens(tmp_path: Path) -> None:
    found = []
    for padding in ("longest", "max_length"):
        train(recipe_of_rows(tmp_path, run=padding, data={"padding": padding}))
        found.append(read_events(tmp_path / padding).filter_by_type(StepEvent))
    short, full = found
    assert [step.supervised_tokens for step in short] == [step.supervised_tokens for step in full]
    assert {step.tokens for step in full} == {ROWS * LENGTH}
    assert all(step.tokens < 0.8 * ROWS * LENGTH for step in short)
    assert [step.loss for step in short] == pytest.approx([step.loss for step in full], rel=2e-6)
    (ended,) = read_events(tmp_path / "longest").filter_by_type(RunFinishedEvent)
    assert ended.total_tokens == sum(step.tokens for step in short)
    assert [step.gradient_norm for step in short] == pytest.approx(
        [step.gradient_norm for step in full], rel=1e-5
    )


def test_a_rank_beyond_the_matrix_is_told(tmp_path: Path) -> None:
    for rank, told in ((4, 0), (9, 1)):
        train(
            recipe_of_rows(
                tmp_path,
                run=str(rank),
                adapters={"rank": rank, "targets": ["k_proj"]},
                training={"max_steps": 1},
            )
        )
        warned = [
            event.message
            for event in read_events(tmp_path / str(rank)).filter_by_type(WarningEvent)
        ]
        assert len(warned) == told
        assert all(
            "adapters.rank 9 exceeds the rank of model.layers.0.self_attn.k_proj.weight (8 x 16)"
            in text
            for text in warned
        )
