"""Sample texts during training: every layout writes the texts of one process, which uses a
cache of keys and values.
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
from shardwright.training.checks.run_checks import validate_run
from shardwright.training.sample_texts import SampleText, choose_prompts, generate_texts
from shardwright.training.setup import build_state
from tests.multiprocess.pool import RankPool

TOKENS = 12


def build_recipe(folder: Path, layout: str = "") -> dict[str, Any]:
    """Return a recipe of lines of text and a tiny model whose random weights are large enough
    that its most likely tokens vary.
    """
    text = folder / "text.txt"
    if not text.exists():
        text.write_text(
            "".join(f"line {n} of a text that says {n * n}\n" for n in range(60)), encoding="utf-8"
        )
    config = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.5,
    }
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


def generate_samples(
    document: dict[str, Any], limit: int
) -> tuple[list[SampleText] | None, list[str]]:
    """Return the texts and, on one process, those of generation with a cache."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    run = validate_run(validate_recipe(document), world_size)
    model = build_state(run, torch.device("cpu")).model
    tokenizer = run.data.tokenizer
    assert run.data.validation is not None
    prompts = choose_prompts(run.data.validation, 3, TOKENS)
    aborts = iter([False] * limit + [True] * 100)
    texts = generate_texts(
        model,
        tokenizer,
        prompts,
        sequence_length=32,
        max_new_tokens=TOKENS,
        should_abort=lambda: next(aborts),
    )
    if world_size > 1:
        return texts, []
    greedy = SamplingSettings(temperature=0.0)
    completions = [
        complete_prompt(
            model.decoder,
            tokenizer,
            p.ids,
            greedy,
            max_new_tokens=TOKENS,
            stop_ids={tokenizer.eos_id},
        )
        for p in prompts
    ]
    return texts, [completion.text for completion in completions]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("samples")


def test_layouts_write_the_texts_of_one_process(ranks: RankPool, folder: Path) -> None:
    expected, generated = ranks.run(1, generate_samples, build_recipe(folder), 100)[0]
    assert [text.text for text in expected] == generated
    assert len({text.text for text in expected}) > 1
    assert all(text.prompt and text.expected for text in expected)
    for layout in ("dp_shard=2,zero_stage=3", "tp=2", "cp=2", "pp=2"):
        for texts, _ in ranks.run(2, generate_samples, build_recipe(folder, layout), 100):
            assert texts == expected, layout
    assert ranks.run(2, generate_samples, build_recipe(folder, "tp=2"), 3)[0][0] is None


def test_a_run_writes_a_file_per_step(folder: Path) -> None:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(build_recipe(folder)))
    assert shardwright(["train", str(path), "--set", "evaluation.every_steps=1"]) == ExitCode.DONE
    for step in (1, 2):
        rows = [
            json.loads(line)
            for line in (folder / f"run/samples/step-{step:08d}.jsonl").read_text().splitlines()
        ]
        assert [set(row) for row in rows] == 3 * [{"prompt", "expected", "text", "stopped"}]


def test_every_row_gives_a_prompt_before_any_gives_two() -> None:
    ignored = -100
    ids = np.arange(8)
    labels = np.array([ignored, 2, 3, ignored, ignored, 6, ignored, ignored])
    # The last document is padding without supervised tokens.
    row = Sample(ids, labels, ids, np.array([0, 0, 0, 1, 1, 1, 2, 2]))
    dataset = mock.MagicMock()
    dataset.__len__.return_value = 2
    dataset.get_sample.side_effect = lambda index: row._replace(input_ids=ids + 10 * index)
    prompts = choose_prompts(dataset, 3, 5)
    assert [prompt.ids for prompt in prompts] == [(0, 1), (10, 11), (3, 4, 5)]
    assert [prompt.expected_ids for prompt in prompts] == [(2, 3), (2, 3), (6,)]


def test_samples_without_validation_data_are_refused(folder: Path) -> None:
    document = build_recipe(folder)
    document["data"] |= {"validation_fraction": 0.0}
    with pytest.raises(
        RecipeError, match=r"evaluation.num_samples: samples continue validation data"
    ):
        validate_run(validate_recipe(document), 1)
