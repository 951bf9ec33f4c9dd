"""Wrong options of `launch`, for all clusters."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.cli.main import run
from shardwright.errors import ExitCode


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "allowed: slurm or kubernetes or torchrun"),
        (["--slurm", "--torchrun"], "allowed: slurm or kubernetes or torchrun"),
        (["--slurm"], "--gpus-per-node"),
        (["--slurm", "--gpus-per-node", "2", "--time", "soon"], "not a time limit"),
        (["--slurm", "--gpus-per-node", "2", "--time", "30\n"], "not a time limit"),
        (
            ["--slurm", "--gpus-per-node", "2", "--partition", "a\nrm -rf /"],
            "--partition: not a single word",
        ),
        (["--torchrun", "--gpus-per-node", "2", "--hosts", ",,,"], "--hosts: not a node address"),
        (
            ["--torchrun", "--gpus-per-node", "2", "--hosts", "a b,c;d"],
            "--hosts: not a node address (got 'a b'",
        ),
        (
            ["--torchrun", "--gpus-per-node", "2", "--hosts", "a:29500,b"],
            "--hosts: an address with a port (got 'a:29500'",
        ),
        (
            ["--torchrun", "--gpus-per-node", "2", "--hosts", "[fe80::1]:29500,b"],
            "--hosts: an address with a port",
        ),
        (
            ["--torchrun", "--gpus-per-node", "2", "--hosts", "a,b,a"],
            "--hosts: this node is listed twice",
        ),
        (["--kubernetes", "--gpus-per-node", "2", "--image", ""], "pods need a container image"),
        (
            ["--slurm", "--gpus-per-node", "2", "--hosts", "a"],
            "applies to --torchrun only and has no effect with --slurm",
        ),
        (["--slurm", "--gpus-per-node", "2", "--layout", "tp=3"], "does not divide 2 ranks"),
        (["--slurm", "--gpus-per-node", "2", "--sbatch", "qos=high"], "not an sbatch option"),
        (["--slurm", "--gpus-per-node", "2", "--env", "1=2"], "NAME=VALUE"),
        (
            ["--slurm", "--gpus-per-node", "2", "--ib-hca", "mlx5", "--no-infiniband"],
            "InfiniBand is disabled",
        ),
        (["--kubernetes", "--gpus-per-node", "2"], "--image"),
        (["--kubernetes", "--gpus-per-node", "2", "--image", "i", "--volume", "x"], "CLAIM:/path"),
        (["--torchrun", "--nodes", "2", "--gpus-per-node", "2"], "--hosts node1,node2"),
        (["--slurm", "--gpus-per-node", "2", "--ranks-per-node", "2"], "each rank uses one GPU"),
        (
            ["--slurm", "--gpus-per-node", "2", "--ranks-per-node", "3", "--set", "run.device=cpu"],
            "contradictory numbers of ranks per node (got 3 with --gpus-per-node 2)",
        ),
        (["--slurm", "--gpus-per-node", "2", "--sweep", "seed"], "KEY=VALUE,VALUE"),
        (["--slurm", "--gpus-per-node", "2", "--sweep", "seed=1,1"], "KEY=VALUE,VALUE"),
        (["--slurm", "--gpus-per-node", "2", "--sweep", "sead=1,2"], "sead"),
        (["--torchrun", "--gpus-per-node", "2", "--submit"], "applies to --slurm and --kubernetes"),
        (["--torchrun", "--gpus-per-node", "2", "--image", "a"], "applies to --slurm and --kuber"),
    ],
)
def test_wrong_input_is_refused(
    recipe: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert run(["launch", str(recipe), *words]) == ExitCode.WRONG_INPUT
    assert message in capsys.readouterr().err
