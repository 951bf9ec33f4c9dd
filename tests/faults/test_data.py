"""Fault 10: broken JSON, broken UTF-8, empty documents, ids outside the vocabulary, rows without
supervised tokens. One process.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from shardwright.config import load_recipe
from shardwright.errors import DataError, InputError
from shardwright.telemetry.event_log import StepEvent, read_events
from shardwright.training.checks.run_checks import validate_run
from shardwright.training.run import train

GOOD = [
    json.dumps({"text": f"{number} and {number + 1} make {2 * number + 1}"}) for number in range(60)
]


def test_broken_records_are_reported_by_file_and_line_and_never_trained_on(
    recipe: Path, tmp_path: Path
) -> None:
    lines: list[bytes] = [line.encode() for line in GOOD]
    lines[7] = b'{"text": "no quo'
    lines[11] = b'{"text": "\xff\xfe"}'
    lines[19] = b'{"text": ""}'
    lines[23] = b'{"words": "no text"}'
    (tmp_path / "corpus.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    changes = [
        f"data.sources={tmp_path / 'corpus.jsonl'}",
        "data.max_broken_fraction=0.1",
        f"run.dir={tmp_path / 'run'}",
    ]
    changed = load_recipe(recipe, changes)
    records = validate_run(changed, 1).data.report.records
    assert {(Path(item.file).name, item.line) for item in records.broken} >= {
        ("corpus.jsonl", 8),
        ("corpus.jsonl", 12),
    }
    assert records.num_broken == len(records.broken)
    train(changed)
    assert all(
        math.isfinite(step.loss) and math.isfinite(step.gradient_norm)
        for step in read_events(tmp_path / "run").filter_by_type(StepEvent)
    )
    with pytest.raises(DataError, match=r"corpus\.jsonl:8"):
        validate_run(load_recipe(recipe, [*changes, "data.max_broken_fraction=0.001"]), 1)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"input_ids": [1, 2, 3, 1000], "labels": [1, 2, 3, 1000]}], "vocabulary"),
        ([{"input_ids": [1, 2, 3, 4], "labels": [-100, -100, -100, -100]}], "learn|supervis"),
    ],
)
def test_ids_outside_the_vocabulary_and_nothing_to_learn_are_refused(
    recipe: Path, tmp_path: Path, rows: list[dict[str, Any]], message: str
) -> None:
    vocabulary = {"<unk>": 0, "<eos>": 1} | {
        letter: 2 + number for number, letter in enumerate("abcdefgh")
    }
    Tokenizer(WordLevel(vocabulary, unk_token="<unk>")).save(str(tmp_path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "eos_token": "<eos>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "ids.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 40))
    tokenizer = [f"tokenizer={{kind: huggingface, path: {tmp_path}}}", "model.config.vocab_size=10"]
    with pytest.raises(InputError, match=message):
        validate_run(load_recipe(recipe, [f"data.sources={tmp_path / 'ids.jsonl'}", *tokenizer]), 1)
