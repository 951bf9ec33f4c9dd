"""Slurm scripts of `launch`: shellcheck accepts them, bash runs them, sbatch gets them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from shardwright.cli.main import run
from shardwright.errors import ExitCode
from tests.unit.cluster.conftest import run_launch

SLURM = (
    "--slurm",
    "--nodes",
    "2",
    "--gpus-per-node",
    "4",
    "--time",
    "04:00:00",
    "--account",
    "lab",
    "--cores-per-rank",
    "8",
)


@pytest.mark.parametrize(
    "extra",
    [
        (),
        ("--image", "lab/sw:1"),
        ("--image", "lab/sw:1", "--run-dir", "/shared/my runs/first"),
        ("--env", "WORDS=two words", "--interface", "ib0", "--port", "29501"),
        ("--sweep", "seed=1,2", "--set", "checkpoint.dir=s3://bucket/a"),
    ],
)
def test_the_script_passes_shellcheck(
    recipe: Path, capsys: pytest.CaptureFixture[str], extra: tuple[str, ...]
) -> None:
    shellcheck = shutil.which(
        "shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    )
    if shellcheck is None:
        pytest.skip("shellcheck is not installed (the `dev` extra has it)")
    text = run_launch(capsys, str(recipe), *SLURM, *extra)
    completed = subprocess.run(
        [shellcheck, "-"], input=text, capture_output=True, text=True, check=False
    )
    assert completed.returncode == 0, completed.stdout


def test_the_slurm_script_has_all_directives(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = run_launch(
        capsys, str(recipe), *SLURM, "--sbatch=--qos=high", "--save-seconds", "600"
    ).splitlines()
    directives = {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")}
    assert directives >= {
        "--nodes=2",
        "--ntasks-per-node=4",
        "--gpus-per-node=4",
        "--cpus-per-task=8",
        "--time=04:00:00",
    }
    assert directives >= {
        "--account=lab",
        "--qos=high",
        "--signal=TERM@600",
        "--requeue",
        "--open-mode=append",
    }


FAKES = {
    "srun": 'printf "cores=%s %s\\n" "${SRUN_CPUS_PER_TASK-}" "$*" >> srun.log\n'
    '[ "$MASTER_ADDR" = first ] || exit 99\n'
    'exit "$(cat status)"',
    "scontrol": 'if [ "$1" = show ]; then printf "first\\nsecond\\n"; '
    'else printf "%s\\n" "$*" >> scontrol.log; fi',
}
"""Replacements for Slurm's commands."""


