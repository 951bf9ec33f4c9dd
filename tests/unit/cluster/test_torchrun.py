"""torchrun commands of `launch`, one per node."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from shardwright.cli.main import run
from shardwright.errors import ExitCode
from tests.unit.cluster.conftest import run_launch


def test_each_node_has_its_torchrun_command(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--torchrun",
        "--hosts",
        "10.0.0.1,10.0.0.2",
        "--gpus-per-node",
        "4",
        "--env",
        "WORDS=two words",
        "--json",
    ]
    output = json.loads(run_launch(capsys, str(recipe), *words))
    first, second = output["text"].splitlines()[1::2]
    assert output["world_size"] == 8
    assert "--local-addr=10.0.0.1" in first
    assert "is_host=1" in first
    assert "--local-addr=10.0.0.2" in second
    assert "is_host=0" in second
    for command in (first, second):
        printed = subprocess.run(
            ["bash", "-c", command.replace("torchrun", "printenv WORDS; printf '%s\\n'", 1)],
            capture_output=True,
            text=True,
            check=True,
        )
        assert printed.stdout.splitlines()[0] == "two words"
        assert str(recipe) in printed.stdout.splitlines()
        assert "--rdzv-endpoint=10.0.0.1:29500" in printed.stdout.splitlines()


def test_a_name_that_is_not_utf8_is_written_with_its_bytes(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.txt"
    words = ["--torchrun", "--gpus-per-node", "4", "--env", "FOLDER=/data/\udcff"]
    assert run(["launch", str(recipe), *words, "--out", str(out)]) == ExitCode.DONE
    assert b"/data/\xff" in out.read_bytes()


WARM = ["--set", "elastic.warm_restarts=true", "--set", "elastic.max_restarts=2"]


def test_nodes_that_keep_their_processes_are_started_without_torchrun(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(recipe), "--torchrun", "--hosts", "a,b,c", "--gpus-per-node", "4", *WARM]
    output = json.loads(run_launch(capsys, *words, "--json"))
    commands = output["text"].splitlines()[1::2]
    assert output["world_size"] == 12
    for number, command in enumerate(commands):
        assert "torchrun" not in command
        assert f" RANK={number} WORLD_SIZE=3 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 " in command
        assert " MASTER_ADDR=a MASTER_PORT=29500 shardwright train " in command
        assert command.endswith(" --resume-if-begun")
        assert re.search(r" SHARDWRIGHT_NODE_TOKEN=[0-9a-f]{32} ", command)
        assert " --nproc 4 " in command


def test_spare_nodes_have_no_ranks(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(recipe), "--torchrun", "--hosts", "a,b,c", "--gpus-per-node", "4", *WARM]
    spare = ["--set", "elastic.spare_nodes=1", "--json"]
    assert json.loads(run_launch(capsys, *words, *spare))["world_size"] == 8
    assert run(["launch", *words, "--set", "elastic.spare_nodes=3"]) == ExitCode.WRONG_INPUT
    assert (
        "elastic.spare_nodes: all nodes are spare nodes, so none is left for the ranks"
        in capsys.readouterr().err
    )
    kubernetes = [str(recipe), "--kubernetes", "--image", "i", "--gpus-per-node", "4", *WARM]
    assert run(["launch", *kubernetes]) == ExitCode.WRONG_INPUT
    assert "elastic.warm_restarts: kubernetes restarts all ranks" in capsys.readouterr().err


def test_ipv6_addresses_are_hosts(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(recipe), "--torchrun", "--hosts", "fe80::1,fe80::2", "--gpus-per-node", "4"]
    assert "--rdzv-endpoint=fe80::1:29500" in run_launch(capsys, *words)
