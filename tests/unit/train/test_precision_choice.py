"""`precision: auto` through a run: chosen once, recorded, kept where it resumes, and agreed on by
all ranks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.checkpoint.run_folder import RunFolder
from shardwright.config import Recipe, load_recipe
from shardwright.errors import CheckpointError
from shardwright.inference.model_source import open_model_source
from shardwright.launch.rank_environment import RankEnvironment
from shardwright.numerics import bf16
from shardwright.plan import PrecisionChoice, resolve_plan
from shardwright.telemetry.event_log import RunStartedEvent, WarningEvent, read_events
from shardwright.telemetry.sinks import describe_event
from shardwright.train.precision_choice import agree_on_precision, predict_precision
from shardwright.train.rank_sync import RankSync
from shardwright.train.run import train
from tests.unit.train.finished import ALPHABET, CONFIG

FAST = 3.0
EMULATED = 0.025


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`machine(ratio)`: from here on bf16 products are so many times as fast as fp32's."""
    return lambda ratio: monkeypatch.setattr(bf16, "measure_bf16_ratio", lambda _device: ratio)


def recipe_in(folder: Path, precision: str | None = None, max_steps: int = 1) -> Recipe:
    """A run of a few steps; a recipe that says nothing of its precision, unless one is given."""
    (folder / "corpus.txt").write_text(ALPHABET * 20)
    return Recipe.model_validate(
        {
            "model": {"config": CONFIG},
            "tokenizer": {"kind": "character"},
            "data": {"sources": str(folder / "corpus.txt"), "cache_dir": str(folder / "cache")},
            **({} if precision is None else {"precision": precision}),
            "training": {
                "sequence_length": 8,
                "micro_batch_size": 2,
                "max_steps": max_steps,
                "learning_rate": 1e-3,
            },
            "run": {"dir": str(folder / "run"), "device": "cpu"},
        }
    )


def recorded_plan(folder: Path) -> dict[str, Any]:
    plan: dict[str, Any] = json.loads(RunFolder(folder / "run").plan_path.read_text())
    return plan


def warnings(folder: Path) -> list[str]:
    return [event.message for event in read_events(folder / "run").filter_by_type(WarningEvent)]


@pytest.mark.parametrize(("ratio", "kind"), [(FAST, "bf16"), (EMULATED, "fp32")])
def test_a_recipe_that_says_nothing_trains_in_what_the_machine_is_best_at(
    tmp_path: Path, machine: Any, ratio: float, kind: str
) -> None:
    machine(ratio)
    train(recipe_in(tmp_path))
    assert recorded_plan(tmp_path)["precision"]["kind"] == kind
    assert "on this CPU" in recorded_plan(tmp_path)["precision_reason"]
    assert load_recipe(RunFolder(tmp_path / "run").recipe_path).precision.kind == kind
    (started,) = read_events(tmp_path / "run").filter_by_type(RunStartedEvent)
    assert f"{kind} (precision auto: bf16 " in describe_event(started)
    assert not warnings(tmp_path)
    assert (
        open_model_source(tmp_path / "run").dtype
        == {"fp32": torch.float32, "bf16": torch.bfloat16}[kind]
    )


@pytest.mark.parametrize(("begun", "resumed"), [(FAST, EMULATED), (EMULATED, FAST)])
def test_a_run_that_resumes_on_another_kind_of_machine_keeps_its_precision_and_says_so(
    tmp_path: Path, machine: Any, begun: float, resumed: float
) -> None:
    machine(begun)
    train(recipe_in(tmp_path))
    kind = recorded_plan(tmp_path)["precision"]["kind"]
    machine(resumed)
    assert predict_precision(recipe_in(tmp_path)) == PrecisionChoice(
        kind, "the run was started in it"
    )
    train(recipe_in(tmp_path, max_steps=2), resume=True)
    plan = recorded_plan(tmp_path)
    assert plan["precision"]["kind"] == kind
    assert plan["precision_reason"].startswith("the run was started in it; a new run would use ")
    # What an emulating machine is asked to do all the same is told once, with the ratio.
    slow = [message for message in warnings(tmp_path) if "40 times slower" in message]
    assert len(slow) == (1 if kind == "bf16" else 0)