def run_script(
    folder: Path, text: str, status: int, restarts: int = 0, keep: Sequence[str] = ()
) -> tuple[int, list[str]]:
    """Run the script with `FAKES`, where srun exits with `status`; return exit code and calls of
    scontrol. `keep` names variables of this process that the script gets.
    """
    for name, body in FAKES.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    (folder / "status").write_text(str(status))
    (folder / "scontrol.log").unlink(missing_ok=True)
    environment = {
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "PATH": f"{folder}:{os.environ['PATH']}",
    }
    environment |= {name: os.environ[name] for name in keep}
    environment |= {"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}
    completed = subprocess.run(
        ["bash", "-c", text],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    log = folder / "scontrol.log"
    return completed.returncode, log.read_text().splitlines() if log.exists() else []


def test_the_script_requeues_after_preemption_and_losses(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = run_launch(capsys, str(recipe), *SLURM)
    requeue = ["requeue 77"]
    assert run_script(tmp_path, text, 0) == (0, [])
    assert run_script(tmp_path, text, ExitCode.WRONG_INPUT) == (ExitCode.WRONG_INPUT, [])
    assert run_script(tmp_path, text, ExitCode.PREEMPTED) == (ExitCode.PREEMPTED, requeue)
    assert "--resume-if-begun" not in (tmp_path / "srun.log").read_text(), (
        "a new job must refuse a run folder that is in use"
    )
    assert run_script(tmp_path, text, ExitCode.PREEMPTED, restarts=1) == (
        ExitCode.PREEMPTED,
        requeue,
    )
    assert (tmp_path / "srun.log").read_text().splitlines()[-1].endswith("--resume-if-begun")


@pytest.mark.parametrize("cores", ["8", ""])
def test_srun_gets_the_cores_that_the_job_requested(
    recipe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    cores: str,
) -> None:
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", cores)
    text = run_launch(capsys, str(recipe), *SLURM)
    assert run_script(tmp_path, text, 0, keep=["SLURM_CPUS_PER_TASK"]) == (0, [])
    assert (tmp_path / "srun.log").read_text().startswith(f"cores={cores} ")


def test_the_script_counts_restarts_that_did_not_follow_a_save(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = run_launch(capsys, str(recipe), *SLURM)
    failed = (ExitCode.RUN_FAILED, ["requeue 77"])
    assert run_script(tmp_path, text, ExitCode.RUN_FAILED) == failed
    assert run_script(tmp_path, text, 137, restarts=1) == failed, "not the number of the signal"
    saved = (ExitCode.PREEMPTED, ["requeue 77"])
    assert run_script(tmp_path, text, ExitCode.PREEMPTED, restarts=2) == saved
    assert run_script(tmp_path, text, ExitCode.DONE, restarts=3)[0] == 0, "two losses, one save"
    last = run_script(tmp_path, text, ExitCode.RUN_FAILED, restarts=3)
    assert last == (ExitCode.RUN_FAILED, []), "elastic.max_restarts is 2, and one restart was free"
    (tmp_path / "srun.log").unlink()
    # Slurm has requeued the job after the loss of a node.
    assert run_script(tmp_path, text, ExitCode.DONE, restarts=4) == (ExitCode.RUN_FAILED, [])
    assert not (tmp_path / "srun.log").exists(), "the ranks are not started again"


def test_exit_codes_pass_where_slurm_does_not_requeue(
    recipe: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refusing = FAKES["scontrol"].replace("else ", "else exit 1; ")
    monkeypatch.setitem(FAKES, "scontrol", refusing)
    text = run_launch(capsys, str(recipe), *SLURM)
    for status in (ExitCode.PREEMPTED, ExitCode.RUN_FAILED):
        assert run_script(tmp_path, text, status) == (status, [])


def test_each_task_of_a_sweep_has_its_value_and_folders(
    recipe: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sweep = ("--sweep", "model.config.model_type=llama,gpt2", "--run-dir", "my runs")
    text = run_launch(capsys, str(recipe), *SLURM, *sweep, "--set", "checkpoint.dir=s3://bucket/a")
    assert "#SBATCH --array=0-1" in text
    assert "#SBATCH --output=small-%A_%a.log" in text
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    monkeypatch.setitem(FAKES, "srun", 'printf "%s\n" "$@" > srun.log')
    assert run_script(tmp_path, text, 0, keep=("SLURM_ARRAY_TASK_ID",))[0] == 0
    words = (tmp_path / "srun.log").read_text().splitlines()
    name = "model.config.model_type=gpt2"
    for pair in (["--set", name], ["--run-dir", f"my runs/{name}"]):
        assert words[words.index(pair[1]) - 1 : words.index(pair[1]) + 1] == pair
    assert f"checkpoint.dir=s3://bucket/a/{name}" in words


def test_cpu_jobs_request_no_gpus(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--slurm", "--nodes", "2", "--gpus-per-node", "0", "--ranks-per-node", "3")
    text = run_launch(capsys, str(recipe), *words)
    assert "#SBATCH --ntasks-per-node=3" in text
    assert "--gpus-per-node" not in text
    assert "--set run.device=cpu" in text
    assert "NCCL" not in text


def test_nodes_that_keep_their_processes_are_one_task_each(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--nodes", "3", "--gpus-per-node", "4", "--cores-per-rank", "2"]
    words += ["--set", "elastic.warm_restarts=true", "--set", "elastic.max_restarts=2"]
    script = run_launch(capsys, str(recipe), "--slurm", *words)
    directives = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    assert "#SBATCH --no-kill" in directives
    assert "#SBATCH --ntasks-per-node=1" in directives
    assert "#SBATCH --gpus-per-node=4" in directives
    assert "#SBATCH --cpus-per-task=8" in directives
    assert "srun --kill-on-bad-exit=0 --wait=0 --no-kill shardwright train" in script
    assert "--nproc 4" in script
    tokens = {
        subprocess.check_output(["bash", "-c", f"{line}; echo $SHARDWRIGHT_NODE_TOKEN"], text=True)
        for line in [next(line for line in script.splitlines() if "NODE_TOKEN=" in line)] * 2
    }
    assert len(tokens) == 2
    assert all(re.fullmatch(r"[0-9a-f]{32}\n", token) for token in tokens)


def test_a_recipe_without_restarts_is_not_requeued(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = run_launch(capsys, str(recipe), *SLURM, "--set", "elastic.max_restarts=0")
    assert run_script(tmp_path, text, ExitCode.RUN_FAILED) == (ExitCode.RUN_FAILED, [])


def test_submit_passes_the_script_to_sbatch(
    recipe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["launch", str(recipe), "--slurm", "--gpus-per-node", "2", "--submit"]
    monkeypatch.setenv("PATH", str(tmp_path))  # the machine may have a real sbatch
    assert run(words) == ExitCode.WRONG_INPUT
    assert "sbatch is not installed" in capsys.readouterr().err
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(f'#!/bin/bash\n/bin/cat > "{tmp_path}/submitted"\necho 4711\n')
    sbatch.chmod(0o755)
    assert run(words) == ExitCode.DONE
    assert capsys.readouterr().out == "submitted: 4711\n"
    assert (tmp_path / "submitted").read_text().startswith("#!/bin/bash\n#")
    sbatch.write_text("#!/bin/bash\necho 'no such account' >&2\nexit 1\n")
    assert run(words) == ExitCode.RUN_FAILED
    assert "sbatch failed: no such account" in capsys.readouterr().err


def test_a_container_has_the_folders_of_recipe_and_run(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a mount, files that the ranks write would be lost with the container."""
    scratch = ("--set", "data.cache_dir=/scratch")
    text = run_launch(
        capsys, str(recipe), *SLURM, *scratch, "--image", "sw", "--run-dir", "/shared/my runs/first"
    )
    (command,) = [line for line in text.splitlines() if line.startswith("srun ")]
    (mounts,) = [word for word in shlex.split(command) if word.startswith("--container-mounts=")]
    mounted = {mount.split(":")[0] for mount in mounts.partition("=")[2].split(",")}
    assert mounted >= {"$PWD", "/shared/my runs/first", "/scratch", str(recipe.parent)}
    assert "mkdir -p '/shared/my runs/first'" in text.splitlines()
    without = run_launch(capsys, str(recipe), *SLURM, "--run-dir", "/shared/first")
    assert "mkdir" not in without
    relative = run_launch(capsys, str(recipe), *SLURM, "--image", "sw")
    assert "mkdir" not in relative


def test_a_folder_that_a_container_cannot_mount_is_refused(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--image", "sw", "--run-dir", "/shared/a,b")
    assert run(["launch", str(recipe), *SLURM, *arguments]) == ExitCode.WRONG_INPUT
    assert "--image: a container needs this folder" in capsys.readouterr().err
