"""Runs whose data and checkpoints are in a real S3 server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from shardwright.telemetry.event_log import (
    CheckpointEvent,
    ResumeEvent,
    read_events,
    select_surviving_steps,
)
from tests import forked
from tests.object_store.conftest import ACCESS_KEY, ROOT, SECRET_KEY, Server, get_client


def write_recipe(folder: Path) -> Path:
    document = {
        "seed": 1,
        "model": {
            "config": {
                "model_type": "llama",
                "hidden_size": 24,
                "intermediate_size": 20,
                "num_hidden_layers": 2,
                "max_position_embeddings": 32,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 6,
            }
        },
        "tokenizer": {"kind": "character"},
        "data": {"sources": "s3://bucket/corpus.txt", "cache_dir": str(folder / "cache")},
        "precision": "fp32",
        "training": {
            "sequence_length": 16,
            "global_batch_size": 8,
            "max_steps": 4,
            "learning_rate": 1e-2,
        },
        "checkpoint": {"dir": "s3://bucket/run", "every_steps": 2},
        "run": {"device": "cpu", "dir": str(folder / "run")},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def train(recipe: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return forked.run(
        [sys.executable, "-m", "shardwright", "train", str(recipe), *options],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=dict(os.environ),
    )


def test_a_run_resumes_under_another_layout(store: Server, tmp_path: Path) -> None:
    client = get_client()
    client.pipe_file(
        "bucket/corpus.txt",
        "".join(f"{a} + {b} = {a + b}\n" for a in range(40) for b in range(20)).encode(),
    )
    recipe = write_recipe(tmp_path)
    first = train(recipe, "--nproc", "2", "--layout", "dp_shard=2,zero_stage=3")
    assert first.returncode == 0, first.stderr
    client.invalidate_cache()
    client.rm("bucket/run/step-00000004", recursive=True)
    client.pipe_file("bucket/run/latest", b"step-00000002\n")
    steps = select_surviving_steps(read_events(tmp_path / "run"))
    store.proxy.forget()
    second = train(recipe, "--nproc", "2", "--layout", "tp=2", "--resume")
    assert second.returncode == 0, second.stderr
    for name in ("shard-00000.safetensors", "shard-00001.safetensors"):
        shard = f"run/step-00000002/{name}"
        size = client.info(f"bucket/{shard}")["size"]
        assert store.proxy.count_read_bytes(shard) == size, "once, by the rank that hashes it"
    events = read_events(tmp_path / "run")
    assert [event.step for event in events.filter_by_type(ResumeEvent)] == [2]
    assert [event.step for event in events.filter_by_type(CheckpointEvent)][-1] == 4
    again = select_surviving_steps(events)
    assert [step.step for step in again] == [1, 2, 3, 4]
    for step, former in zip(again, steps, strict=True):
        assert step.loss == pytest.approx(former.loss, rel=2e-5), step.step
    for path in tmp_path.rglob("*"):  # the run, its recipe copies and logs, and the data cache
        content = path.read_bytes() if path.is_file() else b""
        assert not any(secret.encode() in content for secret in (ACCESS_KEY, SECRET_KEY)), path
    for name in client.find("bucket"):
        content = client.cat_file(name)
        assert not any(secret.encode() in content for secret in (ACCESS_KEY, SECRET_KEY)), name
    for output in (first.stdout, first.stderr, second.stdout, second.stderr):
        assert not any(secret in output for secret in (ACCESS_KEY, SECRET_KEY))


def test_a_missing_bucket_ends_the_command_before_training(store: Server, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    ended = train(recipe, "--set", "checkpoint.dir=s3://misspelled/run")
    assert ended.returncode == 2
    assert ended.stderr.count("error:") == 1
    assert "checkpoint.dir: checkpoints cannot be written here: FileNotFoundError" in ended.stderr
    assert not (tmp_path / "run" / "events.jsonl").exists()
