"""`shardwright tune` with real ranks: a candidate that runs out of memory, a stop, a budget, a
resumed search, and nothing left behind; marked long, the best of twelve in a third of the time.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwright.config import load_recipe
from shardwright.data.model_data import prepare_for_model
from shardwright.errors import ExitCode
from shardwright.launch.auto_layout import plan_ranks
from shardwright.model.hf.hf_model import read_model_shape
from shardwright.tuning.halving import RELEVANT_SHARE
from shardwright.tuning.measurement import WARMUP_STEPS
from shardwright.tuning.results_file import RESULTS_FILE_NAME
from tests import forked

TIMEOUT_SECONDS = 550
LIMITED = """
import sys
from pathlib import Path
from shardwright.tuning import trial
launch_ranks = trial.launch_ranks
def launch_limited_ranks(num_ranks, module, words, *rest, **options):
    launch_ranks(num_ranks, "tests.multiprocess.limited_rank", words, *rest, **options)
    run = Path(words[0]).parent / "run"
    assert (run / "events.jsonl").exists()
    assert not (run / "checkpoints").exists(), "a trial saves nothing"
trial.launch_ranks = launch_limited_ranks
from shardwright.cli.main import main
main(sys.argv[1:])
"""
"""The command with a limit on the memory of its ranks. It suffices for one row or four of the model
below, whose activations are wide, and not for eight."""
FIXED = [
    word for name in ("layout", "recompute", "compile", "bucket_size") for word in ("--fix", name)
]


class Workplace:
    """Folder of a recipe, and everything that a command may leave behind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.mark = uuid.uuid4().hex
        self.environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.temporary),
            "SHARDWRIGHT_CACHE": str(folder / "cache"),
            "TUNE_TEST_MARK": self.mark,
        }
        self.shared_before = set(os.listdir("/dev/shm"))

    @property
    def results(self) -> Path:
        return self.folder / "results"

    def build_command(self, *words: str) -> list[str]:
        return [
            sys.executable,
            "-c",
            LIMITED,
            "tune",
            str(self.folder / "recipe.yaml"),
            "--cluster",
            "2xcpu",
            *FIXED,
            "--dir",
            str(self.results),
            *words,
        ]

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        done = forked.run(
            self.build_command(*words),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            env=self.environment,
            check=False,
        )
        assert isinstance(done, subprocess.CompletedProcess)
        return done

    def list_processes(self) -> list[str]:
        """List the command lines of processes that the command started and that still run."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if self.mark.encode() in (path / "environ").read_bytes():
                    found.append((path / "cmdline").read_bytes().decode(errors="replace"))
        return found

    def list_shared_memory(self) -> set[str]:
        """List new files of shared memory that no process uses.

        Other tests use this memory too: files with names of `tempfile` are theirs, because the
        command has a folder of its own for them.
        """
        new = {}
        for name in set(os.listdir("/dev/shm")) - self.shared_before:
            with suppress(OSError):
                if name.startswith("tmp"):
                    continue
                new[os.stat(f"/dev/shm/{name}").st_ino] = name
        for path in Path("/proc").glob("[0-9]*/maps"):
            with suppress(OSError):
                for line in path.read_text(errors="replace").splitlines():
                    if "/dev/shm/" in line:
                        new.pop(int(line.split()[4]), None)
        return {name for name in new.values() if Path("/dev/shm", name).exists()}

    def check_nothing_is_left(self) -> None:
        limit = time.monotonic() + 20
        while time.monotonic() < limit and (self.list_processes() or self.list_shared_memory()):
            time.sleep(0.1)  # the last process of a command may be exiting
        assert self.list_processes() == []
        assert self.list_shared_memory() == set()
        assert list(self.temporary.iterdir()) == []
        assert [path.name for path in self.results.glob("trial-*")] == []


def write_recipe(folder: Path, **changes: Any) -> None:
    (folder / "corpus.txt").write_text(
        "".join(f"{a} + {b} = {a + b}\n" for a in range(60) for b in range(40))
    )
    recipe = {
        "name": "wide",
        "model": {
            "config": {
                "model_type": "llama",
                "hidden_size": 8,
                "intermediate_size": 16384,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "max_position_embeddings": 128,
            },
        },
        "tokenizer": {"kind": "character"},
        "data": {"sources": str(folder / "corpus.txt"), "cache_dir": str(folder / "data")},
        "precision": "fp32",
        "layout": {"zero_stage": 0, "dp_replicate": 2},
        "training": {
            "sequence_length": 128,
            "global_batch_size": 16,
            "micro_batch_size": 1,
            "max_steps": 20,
            "learning_rate": 1e-3,
        },
        "checkpoint": {"every_steps": 1, "dir": str(folder / "checkpoints")},
        "run": {"device": "cpu"},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe | changes))


@pytest.fixture
def workplace(tmp_path: Path) -> Iterator[Workplace]:
    write_recipe(tmp_path)
    place = Workplace(tmp_path)
    yield place
    for process in place.list_processes():
        pytest.fail(f"left behind: {process}")


def test_a_candidate_without_memory_is_out_and_nothing_is_left(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--steps", "3", "--candidates", "3", "--budget", "500s", "--json")
    done = workplace.run(*words)
    assert done.returncode == ExitCode.DONE, done.stderr
    result = json.loads(done.stdout)
    assert result["schema_version"] == 1
    outcomes = {
        each["prediction"]["micro_batch_size"]: each["outcome"] for each in result["candidates"]
    }
    assert {size: outcome["status"] for size, outcome in outcomes.items()} == {
        1: "measured",
        8: "out_of_memory",
        4: "measured",
    }
    assert "ran out of memory" in outcomes[8]["reason"]
    assert outcomes[8]["measurement"] is None
    fastest = min((1, 4), key=lambda size: outcomes[size]["measurement"]["step_seconds"])
    assert result["winner"]["prediction"]["micro_batch_size"] == fastest
    assert outcomes[1]["measurement"]["memory_bytes"] > 100 * 2**20
    workplace.check_nothing_is_left()
    assert not (workplace.folder / "checkpoints").exists()
    assert not (workplace.folder / "runs").exists()

    tuned = load_recipe(result["recipe"])
    source = load_recipe(workplace.folder / "recipe.yaml")
    assert tuned.training.micro_batch_size == fastest
    assert tuned.training.global_batch_size == 16
    assert tuned.training.learning_rate == 1e-3
    assert tuned.checkpoint == source.checkpoint
    assert tuned.run == source.run
    assert tuned.model == source.model

    profile = json.loads(Path(result["measured_steps"]).read_text())
    assert sorted(step["micro_batch_size"] for step in profile["steps"]) == [1, 4]
    monkeypatch.setenv("SHARDWRIGHT_CACHE", workplace.environment["SHARDWRIGHT_CACHE"])
    shape, _ = prepare_for_model(source, partial(read_model_shape, section=source.model))
    words_of_plan = [f"model.config.vocab_size={shape.vocab_size}", "layout={auto: true}"]
    automatic = load_recipe(workplace.folder / "recipe.yaml", [*words_of_plan, "cluster=2xcpu"])
    planned = plan_ranks(automatic, 2)
    assert planned.correction_summary is not None
    assert planned.correction_summary.startswith("corrected by 2 step times of this recipe that")

    again = workplace.run(*words, "--resume")
    assert again.returncode == ExitCode.DONE, again.stderr
    resumed = json.loads(again.stdout)
    assert resumed["num_trials"] == 0
    assert resumed["winner"] == result["winner"]
    assert json.loads(Path(resumed["measured_steps"]).read_text()) == profile
    changed = workplace.run(*words, "--resume", "--set", "seed=5")
    assert changed.returncode == ExitCode.WRONG_INPUT
    assert "another search: they differ in recipe" in changed.stderr


def test_a_budget_too_small_for_one_candidate_is_refused(workplace: Workplace) -> None:
    started = time.monotonic()
    done = workplace.run("--steps", "5000", "--candidates", "2", "--budget", "6s")
    assert done.returncode == ExitCode.WRONG_INPUT, done.stderr
    assert "--budget: too small: no candidate ended in time (got 6 s)" in done.stderr
    assert time.monotonic() - started < 60
    workplace.check_nothing_is_left()


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)]
)
def test_a_stop_ends_the_trial_and_keeps_the_results(
    workplace: Workplace, number: signal.Signals
) -> None:
    """The stop comes when the first candidate is measured and the second one runs."""
    command = workplace.build_command("--steps", "3", "--candidates", "2", "--trial-limit", "300s")
    process = forked.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=workplace.environment,
    )
    results = workplace.results / RESULTS_FILE_NAME
    limit = time.monotonic() + 300
    while time.monotonic() < limit and process.poll() is None:
        if results.exists() and results.read_text().count("\n") >= 2:
            break
        time.sleep(0.05)
    process.send_signal(number)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == ExitCode.PREEMPTED, errors
    assert f"{number.name}: results of 1 candidates are in" in errors
    assert "not tried" in output
    workplace.check_nothing_is_left()
    assert not (workplace.results / "tuned.yaml").exists()
    done = workplace.run("--steps", "3", "--candidates", "2", "--resume", "--json")
    assert done.returncode == ExitCode.DONE, done.stderr
    assert json.loads(done.stdout)["num_trials"] == 1


SMALL_MODEL = {
    "config": {
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    },
    "compile": False,
}
FULL_STEPS = 160
MAX_NOISE = 0.15
"""Noise above which a machine cannot show which candidate is the fastest."""
TRY_ALL = f"""
import json, sys, time
from pathlib import Path
from shardwright.config import load_recipe
from shardwright.launch.stop_signals import StopRequest
from shardwright.planner.cluster_choice import load_cluster
from shardwright.tuning import recipe_tuning
from shardwright.tuning.tuning_result import TuningOptions
recipe = load_recipe(sys.argv[1])
options = TuningOptions(max_candidates=12, fixed=("compile",))
_, request = recipe_tuning._prepare(recipe, load_cluster("2xcpu"), options)
seconds = {{}}
started = time.monotonic()
for candidate in recipe_tuning.list_candidates(request).candidates:
    tried = recipe_tuning.restore_source(candidate.recipe, recipe)
    outcome = recipe_tuning.run_trial(
        tried, 2, {FULL_STEPS}, 1e9, folder=Path(sys.argv[2]), stop=StopRequest()
    )
    seconds[candidate.key] = outcome.measurement and outcome.measurement.step_seconds
