"""Ranks from the environment, stop signals, and checks of the run folder."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardwright.checkpoint.run_folder import RunFolder
from shardwright.cli.main import run
from shardwright.cluster.scheduler_variables import SCHEDULERS, SchedulerVariables
from shardwright.config import dump_recipe
from shardwright.config.recipe_loading import validate_recipe
from shardwright.errors import CheckpointError, ExitCode, InputError, Preempted
from shardwright.launch.launcher import _forward_stop_signals
from shardwright.launch.rank_environment import (
    RankEnvironment,
    count_local_ranks,
    detect_rank_environment,
    is_restart,
)
from shardwright.launch.rank_outcome import LAUNCHER_VARIABLE, find_launcher_pid
from shardwright.launch.stop_signals import (
    LAUNCHER_DIED,
    STOP_SIGNALS,
    StopRequest,
    listen_for_stop,
    stop_when_parent_exits,
)


def build_recipe(folder: Path):
    return validate_recipe(
        {
            "model": {"config": {"model_type": "llama"}},
            "data": {"sources": "corpus.txt"},
            "precision": "fp32",
            "training": {
                "sequence_length": 8,
                "max_steps": 3,
                "learning_rate": 1e-3,
                "micro_batch_size": 1,
            },
            "run": {"dir": str(folder)},
        }
    )


def test_torchrun_has_precedence_over_slurm() -> None:
    both = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "1",
    }
    assert detect_rank_environment(both) == RankEnvironment(1, 2, 1)
    assert detect_rank_environment(
        {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1"}
    ) == RankEnvironment(3, 4, 1)
    assert detect_rank_environment({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) is None


@pytest.mark.parametrize(
    "environment", [{"RANK": "2", "WORLD_SIZE": "2"}, {"RANK": "one", "WORLD_SIZE": "2"}]
)
def test_invalid_variables_are_refused(environment: dict[str, str]) -> None:
    with pytest.raises(InputError, match="RANK"):
        detect_rank_environment(environment)


def test_ranks_without_a_rendezvous_address_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="MASTER_ADDR and MASTER_PORT"):
        detect_rank_environment()


def test_ranks_of_srun_connect_to_the_first_node_of_their_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = {"SLURM_STEP_NODELIST": "n[3-4]", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
    rank = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "")  # so that what the ranks set is removed after the test
        monkeypatch.delenv(name)
    for name, value in {**step, **rank, "MASTER_PORT": "31"}.items():
        monkeypatch.setenv(name, value)
    assert detect_rank_environment() == RankEnvironment(1, 2, 0)
    assert os.environ["MASTER_ADDR"] == "n3"
    assert os.environ["MASTER_PORT"] == "31", "a given value stays"


def test_a_new_launcher_needs_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    pbs = SchedulerVariables(
        "PBS_RANK",
        "PBS_SIZE",
        "PBS_LOCAL",
        "PBS_NODE",
        "PBS_RUNS",
        ("PBS_JOBID",),
        count_local_ranks=lambda environment: len(environment.get("PBS_HOSTS", "").split()),
        find_rendezvous=lambda _environment: {"MASTER_ADDR": "n1", "MASTER_PORT": "31"},
    )
    monkeypatch.setattr("shardwright.launch.rank_environment.SCHEDULERS", (*SCHEDULERS, pbs))
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that what the ranks set is removed after the test
        monkeypatch.delenv(name)
    assert not is_restart()
    rank = {"PBS_RANK": "1", "PBS_SIZE": "2", "PBS_LOCAL": "1", "PBS_RUNS": "1"}
    for name, value in {**rank, "PBS_HOSTS": "n1 n1"}.items():
        monkeypatch.setenv(name, value)
    assert detect_rank_environment() == RankEnvironment(1, 2, 1)
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("n1", "31")
    assert count_local_ranks() == 2
    assert is_restart()


def test_a_stop_is_recorded_and_handlers_are_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with listen_for_stop() as stop:
        assert not stop
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop
        assert stop.cause == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before


def set_clock(monkeypatch: pytest.MonkeyPatch, *seconds: float) -> None:
    """Set the times at which stop signals arrive."""
    clock = SimpleNamespace(monotonic=iter(seconds).__next__)
    monkeypatch.setattr("shardwright.launch.stop_signals.time", clock)


def test_a_second_ctrl_c_interrupts_the_process_that_the_user_started(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    set_clock(monkeypatch, 0.0, 0.5, 2.0)
    with listen_for_stop(is_foreground=True) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert "saves after this step" in capfd.readouterr().err
        try:  # the same Ctrl-C, from a program that forwards it
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            pytest.fail("one Ctrl-C interrupted twice")
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.cause == signal.SIGINT
    assert capfd.readouterr().err == ""


def test_a_second_ctrl_c_kills_the_ranks_of_a_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_clock(monkeypatch, 0.0, 2.0)
    code = (
        "import signal, time; signal.signal(2, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None
        rank.stdout.readline()  # it ignores SIGINT from here on
        (tmp_path / "rank-0.pid").write_text(str(rank.pid))
        with _forward_stop_signals(tmp_path, StopRequest(is_foreground=True)):
            os.kill(os.getpid(), signal.SIGINT)
            assert rank.poll() is None
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
        assert rank.wait(30) == -signal.SIGKILL


@pytest.mark.parametrize("outcome", [None, Preempted("saved")])
def test_a_stop_signal_does_not_kill_a_rank_that_exits(
    outcome: Exception | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(*_: object, **__: object) -> None:
        if outcome is not None:
            raise outcome

    path = tmp_path / "recipe.yaml"
    path.write_text(dump_recipe(build_recipe(tmp_path / "run")))
    monkeypatch.setattr("shardwright.training.run.train", train)
    words = ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    for name, value in zip(words, ("0", "1", "localhost", "1"), strict=True):
        monkeypatch.setenv(name, value)
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        code = run(["train", str(path)])
        handlers = {signal.getsignal(number) for number in STOP_SIGNALS}
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert handlers == {signal.SIG_IGN}
    assert code == (ExitCode.DONE if outcome is None else ExitCode.PREEMPTED)


def test_a_rank_stops_if_its_launcher_already_exited() -> None:
    launcher = subprocess.Popen([sys.executable, "-c", ""])
    launcher.wait()
    request = StopRequest()
    with stop_when_parent_exits(request, launcher.pid):
        deadline = time.monotonic() + 60
        while not request and time.monotonic() < deadline:
            time.sleep(0.01)
    assert request.cause == LAUNCHER_DIED


def test_torchrun_and_our_launchers_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent of another rank may be a shell that ends before it."""
    monkeypatch.delenv(LAUNCHER_VARIABLE, raising=False)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setenv("RANK", "0")
    assert find_launcher_pid() is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert find_launcher_pid() == os.getppid()
    monkeypatch.setenv(LAUNCHER_VARIABLE, str(os.getpid()))
    assert find_launcher_pid() is None, "the parent is a shell between launcher and rank"