def test_a_run_of_a_version_whose_default_was_fp32_resumes_in_fp32(
    tmp_path: Path, machine: Any
) -> None:
    train(recipe_in(tmp_path, "fp32"))  # what such a version recorded of a recipe that said nothing
    machine(FAST)
    train(recipe_in(tmp_path, max_steps=2), resume=True)
    assert recorded_plan(tmp_path)["precision"]["kind"] == "fp32"
    RunFolder(
        tmp_path / "run"
    ).recipe_path.unlink()  # resumed from its checkpoints alone, in another run folder
    assert predict_precision(recipe_in(tmp_path)) == PrecisionChoice(
        "fp32", "the run was started in it"
    )


def test_a_precision_that_the_recipe_names_is_still_held_against_the_runs(
    tmp_path: Path, machine: Any
) -> None:
    machine(EMULATED)
    train(recipe_in(tmp_path))
    with pytest.raises(CheckpointError, match="precision: saved 'fp32', now 'bf16'"):
        train(recipe_in(tmp_path, "bf16", max_steps=2), resume=True)


def test_bf16_by_name_on_a_machine_that_emulates_it_is_obeyed_with_one_warning(
    tmp_path: Path, machine: Any
) -> None:
    machine(EMULATED)
    train(recipe_in(tmp_path, "bf16"))
    assert recorded_plan(tmp_path)["precision"]["kind"] == "bf16"
    assert "precision_reason" not in recorded_plan(tmp_path)
    (warning,) = warnings(tmp_path)
    assert "bf16 is emulated on this CPU, 40 times slower than fp32" in warning


class Others(RankSync):
    """A meeting with ranks whose rows are given."""

    def __init__(self, *rows: list[float]) -> None:
        self.ranks = RankEnvironment(world_size=1 + len(rows))
        self._row_chunks = rows

    def gather(self, values: Any, *, ragged: bool = False) -> list[list[float]]:
        """This rank's values, then the others'."""
        return [list(values), *self._row_chunks]


@pytest.mark.parametrize(
    ("ratio", "others", "kind", "reason"),
    [
        (FAST, [[-1.0, 0.0], [-1.0, 0.0]], "bf16", "bf16 products are 3 times as fast"),
        (
            FAST,
            [[-1.0, 0.0], [-1.0, 1.0]],
            "fp32",
            "1 of 3 ranks multiply bf16 more slowly than fp32",
        ),
        (
            EMULATED,
            [[-1.0, 0.0], [-1.0, 0.0]],
            "fp32",
            "bf16 is emulated on this CPU, 40 times slower",
        ),
    ],
)
def test_ranks_that_would_choose_differently_take_fp32(
    tmp_path: Path, machine: Any, ratio: float, others: list[list[float]], kind: str, reason: str
) -> None:
    machine(ratio)
    recipe = recipe_in(tmp_path)
    choice = agree_on_precision(
        recipe,
        RunFolder.from_recipe(recipe),
        Others(*others),
        torch.device("cpu"),
        is_resumed=False,
    )
    assert choice is not None
    assert choice.kind == kind
    assert reason in choice.reason


def test_no_plan_says_auto(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="`resolve` resolves `auto`"):
        resolve_plan(recipe_in(tmp_path), 1)
    plan = resolve_plan(recipe_in(tmp_path), 1, PrecisionChoice("bf16", "a test says so"))
    assert (plan.precision.kind, plan.precision_reason) == ("bf16", "a test says so")
    named = resolve_plan(recipe_in(tmp_path, "fp64"), 1, PrecisionChoice("bf16", "a test says so"))
    assert (named.precision.kind, named.precision_reason) == ("fp64", None)
