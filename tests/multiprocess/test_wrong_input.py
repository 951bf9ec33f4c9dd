"""Wrong input and broken machines, through the real command line: one clear message, the right exit
code, nothing left behind.
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

PATIENCE_SECONDS = 400
"""For what ends by itself within seconds on a quiet machine; what hangs does so for ever."""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small corpus and a good recipe that would train for hours."""
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


def words(workplace: Path, run: str, *more: str) -> list[str]:
    return ["train", str(workplace / "recipe.yaml"), "--run-dir", str(workplace / run), *more]


WRONG: dict[str, tuple[list[str], list[str]]] = {
    "data that are not there": (
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
    "a row that context ranks cannot cut": (
        ["--nproc", "2", "--layout", "cp=2,cp_method=ring", "--set", "training.sequence_length=30"],
        ["training.sequence_length", "30 tokens", "multiple of 4", "28 or 32"],
    ),
    "heads that context ranks cannot cut": (
        ["--nproc", "4", "--layout", "cp=4,cp_method=ulysses"],
        ["layout.cp", "2 heads do not divide by 4", "nearest degree that works is 2"],
    ),
    "a tokenizer that does not fit its model": (
        ["--nproc", "2", "--set", "model.config.vocab_size=5"],
        ["model.vocab_size", "token id 13", "vocab_size of 5"],
    ),
    "a model folder that is not there": (
        ["--set", "model={path: /no/such/model}"],
        ["/no/such/model"],
    ),
    "a model that only its own class can begin": (
        ["--set", "model.config.model_type=mamba"],
        ["model.init", "mamba"],
    ),
    "a model field that we do not know": (["--set", "model.config.rope_twist=3"], ["rope_twist"]),
    "a device that is not there": (
        ["--nproc", "2", "--set", "run.device=cuda"],
        ["run.device", "cuda"],
    ),
    "a sink whose package is not there": (
        ["--nproc", "2", "--set", "run.sinks=[wandb]"],
        ["run.sinks", "wandb"],
    ),
    "a run that is not there to resume": (["--resume"], ["--resume", "checkpoint"]),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_input_is_told_by_field_before_any_rank_starts(
    what: str, workplace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given, told = WRONG[what]
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert run_command(words(workplace, "never", *given)) == ExitCode.WRONG_INPUT
    shown = capsys.readouterr()
    assert shown.out == ""
    errors = [line for line in shown.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, shown.err
    assert "Traceback" not in shown.err
    for part in told:
        assert part in errors[0]
    assert not (workplace / "never").exists()


def test_a_recipe_that_is_not_there(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["train", str(workplace / "none.yaml")]) == ExitCode.WRONG_INPUT
    assert "no such file" in capsys.readouterr().err


def test_a_bad_line_of_yaml_is_told_by_its_number(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (workplace / "bad.yaml").write_text("name: sums\ntraining: {sequence_length: 8\nmodel: 3\n")
    assert run_command(["train", str(workplace / "bad.yaml")]) == ExitCode.WRONG_INPUT
    assert "bad.yaml, line 3" in capsys.readouterr().err


def test_a_run_folder_that_cannot_be_made(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(words(workplace, "corpus.txt/run")) == ExitCode.WRONG_INPUT
    assert "run.dir" in capsys.readouterr().err


def environment(**changes: str) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"} | changes


class Command(subprocess.Popen[bytes]):
    """A command of ours, which says what it says into files: a pipe that nobody reads fills up, and
    holds up who writes.
    """

    def __init__(
        self, command: list[str], variables: dict[str, str], out: IO[bytes], err: IO[bytes]
    ) -> None:
        self.files = (out, err)
        super().__init__(command, stdout=out, stderr=err, env=variables, start_new_session=True)

    def said(self) -> tuple[str, str]:
        """Standard output and error so far."""
        out, err = (os.pread(file.fileno(), 1 << 24, 0).decode() for file in self.files)
        return out, err


@contextmanager
def started(
    arguments: list[str], prefix: list[str] | None = None, **changes: str
) -> Iterator[Command]:
    """The command as a process of its own; whatever of its processes is left at the end is killed,
    and fails the test.
    """
    mark = uuid.uuid4().hex
    command = [*(prefix or []), sys.executable, "-m", "shardwright", *arguments]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = Command(command, environment(SHARDWRIGHT_TEST_RUN=mark, **changes), out, err)
        try:
            yield process
            _, left = psutil.wait_procs(ours(mark), timeout=30)  # who is leaving takes a moment
            assert not left, f"left behind: {left}"
        finally:
            for other in ours(mark):
                other.kill()
            process.wait()


def ours(mark: str) -> list[psutil.Process]:
    """Processes that carry the test's mark in their environment, however they were started, dead
    ones left out.
    """
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


def ended(process: Command) -> tuple[str, str]:
    """Standard output and error of a command that ends by itself; of one that hangs, where each of
    its threads stands.
    """
    try:
        process.wait(timeout=PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.send_signal(signal.SIGABRT)
        process.send_signal(signal.SIGABRT)
        process.wait()
        pytest.fail(f"it hangs:\n{process.said()[1]}")
    return process.said()


def wait_until(happened: Callable[[], bool], process: Command) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not happened():
        assert process.poll() is None, process.said()[1]
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.05)


def num_steps(run: Path) -> int:
    return len(select_surviving_steps(read_events(run))) if (run / "events.jsonl").exists() else 0


def rank_processes(process: Command) -> dict[int, psutil.Process]:
    """The ranks that the command has started so far."""
    found: dict[int, psutil.Process] = {}
    for child in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.Error, ProcessLookupError):  # it has just ended
            if rank := child.environ().get("RANK"):
                found.setdefault(int(rank), child)  # before children of its own
    return found


def test_what_only_a_rank_can_see_is_told_once(workplace: Path) -> None:
    given = words(workplace, "no-device", "--nproc", "2", "--set", "run.device=cuda", "--json")
    with started(given, CUDA_VISIBLE_DEVICES="") as process:
        out, err = ended(process)
    assert process.returncode == ExitCode.WRONG_INPUT, err
    assert json.loads(out)["error"]["field"] == "run.device"
    assert [line for line in err.splitlines() if line.startswith("error: ")] == [
        "error: run.device: this machine has no CUDA device (got cuda; allowed: cpu or auto)"
    ]


@pytest.mark.long
def test_a_killed_rank_ends_all_and_the_run_resumes(workplace: Path, tmp_path: Path) -> None:
    run = tmp_path / "killed"
    with started(words(workplace, str(run), "--nproc", "2", "--layout", "zero_stage=3")) as process:
        wait_until(lambda: num_steps(run) >= 3, process)
        rank_processes(process)[
            1
        ].kill()  # a checkpoint is written at every step: some will be under way
        began = time.monotonic()
        _, err = ended(process)
        assert time.monotonic() - began < PATIENCE_SECONDS
    assert process.returncode == ExitCode.RUN_FAILED
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert errors == ["error: rank 1 was killed by SIGKILL; the system may be out of memory. All ranks have stopped; "
                      "--resume continues from the last checkpoint"]  # fmt: skip
    assert "Traceback" not in err
    newest = find_newest_checkpoint(run / "checkpoints")
    assert newest is not None
    assert verify_checkpoint(newest.path)[1] == []
    steps = num_steps(run)
    assert newest.step in (steps - 1, steps, steps + 1)
    with started(
        words(workplace, str(run), "--resume", "--set", f"training.max_steps={newest.step + 1}")
    ) as process:
        _, err = ended(process)
    assert process.returncode == ExitCode.DONE, err
    assert select_surviving_steps(read_events(run))[-1].step == newest.step + 1


def test_no_rank_outlives_a_killed_launcher(workplace: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with started(words(workplace, str(run), "--nproc", "2")) as process:
        wait_until(lambda: num_steps(run) >= 1, process)
        ranks = rank_processes(process)
        assert sorted(ranks) == [0, 1]
        process.kill()
        _, alive = psutil.wait_procs(ranks.values(), timeout=PATIENCE_SECONDS)
        assert not alive
    assert (
        read_events(run).filter_by_type(PreemptionEvent)[-1].reason == "the launcher's death"
    )  # and it has saved
    assert find_newest_checkpoint(run / "checkpoints") is not None


@contextmanager
def full_disk(folder: Path) -> Iterator[list[str]]:
    """A folder that soon has no room left: a small file system where we may mount one, else a limit
    on the size of files.
    """
    folder.mkdir()
    mounted = sys.platform == "linux" and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], capture_output=True, check=False
    ).returncode == 0  # fmt: skip
    try:
        yield [] if mounted else ["sh", "-c", 'ulimit -f 64; exec "$@"', "sh"]
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.long
def test_a_full_disk_ends_the_run_and_leaves_what_was_whole(
    workplace: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    run = disk / "run"
    given = words(
        workplace,
        str(run),
        "--nproc",
        "2",
        "--layout",
        "zero_stage=3",
        "--set",
        "checkpoint.keep_last=100",
    )
    with full_disk(disk) as prefix:
        with started(given, prefix) as process:
            _, err = ended(process)
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


def test_a_port_in_use_is_told(workplace: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ranks = {
            "RANK": "0",
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        began = time.monotonic()
        with started(words(workplace, "port"), **ranks) as process:
            _, err = ended(process)
    assert process.returncode == ExitCode.WRONG_INPUT
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, err
    assert f"MASTER_PORT: port {port} is in use" in errors[0]
    assert "Traceback" not in err
    assert time.monotonic() - began < PATIENCE_SECONDS
    assert not (workplace / "port").exists()


def test_stopping_signals_while_ranks_start_leave_no_process(
    workplace: Path, tmp_path: Path
) -> None:
    with started(words(workplace, str(tmp_path / "run"), "--nproc", "2")) as process:
        wait_until(lambda: len(rank_processes(process)) == 2, process)
        process.send_signal(signal.SIGTERM)
        _, err = ended(process)
    assert process.returncode == ExitCode.PREEMPTED, err
