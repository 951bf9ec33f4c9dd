"""The `train` verb end to end, with real processes: runs, stops, resumes, and the files of a
run folder.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwright.config import Recipe
from shardwright.errors import ExitCode
from shardwright.hardware.measured_profile import MeasuredProfile, save_profile
from shardwright.planner.auto_layout import build_cluster, choose_layout
from shardwright.report.recorded_run import load_runs
from shardwright.report.run_page import render_page
from shardwright.telemetry.event_log import (
    EVENTS_FILE_NAME,
    EvaluationEvent,
    EventWriter,
    MemoryEvent,
    ProfileEvent,
    RanksEvent,
    ResumeEvent,
    RunStartedEvent,
    StepEvent,
    read_events,
    select_surviving_steps,
)
from tests import forked
from tests.faults.conftest import ROOT
from tests.faults.worker import MARKS, PLAN

SHARDWRIGHT = [sys.executable, "-m", "shardwright"]
STEPS = 20
TIMEOUT_SECONDS = 550
"""Time limit of commands that end within seconds on an idle machine."""


@pytest.fixture(scope="module")
def recipe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a recipe and a corpus of sums, which a small model learns quickly."""
    folder = tmp_path_factory.mktemp("train")
    (folder / "corpus.txt").write_text(
        "".join(f"{a} + {b} = {a + b}\n" for a in range(60) for b in range(40))
    )
    recipe = {
        "name": "sums",
        "seed": 3,
        "model": {
            "config": {
                "model_type": "llama",
                "hidden_size": 30,
                "intermediate_size": 50,
                "num_hidden_layers": 2,
                "num_attention_heads": 3,
                "num_key_value_heads": 1,
                "head_dim": 10,
                "max_position_embeddings": 32,
                "attention_dropout": 0.1,
            }
        },
        "tokenizer": {"kind": "character"},
        "data": {
            "sources": str(folder / "corpus.txt"),
            "validation_split": "tail",
            "validation_fraction": 0.1,
            "cache_dir": str(folder / "cache"),
        },
        "precision": "fp32",
        "training": {
            "sequence_length": 32,
            "global_batch_size": 8,
            "gradient_accumulation_steps": 2,
            "max_steps": STEPS,
            "learning_rate": 1e-2,
            "warmup_steps": 2,
        },
        "evaluation": {"every_steps": STEPS // 2, "micro_batch_size": 16},
        "checkpoint": {"every_steps": 4, "keep_last": 3},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder


def build_environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


def train(
    recipe_folder: Path, run: Path, *words: str, by: Any = forked
) -> subprocess.CompletedProcess[str]:
    command = [
        *SHARDWRIGHT,
        "train",
        str(recipe_folder / "recipe.yaml"),
        "--run-dir",
        str(run),
        *words,
    ]
    done = by.run(
        command,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        env=build_environment(),
        check=False,
    )
    assert isinstance(done, subprocess.CompletedProcess)
    return done


@pytest.fixture(scope="module")
def uninterrupted(recipe_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("whole") / "run"
    words = ["--layout", "zero_stage=3", "--set", "run.profile_steps=[3]", "--json"]
    # A new process, as users start it; the forked runs of this file end with the same bits.
    done = train(recipe_folder, run, "--nproc", "2", *words, by=subprocess)
    assert done.returncode == ExitCode.DONE, done.stderr
    summary = json.loads(done.stdout)
    assert summary["schema_version"] == 1
    assert summary["steps"] == STEPS
    assert summary["status"] == "completed"
    return run


def read_final_weights(run: Path) -> dict[str, bytes]:
    folder = run / "checkpoints" / f"step-{STEPS:08d}"
    files = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    assert len(files) == 2
    return files


def test_every_rank_logs_its_times(uninterrupted: Path) -> None:
    log = read_events(uninterrupted)
    rank_events = log.filter_by_type(RanksEvent)
    assert [event.step for event in rank_events] == list(range(1, STEPS + 1))
    for event in rank_events:
        assert len(event.own_seconds) == len(event.checkpoint_seconds) == 2
        waits = [sum(row[rank] for row in event.wait_seconds.values()) for rank in range(2)]
        for rank in range(2):
            assert 0 < event.own_seconds[rank] < event.step_seconds[rank]
            assert event.own_seconds[rank] + waits[rank] == pytest.approx(
                event.step_seconds[rank], abs=1e-4
            )
        assert min(event.wait_seconds["data"]) > 0
    (memory,) = log.filter_by_type(MemoryEvent)
    # ZeRO 3 shards all three; 30 features do not divide evenly over every dimension.
    assert sum(memory.weights_bytes) == 4 * log.filter_by_type(RunStartedEvent)[0].num_parameters
    assert memory.gradients_bytes == memory.weights_bytes
    assert sum(memory.optimizer_bytes) >= 2 * sum(memory.weights_bytes)
    (profile,) = log.filter_by_type(ProfileEvent)
    assert (profile.step, profile.ranks) == (3, 2)
    with gzip.open(uninterrupted / profile.path) as file:
        events = json.load(file)["traceEvents"]
    work = [
        [event for event in events if event.get("ph") == "X" and event["pid"] // 1000 == rank]
        for rank in range(2)
    ]
    # On a common clock, within its error, the ranks' work of one step overlaps, because they
    # synchronise at its end.
    begins = [min(e["ts"] for e in row) for row in work]
    ends = [max(e["ts"] + e.get("dur", 0) for e in row) for row in work]
    assert max(begins) < min(ends) + 1e6 * profile.clock_error_seconds
    assert profile.clock_error_seconds < 5


def test_a_run_folder_has_its_files(uninterrupted: Path) -> None:
    present = {path.name for path in uninterrupted.iterdir()}
    assert {
        "recipe.yaml",
        "plan.json",
        "config.json",
        "tokenizer",
        "events.jsonl",
        "log.txt",
        "checkpoints",
    } <= present
    plan = json.loads((uninterrupted / "plan.json").read_text())
    assert plan["layout"]["zero_stage"] == 3
    assert plan["batch"]["global_batch_size"] == 8
    events = read_events(uninterrupted)
    steps = select_surviving_steps(events)
    assert [step.step for step in steps] == list(range(1, STEPS + 1))
    assert all(len(step.memory_bytes) == 2 and min(step.memory_bytes) > 0 for step in steps)
    assert all(step.mfu is not None and 0.0 < step.mfu <= 1.0 for step in steps)
    assert all(
        step.step_seconds >= (step.forward_seconds or 0) + (step.backward_seconds or 0)
        for step in steps
    )
    losses = [event.loss for event in events.filter_by_type(EvaluationEvent)]
    assert len(losses) == 2
    assert losses[1] < losses[0] < 3.3
    assert f"evaluation at step {STEPS}" in (uninterrupted / "log.txt").read_text()


def test_one_process_has_the_same_losses(
    recipe_folder: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    done = train(recipe_folder, tmp_path)
    assert done.returncode == ExitCode.DONE, done.stderr
    alone, sharded = (select_surviving_steps(read_events(run)) for run in (tmp_path, uninterrupted))
    for one, other in zip(alone, sharded, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=2e-5)
        assert one.gradient_norm == pytest.approx(other.gradient_norm, rel=2e-4)
    hashes = {
        read_events(run).filter_by_type(RunStartedEvent)[0].data_hash
        for run in (tmp_path, uninterrupted)
    }
    assert len(hashes) == 1


def test_a_stopped_and_resumed_run_ends_with_the_same_bits(
    recipe_folder: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    stopped_at = 7
    words = ["--nproc", "2", "--layout", "zero_stage=3"]
    command = [
        sys.executable,
        "-m",
        "tests.faults.run",
        str(recipe_folder / "recipe.yaml"),
        "--run-dir",
        str(run),
        *words,
    ]
    interrupt = {"rank": 0, "step": stopped_at - 1, "place": "interrupt", "signals": []}
    variables = build_environment() | {PLAN: json.dumps([interrupt]), MARKS: str(tmp_path)}
    done = forked.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, env=variables, cwd=ROOT
    )
    assert done.returncode == ExitCode.PREEMPTED, done.stderr
    assert f"SIGINT: saved at step {stopped_at}" in done.stderr
    assert select_surviving_steps(read_events(run))[-1].step == stopped_at

    done = train(recipe_folder, run, *words, "--resume")
    assert done.returncode == ExitCode.DONE, done.stderr
    assert read_final_weights(run) == read_final_weights(uninterrupted)
    events = read_events(run)
    assert [event.step for event in events.filter_by_type(ResumeEvent)] == [stopped_at]
    samples_seen = [step.samples_seen for step in select_surviving_steps(events)]
    assert samples_seen == [8 * step for step in range(1, STEPS + 1)]
    uninterrupted_losses = [
        step.loss for step in select_surviving_steps(read_events(uninterrupted))
    ]
    assert [step.loss for step in select_surviving_steps(events)] == uninterrupted_losses


@pytest.mark.long
def test_a_checkpoint_loads_under_another_layout(recipe_folder: Path, tmp_path: Path) -> None:
    """A checkpoint of zero_stage 3 on two ranks continues in one process, with the losses of an
    uninterrupted run.

    It is in the long suite because `test_checkpoint_resume` covers nine layouts in less time;
    this test runs the verb itself.
    """
    moved_run = tmp_path / "elsewhere"
    constant = ["--set", "training.schedule=constant", "--set"]
    done = train(
        recipe_folder,
        moved_run,
        "--nproc",
        "2",
        "--layout",
        "zero_stage=3",
        *constant,
        "training.max_steps=4",
    )
    assert done.returncode == ExitCode.DONE, done.stderr
    done = train(recipe_folder, moved_run, "--resume", *constant, "training.max_steps=6")
    assert done.returncode == ExitCode.DONE, done.stderr
    done = train(recipe_folder, tmp_path / "straight", *constant, "training.max_steps=6")
    assert done.returncode == ExitCode.DONE, done.stderr
    moved, uninterrupted_losses = (
        select_surviving_steps(read_events(tmp_path / run)) for run in ("elsewhere", "straight")
    )
    assert [step.samples_seen for step in moved] == [
        step.samples_seen for step in uninterrupted_losses
    ]
    for one, other in zip(moved, uninterrupted_losses, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=2e-5)


def test_a_changed_recipe_is_not_resumed(recipe_folder: Path, uninterrupted: Path) -> None:
    before = {path.name: path.read_bytes() for path in uninterrupted.iterdir() if path.is_file()}
    done = train(
        recipe_folder,
        uninterrupted,
        "--resume",
        "--set",
        "seed=4",
        "--set",
        "model.config.hidden_size=60",
        "--set",
        "model.config.head_dim=20",
    )
    assert done.returncode == ExitCode.WRONG_INPUT
    assert "seed: saved 3, now 4" in done.stderr
    assert "hidden_size: saved 30, now 60" in done.stderr
    assert {
        path.name: path.read_bytes() for path in uninterrupted.iterdir() if path.is_file()
    } == before


def test_a_run_that_ended_before_its_first_checkpoint_starts_again(
    recipe_folder: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    run = tmp_path / "early"
    shutil.copytree(uninterrupted, run, ignore=shutil.ignore_patterns("checkpoints"))
    path = run / EVENTS_FILE_NAME
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if '"kind": "checkpoint"' not in line))
    again = [run, "--resume", "--set", "training.max_steps=1", "--json"]
    done = train(recipe_folder, *again)
    assert done.returncode == ExitCode.DONE, done.stderr
    assert "starts again at step 0" in done.stderr
    assert json.loads(done.stdout)["steps"] == 1
    assert (run / "checkpoints" / "step-00000001").is_dir()
    with EventWriter(run):  # another process writes the run
        done = train(recipe_folder, *again)
    assert done.returncode == ExitCode.WRONG_INPUT
    assert "another process is writing this run" in done.stderr


def test_all_ranks_refuse_a_run_after_its_checkpoints_vanished(
    recipe_folder: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    run = tmp_path / "lost"
    shutil.copytree(uninterrupted, run, ignore=shutil.ignore_patterns("checkpoints"))
    before = (run / EVENTS_FILE_NAME).read_bytes()
    words = ["--nproc", "2", "--layout", "zero_stage=3", "--set", "elastic.max_restarts=2"]
    done = train(recipe_folder, run, *words, "--resume-if-begun", "--json")
    assert done.returncode == ExitCode.WRONG_INPUT, done.stderr
    error = json.loads(done.stdout)["error"]
    assert error["field"] == "checkpoint.dir"
    assert f"step-{STEPS:08d} at step {STEPS}" in error["message"]
    assert str(run) in error["remedy"]
    assert (run / EVENTS_FILE_NAME).read_bytes() == before
    assert not (run / "checkpoints").exists()


def test_a_folder_in_use_is_not_overwritten(recipe_folder: Path, uninterrupted: Path) -> None:
    done = train(recipe_folder, uninterrupted, "--json")
    assert done.returncode == ExitCode.WRONG_INPUT
    error = json.loads(done.stdout)["error"]
    assert error["field"] == "run.dir"
    assert "--resume" in error["remedy"]


def test_torchrun_starts_the_ranks(
    recipe_folder: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "shardwright",
    ]
    words = [
        "train",
        str(recipe_folder / "recipe.yaml"),
        "--run-dir",
        str(tmp_path),
        "--layout",
        "zero_stage=3",
    ]
    variables = build_environment()
    done = forked.run(  # torchrun forks the ranks too
        [*command, *words],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        env=variables,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert read_final_weights(tmp_path) == read_final_weights(uninterrupted)
    events = read_events(tmp_path)
    assert [event.step for event in events if isinstance(event, StepEvent)] == list(
        range(1, STEPS + 1)
    )


def test_layout_auto_offloads_if_no_layout_fits(recipe_folder: Path, tmp_path: Path) -> None:
    """The devices have just the memory that the plan needs with saved tensors on disk."""
    document = yaml.safe_load((recipe_folder / "recipe.yaml").read_text())
    document["model"]["config"] |= {
        "vocab_size": 32, "hidden_size": 64, "num_hidden_layers": 16, "num_attention_heads": 8,
        "num_key_value_heads": 8, "head_dim": 8, "max_position_embeddings": 1024,
    }  # fmt: skip
    del document["model"]["config"]["attention_dropout"], document["evaluation"]
    del document["data"]["validation_split"], document["data"]["validation_fraction"]
    document["training"] |= {
        "sequence_length": 1024, "global_batch_size": 2, "gradient_accumulation_steps": 1,
        "max_steps": 2,
    }  # fmt: skip
    profile = MeasuredProfile("CPU", "EPYC-9654", "today", 2**36, 2e10)
    document |= {"layout": "auto", "recompute": "none", "optimizer": {"name": "sgd"}}
    document["cluster"] = {"node": "2xcpu", "profile": str(tmp_path / "profile.json")}
    save_profile(profile, tmp_path / "profile.json")
    offloaded = Recipe.model_validate(document | {"offload": {"activations": "disk"}})
    assert offloaded.cluster is not None
    planned = choose_layout(offloaded, build_cluster(offloaded.cluster, 2), 2)
    needed = int(1.001 * planned.prediction.memory.total)
    save_profile(replace(profile, memory_bytes=needed), tmp_path / "profile.json")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(document))
    run = tmp_path / "run"
    done = train(tmp_path, run, "--nproc", "2")
    assert done.returncode == ExitCode.DONE, done.stderr
    assert "activations on disk" in done.stderr
    assert "of the transfer time was hidden" in (run / "log.txt").read_text()
    events = read_events(run)
    (memory,) = events.filter_by_type(MemoryEvent)
    assert memory.offloaded_activation_bytes is not None
    for step in events.filter_by_type(StepEvent):
        assert step.activation_written_bytes is not None
        assert step.activation_written_bytes >= memory.offloaded_activation_bytes[0] > 2**23
        assert step.activation_read_bytes == step.activation_written_bytes
    assert "of saved tensors are offloaded" in render_page(load_runs([run]))


def test_skipped_records_are_logged_once(recipe_folder: Path, tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"{a} + {b} = {a + b}"}) for a in range(20) for b in range(20)]
    data = tmp_path / "data"
    data.mkdir()
    (data / "sums.jsonl").write_text("\n".join([*lines, "{broken"]) + "\n")
    (data / "notes.pdf").write_text("x")
    words = [f"data.sources={data}", "data.validation_fraction=0.0", "training.max_steps=1"]
    changes = [word for change in words for word in ("--set", change)]
    done = train(recipe_folder, tmp_path / "run", "--nproc", "2", *changes)
    assert done.returncode == ExitCode.DONE, done.stderr
    assert done.stderr.count("skipped 1 of 401 records of data.sources") == 1
    assert done.stderr.count("skipped files of unsupported formats") == 1
    # Under torchrun no process prepares the data before the ranks.
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "shardwright", "train"]
    run = ["--run-dir", str(tmp_path / "launched")]
    launched = subprocess.run(
        [*command, str(recipe_folder / "recipe.yaml"), *run, *changes],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        env=build_environment(),
        check=False,
    )
    assert launched.returncode == ExitCode.DONE, launched.stderr
    assert launched.stderr.count("skipped 1 of 401 records of data.sources") == 1