print(json.dumps({{"steps": seconds, "seconds": time.monotonic() - started}}))
"""


def compute_seconds(
    trials: list[tuple[str, int]], step_seconds: dict[str, float], setup_seconds: float
) -> float:
    """Return the time of trials if all steps of a candidate take equally long."""
    return sum(
        setup_seconds + (WARMUP_STEPS + num_steps) * step_seconds[key] for key, num_steps in trials
    )


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_best_of_twelve_is_found_in_a_third_of_the_time(tmp_path: Path) -> None:
    """The best is determined by all candidates in full: every one with the steps of the last round.

    The noise is the difference between two runs of the same settings, of those that both measured.
    """
    training = {
        "sequence_length": 128,
        "global_batch_size": 16,
        "max_steps": 20,
        "learning_rate": 1e-3,
    }
    write_recipe(
        tmp_path, model=SMALL_MODEL, training=training, layout={"zero_stage": 3, "dp_shard": 2}
    )
    place = Workplace(tmp_path)
    place.results.mkdir()

    def run(*words: str) -> Any:
        done = forked.run(
            [sys.executable, *words],
            capture_output=True,
            text=True,
            timeout=3600,
            env=place.environment,
            check=False,
        )
        assert isinstance(done, subprocess.CompletedProcess)
        assert done.returncode == ExitCode.DONE, done.stderr
        return json.loads(done.stdout)

    recipe = str(tmp_path / "recipe.yaml")
    everything = run("-c", TRY_ALL, recipe, str(tmp_path))
    words = ["--candidates", "12", "--fix", "compile", "--steps", str(FULL_STEPS), "--budget", "1h"]
    tuned = run(
        "-m", "shardwright", "tune", recipe, "--cluster", "2xcpu",
        "--dir", str(place.results), "--json", *words,
    )  # fmt: skip
    full = {key: seconds for key, seconds in everything["steps"].items() if seconds is not None}
    assert len(everything["steps"]) == len(tuned["candidates"]) == 12
    assert set(everything["steps"]) == {each["key"] for each in tuned["candidates"]}
    most_steps = {
        each["key"]: each["outcome"]["measurement"]
        for each in tuned["candidates"]
        if each["outcome"]["measurement"] is not None
        and each["outcome"]["measurement"]["num_steps"] > FULL_STEPS // 16
    }
    noise = max(
        abs(measured["step_seconds"] / full[key] - 1) for key, measured in most_steps.items()
    )
    winner = tuned["winner"]["key"]
    regret = full[winner] / min(full.values()) - 1
    spread = sorted(seconds / min(full.values()) for seconds in full.values())
    lines = (place.results / RESULTS_FILE_NAME).read_text().splitlines()[1:]
    trials = [(trial["key"], trial["num_steps"]) for trial in map(json.loads, lines)]
    setup = min(measured["setup_seconds"] for measured in most_steps.values())
    share = compute_seconds(trials, full, setup) / compute_seconds(
        [(key, FULL_STEPS) for key in full], full, setup
    )
    figures = (
        f"regret {regret:.1%}, noise {noise:.1%}; share of the time at equal speed {share:.0%}; "
        f"tuning {tuned['seconds']:.0f} s, all {everything['seconds']:.0f} s; relative to the "
        f"best: {' '.join(f'{value:.2f}' for value in spread)}"
    )
    sys.stdout.write(f"{figures}\n")
    # Differences below `RELEVANT_SHARE` are not worth the time that would distinguish them.
    assert regret <= min(max(noise, RELEVANT_SHARE), MAX_NOISE), figures
    assert share <= 1 / 3, figures
    place.check_nothing_is_left()
    if noise > MAX_NOISE:
        pytest.skip(f"the machine changed its speed, so elapsed times are no evidence: {figures}")
    assert tuned["seconds"] <= everything["seconds"] / 3, figures
