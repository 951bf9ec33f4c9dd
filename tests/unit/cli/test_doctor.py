"""`shardwright doctor`: tables that fit the terminal, exit codes, options that contradict."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from rich.console import Console

from shardwright.cli.doctor import doctor_command
from shardwright.cli.main import run
from shardwright.cli.output.doctor_table import print_findings
from shardwright.doctor.examination import CALIBRATION_SECONDS
from shardwright.doctor.finding import Finding
from shardwright.doctor.rates.collective_bandwidth import GroupTime, judge_collectives
from shardwright.errors import ExitCode

RANKS = tuple(range(8))
TRAFFIC = judge_collectives(
    [
        GroupTime("dp_shard = fsdp = all", RANKS, kind, size, size / rate)
        for kind, rate in (("all_reduce", 4e9), ("all_gather", 400e9))
        for size in (65536, 2**20, 2**24, 2**28)
    ],
    {RANKS: 8},
    "NVIDIA H100 80GB HBM3",
    None,
)
FINDINGS = [
    Finding("host", "cores", "pass", "32 cores for 8 ranks"),
    Finding(
        "devices",
        "throttling, rank 3",
        "fail",
        "thermal slowdown (hardware) at 91 C",
        "Cool it: fans, air flow, inlet temperature",
    ),
    *TRAFFIC,
]


@pytest.mark.parametrize("width", [60, 80, 140])
def test_the_tables_fit_and_show_remedies(width: int) -> None:
    page = io.StringIO()
    print_findings(FINDINGS, Console(width=width, file=page))
    lines = page.getvalue().splitlines()
    assert max(len(line) for line in lines) <= width
    assert all(line == line.rstrip() for line in lines)
    words = " ".join(page.getvalue().split())
    assert "-> Cool it: fans, air flow, inlet temperature" in words
    assert (
        "64.00 KiB 1.00 MiB 16.00 MiB 256 MiB of peak"
        if width >= 80
        else "64.00 KiB 256 MiB of peak"
    ) in words
    assert ("2 more sizes" in words) == (width < 80)
    assert " all_reduce " in words  # names are never truncated
    assert "NCCL_DEBUG=INFO" in words  # below the row of the slow collective
    assert "2 pass 0 warn 2 fail" in words


def test_a_narrow_terminal_shows_values_below_their_names() -> None:
    """In the columns of a table, 40 columns left 10 for the value: one word per line, or half."""
    remedy = "Name the devices, such as --set cluster=8xH100-80GB; `shardwright plan` shows more"
    value = "not predicted: the recipe names no cluster"
    finding = Finding("layout", "layout fits the model", "warn", value, remedy)
    page = io.StringIO()
    print_findings([finding], Console(width=40, file=page))
    lines = [line.rstrip() for line in page.getvalue().splitlines()]
    assert max(map(len, lines)) <= 40
    assert "  warn  layout fits the model" in lines
    assert "        not predicted: the recipe names" in lines
    assert {*value.split(), *remedy.split()} <= set(" ".join(lines).split())


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["--device", "abacus"], "--device"),
        (["--set", "seed=1"], "--set"),
        (["--layout", "tp=3", "--nproc", "2"], "layout"),
        (["--layout", "speed=3"], "--layout"),
        (["--checklist", "r.yaml", "--recipe", "r.yaml"], "--checklist"),
        (["--recipe", "no-such.yaml"], "no-such.yaml"),
        (["--calibrate", "/proc/no/rates.json"], "--calibrate"),
        (["--calibrate", "/"], "--calibrate"),
        (["--html", "/dev/null/page.html"], "--html"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(
    words: list[str],
    field: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def examine(*_arguments: object) -> None:
        pytest.fail("an examination has begun")

    monkeypatch.setattr("shardwright.doctor.diagnosis.examine", examine)
    assert run(["doctor", *words]) == ExitCode.WRONG_INPUT
    assert field in capsys.readouterr().err


def test_the_help_names_the_budget_of_the_calibration() -> None:
    _, option = get_args(get_type_hints(doctor_command, include_extras=True)["budget"])
    assert f"by default {CALIBRATION_SECONDS:g};" in option.help


def test_a_budget_without_calibration_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--budget", "30"]) == ExitCode.WRONG_INPUT
    assert "--budget: it limits --calibrate, which is not given" in capsys.readouterr().err


def test_a_failed_checklist_exits_with_1_and_one_object(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r.yaml").write_text(
        "model: {config: {model_type: llama, hidden_size: 32, intermediate_size: 64,"
        " num_hidden_layers: 2, num_attention_heads: 4,"
        " vocab_size: 64, max_position_embeddings: 32}}\n"
        f"data: {{sources: {tmp_path / 'corpus.txt'}, cache_dir: {tmp_path / 'cache'}}}\n"
        "tokenizer: {kind: character}\n"
        f"run: {{dir: {tmp_path / 'run'}}}\n"
        "training: {sequence_length: 32, micro_batch_size: 2, max_steps: 4, learning_rate: 1e-3}\n"
    )
    assert (
        run(["doctor", "--checklist", str(tmp_path / "r.yaml"), "--nproc", "1", "--json"])
        == ExitCode.CHECK_FAILED
    )
    output = json.loads(capsys.readouterr().out)
    assert output["schema_version"] == 1
    failed = [finding for finding in output["findings"] if finding["verdict"] == "fail"]
    assert any("corpus.txt" in finding["value"] for finding in failed)
