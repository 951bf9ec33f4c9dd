"""`shardwright tune`: wrong input, before any rank starts; the table and the JSON of a result.

tests/multiprocess/test_tune.py runs it with ranks.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

import shardwright as sw
from shardwright.cli.main import run
from shardwright.cli.output.tune_table import TrialPrinter, print_result
from shardwright.cli.tune import describe_stop, parse_duration
from shardwright.config.recipe_loading import validate_recipe
from shardwright.errors import ExitCode, InputError
from shardwright.hardware.catalog_loading import parse_cluster
from shardwright.tuning.candidates import CandidateList, TuningRequest, list_candidates
from shardwright.tuning.halving import Trial
from shardwright.tuning.measurement import Measurement, TrialOutcome
from shardwright.tuning.tuning_result import TriedCandidate, TuningOptions, TuningResult
from tests.unit.test_api import build_recipe

OOM = TrialOutcome("out_of_memory", 5.0, reason="rank 1 ran out of memory")


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(build_recipe(tmp_path)))
    return path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--budget", "soon"], "--budget: not a duration (got soon;"),
        (["--budget", "0s"], "--budget: not a duration (got 0s;"),
        (["--budget", "0.5s"], "--budget: too small (got 0.5; allowed: at least 1)"),
        (["--trial-limit", "-1"], "--trial-limit: not a duration"),
        (["--fix", "batch"], "--fix: not a setting that tuning changes (got batch;"),
        (["--profile", "rates.json"], "--profile: measured rates need the name"),
        (["--cluster", "2xcpu", "--nproc", "4"], "--nproc: more ranks than devices"),
        (["--cluster", "2xnothing"], "nothing"),
        (["--nproc", "7", "--set", "training.global_batch_size=16"], "no layout divides"),
        (["--resume"], "--resume: there are no results to resume"),
        (["--set", "layout.auto=true", "--nproc", "2"], "training.global_batch_size: the global"),
    ],
)
def test_wrong_input_is_refused_before_any_rank_starts(
    recipe: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    extra = ["--set", "training.micro_batch_size=null"] if "--nproc" in words[:1] else []
    if "layout.auto=true" in words:
        extra = []
    assert run(["tune", str(recipe), *words, *extra, "--json"]) == ExitCode.WRONG_INPUT
    output = capsys.readouterr()
    assert message in output.err
    assert json.loads(output.out)["error"]["exit_code"] == ExitCode.WRONG_INPUT
    assert not (recipe.parent / "runs").exists()


def test_a_recipe_with_everything_fixed_has_nothing_to_tune(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["layout", "micro_batch_size", "recompute", "compile", "prefetch", "bucket_size"]
    words = [word for name in names for word in ("--fix", name)]
    assert run(["tune", str(recipe), "--nproc", "2", *words]) == ExitCode.WRONG_INPUT
    assert "nothing to tune: only one combination of settings remains" in capsys.readouterr().err


def test_a_launchers_rank_is_refused(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(InputError, match="a launcher has already started"):
        sw.tune(recipe)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("10m", 600), ("1.5h", 5400), (" 2 m", 120)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text, field="--budget") == seconds


@pytest.mark.parametrize(
    "option",
    [{"budget_seconds": 0.0}, {"num_steps": 2}, {"max_candidates": 1}, {"max_trial_seconds": 0.1}],
)
def test_options_have_lower_limits(option: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="too small"):
        TuningOptions(**option)


def build_result(recipe: Path, outcomes: Sequence[TrialOutcome | None]) -> TuningResult:
    cluster = parse_cluster("2xcpu")
    document = yaml.safe_load(recipe.read_text())
    document["model"]["config"]["vocab_size"] = 40
    loaded = validate_recipe(document | {"precision": "fp32"})
    found = list_candidates(TuningRequest(loaded, cluster, 2, False, False, max_candidates=4))
    tried = tuple(
        TriedCandidate(candidate, outcome, 7.0 if outcome is not None else None)
        for candidate, outcome in zip(found.candidates, outcomes, strict=True)
    )
    return TuningResult(
        tried,
        tried[1],
        "budget",
        None,
        cluster,
        Path("runs/tiny-tune"),
        Path("runs/tiny-tune/tuned.yaml"),
        Path("steps.json"),
        None,
        61.0,
        3,
        found,
    )


def measure(seconds: float) -> TrialOutcome:
    measured = Measurement(16, seconds, 0.02 * seconds, 1000 / seconds, 2**30, 7.0, 5.0)
    return TrialOutcome("measured", 12.0, measured)


def render(result: TuningResult) -> str:
    console = Console(file=io.StringIO(), width=200)
    print_result(result, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_has_predictions_measurements_and_failures(recipe: Path) -> None:
    result = build_result(recipe, [measure(0.2), measure(0.1), OOM, None])
    text = render(result)
    rows = text.splitlines()
    assert "100 ms ±2%" in next(row for row in rows if row.startswith("*"))
    assert "200 ms ±2%" in next(row for row in rows if row.startswith("="))
    assert "out of memory" in text
    assert "rank 1 ran out of memory" in text
    assert "3 trials in 1m 01s; the budget ended the search with 1 candidates not tried" in text
    assert "2.00 times as fast as the recipe's own settings" in text
    assert "mostly compilation" in text
    assert "runs/tiny-tune/tuned.yaml" in text
    assert "later plans for 2xEPYC-9654 use these step times: steps.json" in text


def test_the_json_has_the_content_of_the_table(recipe: Path) -> None:
    result = build_result(recipe, [measure(0.2), measure(0.1), OOM, None])
    content = json.loads(json.dumps(result.as_dict()))
    assert content["speedup"] == 2.0
    assert content["ending"] == "budget"
    assert [each["baseline"] for each in content["candidates"]] == [True, False, False, False]
    assert content["winner"]["outcome"]["measurement"]["step_seconds"] == 0.1
    assert content["winner"]["warmup_seconds"] == 7.0
    assert content["candidates"][2]["outcome"]["reason"] == OOM.reason
    assert content["candidates"][3]["outcome"] is None
    assert {"low", "high"} <= set(content["winner"]["prediction"]["step_seconds"])


def test_a_search_that_was_stopped_names_its_results(recipe: Path) -> None:
    result = build_result(recipe, [measure(0.2), measure(0.1), OOM, None])
    stopped = replace(result, ending="stopped", stop_cause="SIGTERM", recipe_path=None)
    assert describe_stop(stopped).startswith("SIGTERM: results of 3 candidates are in runs/tiny")
    assert "fastest:" not in render(stopped)


def test_lines_of_trials(recipe: Path) -> None:
    result = build_result(recipe, [measure(0.2), measure(0.1), OOM, None])
    console = Console(file=io.StringIO(), width=300)
    printer = TrialPrinter(console)
    candidates: CandidateList = replace(result.candidates, baseline_obstacle="it is too large")
    printer.print_start(candidates, result.cluster)
    candidate = candidates.candidates[0]
    printer.print_trial(candidate, Trial("a", 4, measure(0.2)))
    printer.print_trial(candidate, Trial("a", 4, OOM, is_new=False))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert lines[0].startswith(f"4 candidates of {candidates.num_overlapping} whose predicted")
    assert "no measured rates" in lines[1]
    assert lines[2] == "the recipe's own settings are not tried: it is too large"
    assert "200 ms ±2% per step, predicted" in lines[3]
    assert lines[4].endswith("out of memory: rank 1 ran out of memory (earlier result)")
