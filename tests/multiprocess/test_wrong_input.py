"""Wrong input and failing machines through the real command line: one clear message, the right
exit code, no process left.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import psutil
import pytest
import yaml

from shardwright.checkpoint.integrity import verify_checkpoint
from shardwright.checkpoint.tensor_loading import find_newest_checkpoint
from shardwright.cli.main import run as run_command
from shardwright.errors import ExitCode
from shardwright.telemetry.event_log import (
    CheckpointEvent,
    PreemptionEvent,
    read_events,
    select_surviving_steps,
)
from tests import forked

TIMEOUT_SECONDS = 400
"""Time limit of commands that end within seconds on an idle machine; a hang reaches it."""


@pytest.fixture(scope="module")
def recipe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a small corpus and a valid recipe that would train for hours."""
    folder = tmp_path_factory.mktemp("wrong")
    (folder / "corpus.txt").write_text(
        "".join(f"{a} + {b} = {a + b}\n" for a in range(40) for b in range(20))
    )
    recipe = {
        "name": "sums",
        "model": {
            "config": {
                "model_type": "llama",
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "max_position_embeddings": 32,
            }
        },
        "tokenizer": {"kind": "character"},
        "data": {"sources": str(folder / "corpus.txt"), "cache_dir": str(folder / "cache")},
        "precision": "fp32",
        "training": {
            "sequence_length": 32,
            "global_batch_size": 4,
            "max_steps": 1_000_000,
            "learning_rate": 1e-3,
        },
        "checkpoint": {"every_steps": 1},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder


def build_arguments(recipe_folder: Path, run: str, *more: str) -> list[str]:
    return [
        "train",
        str(recipe_folder / "recipe.yaml"),
        "--run-dir",
        str(recipe_folder / run),
        *more,
    ]


WRONG_INPUTS: dict[str, tuple[list[str], list[str]]] = {
    "missing data": (
        ["--set", "data.sources=/no/such/corpus.txt"],
        ["data.sources", "/no/such/corpus.txt"],
    ),
    "an unknown key": (
        ["--set", "training.learning_rat=1"],
        ["training.learning_rat", "Did you mean `learning_rate`"],
    ),
    "a value of the wrong kind": (
        ["--set", "training.warmup_steps=-3"],
        ["training.warmup_steps", "-3"],
    ),
    "degrees that do not fit the ranks": (
        ["--nproc", "2", "--layout", "dp_shard=3,zero_stage=3"],
        ["dp_shard", "2 data ranks"],
    ),
    "a degree that does not exist": (["--layout", "dp_chard=2"], ["dp_chard", "dp_shard"]),
    "a batch that does not fit the ranks": (
        ["--nproc", "2", "--set", "training.global_batch_size=3"],
        ["training.global_batch_size", "2 data ranks", "not a whole number"],
    ),
    "a sequence longer than the model's positions": (
        ["--nproc", "2", "--set", "training.sequence_length=64"],
        ["training.sequence_length", "64", "at most 32"],
    ),
    "a row that context ranks cannot split": (
        ["--nproc", "2", "--layout", "cp=2,cp_method=ring", "--set", "training.sequence_length=30"],
        ["training.sequence_length", "30 tokens", "multiple of 4", "28 or 32"],
    ),
    "heads that context ranks cannot split": (
        ["--nproc", "4", "--layout", "cp=4,cp_method=ulysses"],
        ["layout.cp", "2 heads are not divisible by 4", "nearest degree that works is 2"],
    ),
    "a tokenizer that does not fit its model": (
        ["--nproc", "2", "--set", "model.config.vocab_size=5"],
        ["model.vocab_size", "token id 13", "vocab_size of 5"],
    ),
    "a missing model folder": (
        ["--set", "model={path: /no/such/model}"],
        ["/no/such/model"],
    ),
    "a model that only its own class can initialise": (
        ["--set", "model.config.model_type=mamba"],
        ["model.init", "mamba"],
    ),
    "an unknown model field": (["--set", "model.config.rope_twist=3"], ["rope_twist"]),
    "a missing device": (
        ["--nproc", "2", "--set", "run.device=cuda"],
        ["run.device", "cuda"],
    ),
    "a sink without its package": (
        ["--nproc", "2", "--set", "run.sinks=[wandb]"],
        ["run.sinks", "wandb"],
    ),
    "a missing run to resume": (["--resume"], ["--resume", "checkpoint"]),
}


@pytest.mark.parametrize("mistake", WRONG_INPUTS)
def test_wrong_input_is_reported_by_field_before_any_rank_starts(
    mistake: str,
    recipe_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments, parts = WRONG_INPUTS[mistake]
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert run_command(build_arguments(recipe_folder, "never", *arguments)) == ExitCode.WRONG_INPUT
    captured = capsys.readouterr()
    assert captured.out == ""
    errors = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, captured.err
    assert "Traceback" not in captured.err
    for part in parts:
        assert part in errors[0]
    assert not (recipe_folder / "never").exists()


def test_a_missing_recipe_is_reported(
    recipe_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["train", str(recipe_folder / "none.yaml")]) == ExitCode.WRONG_INPUT
    assert "no such file" in capsys.readouterr().err


def test_a_bad_line_of_yaml_is_reported_by_number(
    recipe_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (recipe_folder / "bad.yaml").write_text("name: sums\ntraining: {sequence_length: 8\nmodel: 3\n")
    assert run_command(["train", str(recipe_folder / "bad.yaml")]) == ExitCode.WRONG_INPUT
    assert "bad.yaml, line 3" in capsys.readouterr().err


def test_a_run_folder_that_cannot_be_created_is_reported(
    recipe_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(build_arguments(recipe_folder, "corpus.txt/run")) == ExitCode.WRONG_INPUT
    assert "run.dir" in capsys.readouterr().err


def build_environment(**changes: str) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"} | changes


class Command(forked.Popen):
    """Process of a command, which writes its output into files because an unread pipe would
    block it.
    """

    def __init__(
        self, command: list[str], variables: dict[str, str], out: IO[bytes], err: IO[bytes]
    ) -> None:
        self.files = (out, err)
        super().__init__(command, stdout=out, stderr=err, env=variables, start_new_session=True)

    def read_output(self) -> tuple[str, str]:
        """Return standard output and error so far."""
        out, err = (os.pread(file.fileno(), 1 << 24, 0).decode() for file in self.files)
        return out, err


@contextmanager
def run_process(
    arguments: list[str],
    prefix: list[str] | None = None,
    *,
    is_forked: bool = True,
    **changes: str,
) -> Iterator[Command]:
    """Run a command as a process; processes left at the end are killed and fail the test."""
    if not is_forked:
        changes["PYTHONFAULTHANDLER"] = "1"  # an interpreter reads it as it starts
    mark = uuid.uuid4().hex
    command = [*(prefix or []), sys.executable, "-m", "shardwright", *arguments]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = Command(
            command, build_environment(SHARDWRIGHT_TEST_RUN=mark, **changes), out, err
        )
        try:
            yield process
            _, left = psutil.wait_procs(
                find_marked_processes(mark), timeout=30
            )  # processes need time to end
            assert not left, f"processes left: {left}"
        finally:
            for other in find_marked_processes(mark):
                other.kill()
            process.wait()


def find_marked_processes(mark: str) -> list[psutil.Process]:
    """Return live processes whose environment has the test's mark, however they were started."""
    found = []
    for process in psutil.process_iter():
        try:
            if (
                process.environ().get("SHARDWRIGHT_TEST_RUN") == mark
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError):
            continue
    return found


def wait_for_end(process: Command) -> tuple[str, str]:
    """Return the output of a command that ends by itself; fail with stack dumps if it hangs."""
    try:
        process.wait(timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.send_signal(signal.SIGABRT)
        process.send_signal(signal.SIGABRT)
        process.wait()
        pytest.fail(f"the command hangs:\n{process.read_output()[1]}")
    return process.read_output()


def wait_until(is_reached: Callable[[], bool], process: Command) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not is_reached():
        assert process.poll() is None, process.read_output()[1]
        assert time.monotonic() < deadline, "the condition was not reached in time"
        time.sleep(0.05)


def count_steps(run: Path) -> int:
    return len(select_surviving_steps(read_events(run))) if (run / "events.jsonl").exists() else 0


def find_ranks(process: Command) -> dict[int, psutil.Process]:
    """Return the ranks that the command has started so far."""
    found: dict[int, psutil.Process] = {}
    for child in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.Error, ProcessLookupError):  # it has ended
            if rank := child.environ().get("RANK"):
                found.setdefault(int(rank), child)  # the rank itself comes before its children
    return found


def test_an_error_found_by_ranks_is_reported_once(recipe_folder: Path) -> None:
    arguments = build_arguments(
        recipe_folder, "no-device", "--nproc", "2", "--set", "run.device=cuda", "--json"
    )
    with run_process(arguments, CUDA_VISIBLE_DEVICES="") as process:
        out, err = wait_for_end(process)
    assert process.returncode == ExitCode.WRONG_INPUT, err
    assert json.loads(out)["error"]["field"] == "run.device"
    assert [line for line in err.splitlines() if line.startswith("error: ")] == [
        "error: run.device: this machine has no CUDA device (got cuda; allowed: cpu or auto)"
    ]


@pytest.mark.long
def test_a_killed_rank_ends_all_and_the_run_resumes(recipe_folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "killed"
    with run_process(
        build_arguments(recipe_folder, str(run), "--nproc", "2", "--layout", "zero_stage=3")
    ) as process:
        wait_until(lambda: count_steps(run) >= 3, process)
        # A checkpoint is saved at every step, so a save is probably in progress.
        find_ranks(process)[1].kill()
        start = time.monotonic()
        _, err = wait_for_end(process)
        assert time.monotonic() - start < TIMEOUT_SECONDS
    assert process.returncode == ExitCode.RUN_FAILED
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert errors == [
        "error: rank 1 was killed by SIGKILL; the system may be out of memory. "
        "All ranks have stopped; --resume continues from the last checkpoint"
    ]
    assert "Traceback" not in err
    newest = find_newest_checkpoint(run / "checkpoints")
    assert newest is not None
    assert verify_checkpoint(newest.path)[1] == []
    steps = count_steps(run)
    assert newest.step in (steps - 1, steps, steps + 1)
    with run_process(
        build_arguments(
            recipe_folder, str(run), "--resume", "--set", f"training.max_steps={newest.step + 1}"
        )
    ) as process:
        _, err = wait_for_end(process)
    assert process.returncode == ExitCode.DONE, err
    assert select_surviving_steps(read_events(run))[-1].step == newest.step + 1


def test_no_rank_outlives_a_killed_launcher(recipe_folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with run_process(build_arguments(recipe_folder, str(run), "--nproc", "2")) as process:
        wait_until(lambda: count_steps(run) >= 1, process)
        ranks = find_ranks(process)
        assert sorted(ranks) == [0, 1]
        process.kill()
        _, alive = psutil.wait_procs(ranks.values(), timeout=TIMEOUT_SECONDS)
        assert not alive
    # The ranks have saved too.
    assert read_events(run).filter_by_type(PreemptionEvent)[-1].reason == "the launcher's death"
    assert find_newest_checkpoint(run / "checkpoints") is not None


@contextmanager
def limit_disk_space(folder: Path) -> Iterator[list[str]]:
    """Create a folder with little disk space: a small file system if mounting is allowed, else
    a limit on file sizes.
    """
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    mounted = sys.platform == "linux" and (
        subprocess.run(command, capture_output=True, check=False).returncode == 0
    )
    try:
        yield [] if mounted else ["sh", "-c", 'ulimit -f 64; exec "$@"', "sh"]
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.long
def test_a_full_disk_ends_the_run_and_keeps_complete_checkpoints(
    recipe_folder: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    run = disk / "run"
    arguments = build_arguments(
        recipe_folder,
        str(run),
        "--nproc",
        "2",
        "--layout",
        "zero_stage=3",
        "--set",
        "checkpoint.keep_last=100",
    )
    with limit_disk_space(disk) as prefix:
        with run_process(arguments, prefix) as process:
            _, err = wait_for_end(process)
        assert process.returncode == ExitCode.RUN_FAILED, err
        errors = [line for line in err.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1, err
        assert "No space left on device" in errors[0] or "File too large" in errors[0]
        assert "Traceback" not in err
        newest = find_newest_checkpoint(run / "checkpoints") if prefix == [] else None
        if newest is not None:
            assert verify_checkpoint(newest.path)[1] == []
            assert newest.step == read_events(run).filter_by_type(CheckpointEvent)[-1].step
        assert not [
            path.name for path in (run / "checkpoints").iterdir() if path.name.startswith(".")
        ]


def test_a_port_in_use_is_reported(recipe_folder: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        ranks = {
            "RANK": "0",
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        start = time.monotonic()
        with run_process(build_arguments(recipe_folder, "port"), **ranks) as process:
            _, err = wait_for_end(process)
    assert process.returncode == ExitCode.WRONG_INPUT
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, err
    assert f"MASTER_PORT: port {port} is in use" in errors[0]
    assert "Traceback" not in err
    assert time.monotonic() - start < TIMEOUT_SECONDS
    assert not (recipe_folder / "port").exists()


def test_stopping_signals_while_ranks_start_leave_no_process(
    recipe_folder: Path, tmp_path: Path
) -> None:
    with run_process(
        build_arguments(recipe_folder, str(tmp_path / "run"), "--nproc", "2"),
        is_forked=False,  # ranks that import torch take longer to start
    ) as process:
        wait_until(lambda: len(find_ranks(process)) == 2, process)
        process.send_signal(signal.SIGTERM)
        _, err = wait_for_end(process)
    assert process.returncode == ExitCode.PREEMPTED, err