def test_a_run_folder_is_not_reused_without_resume(tmp_path: Path) -> None:
    recipe = build_recipe(tmp_path / "run")
    folder = RunFolder.from_recipe(recipe)
    folder.check_available(resume=False)
    with pytest.raises(CheckpointError, match="no checkpoint to resume from"):
        folder.check_available(resume=True)
    folder.write_metadata(recipe, {"layout": {}}, {"model_type": "llama"})
    assert folder.load_recipe() == recipe
    with pytest.raises(InputError, match="--resume"):
        folder.check_available(resume=False)
    folder.checkpoints.mkdir()
    folder.check_available(resume=True)
    assert RunFolder.open_existing(folder.path) == folder


def test_a_relative_checkpoint_folder_is_found_from_another_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resume from elsewhere found no checkpoint and started the run again."""
    document = build_recipe(tmp_path / "run").model_dump(mode="json")
    recipe = validate_recipe(document | {"checkpoint": {"dir": "saved"}})
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "first")
    folder = RunFolder.from_recipe(recipe)
    folder.write_metadata(recipe, {"layout": {}}, {"model_type": "llama"})
    saved = tmp_path / "first" / "saved"
    (saved / "step-00000004").mkdir(parents=True)
    (saved / "step-00000004" / "manifest.json").write_text("{}")
    (saved / "latest").write_text("step-00000004")
    folder.check_started(resume=True)

    monkeypatch.chdir(tmp_path / "second")
    assert RunFolder.open_existing(folder.path).checkpoints == saved
    assert run(["checkpoint", "list", str(folder.path)]) == ExitCode.DONE
    assert "step-00000004" in capsys.readouterr().out
    message = rf"in {saved} \(got saved, here {tmp_path}/second/saved;"
    with pytest.raises(CheckpointError, match=message):
        folder.check_started(resume=True)
    with pytest.raises(CheckpointError, match="Start in the former working directory"):
        RunFolder(folder.path).check_started(resume=True)  # no checkpoint.dir any more
    RunFolder(folder.path, str(saved)).check_started(resume=True)
    saved.rename(tmp_path / "second" / "saved")
    folder.check_started(resume=True)


def test_a_folder_that_is_not_a_run_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"recipe\.yaml"):
        RunFolder.open_existing(tmp_path)


def test_a_full_disk_leaves_no_run_folder(tmp_path: Path) -> None:
    def save_tokenizer(folder: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    recipe = build_recipe(tmp_path / "run")
    folder = RunFolder.from_recipe(recipe)
    with pytest.raises(InputError, match=r"run\.dir: .*No space left.*Free space"):
        folder.write_metadata(recipe, {}, {}, save_tokenizer=save_tokenizer)
    assert not folder.is_started


def test_an_unwritable_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    recipe = build_recipe(tmp_path / "file" / "run")
    with pytest.raises(InputError, match="cannot be written"):
        RunFolder.from_recipe(recipe).write_metadata(recipe, {}, {})
