"""A real set of questions and answers: the supervised tokens are those of a plain reading of the
file.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from shardwright.config.recipe_loading import validate_recipe
from shardwright.data.loader import read_step_micro_batches
from shardwright.data.preparation import prepare_data
from shardwright.data.sample_order import SampleOrder
from shardwright.data.tokens.tokenizer import FastTokenizer
from shardwright.plans import BatchPlan

pytestmark = pytest.mark.data
BATCH = 8


def test_supervised_tokens_of_every_batch_are_those_of_the_answers(
    outside_data: Path, tmp_path: Path
) -> None:
    path = outside_data / "sft" / "gsm8k_test.jsonl"
    recipe = validate_recipe(
        {
            "model": {"config": {"model_type": "llama"}},
            "tokenizer": {"kind": "bpe", "vocab_size": 512},
            "data": {
                "sources": str(path),
                "packing": "none",
                "overlong": "refuse",
                "cache_dir": str(tmp_path),
            },
            "precision": "fp32",
            "training": {
                "sequence_length": 1024,
                "global_batch_size": BATCH,
                "num_epochs": 1,
                "learning_rate": 1e-3,
            },
        }
    )
    prepared = prepare_data(recipe)
    tokenizer = prepared.tokenizer
    assert isinstance(tokenizer, FastTokenizer)

    def encode_answer(question: str, answer: str) -> list[int]:
        """Encode an answer and the end of text as they follow the question."""
        before, both = (
            tokenizer.encode(text) for text in (f"{question}\n", f"{question}\n{answer}")
        )
        after = both[len(before) :] if both[: len(before)] == before else tokenizer.encode(answer)
        return [*after, *tokenizer.suffix_ids]

    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    answers = [encode_answer(row["question"], row["answer"]) for row in rows]
    assert len(prepared.train) == len(rows)
    order = SampleOrder(recipe.seed, len(rows))
    plan = BatchPlan(1024, BATCH, 1, 1)
    for step in range(len(rows) // BATCH):
        (batch,) = read_step_micro_batches(prepared.train, order, plan, step, 0)
        chosen = [order.get_index(position) for position in range(step * BATCH, (step + 1) * BATCH)]
        assert batch.num_supervised == sum(len(answers[index]) for index in chosen)
        for labels_T, index in zip(batch.labels_BT.numpy(), chosen, strict=True):
            assert np.array_equal(labels_T[labels_T != -100], answers[index])
