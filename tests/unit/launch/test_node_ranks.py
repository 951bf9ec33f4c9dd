"""Ranks of a node: their variables, their exit code, stop signals, ranks that do not end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwright.errors import ExitCode
from shardwright.launch.node_ranks import NodeRanks, run_node_ranks
from shardwright.launch.rank_outcome import LAUNCHER_VARIABLE

WAIT_FOR_STOP = (
    "trap 'echo saved > {folder}/$RANK.saved; exit 4' TERM; touch {folder}/$RANK.ready; "
)


def write_command(script: str) -> list[str]:
    """Return a command whose ranks run this shell script."""
    return ["sh", "-c", script]


def test_each_rank_has_its_own_variables(tmp_path: Path) -> None:
    names = "$RANK $LOCAL_RANK $GROUP_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT"
    names += f" ${LAUNCHER_VARIABLE}"
    ranks = NodeRanks(2, num_nodes=3, node_rank=2, master_address="first", master_port=7)
    code = run_node_ranks(ranks, write_command(f'echo "{names}" > {tmp_path}/$RANK'))
    assert code == ExitCode.DONE
    assert {path.name: path.read_text().strip() for path in tmp_path.iterdir()} == {
        "4": f"4 0 2 6 2 first 7 {os.getpid()}",
        "5": f"5 1 2 6 2 first 7 {os.getpid()}",
    }


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("exit 0", ExitCode.DONE),
        ("exit 4", ExitCode.PREEMPTED),
        ("exit 2", ExitCode.WRONG_INPUT),
        ("exit $((1 + RANK))", ExitCode.CHECK_FAILED),
        ("test $RANK = 0 && kill -9 $$; exit 4", ExitCode.RUN_FAILED),
        ("test $RANK = 0 && exit 77; exit 0", ExitCode.RUN_FAILED),
    ],
)
def test_a_node_ends_with_the_exit_code_of_its_ranks(script: str, expected: ExitCode) -> None:
    assert run_node_ranks(NodeRanks(2), write_command(script)) == expected


def test_the_others_are_ended_after_a_failure_and_killed_if_they_stay(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ready = tmp_path / "ready"  # rank 1 fails once rank 0 ignores the signal
    script = (
        f"if test $RANK = 1; then until test -e {ready}; do sleep 0.05; done; exit 3; fi; "
        f"trap '' TERM; touch {ready}; while true; do sleep 0.05; done"
    )
    start = time.monotonic()
    code = run_node_ranks(NodeRanks(2), write_command(script), peer_seconds=0.3)
    assert code == ExitCode.RUN_FAILED
    assert time.monotonic() - start < 10
    error = capfd.readouterr().err
    assert "rank 1 ended with exit code 3" in error
    assert "rank 0 was killed by SIGKILL" in error


def test_a_stop_signal_reaches_all_ranks_which_may_take_their_time(tmp_path: Path) -> None:
    script = WAIT_FOR_STOP.format(folder=tmp_path) + "while true; do sleep 0.05; done"
    program = (
        "import sys\n"
        "from shardwright.launch.node_ranks import NodeRanks, run_node_ranks\n"
        "sys.exit(run_node_ranks(NodeRanks(2), sys.argv[1:], peer_seconds=0.0))\n"
    )
    command = [sys.executable, "-c", program, *write_command(script)]
    with subprocess.Popen(command, env=dict(os.environ)) as process:
        end = time.monotonic() + 60
        while len(list(tmp_path.glob("*.ready"))) < 2:
            assert time.monotonic() < end
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == ExitCode.PREEMPTED
    assert {path.name for path in tmp_path.glob("*.saved")} == {"0.saved", "1.saved"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-ranks", "0", "--", "train"], "--num-ranks 0"),
        (["--num-ranks", "1", "--num-nodes", "2", "--", "train"], "need --master-addr"),
        (["--num-ranks", "1", "--node-rank", "1", "--", "train"], "--node-rank 1"),
    ],
)
def test_wrong_numbers_are_wrong_input(words: list[str], message: str) -> None:
    command = [sys.executable, "-m", "shardwright.launch.node_ranks", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == ExitCode.WRONG_INPUT
    assert message in done.stderr


def test_the_command_line_runs_shardwright_and_imports_no_torch() -> None:
    module = "shardwright.launch.node_ranks"
    words = ["--num-ranks", "2", "--", "train", "absent.yaml", "--resume-if-begun"]
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", module, *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == ExitCode.WRONG_INPUT
    assert "absent.yaml" in done.stderr
    assert not any(line.rstrip().endswith("| torch") for line in done.stderr.splitlines())
