"""lm-evaluation-harness reads an exported folder offline and computes the log-probabilities of our
decoder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from shardwright.cli.main import run as shardwright
from shardwright.errors import ExitCode
from shardwright.inference.model_source import load_decoder, open_model_source

LIMIT_SECONDS = 840.0
"""The imports of the harness alone take a minute on a busy machine."""
QUESTIONS = [("1 + 2 =", " 3"), ("7 + 12 =", " 19"), ("3 +", " 4 = 7")]


def train_two_steps(folder: Path, run: Path) -> None:
    """Train two steps with a tokenizer that has an end-of-text token, which the harness needs."""
    (folder / "sums.txt").write_text(
        "".join(f"{a} + {b} = {a + b}\n" for a in range(20) for b in range(20))
    )
    config = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
    }
    recipe = {
        "model": {"config": config},
        "tokenizer": {"kind": "bpe", "vocab_size": 270},
        "data": {"sources": str(folder / "sums.txt"), "cache_dir": str(folder / "cache")},
        "precision": "fp32",
        "training": {
            "sequence_length": 32,
            "global_batch_size": 4,
            "max_steps": 2,
            "learning_rate": 0.01,
        },
        "run": {"dir": str(run), "device": "cpu"},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert shardwright(["train", str(folder / "recipe.yaml")]) == ExitCode.DONE


@pytest.mark.timeout(900)
def test_a_local_task_on_an_exported_run(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="the extra `lm-eval` is not installed")
    run = tmp_path / "run"
    out = tmp_path / "out"
    tasks = tmp_path / "tasks"
    train_two_steps(tmp_path, run)
    assert shardwright(["export", str(run), "--out", str(out)]) == ExitCode.DONE
    tasks.mkdir()
    rows = "".join(
        json.dumps({"question": question, "answer": answer}) + "\n"
        for question, answer in QUESTIONS
    )
    (tasks / "rows.jsonl").write_text(rows)
    task = {
        "task": "local_answers",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tasks / "rows.jsonl")}},
        "test_split": "test",
        "output_type": "loglikelihood",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "perplexity"}],
    }
    (tasks / "local_answers.yaml").write_text(yaml.safe_dump(task))
    command = [
        sys.executable,
        "-m",
        "lm_eval",
        "--model",
        "hf",
        "--model_args",
        f"pretrained={out},dtype=float32",
    ]
    command += [
        "--tasks",
        "local_answers",
        "--include_path",
        str(tasks),
        "--device",
        "cpu",
        "--batch_size",
        "1",
    ]
    command += ["--output_path", str(tmp_path / "results"), "--log_samples"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        command,
        env=os.environ | offline,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (samples,) = (tmp_path / "results").rglob("samples_local_answers_*.jsonl")
    log_probs = {
        sample["doc"]["question"]: float(sample["resps"][0][0][0])
        for sample in map(json.loads, samples.read_text().splitlines())
    }

    source = open_model_source(run)
    decoder = load_decoder(source, device=torch.device("cpu"), dtype=torch.float32)
    tokenizer = source.load_tokenizer()
    for question, answer in QUESTIONS:
        prompt = tokenizer.encode(question)
        ids = tokenizer.encode(question + answer)
        assert ids[: len(prompt)] == prompt
        with torch.no_grad():
            log_probs_TV = torch.log_softmax(decoder(torch.tensor([ids]))[0, :-1].double(), dim=-1)
        expected = log_probs_TV[range(len(ids) - 1), ids[1:]][len(prompt) - 1 :].sum()
        assert log_probs[question] == pytest.approx(float(expected), abs=1e-4)
