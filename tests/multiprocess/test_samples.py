"""Texts written while training: under every layout those that one process writes, with its cache of
keys and values.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import yaml

from shardwright.cli.main import run as shardwright
from shardwright.config.recipe_loading import parse_layout, validate_recipe
from shardwright.data.dataset import Sample
from shardwright.errors import ExitCode, RecipeError
from shardwright.inference.generation import SamplingSettings, complete_prompt
from shardwright.train.run_checks import validate_run
from shardwright.train.sample_texts import SampleText, choose_prompts, generate_texts
from shardwright.train.setup import build_state
from tests.multiprocess.pool import RankPool

TOKENS = 12


def recipe(folder: Path, layout: str = "") -> dict[str, Any]:
    """A tiny model with random weights large enough that its likeliest tokens differ, on lines of
    text.
    """
    text = folder / "text.txt"
    if not text.exists():
        text.write_text(
            "".join(f"line {n} of a text that says {n * n}\n" for n in range(60)), encoding="utf-8"
        )
    config = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
              "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.5}  # fmt: skip
    return {
        "model": {"config": config},
        "tokenizer": {"kind": "character"},
        "data": {
            "sources": str(text),
            "validation_fraction": 0.2,
            "validation_split": "tail",
            "cache_dir": str(folder / "cache"),
        },
        "precision": "fp32",
        "training": {
            "sequence_length": 32,
            "global_batch_size": 4,
            "max_steps": 2,
            "learning_rate": 0.01,
        },
        "evaluation": {"num_samples": 3, "sample_tokens": TOKENS},
        "layout": parse_layout(layout) if layout else {},
        "run": {"dir": str(folder / "run"), "device": "cpu"},
    }


def write(document: dict[str, Any], limit: int) -> tuple[list[SampleText] | None, list[str]]:
    """The texts; and, of one process, what generation with a cache makes of the same prompts."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    checked = validate_run(validate_recipe(document), world_size)
    model = build_state(checked, torch.device("cpu")).model
    tokenizer = checked.data.tokenizer
    assert checked.data.validation is not None
    prompts = choose_prompts(checked.data.validation, 3, TOKENS)
    asked = iter([False] * limit + [True] * 100)
    texts = generate_texts(
        model,
        tokenizer,
        prompts,
        sequence_length=32,
        max_new_tokens=TOKENS,
        should_abort=lambda: next(asked),
    )
    if world_size > 1:
        return texts, []
    likeliest = SamplingSettings(temperature=0.0)
    found = [
        complete_prompt(
            model.decoder,
            tokenizer,
            p.ids,
            likeliest,
            max_new_tokens=TOKENS,
            stop_ids={tokenizer.eos_id},
        )
        for p in prompts
    ]
    return texts, [completion.text for completion in found]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("samples")


def test_layouts_write_what_one_process_writes(ranks: RankPool, folder: Path) -> None:
    alone, generated = ranks.run(1, write, recipe(folder), 100)[0]
    assert [text.text for text in alone] == generated
    assert len({text.text for text in alone}) > 1
    assert all(text.prompt and text.expected for text in alone)
    for layout in ("dp_shard=2,zero_stage=3", "tp=2", "cp=2", "pp=2"):
        for texts, _ in ranks.run(2, write, recipe(folder, layout), 100):
            assert texts == alone, layout
    assert ranks.run(2, write, recipe(folder, "tp=2"), 3)[0][0] is None


def test_a_run_keeps_them_by_step(folder: Path) -> None:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe(folder)))
    assert shardwright(["train", str(path), "--set", "evaluation.every_steps=1"]) == ExitCode.DONE
    for step in (1, 2):
        rows = [
            json.loads(line)
            for line in (folder / f"run/samples/step-{step:08d}.jsonl").read_text().splitlines()
        ]
        assert [set(row) for row in rows] == 3 * [{"prompt", "expected", "text", "stopped"}]


def test_prompts_come_from_every_row_before_a_second_of_any() -> None:
    nothing = -100
    ids = np.arange(8)
    labels = np.array([nothing, 2, 3, nothing, nothing, 6, nothing, nothing])
    row = Sample(
        ids, labels, ids, np.array([0, 0, 0, 1, 1, 1, 2, 2])
    )  # what fills the row learns nothing
    dataset = mock.MagicMock()
    dataset.__len__.return_value = 2
    dataset.sample.side_effect = lambda index: row._replace(input_ids=ids + 10 * index)
    found = choose_prompts(dataset, 3, 5)
    assert [prompt.ids for prompt in found] == [(0, 1), (10, 11), (3, 4, 5)]
    assert [prompt.expected_ids for prompt in found] == [(2, 3), (2, 3), (6,)]


def test_without_validation_there_is_nothing_to_go_on_from(folder: Path) -> None:
    document = recipe(folder)
    document["data"] |= {"validation_fraction": 0.0}
    with pytest.raises(
        RecipeError, match=r"evaluation.num_samples: samples continue validation data"
    ):
        validate_run(validate_recipe(document), 1)
